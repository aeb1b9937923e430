"""A layer of `axial.layers.attention` in training on a TPU, as kernels: no map is ever in the TPU's main memory.

jax, of the extra `kernel`, must be there when a step is traced: it writes the kernels (Pallas), and TensorFlow calls
what it wrote as an `XlaCallModule`. There are three each way: the projection with its norm's sums, the sums of the
logits, and attention with its outputs' sums. What stands between them are numbers a channel or a head, which replicas
add up.

Compiled by a TPU's own compiler, with all of Axial-DeepLab-S on COCO, and never run on a TPU: hence a choice
(`memory = 'kernel'`) and no default. Cycles of a training step of one layer, in millions (`axial-analyze tpu
--layer=258x65`; of kernels, bundles of instructions; what they read and write passes in less than 0.8 of the same
time at a v5e's 546 bytes a cycle):

| rows x length | 258 x 65 | 130 x 129 | 128 x 128 |
|---|---|---|---|
| no kernels (`attend_xla`) | 10.6 | 15.6 | 6.0 |
| kernels of attention alone, maps [queries, keys] | 7.7 | 8.1 | 5.5 |
| maps [keys, queries], heads a step behind each other | 6.4 | 6.9 | 4.7 |
| the logits' sums in kernels, no norm of its own | | | 3.7 |
| the projection a product, not a convolution, of XLA's | 4.6 | 5.1 | 2.9 |
| the projection in kernels | 3.9 | 4.8 | 2.6 |

Of the two kernels of attention at 128 x 128: 2.0 with maps [queries, keys], 1.7 turned, 1.2 with heads in step; two
or three steps apart 1.3 and 1.4, steps shorter or longer 1.2 to 1.3. Tried and left out: arrays padded to whole
tiles in main memory, 8.8 for 8.1 at 130 x 129.
"""

import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax only lowers: it must not take a TPU that TensorFlow has
import tensorflow as tf
from jax.experimental import jax2tf

from axial.layers.kernels import attend as attention
from axial.layers.kernels import logit_sums, project
from axial.layers.kernels.shear import LANES, up
from axial.layers.kernels.window import FAST_MEMORY, Window, group_lanes
from axial.layers.windows import Windows, table_rows

LONGEST = 384  # keys of a window


def _as_tensorflow(function, window, interpret):
    """A function of arrays as one of tensors; the check left out would refuse to trace for a TPU elsewhere."""
    return jax2tf.convert(
        functools.partial(function, window, interpret),
        with_gradient=False,
        native_serialization_platforms=("cpu" if interpret else "tpu",),
        native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
    )


