"""A whole attention layer on a TPU, as Pallas kernels: no map of logits is ever in the TPU's main memory.

The forward pass of training has three kernels: the projection with the sums of its batch norm (`project.py`), the sums
of the logits (`logit_sums.py`), and softmax and outputs with the sums of their batch norms (`outputs.py`). Each has one
for its gradient, and there is one more for the sums of the gradient that the last batch norms need. Between kernels,
replicas add up such sums: some numbers for each channel or head. Inference has the statistics already, and runs the
projection and the outputs.

jax (of the extra `kernel`) lowers the kernels while a step is traced, and TensorFlow calls them as an `XlaCallModule`.
The TPU's own compiler has compiled them, and jax has interpreted them on a CPU, but they have never run on a TPU. A
layer uses them where `backend='kernel'`, which is what the recipes say. `../NOTES.md` has the cycles.
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
    """Whether the kernels can compute a layer.

    They need static shapes, all terms, one axis with a short reach, enough memory, and at most float32.

    Args:
        x: [N, h, w, C].
        kernel: [C, .], the projection.
        spec: `AttentionSpec`.
        windows: windows of the image.
    """
    all_terms = len(spec.options.terms) == len(spec.uses) == 3
    if not (x.shape.is_fully_defined() and all_terms and isinstance(windows, Windows)) or x.dtype == tf.float64:
        return False
    memory = FAST_MEMORY if tpu_generation() > 4 else FAST_MEMORY_V4
    fits = (x.dtype.size + 4) * kernel.shape.num_elements() < 0.7 * memory  # the projection and its gradient
    fits = fits and CHANNEL_FACTOR * x.dtype.size * kernel.shape[1] < memory
    return fits and windows.reach <= REACH


class Norms(typing.NamedTuple):
    """The batch norms of a layer, as functions of sums that the kernels make.

    Attributes:
        qkv_affine: function from the sums [2, .] of q, k, v and of their squares to the factors and summands [2, .] of
            their batch norm.
        logit_scales: [terms, H], or `BatchScales`.
        output_affines: function from the sums [2, 2, value_channels] of the outputs by content and by position, and of
            their squares, to the factors and summands [2, 2, value_channels] of their batch norms.
    """

    qkv_affine: typing.Callable
    logit_scales: tf.Tensor | BatchScales
    output_affines: typing.Callable


def project_and_attend(x, kernel, spec, tables, *, windows, norms, interpret=False):
    """An attention layer, where `can_serve`.

    Args:
        x: [N, h, w, C].
        kernel: [C, 2 H*D + value_channels], the projection to q, k and v.
        spec: `AttentionSpec`.
        tables: dict of 'query', 'key' [R, D] and 'value' [R, E].
        windows: `Windows` of the image.
        norms: `Norms`.
        interpret: whether jax computes it on a CPU, slowly.

    Returns:
        the sum of the normalised outputs by content and by position, [N, h, w, value_channels].
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
        """[., channels of q, k and v] -> the same with q, k and v padded to whole registers each."""
        blocks = tf.split(x, self.tiling.sizes, 1)
        return tf.concat([tf.pad(block, [[0, 0], [0, -block.shape[1] % LANES]]) for block in blocks], 1)

    def unalign(self, x):
        """The inverse of `align`."""
        return tf.concat([x[:, lanes][:, :size] for lanes, size in zip(self.tiling.lanes, self.tiling.sizes)], 1)

    def affine(self, affine, scales):
        """affine [2, .] as the kernels take it: q times the scales [H] of the content term, then q, k and v."""
        scales = tf.repeat(scales, self.tiling.depth)
        q = affine[:, : self.tiling.sizes[0]] * scales
        return tf.concat([tf.pad(q, [[0, 0], [0, -q.shape[1] % LANES]]), self.align(affine)], 1)

    def table(self, name, scales):
        """Rows of the query's or the key's table in the order of a product, for each head: [lanes of q, J]."""
        offsets = OFFSETS if name == "query" else -OFFSETS
        rows = scales[:, None, None] * tf.transpose(table_rows(self.tables[name], offsets))  # [H, D, J]
        rows = tf.reshape(rows, [-1, LANES])
        return tf.pad(rows, [[0, -rows.shape[0] % LANES], [0, 0]])

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
        def run(x, affine, *tables):
            def gradient(d_sums, more):
                d_sums = tf.reshape(tf.transpose(d_sums, [2, 0, 1]), [-1, heads])
                return self._call(logit_sums.logit_sums_gradient, d_sums, x, more, affine, tables)

            sums = tf.reduce_sum(self._call(logit_sums.logit_sums, x, affine, tables), 1)
            return (tf.transpose(tf.reshape(sums, [2, -1, heads]), [1, 2, 0]), tf.identity(x)), gradient

        ones = tf.ones([heads])
        return run(x, self.affine(affine, ones), self.table("query", ones), self.table("key", ones))

    def outputs(self, x, affine, scales, output_affines):
        """The sum of the normalised outputs by content and by position, [P, H*E].

        Main memory holds its gradient, but not those of the two outputs: the kernel makes them from it. So nothing but
        kernels reads the gradient, and XLA moves it in its own dtype.
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
                return d, None, tf.stack([[on_content, total], [on_position, total]])  # `attend` takes d itself

            return tf.cast(total, content.dtype), gradient

        on_content, on_query, on_key = tf.unstack(scales)
        tables = self.table("query", on_query), self.table("key", on_key)
        value = tf.transpose(table_rows(self.tables["value"], OFFSETS))
        content, position, sums = attend(x, self.affine(affine, on_content), *tables, value)
        affines = output_affines(tf.reshape(sums, [2, 2, -1]))
        return normalize(content, position, affines)

    def _call(self, function, *args):
        """Calls a function of jax arrays on tensors."""
        return on_tensors(function, self.tiling, interpret=self.interpret)(*args)
