"""A whole attention layer as Pallas kernels for TPUs: the TPU's main memory never holds a map of logits.

The forward pass of training has three kernels: the projection with the sums of its batch norm (`project.py`), the sums
of the logits (`logit_sums.py`), and softmax and outputs with the sums of their batch norms (`outputs.py`). Each has a
backward kernel. A seventh kernel computes the sums of the gradient that the output norms need. Between two kernels the
replicas add up these sums, which are a few numbers per channel or head. Inference has stored statistics, so it needs
only the kernels of the projection and of the outputs.

jax (of the extra `kernel`) lowers the kernels while a step is traced. TensorFlow calls them as an `XlaCallModule`. The
TPU compiler has compiled them, and jax has interpreted them on a CPU, but they have never run on a TPU. A layer uses
the kernels if `backend='kernel'`, as in the recipes. `../NOTES.md` has the cycles that the kernels take.
"""

import dataclasses
import typing

import tensorflow as tf

from axial.layers.attention.tpu import logit_sums, outputs, project
from axial.layers.attention.tpu.shear import LANES, OFFSETS
from axial.layers.attention.tpu.tiling import CHANNEL_FACTOR, FAST_MEMORY, REACH, Tiling
from axial.layers.attention.windows import Windows, table_rows
from axial.layers.batch_norm import BatchScales
from axial.layers.tpu.pallas import FAST_MEMORY_V4, on_tensors, tpu_generation


def can_serve(x, kernel, spec, windows):
    """Whether the kernels support a layer.

    The kernels need static shapes, all terms, axial attention with a reach of at most `REACH`, enough memory, and a
    dtype other than float64.

    Args:
        x: [N, h, w, C].
        kernel: [C, 2 H*D + H*E], the projection.
        spec: `AttentionSpec`.
        windows: `Windows` or `SquareWindows` of the image.
    """
    all_terms = len(spec.options.terms) == len(spec.uses) == 3
    if not (x.shape.is_fully_defined() and all_terms and isinstance(windows, Windows)) or x.dtype == tf.float64:
        return False
    memory = FAST_MEMORY if tpu_generation() > 4 else FAST_MEMORY_V4
    fits = (x.dtype.size + 4) * kernel.shape.num_elements() < 0.7 * memory  # the projection and its gradient
    fits = fits and CHANNEL_FACTOR * x.dtype.size * kernel.shape[1] < memory
    return fits and windows.reach <= REACH


class Norms(typing.NamedTuple):
    """The batch norms of a layer, as functions of sums that the kernels compute.

    Attributes:
        qkv_affine: function from the sums of q, k, v and of their squares [2, .] to the scale and the shift of their
            batch norm [2, .].
        logit_scales: [terms, H], or `BatchScales`.
        output_affines: function from the sums of the content and the position output and of their squares [2, 2,
            value_channels] to the scales and shifts of their batch norms [2, 2, value_channels].
    """

    qkv_affine: typing.Callable
    logit_scales: tf.Tensor | BatchScales
    output_affines: typing.Callable


