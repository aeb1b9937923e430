"""The projection to q, k and v, and the sums that their batch norm needs."""

import jax
import jax.numpy as jnp
from jax import lax

from axial.layers.attention.tpu.shear import LANES, dot, dot_turned, join, up
from axial.layers.attention.tpu.tiling import (
    Operands,
    chunks,
    clear_at_the_start,
    float_shape,
    pad_rows,
    rows_at,
    run_programs,
    turn_over,
)


def _for_parts(tiling, run):
    """Calls run(first, rows) for each part of an axis."""
    count, rows = tiling.parts
    if count == 1:
        run(0, rows)
    else:
        lax.fori_loop(0, count, lambda i, _: run(i * rows, rows), None)


def _stack(tiling, ref, first, rows, *, before=0):
    """float32 [axes * rows, .]: some rows of each axis of a ref. Whatever memory holds beyond an axis becomes 0."""
    seen = tiling.of_axis(first, (rows, 1))
    parts = [ref[i, rows_at(first + before, rows), :].astype(jnp.float32) for i in range(ref.shape[0])]
    return join([jnp.where(seen, part, 0.0) for part in parts], 0)


def _project(tiling, *refs):
    """q, k and v of some axes. Refs: x, kernel. Then qkv, and the sums [2, C] of qkv and of its squares."""
    x, kernel, qkv, sums = refs
    clear_at_the_start(sums)
    if tiling.blocks > 1:
        qkv[...] = jnp.zeros_like(qkv)

    def run(first, rows):
        part = _stack(tiling, x, first, rows).astype(x.dtype)
        for lanes in chunks(tiling.channels):
            y = dot(part, kernel[:, lanes])
            for i in range(x.shape[0]):
                qkv[i, rows_at(first + tiling.before, rows), lanes] = y[i * rows : (i + 1) * rows].astype(qkv.dtype)
            for row, z in ((0, y), (1, y * y)):
                sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)

    _for_parts(tiling, run)


def _project_backward(tiling, *refs):
    """Gradients of some axes. That of the kernel is summed over all axes.

    Refs: x, qkv, d_qkv, kernel, d_sums. Then d_x and d_kernel.
    """
    x, qkv, d_qkv, kernel, d_sums, d_x, d_kernel = refs
    clear_at_the_start(d_kernel)

    def run(first, rows):
        d, y = (_stack(tiling, ref, first, rows, before=tiling.before) for ref in (d_qkv, qkv))
        seen = join([tiling.of_axis(first, (rows, 1))] * x.shape[0], 0)
        d = jnp.where(seen, d + d_sums[0:1] + 2.0 * d_sums[1:2] * y, 0.0).astype(x.dtype)
        for channels in chunks(x.shape[2]):
            z = dot_turned(d, kernel[channels, :]).astype(d_x.dtype)
            for i in range(x.shape[0]):
                d_x[i, rows_at(first, rows), channels] = z[i * rows : (i + 1) * rows]
        size = up(len(d), LANES)
        turned = turn_over(_stack(tiling, x, first, rows), size).astype(x.dtype)
        d = pad_rows(d, size)
        for lanes in chunks(tiling.channels):
            d_kernel[:, lanes] += dot(turned, d[:, lanes])

    _for_parts(tiling, run)


def project(tiling, interpret, x, kernel):
    """qkv [A, ., C], and the sums [2, C] of qkv and of its squares, from x [A, length, .] and kernel [., C]."""
    rows = tiling.length if tiling.blocks == 1 else tiling.rows
    qkv = jax.ShapeDtypeStruct((x.shape[0], rows, tiling.channels), tiling.dtype)
    operands = Operands(arrays=[x], small=[kernel], outputs=[qkv], sums=[float_shape(2, tiling.channels)])
    flops = _flops(tiling, x, kernel)
    return run_programs(_project, tiling, interpret, operands, flops=flops, in_windows=False)


def project_gradient(tiling, interpret, x, qkv, d_qkv, kernel, d_sums):
    """d_x and d_kernel. Arguments: see `project`; d_qkv and d_sums are the gradients of its results."""
    operands = Operands(arrays=[x, qkv, d_qkv], small=[kernel, d_sums], outputs=[x], sums=[float_shape(*kernel.shape)])
    flops = 2 * _flops(tiling, x, kernel)
    return run_programs(_project_backward, tiling, interpret, operands, flops=flops, in_windows=False)


def _flops(tiling, x, kernel):
    """FLOPs of one program's product with the kernel."""
    return 2 * tiling.together(x.shape[0]) * tiling.length * kernel.shape[0] * kernel.shape[1]
