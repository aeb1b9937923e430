"""Depthwise convolution as Pallas kernels for TPUs.

A map is [N, W, H, C] here: the rows of the image are the sublanes of a vector, and the channels are its lanes. A kernel
reads the neighbours of a vector's pixels from other columns, or from memory a few sublanes away. So no data moves
within vectors. A program computes `COLUMNS` columns of 128 channels and also reads the columns beside them.

The kernels need the extra `kernel`. The TPU compiler has compiled them, and jax has interpreted them on a CPU, but they
have never run on a TPU.
"""

import functools

import jax
import jax.numpy as jnp
import tensorflow as tf
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axial.layers.tpu.pallas import FAST_MEMORY, FAST_MEMORY_V4, compiler_params, on_tensors, tpu_generation

LANES, ROWS = 128, 8  # lanes and rows of a float32 vector
MARGIN = 8  # rows of zeros above and below a column: the largest reach of a kernel
COLUMNS = 8  # columns that a program computes


def can_serve(x, side):
    """Whether the kernels support a convolution: a static shape, an odd kernel up to 2 * `MARGIN` + 1, enough memory.

    Args:
        x: [N, h, w, C].
        side: side of the kernel.
    """
    if not x.shape.is_fully_defined() or side % 2 == 0 or side // 2 > MARGIN:
        return False
    # The backward pass reads two arrays and writes one. Fast memory holds two blocks and a float32 copy of each array.
    columns, rows = 3 * COLUMNS + side - 1, x.shape[1] + 2 * MARGIN + ROWS
    memory = columns * rows * LANES * (2 * x.dtype.size + 4)
    return memory < (FAST_MEMORY if tpu_generation() > 4 else FAST_MEMORY_V4)


def convolve(x, kernel, interpret=False):
    """Depthwise convolution of stride 1 with symmetric padding, summed in float32, if `can_serve` is true.

    Args:
        x: [N, h, w, C], of static shape.
        kernel: [k, k, C, 1].
        interpret: whether jax interprets the kernels on a CPU, slowly.

    Returns:
        [N, h, w, C].
    """
    side, _, channels, _ = kernel.shape
    rest = channels % LANES
    if rest < channels and rest:  # the decoders join two maps here, and XLA then needs no joined map
        pairs = zip(*(tf.split(y, [channels - rest, rest], axis) for y, axis in ((x, 3), (kernel, 2))))
        return tf.concat([convolve(*pair, interpret) for pair in pairs], -1)

    def call(kernel, *arrays):
        return on_tensors(_run, kernel, side, interpret=interpret)(*arrays)

    @tf.custom_gradient
    def run(x, taps):
        def gradient(d):
            d_x, d_taps = call(_convolve_backward, d, x, taps)
            return d_x, tf.reduce_sum(d_taps, (0, 2))

        return call(_convolve, x, taps)[0], gradient

    taps = tf.cast(tf.reshape(kernel, [side * side, channels]), tf.float32)
    return tf.transpose(run(tf.transpose(x, [0, 2, 1, 3]), taps), [0, 2, 1, 3])


def _run(kernel, side, interpret, *inputs):
    """Runs a kernel over blocks of columns and channels. It also reads the first array's columns beside a block.

    Returns:
        list of a map like the arrays and, with two arrays, partial sums of the taps' gradients [N, k * k, ROWS, C].
    """
    arrays = inputs[:-1]
    images, width, height, channels = arrays[0].shape
    blocks, groups = pl.cdiv(width, COLUMNS), pl.cdiv(channels, LANES)
    rows, backward = pl.cdiv(height, ROWS) * ROWS, len(arrays) > 1
    # Pallas needs whole blocks here. Missing channels have arbitrary values.
    missing = (0, 0), (0, 0), (0, 0), (0, groups * LANES - channels)
    around = pl.BlockSpec(
        tuple(map(pl.Element, (1, _columns_read(side, width), height, LANES), missing)),
        lambda n, g, b: (n, _first_read(side, width, b), 0, g * LANES),
    )
    center = pl.BlockSpec((1, COLUMNS, height, LANES), lambda n, g, b: (n, b, 0, g))
    tap_block = pl.BlockSpec((side * side, LANES), lambda n, g, b: (0, g))
    tap_sums = jax.ShapeDtypeStruct((images, side * side, ROWS, channels), jnp.float32)
    sums = pl.BlockSpec((1, side * side, ROWS, LANES), lambda n, g, b: (n, 0, 0, g))
    columns = [COLUMNS + side - 1, *[COLUMNS] * len(arrays)]
    margins = [2 * MARGIN, *[0] * len(arrays)]
    return pl.pallas_call(
        functools.partial(kernel, side, width),
        name=kernel.__name__.strip("_"),
        grid=(images, groups, blocks),
        in_specs=[around, *[center] * backward, tap_block],
        out_specs=[center, *[sums] * backward],
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype), *[tap_sums] * backward],
        scratch_shapes=[
            pltpu.VMEM((side * side, ROWS, LANES), jnp.float32),
            *(pltpu.VMEM((n, rows + more, LANES), jnp.float32) for n, more in zip(columns, margins)),
        ],
        compiler_params=compiler_params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
    )(*inputs)


