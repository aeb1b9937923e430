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
| the sums of logits and outputs, and what norms multiply by, in kernels | | | 3.7 |
| the projection a product, not a convolution, of XLA's | 4.6 | 5.1 | 2.9 |
| the projection in kernels | 3.9 | 4.8 | 2.6 |

Of the two kernels of attention at 128 x 128: 2.0 with maps [queries, keys], 1.7 turned, 1.2 with heads in step; two
or three steps apart 1.3 and 1.4, steps shorter or longer 1.2 to 1.3. Tried and left out: arrays padded to whole
tiles in main memory, 8.8 for 8.1 at 130 x 129.
"""

import dataclasses
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
    offsets = window.offsets()
    rows = {name: table_rows(tables[name.split("_")[0]], offsets[name]) for name in offsets}
    calls = _Calls(window, rows, interpret)
    qkv, sums = calls.project(_open(x, windows), calls.align(kernel))
    affine = calls.align(normalise(calls.unalign(sums)))
    sums, qkv = calls.logit_sums(qkv, affine)
    content, position, sums = calls.attend(qkv, affine, logit_scales(sums))
    return _close(content, windows), _close(position, windows), tf.reshape(sums, [2, 2, -1])


def _open(x, windows):
    """[N, h, w, C] -> [A, length, C]."""
    x = tf.reshape(windows.whole(x), [-1, windows.length, windows.abreast, x.shape[3]])
    return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, windows.length, x.shape[3]])


def _close(x, windows):
    """[A, length, C] -> [N, h, w, C]."""
    x = tf.reshape(x, [-1, windows.abreast, windows.length, x.shape[2]])
    return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, windows.height, windows.width, x.shape[3]])


@dataclasses.dataclass(frozen=True)
class _Calls:
    """The kernels as functions of tensors, with their gradients.

    Attributes:
        window: `Window`.
        rows: dict of the tables' rows at `window.offsets()`.
        interpret: as of `attend`.
    """

    window: Window
    rows: dict
    interpret: bool

    def align(self, x):
        """[., channels of q, k and v] -> [., the same, each in whole tiles]."""
        parts = tf.split(x, self.window.sizes, 1)
        return tf.concat([tf.pad(part, [[0, 0], [0, -part.shape[1] % LANES]]) for part in parts], 1)

    def unalign(self, x):
        """The other way."""
        parts = tf.split(x, [up(size, LANES) for size in self.window.sizes], 1)
        return tf.concat([part[:, :size] for part, size in zip(parts, self.window.sizes)], 1)

    def project(self, x, kernel):
        """qkv, and the sums of it and of its squares."""

        @tf.custom_gradient
        def run(x, kernel):
            qkv, sums = self._call(project.project, x, kernel)

            def gradient(d_qkv, d_sums):
                return self._call(project.project_gradient, x, qkv, d_qkv, kernel, d_sums)

            return (qkv, sums), gradient

        return run(x, kernel)

    def logit_sums(self, x, affine):
        """Sums [terms, H, 2], and x: to what comes back for it what comes back for the sums is added in one go."""
        heads = self.window.heads

        @tf.custom_gradient
        def run(x, affine, *rows):
            rows = tf.nest.pack_sequence_as(self.rows, rows)

            def gradient(d_sums, more):
                d_sums = tf.reshape(tf.transpose(d_sums, [2, 0, 1]), [-1, heads])
                found = self._call(logit_sums.logit_sums_gradient, d_sums, x, more, affine, rows)
                d_x, d_affine, d_query, d_key = found
                return d_x, d_affine, *self._gradients_of_rows(query=d_query, key_sums=d_key)

            sums = tf.reduce_sum(self._call(logit_sums.logit_sums, x, affine, rows), 1)
            return (tf.transpose(tf.reshape(sums, [2, -1, heads]), [1, 2, 0]), tf.identity(x)), gradient

        return run(x, affine, *tf.nest.flatten(self.rows))

    def attend(self, x, affine, scales):
        """Content, position and the sums of both and of their squares [4, H*E]."""

        @tf.custom_gradient
        def run(x, affine, scales, *rows):
            rows = tf.nest.pack_sequence_as(self.rows, rows)
            content, position, sums = self._call(attention.attend, scales, x, affine, rows)

            def with_sums(d, y, d_sums):
                d = tf.cast(d, tf.float32) + d_sums[0] + 2.0 * d_sums[1] * tf.cast(y, tf.float32)
                return tf.cast(d, y.dtype)

            def gradient(d_content, d_position, d_sums):
                d = with_sums(d_content, content, d_sums[:2]), with_sums(d_position, position, d_sums[2:])
                found = self._call(attention.attend_gradient, scales, x, affine, d, rows)
                d_x, d_affine, d_query, d_key, d_value, d_scales = found
                d_scales = tf.reshape(tf.reduce_sum(d_scales, 1), [-1, self.window.heads])
                d_rows = self._gradients_of_rows(query_back=d_query, key_back=d_key, value_back=d_value)
                return d_x, d_affine, d_scales, *d_rows

            return (content, position, sums), gradient

        return run(x, affine, scales, *tf.nest.flatten(self.rows))

    def _gradients_of_rows(self, **found):
        """In the order of rows: of a table's rows at other offsets all of the gradient is in those found."""

        def of(name, x):
            return tf.transpose(found[name]) if name in found else tf.zeros_like(x)

        return [of(name, x) for name, x in sorted(self.rows.items())]

    def _call(self, function, *args):
        """A function of arrays on tensors; the check left out would refuse to trace for a TPU elsewhere."""
        return jax2tf.convert(
            functools.partial(function, self.window, self.interpret),
            with_gradient=False,
            native_serialization_platforms=("cpu" if self.interpret else "tpu",),
            native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
        )(*args)
