"""The projection to q, k and v, and the sums that their batch norm wants."""

import jax
import jax.numpy as jnp
from jax import lax

from axial.layers.kernels.shear import LANES, dot, dot_turned, join, up
from axial.layers.kernels.window import (
    chunks,
    clear_at_the_start,
    float_shape,
    pad_rows,
    rows_at,
    run_programs,
    turn_over,
)


def _for_parts(window, run):
    """Calls run(first, rows) for each part of an axis."""
    count, rows = window.parts
    if count == 1:
        run(0, rows)
    else:
        lax.fori_loop(0, count, lambda i, _: run(i * rows, rows), None)


def _stack(window, ref, first, rows, before=0):
    """float32 [axes * rows, .] of some rows of each axis of a ref, zero beyond the axis, where anything may be."""
    seen = window.of_axis(first, (rows, 1))
    parts = [ref[i, rows_at(first + before, rows), :].astype(jnp.float32) for i in range(ref.shape[0])]
    return join([jnp.where(seen, part, 0.0) for part in parts], 0)


def _project(window, *refs):
    """q, k and v of some axes. Refs: x, kernel; qkv, the sums of it and of its squares [2, C]."""
    x, kernel, qkv, sums = refs
    clear_at_the_start(sums)
    if window.blocks > 1:
        qkv[...] = jnp.zeros_like(qkv)

    def run(first, rows):
        part = _stack(window, x, first, rows).astype(x.dtype)
        for lanes in chunks(window.channels):
            y = dot(part, kernel[:, lanes])
            for i in range(x.shape[0]):
                qkv[i, rows_at(first + window.before, rows), lanes] = y[i * rows : (i + 1) * rows].astype(qkv.dtype)
            for row, z in ((0, y), (1, y * y)):
                sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)

    _for_parts(window, run)


def _project_backward(window, *refs):
    """Gradients of some axes, the kernel's summed over all. Refs: x, qkv, d_qkv, kernel, d_sums; d_x, d_kernel."""
    x, qkv, d_qkv, kernel, d_sums, d_x, d_kernel = refs
    clear_at_the_start(d_kernel)

    def run(first, rows):
        d, y = (_stack(window, ref, first, rows, window.before) for ref in (d_qkv, qkv))
        seen = join([window.of_axis(first, (rows, 1))] * x.shape[0], 0)
        d = jnp.where(seen, d + d_sums[0:1] + 2.0 * d_sums[1:2] * y, 0.0).astype(x.dtype)
        for channels in chunks(x.shape[2]):
            z = dot_turned(d, kernel[channels, :]).astype(d_x.dtype)
            for i in range(x.shape[0]):
                d_x[i, rows_at(first, rows), channels] = z[i * rows : (i + 1) * rows]
        size = up(len(d), LANES)
        turned = turn_over(_stack(window, x, first, rows), size).astype(x.dtype)
        d = pad_rows(d, size)
        for lanes in chunks(window.channels):
            d_kernel[:, lanes] += dot(turned, d[:, lanes])

    _for_parts(window, run)


def project(window, interpret, x, kernel):
    """qkv [A, ., C], and the sums of it and of its squares [2, C]: of x [A, length, .] and kernel [., C]."""
    rows = window.length if window.blocks == 1 else window.rows
    qkv = jax.ShapeDtypeStruct((x.shape[0], rows, window.channels), window.dtype)
    sums = [float_shape(2, window.channels)]
    return run_programs(_project, window, interpret, [], [x], [kernel], [qkv], sums, in_windows=False)


def project_gradient(window, interpret, x, qkv, d_qkv, kernel, d_sums):
    """d_x and d_kernel."""
    arrays, small, sums = [x, qkv, d_qkv], [kernel, d_sums], [float_shape(*kernel.shape)]
    return run_programs(_project_backward, window, interpret, [], arrays, small, [x], sums, in_windows=False)