def _columns_read(side, width):
    """The number of columns that a program reads."""
    return min(COLUMNS + side - 1, width)


def _first_read(side, width, block):
    """The first column that a program reads. The column lies on the map."""
    return jnp.clip(block * COLUMNS - side // 2, 0, width - _columns_read(side, width))


def _fill(columns, x, *, width, first, start, margin):
    """Fills fast memory with float32 columns, with zeros outside the map.

    Args:
        columns: ref [., rows with margins, lanes].
        x: ref [1, ., h, lanes].
        width: number of columns of the map.
        first: index of the map's column that becomes the first of `columns`.
        start: index of the map's column with which x begins.
        margin: number of rows of zeros above and below.
    """
    height, rows = x.shape[2], columns.shape[1] - 2 * margin
    on_map = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) < height

    def fill(i, _):
        y = x[0, jnp.clip(first + i - start, 0, x.shape[1] - 1)].astype(jnp.float32)
        if rows > height:
            y = jnp.concatenate([y, jnp.zeros((rows - height, LANES), jnp.float32)])
        inside = on_map & (first + i >= 0) & (first + i < width)
        columns[i, margin : margin + rows] = jnp.where(inside, y, 0.0)
        if margin:
            columns[i, :margin] = columns[i, margin + rows :] = jnp.zeros((margin, LANES), jnp.float32)
        return 0

    lax.fori_loop(0, columns.shape[0], fill, 0)


def _load(side, width, x, taps, *, spread, columns):
    """Fills fast memory with the columns that a program reads, and with a whole vector for each tap."""
    block = pl.program_id(2)
    first, start = block * COLUMNS - side // 2, _first_read(side, width, block)
    _fill(columns, x, width=width, first=first, start=start, margin=MARGIN)
    for i in range(side * side):
        spread[i] = jnp.broadcast_to(taps[i : i + 1], (ROWS, LANES))


def _for_rows(side, columns, run, carry):
    """Calls run(rows, vectors, carry) for each `ROWS` rows of the output.

    `vectors` has a list for each column of the output: the input vector of each tap, in the order of the taps.
    """
    count, above = (columns.shape[1] - 2 * MARGIN) // ROWS, MARGIN - side // 2

    def run_rows(r, carry):
        near = [[columns[w, pl.ds(r * ROWS + above + i, ROWS)] for w in range(columns.shape[0])] for i in range(side)]
        vectors = [[vector for row in near for vector in row[w : w + side]] for w in range(COLUMNS)]
        return run(pl.ds(pl.multiple_of(r * ROWS, ROWS), ROWS), vectors, carry)

    return lax.fori_loop(0, count, run_rows, carry)


def _write_sums(side, columns, spread, result, *, order):
    """Writes the sums of the input vectors times the taps `spread`. With `order` -1, the taps are in reverse order."""

    def run(rows, vectors, carry):
        for w, each in enumerate(vectors):
            result[w, rows] = sum(vector * spread[i] for i, vector in enumerate(each[::order]))
        return carry

    _for_rows(side, columns, run, 0)


def _convolve(side, width, *refs):
    """Computes the output. Input refs: x, taps. Output ref: y. The other refs are scratch memory."""
    x, taps, y, spread, columns, result = refs
    _load(side, width, x, taps, spread=spread, columns=columns)
    _write_sums(side, columns, spread, result, order=1)
    y[0] = result[:, : y.shape[2]].astype(y.dtype)


def _convolve_backward(side, width, *refs):
    """Computes the gradients. Input refs: d, x, taps. Output refs: d_x, the taps' gradients. The rest is scratch.

    One loop for both gradients would take 1.1 times the bundles, because its sums do not fit the registers.
    """
    d, x, taps, d_x, d_taps, spread, columns, result, center = refs
    _load(side, width, d, taps, spread=spread, columns=columns)
    first = pl.program_id(2) * COLUMNS
    _fill(center, x, width=width, first=first, start=first, margin=0)

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_taps[...] = jnp.zeros_like(d_taps)

    def run(rows, vectors, sums):
        for w, each in enumerate(vectors):  # the gradient of a tap is the sum of its vectors times x
            sums = [total + vector * center[w, rows] for total, vector in zip(sums, each[::-1])]
        return sums

    _write_sums(side, columns, spread, result, order=-1)
    sums = [jnp.zeros((ROWS, LANES), jnp.float32)] * side**2
    for i, total in enumerate(_for_rows(side, columns, run, sums)):
        d_taps[0, i] += total
    d_x[0] = result[:, : d_x.shape[2]].astype(d_x.dtype)
