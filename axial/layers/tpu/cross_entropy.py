"""Resizing and cross-entropy as Pallas kernels for TPUs: main memory never holds the resized map of logits.

XLA resizes the rows of the logits, which is a matrix product. For each row of the result, a kernel resizes the columns,
also by a product, and computes the loss of the pixels. The backward pass repeats these steps. A map [N, rows, C,
columns] has its classes in the sublanes of a vector and its pixels in the lanes.

The kernels need the extra `kernel`. The TPU compiler has compiled them, and jax has interpreted them on a CPU, but they
have never run on a TPU.
"""

import jax
import jax.numpy as jnp
import tensorflow as tf
from jax import lax
from jax.experimental import pallas as pl

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
    beyond = -width % LANES
    columns = tf.constant(columns.T, dtype)

    def whole(x):
        """Pads [..., W] with zeros to whole tiles of pixels."""
        return tf.pad(x, [*[[0, 0]] * (len(x.shape) - 1), [0, beyond]])

    def call(function, *args):
        return on_tensors(function, interpret=interpret)(*args)

    @tf.custom_gradient
    def run(x):
        fixed = whole(labels), whole(columns)
        loss, log_sums = call(_losses, x, *fixed)

        def gradient(d):
            return call(_gradients, x, *fixed, log_sums, whole(d))

        return loss[..., :width], gradient

    return run(tf.einsum("yh,nhwc->nycw", tf.constant(rows, dtype), tf.cast(logits, dtype)))


def _losses(interpret, x, labels, columns):
    return _run(_forward, interpret, x=x, columns=columns, maps=[labels], outputs=[jnp.float32] * 2)


def _gradients(interpret, x, labels, columns, log_sums, d):
    return _run(_backward, interpret, x=x, columns=columns, maps=[labels, log_sums, d])[0]


def _run(kernel, interpret, *, x, columns, maps, outputs=()):
    """Runs a kernel over rows. Returns a map of pixels for each dtype in `outputs`; without `outputs`, a map like x."""
    images, height, classes, width = x.shape
    pixels = columns.shape[1]
    pixel_block = pl.BlockSpec((1, ROWS, pixels), lambda n, y: (n, y, 0))
    logit_block = pl.BlockSpec((1, ROWS, classes, width), lambda n, y: (n, y, 0, 0))
    work = images * height * classes * pixels
    return pl.pallas_call(
        kernel,
        name=f"cross_entropy{kernel.__name__}",
        grid=(images, pl.cdiv(height, ROWS)),
        in_specs=[logit_block, pl.BlockSpec(columns.shape, lambda n, y: (0, 0)), *[pixel_block] * len(maps)],
        out_specs=[pixel_block] * len(outputs) or [logit_block],
        out_shape=[jax.ShapeDtypeStruct((images, height, pixels), dtype) for dtype in outputs]
        or [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        compiler_params=compiler_params("parallel", "parallel"),
        cost_estimate=pl.CostEstimate(
            flops=2 * work * width * (1 if outputs else 2),
            transcendentals=work,
            bytes_accessed=x.size * x.dtype.itemsize * (1 if outputs else 2) + 4 * images * height * pixels * 3,
        ),
        interpret=interpret,
    )(x, columns, *maps)


def _tile(x, columns, labels, *, row, lanes):
    """The logits [C, 128] of a tile of pixels, and the one-hot mask of the pixels' classes, bool [C, 128]."""
    z = jnp.dot(x[0, row], columns[:, lanes], preferred_element_type=jnp.float32)
    return z, lax.broadcasted_iota(jnp.int32, z.shape, 0) == labels[0, row : row + 1, lanes]


def _tiles(columns):
    return [slice(start, start + LANES) for start in range(0, columns.shape[1], LANES)]


def _forward(x, columns, labels, loss, log_sums):
    for row in range(ROWS):
        for lanes in _tiles(columns):
            z, hot = _tile(x, columns, labels, row=row, lanes=lanes)
            largest = jnp.max(z, 0, keepdims=True)
            log_sum = largest + jnp.log(jnp.sum(jnp.exp(z - largest), 0, keepdims=True))
            loss[0, row : row + 1, lanes] = log_sum - jnp.sum(jnp.where(hot, z, 0.0), 0, keepdims=True)
            log_sums[0, row : row + 1, lanes] = log_sum


def _backward(x, columns, labels, log_sums, d, d_x):
    for row in range(ROWS):
        total = jnp.zeros(x.shape[2:], jnp.float32)
        for lanes in _tiles(columns):
            z, hot = _tile(x, columns, labels, row=row, lanes=lanes)
            p = jnp.exp(z - log_sums[0, row : row + 1, lanes])
            g = (jnp.where(hot, p - 1.0, p) * d[0, row : row + 1, lanes]).astype(columns.dtype)
            total += lax.dot_general(g, columns[:, lanes], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        d_x[0, row] = total.astype(d_x.dtype)
