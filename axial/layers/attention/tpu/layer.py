"""A whole attention layer in training on a TPU, as Pallas kernels: no map of logits is ever in the TPU's main memory.

The forward pass has three kernels, and so has the backward pass: the projection with the sums of its batch norm
(`project.py`), the sums of the logits (`logit_sums.py`), and softmax and outputs with the sums of their batch norms
(`outputs.py`). Between kernels, replicas add up these sums: some numbers for each channel or head.

jax (of the extra `kernel`) lowers the kernels while a step is traced, and TensorFlow calls them as an `XlaCallModule`.
The TPU's own compiler has compiled them, and jax has interpreted them on a CPU, but they have never run on a TPU. A
layer uses them where `backend='kernel'`, which is what the recipes say. `../NOTES.md` has the cycles.
"""

import dataclasses
import functools

import tensorflow as tf

from axial.layers.attention.tpu import logit_sums, outputs, project
from axial.layers.attention.tpu.shear import LANES, up
from axial.layers.attention.tpu.tiling import FAST_MEMORY, Tiling, group_lanes
from axial.layers.attention.windows import Windows, table_rows
from axial.layers.pallas import on_tensors

LONGEST = 384  # keys of a window, at most


def _tiling(x, spec, windows):
    depth, value_depth = spec.key_channels // spec.heads, spec.value_channels // spec.heads
    return Tiling(
        windows.length,
        windows.reach,
        heads=spec.heads,
        depth=depth,
        value_depth=value_depth,
        dtype=x.dtype.name,
    )


def can_serve(x, kernel, spec, windows):
    """Whether the kernels can compute a layer: static shapes, all terms, one axis, and enough fast memory.

    Args:
        x: [N, h, w, C].
        kernel: [C, .], the projection.
        spec: `AttentionSpec`.
        windows: windows of the image.
    """
    all_terms = len(spec.terms) == len(spec.uses) == 3
    if not (x.shape.is_fully_defined() and all_terms and isinstance(windows, Windows)):
        return False
    tiling = _tiling(x, spec, windows)
    depths = tiling.depth, tiling.value_depth
    whole_groups = all(spec.heads * depth % group_lanes(spec.heads, depth) == 0 for depth in depths)
    fits = (x.dtype.size + 4) * kernel.shape.num_elements() < 0.7 * FAST_MEMORY  # the projection and its gradient
    return whole_groups and fits and tiling.keys <= LONGEST


def project_and_attend(x, kernel, spec, tables, *, windows, qkv_affine, logit_scales, interpret=False):
    """What an attention layer computes before its output norms, where `can_serve`.

    Args:
        x: [N, h, w, C].
        kernel: [C, 2 H*D + value_channels], the projection to q, k and v.
        spec: `AttentionSpec`.
        tables: dict of 'query', 'key' [R, D] and 'value' [R, E].
        windows: `Windows` of the image.
        qkv_affine: function from the sums [2, .] of q, k, v and of their squares to the factors and summands [2, .] of
            their batch norm.
        logit_scales: function from the sums [terms, H, 2] of s and s^2 to the scales [terms, H].
        interpret: whether jax computes it on a CPU, slowly.

    Returns:
        sum_p w v_p and sum_p w r^v_{p-o}, both [N, h, w, value_channels]. Then float32 [2, 2, value_channels]: for each
        of the two, its sum over all pixels and the sum of its squares.
    """
    tiling = _tiling(x, spec, windows)
    rows = {name: table_rows(tables[name.split("_")[0]], offsets) for name, offsets in tiling.offsets().items()}
    kernels = _Kernels(tiling, rows, interpret)
    qkv, sums = kernels.project(_split_lines(x, windows), kernels.align(kernel))
    affine = kernels.align(qkv_affine(kernels.unalign(sums)))
    sums, qkv = kernels.logit_sums(qkv, affine)
    content, position, sums = kernels.outputs(qkv, affine, logit_scales(sums))
    return _join_lines(content, windows), _join_lines(position, windows), tf.reshape(sums, [2, 2, -1])


def _split_lines(x, windows):
    """[N, h, w, C] -> [A, length, C]."""
    x = tf.reshape(windows.whole(x), [-1, windows.length, windows.abreast, x.shape[3]])
    return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, windows.length, x.shape[3]])


def _join_lines(x, windows):
    """[A, length, C] -> [N, h, w, C]."""
    x = tf.reshape(x, [-1, windows.abreast, windows.length, x.shape[2]])
    return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, windows.height, windows.width, x.shape[3]])


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The kernels as functions of tensors, with their gradients.

    Attributes:
        tiling: `Tiling`.
        rows: dict of the table rows at `tiling.offsets()`.
        interpret: see `project_and_attend`.
    """

    tiling: Tiling
    rows: dict
    interpret: bool

    def align(self, x):
        """[., channels of q, k and v] -> the same with q, k and v padded to whole tiles each."""
        parts = tf.split(x, self.tiling.sizes, 1)
        return tf.concat([tf.pad(part, [[0, 0], [0, -part.shape[1] % LANES]]) for part in parts], 1)

    def unalign(self, x):
        """The inverse of `align`."""
        parts = tf.split(x, [up(size, LANES) for size in self.tiling.sizes], 1)
        return tf.concat([part[:, :size] for part, size in zip(parts, self.tiling.sizes)], 1)

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
        """The sums [terms, H, 2], and x unchanged.

        x passes through so that one kernel adds the gradient through the sums to the gradient through what follows.
        """
        heads = self.tiling.heads

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

    def outputs(self, x, affine, scales):
        """Content, position, and the sums of both and of their squares [4, H*E]."""

        @tf.custom_gradient
        def run(x, affine, scales, *rows):
            rows = tf.nest.pack_sequence_as(self.rows, rows)
            content, position, sums = self._call(outputs.outputs, scales, x, affine, rows)

            def with_sums(d, y, d_sums):
                d = tf.cast(d, tf.float32) + d_sums[0] + 2.0 * d_sums[1] * tf.cast(y, tf.float32)
                return tf.cast(d, y.dtype)

            def gradient(d_content, d_position, d_sums):
                d = with_sums(d_content, content, d_sums[:2]), with_sums(d_position, position, d_sums[2:])
                found = self._call(outputs.outputs_gradient, scales, x, affine, d, rows)
                d_x, d_affine, d_query, d_key, d_value, d_scales = found
                d_scales = tf.reshape(tf.reduce_sum(d_scales, 1), [-1, self.tiling.heads])
                d_rows = self._gradients_of_rows(query_back=d_query, key_back=d_key, value_back=d_value)
                return d_x, d_affine, d_scales, *d_rows

            return (content, position, sums), gradient

        return run(x, affine, scales, *tf.nest.flatten(self.rows))

    def _gradients_of_rows(self, **found):
        """Gradients in the order of `rows`. Those that were `found` hold a table's whole gradient; the others are 0."""
        return [
            tf.transpose(found[name]) if name in found else tf.zeros_like(x) for name, x in sorted(self.rows.items())
        ]

    def _call(self, function, *args):
        """Calls a function of jax arrays on tensors."""
        return on_tensors(functools.partial(function, self.tiling, self.interpret), self.interpret)(*args)