def _window(x, kernel, heads, value_channels, windows):
    depth = (kernel.shape[1] - value_channels) // 2 // heads
    return Window(windows.length, windows.reach, heads, depth, value_channels // heads, x.dtype.name)


def can_attend(x, kernel, heads, value_channels, tables, windows, terms):
    """Whether the kernels serve `attend` with these arguments: static shapes, all terms, windows of one axis."""
    if not (x.shape.is_fully_defined() and len(terms) == len(tables) == 3 and isinstance(windows, Windows)):
        return False
    window = _window(x, kernel, heads, value_channels, windows)
    depths = window.depth, window.value_depth
    whole_groups = all(heads * depth % group_lanes(heads, depth) == 0 for depth in depths)
    # The projection's kernel and its gradient, and one of each on its way.
    fits = 2 * (x.dtype.size + 4) * kernel.shape.num_elements() < 0.7 * FAST_MEMORY
    return whole_groups and fits and window.keys <= LONGEST


def attend(x, kernel, heads, value_channels, tables, windows, normalise, logit_scales, interpret=False):
    """What a layer of `axial.layers.attention` computes but for its output norms, where `can_attend`.

    Args:
        x: [N, h, w, C].
        kernel: [C, 2 H*D + value_channels], the projection to q, k and v.
        heads: H.
        tables, windows: as of `axial.layers.attend.attend`.
        normalise: function that returns what the norm of q, k and v multiplies by and adds, [2, .], from the sums
            [2, .] of these and of their squares.
        logit_scales: function that returns the scales [terms, H] from the sums [terms, H, 2] of s and of s^2.
        interpret: whether jax computes it on a processor, slowly.

    Returns:
        sum_p w v_p and sum_p w r^v_{p-o}, both [N, h, w, value_channels], and of both the sums over all pixels, and of
        their squares, float32 [2, 2, value_channels].
    """
    window = _window(x, kernel, heads, value_channels, windows)
    length, abreast = window.length, windows.abreast
    call = lambda function, *args: _as_tensorflow(function, window, interpret)(*args)

    def open_(x):
        """[N, h, w, C] -> [A, length, C]."""
        x = tf.reshape(windows.whole(x), [-1, length, abreast, x.shape[3]])
        return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, length, x.shape[3]])

    def close(x):
        x = tf.reshape(x, [-1, abreast, length, x.shape[2]])
        return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, windows.height, windows.width, x.shape[3]])

    def align(x):
        """[., channels of q, k and v], each in whole tiles."""
        parts = tf.split(x, window.sizes, 1)
        return tf.concat([tf.pad(part, [[0, 0], [0, -part.shape[1] % LANES]]) for part in parts], 1)

    def unalign(x):
        parts = tf.split(x, [up(size, LANES) for size in window.sizes], 1)
        return tf.concat([part[:, :size] for part, size in zip(parts, window.sizes)], 1)

    rows = {
        name: table_rows(tables[name.removesuffix("_back").removesuffix("_sums")], offsets)
        for name, offsets in window.offsets().items()
    }

    def gradients_of_rows(**found):
        """In the order of rows: of a table's rows at other offsets all of the gradient is in those found."""
        return [tf.transpose(found[name]) if name in found else tf.zeros_like(x) for name, x in sorted(rows.items())]

    @tf.custom_gradient
    def to_qkv(x, kernel):
        qkv, sums = call(project.project, x, kernel)

        def gradient(d_qkv, d_sums):
            return call(project.project_gradient, x, qkv, d_qkv, kernel, d_sums)

        return (qkv, sums), gradient

    @tf.custom_gradient
    def to_logit_sums(x, affine, *rows_):
        """Sums, and x: to what comes back for x what comes back for the sums is added in one go."""
        rows_ = tf.nest.pack_sequence_as(rows, rows_)

        def gradient(d_sums, more):
            d_sums = tf.reshape(tf.transpose(d_sums, [2, 0, 1]), [-1, heads])
            d_x, d_affine, d_query, d_key = call(logit_sums.logit_sums_gradient, d_sums, x, more, affine, rows_)
            return d_x, d_affine, *gradients_of_rows(query=d_query, key_sums=d_key)

        sums = tf.reshape(tf.reduce_sum(call(logit_sums.logit_sums, x, affine, rows_), 1), [2, -1, heads])
        return (tf.transpose(sums, [1, 2, 0]), tf.identity(x)), gradient

    @tf.custom_gradient
    def to_outputs(x, affine, scales, *rows_):
        rows_ = tf.nest.pack_sequence_as(rows, rows_)
        content, position, sums = call(attention.attend, scales, x, affine, rows_)

        def gradient(d_content, d_position, d_sums):
            def whole(d, y, d_sums):
                d = tf.cast(d, tf.float32) + d_sums[0] + 2.0 * d_sums[1] * tf.cast(y, tf.float32)
                return tf.cast(d, y.dtype)

            d = whole(d_content, content, d_sums[:2]), whole(d_position, position, d_sums[2:])
            d_x, d_affine, *d_rows, d_scales = call(attention.attend_gradient, scales, x, affine, d, rows_)
            d_scales = tf.reshape(tf.reduce_sum(d_scales, 1), [-1, heads])
            d_rows = dict(zip(("query_back", "key_back", "value_back"), d_rows))
            return d_x, d_affine, d_scales, *gradients_of_rows(**d_rows)

        return (content, position, sums), gradient

    flat = tf.nest.flatten(rows)
    qkv, sums = to_qkv(open_(x), align(kernel))
    affine = align(normalise(unalign(sums)))
    sums, qkv = to_logit_sums(qkv, affine, *flat)
    content, position, sums = to_outputs(qkv, affine, logit_scales(sums), *flat)
    return close(content), close(position), tf.reshape(sums, [2, 2, -1])
