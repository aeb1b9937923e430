"""The attention layer of exported models: every batch norm is folded into its weights."""

import numpy as np
import tensorflow as tf

from axial.layers.attention.layer import KERNELS, attend_fast, logit_maps
from axial.layers.attention.windows import join_heads, split_heads, table_rows
from axial.layers.configured import Layer, Unfolded
from axial.layers.conv import product
from axial.layers.device import choose, import_kernels
from axial.layers.masking import hide

PROJECTIONS = ("query", "key", "value")


class FoldedAttention(Unfolded, Layer):
    """An attention layer without batch norms, with the output of an `Attention` of the same spec in inference.

    q, k and v have biases. Each logit term has one scale per head, and the position output has one scale per channel.

    Args:
        spec: `AttentionSpec`.

    Shapes:
        - x: [N, h, w, C], h and w static
        - output: [N, h, w, value_channels]
    """

    def __init__(self, spec, name=None):
        super().__init__(name=name)
        self.spec = spec

    def build(self, shape):
        # There are three kernels, so that no projection's output has to be split.
        sizes, kernel = [*zip(PROJECTIONS, self.spec.sizes)], "glorot_uniform"
        self.kernels = [self.add_weight(f"{n}_kernel", [shape[-1], size], initializer=kernel) for n, size in sizes]
        self.biases = [self.add_weight(f"{n}_bias", [size]) for n, size in sizes]
        self.tables = self.spec.add_tables(self)
        options = self.spec.options
        self.scales = [self.add_weight(f"{t}_scale", [options.heads], initializer="ones") for t in options.terms]
        if options.value_position:
            self.position_scale = self.add_weight("position_scale", [self.spec.value_channels])
        super().build(shape)

    def call(self, x, training=False):
        windows = self.spec.windows(x)
        if choose(self.spec.options.backend, lambda: self._kernels_can_serve(x, windows)) == "kernel":
            with tf.name_scope(windows.scope):
                return self._call_kernels(x, windows)
        q, k, v = self._project(x)
        tables = self.spec.lookup_tables(self.tables)
        options, scales = self.spec.options, tf.stack(self.scales)
        with tf.name_scope(windows.scope):
            content, position = attend_fast(q, k, v, tables, windows=windows, options=options, scales=scales)
        return content if position is None else content + position * self.position_scale

    def _project(self, x):
        """q, k and v of pixels, each [N, h, w, channels of all heads]."""
        return [tf.nn.bias_add(product(x, kernel), bias) for kernel, bias in zip(self.kernels, self.biases)]

    def _kernels_can_serve(self, x, windows):
        return import_kernels(KERNELS).can_serve(x, tf.concat(self.kernels, 1), self.spec, windows)

    def _call_kernels(self, x, windows):
        """The output of `call`, computed by the TPU kernels."""
        bias = tf.cast(tf.concat(self.biases, 0), tf.float32)
        scales = tf.stack([tf.ones([self.spec.value_channels]), tf.cast(self.position_scale, tf.float32)])
        kernels = import_kernels(KERNELS)
        norms = kernels.Norms(
            qkv_affine=lambda _: tf.stack([tf.ones_like(bias), bias]),
            logit_scales=tf.cast(tf.stack(self.scales), tf.float32),
            output_affines=lambda _: tf.stack([scales, tf.zeros_like(scales)], 1),
        )
        kernel, tables = tf.concat(self.kernels, 1), self.spec.lookup_tables(self.tables)
        return kernels.project_and_attend(x, kernel, self.spec, tables, windows=windows, norms=norms)

    def query_weights(self, x, index):
        """The attention weights of one query of every line: float32 [N, H, h, w]. The weights of a line sum to one.

        The method computes only the logits of these queries.

        Args:
            x: [N, h, w, C].
            index: the query's row for axis 'height', its column for axis 'width', or its index in raster order for
                axis 'square'.
        """
        windows, options = self.spec.windows(x), self.spec.options
        offsets, visible = windows.all_pairs([index])
        tables = self.spec.lookup_tables(self.tables)
        rows = {name: tf.cast(table_rows(table, offsets), x.dtype) for name, table in tables.items()}
        q, k, _ = (split_heads(y, windows, options.heads) for y in self._project(x))
        maps = logit_maps(q[:, index : index + 1], k, rows, options.terms)  # [terms, lines, heads, 1, L]
        scales = tf.cast(tf.stack(self.scales), maps.dtype)
        weights = tf.nn.softmax(hide(tf.reduce_sum(maps * scales[:, None, :, None, None], 0), visible))
        return tf.transpose(join_heads(tf.transpose(weights, [0, 3, 1, 2]), windows), [0, 3, 1, 2])

    def factors(self, x):
        """dict of the factors of all logits of a map [1, h, w, C]. Every product of factors is one pair's logit.

        'query' and 'key' [H, h, w, D]; 'scale' [H], of the content term; and the scaled tables of the position terms in
        use: 'query_rows' [H, 2 h - 1, D] and 'query_columns' [H, 2 w - 1, D], 'key_rows' and 'key_columns'. Entry i of
        a table belongs to the difference i - (h - 1), or i - (w - 1), of the query's position minus the key's.
        Attention along an axis has the table of this axis alone. A square's logit is the sum of both tables' logits.
        """
        (height, width), heads = x.shape[1:3], self.spec.options.heads
        maps = (tf.reshape(y, [height, width, heads, -1]) for y in self._project(x)[:2])
        factors = {name: tf.transpose(y, [2, 0, 1, 3]) for name, y in zip(PROJECTIONS, maps)}
        sides = {"height": {"rows": ("", height)}, "width": {"columns": ("", width)}}
        both = {"rows": ("_row", height), "columns": ("_column", width)}
        for use, scale in zip(self.spec.options.terms, self.scales):
            if use == "content":
                factors["scale"] = tf.convert_to_tensor(scale)
                continue
            for side, (ending, size) in sides.get(self.spec.axis, both).items():
                table = table_rows(self.tables[use + ending], np.arange(size - 1, -size, -1))
                factors[f"{use}_{side}"] = scale[:, None, None] * table
        return factors
