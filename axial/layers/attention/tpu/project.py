"""The projection to q, k and v, and the sums that its batch norm needs."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from axial.layers.attention.tpu.programs import Operands, float_shape, run_programs
from axial.layers.attention.tpu.shear import dot, dot_turned
from axial.layers.attention.tpu.tiling import ROWS, chunks, clear


def _read(tiling, program, ref):
    """float32: the pixels that a ref holds, with zeros beyond the last pixel."""
    return jnp.where(tiling.inside(program.first, ROWS), ref[...].astype(jnp.float32), 0.0)


def _project(tiling, program, *refs):
    """Input refs: x, kernel. Output refs: qkv, and the sums [2, .] of qkv and of its squares."""
    x, kernel, qkv, sums = refs
    pl.when(program.begins)(lambda: clear(sums))

    @pl.when(program.exists)
    def _():
        block = tiling.cast(_read(tiling, program, x))
        for lanes in chunks(tiling.channels):
            y = dot(block, kernel[:, lanes])
            qkv[:, lanes] = tiling.cast(y)
            for row, z in ((0, y), (1, y * y)):
                sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)


def _project_backward(tiling, program, *refs):
    """Input refs: x, qkv, d_qkv, kernel, d_sums. Output refs: d_x, and d_kernel, which is summed over the programs."""
    x, qkv, d_qkv, kernel, d_sums, d_x, d_kernel = refs
    pl.when(program.begins)(lambda: clear(d_kernel))

    @pl.when(program.exists)
    def _():
        y = d_sums[0:1] + 2.0 * d_sums[1:2] * qkv[...].astype(jnp.float32)
        inside = tiling.inside(program.first, ROWS)
        d = tiling.cast(jnp.where(inside, d_qkv[...].astype(jnp.float32) + y, 0.0))
        for channels in chunks(x.shape[1]):
            d_x[:, channels] = dot_turned(d, kernel[channels, :]).astype(d_x.dtype)
        turned = tiling.cast(jnp.transpose(_read(tiling, program, x)))
        for lanes in chunks(tiling.channels):
            d_kernel[:, lanes] += dot(turned, d[:, lanes])


def project(tiling, interpret, x, kernel):
    """qkv [P, .], and the sums [2, .] of qkv and of its squares, from x [P, C] and kernel [C, .]."""
    qkv = jax.ShapeDtypeStruct((tiling.pixels, tiling.channels), tiling.dtype)
    operands = Operands(blocks=[x], small=[kernel], outputs=[qkv], sums=[float_shape(2, tiling.channels)])
    return run_programs(_project, tiling, interpret, operands, flops=_flops(tiling, kernel))


def project_gradient(tiling, interpret, x, qkv, d_qkv, kernel, d_sums):
    """d_x and d_kernel. For the arguments see `project`. d_qkv and d_sums are the gradients of its results."""
    operands = Operands(blocks=[x, qkv, d_qkv], small=[kernel, d_sums], outputs=[x], sums=[float_shape(*kernel.shape)])
    return run_programs(_project_backward, tiling, interpret, operands, flops=2 * _flops(tiling, kernel))


def _flops(tiling, kernel):
    """FLOPs of the product of one program's pixels with the kernel."""
    return 2 * ROWS * kernel.shape[0] * kernel.shape[1]
