"""Resizing and cross-entropy as Pallas kernels for TPUs: main memory never holds the resized map of logits.

A program computes `ROWS` rows of pixels. It resizes the rows of the logits by weighted sums and their columns by a
product, and computes the loss of the pixels. The backward pass repeats these steps. It returns the gradients of the
logits that each program reads, and XLA adds them. A map [N, rows, C, columns] has its classes in the sublanes of a
vector and its pixels in the lanes.

The kernels need the extra `kernel`. The TPU compiler has compiled them, and jax has interpreted them on a CPU, but they
have never run on a TPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axial.layers.conv import triangle_weights
from axial.layers.tpu.pallas import compiler_params, on_tensors

LANES, ROWS = 128, 8  # number of pixels in a tile, and number of rows that a program computes


def resized_cross_entropy(logits, labels, dtype=tf.bfloat16, interpret=False):
    """Cross-entropy of each pixel, with the logits resized to the labels' size on the grid of `conv.step_of`.

    Args:
        logits: float32 [N, h, w, C], of static shape.
        labels: int32 [N, H, W], from 0 to C - 1.
        dtype: dtype of the factors of the products. A TPU rounds them to bfloat16.
        interpret: whether jax interprets the kernels on a CPU, slowly.

    Returns:
        float32 [N, H, W].
    """
    height, width = labels.shape[1:]
    rows, columns = (triangle_weights(*sizes, antialias=False) for sizes in zip(logits.shape[1:3], (height, width)))
    first, weights = _blocks(rows)
    beyond = [0, -height % ROWS], [0, -width % LANES]
    columns = np.pad(columns.T, [[0, 0], beyond[1]])
    fixed = tf.constant(first, tf.int32), tf.constant(weights, tf.float32), tf.constant(columns, dtype)

    def call(kernel, x, *maps):
        maps = [tf.pad(pixels, [[0, 0], *beyond]) for pixels in maps]  # whole tiles
        return on_tensors(_run, kernel, interpret=interpret)(*fixed, *maps, x)

    @tf.custom_gradient
    def run(x):
        loss, log_sums = (pixels[:, :height, :width] for pixels in call(_forward, x, labels))

        def gradient(d):
            mask = first[:, None] + np.arange(weights.shape[2]) == np.arange(x.shape[1])[:, None, None]
            return tf.einsum("nbrcw,hbr->nhcw", call(_backward, x, labels, log_sums, d), tf.constant(mask, dtype))

        return loss, gradient

    return run(tf.transpose(tf.cast(logits, dtype), [0, 1, 3, 2]))


def _blocks(rows):
    """Finds the logits that each block of `ROWS` rows of pixels needs.

    Args:
        rows: `triangle_weights` [H, h].

    Returns:
        (index of the first of R rows of logits for each block, weights [blocks, ROWS, R] of these rows). Rows beyond
        the map have weights 0.
    """
    blocks = np.pad(rows, [[0, -len(rows) % ROWS], [0, 0]]).reshape(-1, ROWS, rows.shape[1])
    needed = [np.flatnonzero(block.any(0)) for block in blocks]
    count = max(each[-1] - each[0] for each in needed) + 1
    first = np.minimum([each[0] for each in needed], rows.shape[1] - count)
    return first, np.stack([block[:, start : start + count] for block, start in zip(blocks, first)])


def _run(kernel, interpret, first, weights, columns, *inputs):
    """Runs a kernel over blocks of rows. The inputs are maps of pixels and, last, the logits x [N, h, C, w].

    Returns:
        (loss, logarithms of the sums of exponentials) of `_forward`; for `_backward`, the gradient of the R rows of
        logits of each block, [N, blocks, R, C, w].
    """
    *maps, x = inputs
    (images, _, classes, width), (blocks, _, count), pixels = x.shape, weights.shape, columns.shape[1]
    logit_rows = tuple(map(pl.Element, (1, count, classes, width)))
    pixel_block = pl.BlockSpec((1, ROWS, pixels), lambda n, b, _: (n, b, 0))
    specs, shapes = [pixel_block] * 2, [jax.ShapeDtypeStruct((images, blocks * ROWS, pixels), jnp.float32)] * 2
    if kernel is _backward:
        shape = images, blocks, count, classes, width
        specs = pl.BlockSpec((1, 1, *shape[2:]), lambda n, b, _: (n, b, 0, 0, 0))
        shapes = jax.ShapeDtypeStruct(shape, x.dtype)
    in_specs = [
        pl.BlockSpec((1, ROWS, count), lambda n, b, _: (b, 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec(columns.shape, lambda n, b, _: (0, 0)),
        *[pixel_block] * len(maps),
        pl.BlockSpec(logit_rows, lambda n, b, first: (n, first[b], 0, 0)),
    ]
    return pl.pallas_call(
        kernel,
        name=f"cross_entropy{kernel.__name__}",
        grid_spec=pltpu.PrefetchScalarGridSpec(1, (images, blocks), in_specs, specs),
        out_shape=shapes,
        compiler_params=compiler_params("parallel", "parallel"),
        interpret=interpret,
    )(first, weights, columns, *inputs)


def _resize(x, weights, row):
    """The logits of a row of pixels, before its columns are resized, [C, w]."""
    total = sum(weights[0, row, i] * x[0, i].astype(jnp.float32) for i in range(x.shape[1]))
    return total.astype(x.dtype)


def _tile(x, columns, labels, *, row, lanes):
    """The logits [C, 128] of a tile of pixels, and the one-hot mask of the pixels' classes, bool [C, 128]."""
    z = jnp.dot(x, columns[:, lanes], preferred_element_type=jnp.float32)
    return z, lax.broadcasted_iota(jnp.int32, z.shape, 0) == labels[0, row : row + 1, lanes]


def _tiles(columns):
    return [slice(start, start + LANES) for start in range(0, columns.shape[1], LANES)]


def _forward(_, weights, columns, labels, x, loss, log_sums):
    for row in range(ROWS):
        logits = _resize(x, weights, row)
        for lanes in _tiles(columns):
            z, hot = _tile(logits, columns, labels, row=row, lanes=lanes)
            largest = jnp.max(z, 0, keepdims=True)
            log_sum = largest + jnp.log(jnp.sum(jnp.exp(z - largest), 0, keepdims=True))
            loss[0, row : row + 1, lanes] = log_sum - jnp.sum(jnp.where(hot, z, 0.0), 0, keepdims=True)
            log_sums[0, row : row + 1, lanes] = log_sum


def _backward(_, weights, columns, labels, log_sums, d, x, d_x):
    sums = [0.0] * x.shape[1]
    for row in range(ROWS):
        logits, total = _resize(x, weights, row), jnp.zeros(x.shape[2:], jnp.float32)
        for lanes in _tiles(columns):
            z, hot = _tile(logits, columns, labels, row=row, lanes=lanes)
            p = jnp.exp(z - log_sums[0, row : row + 1, lanes])
            g = (jnp.where(hot, p - 1.0, p) * d[0, row : row + 1, lanes]).astype(columns.dtype)
            total += lax.dot_general(g, columns[:, lanes], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        sums = [each + weights[0, row, i] * total for i, each in enumerate(sums)]
    for i, each in enumerate(sums):
        d_x[0, 0, i] = each.astype(d_x.dtype)