def project_and_attend(x, kernel, spec, tables, *, windows, norms, interpret=False):
    """An attention layer for which `can_serve` is true.

    Args:
        x: [N, h, w, C].
        kernel: [C, 2 H*D + H*E], the projection to q, k and v.
        spec: `AttentionSpec`.
        tables: dict of 'query' [R, D], 'key' [R, D] and 'value' [R, E].
        windows: `Windows` of the image.
        norms: `Norms`.
        interpret: whether jax interprets the kernels on a CPU, slowly.

    Returns:
        [N, h, w, value_channels]: the sum of the normalised content and position outputs.
    """
    heads = spec.options.heads
    tiling = Tiling(
        x.shape[0] * windows.lines,
        windows.length,
        windows.reach,
        depth=spec.key_channels // heads,
        value_depth=spec.value_channels // heads,
        heads=heads,
        dtype=x.dtype.name,
        strided=tpu_generation() > 4,
    )
    kernels = _Kernels(tiling, tables, interpret)
    qkv, sums = kernels.project(tf.reshape(windows.split_lines(x), [-1, x.shape[3]]), kernels.align(kernel))  # [P, C]
    affine, scales = norms.qkv_affine(kernels.unalign(sums)), norms.logit_scales
    if isinstance(scales, BatchScales):
        sums, qkv = kernels.logit_sums(qkv, affine)
        scales = scales.from_sums(sums)
    y = kernels.outputs(qkv, affine, scales, norms.output_affines)
    return windows.join_lines(tf.reshape(y, [-1, windows.length, 1, y.shape[1]]))


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The kernels as functions of tensors, with their gradients.

    Attributes:
        tiling: `Tiling`.
        tables, interpret: see `project_and_attend`.
    """

    tiling: Tiling
    tables: dict
    interpret: bool

    def align(self, x):
        """Pads each of q, k and v along the last axis to whole registers of 128 lanes."""
        blocks = tf.split(x, self.tiling.sizes, 1)
        return tf.concat([tf.pad(block, [[0, 0], [0, -block.shape[1] % LANES]]) for block in blocks], 1)

    def unalign(self, x):
        """The inverse of `align`."""
        return tf.concat([x[:, lanes][:, :size] for lanes, size in zip(self.tiling.lanes, self.tiling.sizes)], 1)

    def affine(self, affine, scales):
        """`affine` of `tiling.py`, from the scale and shift of q, k and v [2, .] and the content term's scales [H]."""
        scales = tf.repeat(scales, self.tiling.depth)
        q = affine[:, : self.tiling.sizes[0]] * scales
        return tf.concat([tf.pad(q, [[0, 0], [0, -q.shape[1] % LANES]]), self.align(affine)], 1)

    def table(self, name, scales):
        """The table 'query' [lanes of q, B] in the order of a band, or 'key' [lanes of q, J], scaled per head."""
        offsets = self.tiling.shear.band if name == "query" else -OFFSETS
        rows = scales[:, None, None] * tf.transpose(table_rows(self.tables[name], offsets))  # [H, D, .]
        rows = tf.reshape(rows, [-1, len(offsets)])
        return tf.pad(rows, [[0, -rows.shape[0] % LANES], [0, 0]])

    def project(self, x, kernel):
        """qkv [P, .], and the sums of qkv and of its squares [2, .]."""

        @tf.custom_gradient
        def run(x, kernel):
            qkv, sums = self._call(project.project, x, kernel)

            def gradient(d_qkv, d_sums):
                return self._call(project.project_gradient, x, qkv, d_qkv, kernel, d_sums)

            return (qkv, sums), gradient

        return run(x, kernel)

    def logit_sums(self, x, affine):
        """The sums [terms, H, 2], and x itself.

        The method returns x so that one kernel adds the gradient through the sums to the gradient through the outputs.
        """
        heads = self.tiling.heads

        @tf.custom_gradient
        def run(x, affine, *tables):
            def gradient(d_sums, more):
                d_sums = tf.reshape(tf.transpose(d_sums, [2, 0, 1]), [-1, heads])
                return self._call(logit_sums.logit_sums_gradient, d_sums, x, more, affine, tables)

            sums = tf.reduce_sum(self._call(logit_sums.logit_sums, x, affine, tables), 1)
            return (tf.transpose(tf.reshape(sums, [2, -1, heads]), [1, 2, 0]), tf.identity(x)), gradient

        ones = tf.ones([heads])
        return run(x, self.affine(affine, ones), self.table("query", ones), self.table("key", ones))

    def outputs(self, x, affine, scales, output_affines):
        """The sum of the normalised content and position outputs, [P, H*E].

        The backward kernel makes the gradients of both outputs from the gradient of their sum, so main memory holds
        only the gradient of the sum. Only kernels read this gradient, so XLA keeps its dtype.
        """

        @tf.custom_gradient
        def attend(x, affine, *tables):
            content, position, sums = self._call(outputs.outputs, x, affine, tables)

            def gradient(d_total, _, d_sums):
                factors = tf.stack([[affines[i, 0], d_sums[2 * i], 2.0 * d_sums[2 * i + 1]] for i in range(2)])
                d = d_total, content, position, tf.reshape(factors, [6, -1])
                return self._call(outputs.outputs_gradient, x, affine, d, tables)

            return (content, position, sums), gradient

        @tf.custom_gradient
        def normalize(content, position, affines):
            pairs = zip((content, position), tf.unstack(affines))
            total = tf.add_n([tf.cast(y, tf.float32) * affine[0] + affine[1] for y, affine in pairs])

            def gradient(d):
                total, on_content, on_position = tf.unstack(self._call(outputs.gradient_sums, d, content, position))
                return d, None, tf.stack([[on_content, total], [on_position, total]])  # `attend` needs d itself

            return tf.cast(total, content.dtype), gradient

        on_content, on_query, on_key = tf.unstack(scales)
        tables = self.table("query", on_query), self.table("key", on_key)
        value = tf.transpose(table_rows(self.tables["value"], self.tiling.shear.band))
        content, position, sums = attend(x, self.affine(affine, on_content), *tables, value)
        affines = output_affines(tf.reshape(sums, [2, 2, -1]))
        return normalize(content, position, affines)

    def _call(self, function, *args):
        """Calls a function of jax arrays on tensors."""
        return on_tensors(function, self.tiling, interpret=self.interpret)(*args)
