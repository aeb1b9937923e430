"""The textbook form of axial attention, which applies the batch norms as the paper writes them.

This form computes every L x L map of logits and normalises it by its mean and variance. The form is slow and needs much
memory. Only tests, benchmark.py and layers.py use it, for comparison with axial's form.
"""

import numpy as np
import tensorflow as tf

from axial.layers.attention.layer import AxialAttention, logit_maps
from axial.layers.attention.windows import table_rows
from axial.layers.batch_norm import update_moving
from axial.layers.blocks import AxialPair
from axial.layers.masking import hide


class TextbookAttention(AxialAttention):
    """The textbook form of `AxialAttention`, with the same weights and moving statistics, for a single replica.

    Axes of the shapes: B lines, H heads, L queries, M keys, D key channels of a head, E value channels of a head.
    """

    def call(self, x, training=False):
        spec, axis, windows = self.spec, self.spec.axis, self.spec.windows(x)
        heads = spec.options.heads
        if axis == "height":
            x = tf.transpose(x, [0, 2, 1, 3])
        _, lines, length, channels = x.shape
        x = tf.reshape(x, [-1, length, channels])
        qkv = self._normalize(tf.einsum("blc,cd->bld", x, self.kernel), self.qkv_norm, training)
        q, k, v = (tf.reshape(t, [-1, length, heads, t.shape[2] // heads]) for t in tf.split(qkv, spec.sizes, 2))
        offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
        visible = np.abs(offsets) <= windows.reach
        rows = {name: tf.cast(table_rows(table, offsets), q.dtype) for name, table in self.tables.items()}
        maps = self._normalize_maps(logit_maps(q, k, rows, spec.options.terms), visible, training)
        w = tf.cast(tf.nn.softmax(hide(tf.reduce_sum(maps, 0), visible)), v.dtype)
        y = self._output(tf.einsum("bhlm,bmhe->blhe", w, v), self.content_output_norm, training)
        if "value" in rows:
            position = tf.einsum("bhlm,lme->blhe", w, rows["value"])
            y += self._output(position, self.position_output_norm, training)
        y = tf.reshape(y, [-1, lines, length, spec.value_channels])
        return tf.transpose(y, [0, 2, 1, 3]) if axis == "height" else y

    def _normalize_maps(self, maps, visible, training):
        """Normalises logit maps [terms, B, H, L, M] for each term and head, with statistics over the visible pairs."""
        norm = self.logit_norm
        mean, variance = (s[:, None, :, None, None] for s in (norm.moving_mean, norm.moving_variance))
        if training:
            if visible.all():
                mean, variance = tf.nn.moments(maps, [1, 3, 4], keepdims=True)
            else:
                mean, variance = tf.nn.weighted_moments(maps, [1, 3, 4], visible.astype(np.float32), keepdims=True)
            count = tf.cast(tf.shape(maps)[1] * int(visible.sum()), tf.float32)
            batch = [tf.reshape(s, norm.shape) for s in (mean, variance)]
            update_moving(
                norm.config, norm.moving_mean, norm.moving_variance, mean=batch[0], variance=batch[1], count=count
            )
        scale = norm.gamma[:, None, :, None, None]
        return (maps - mean) * tf.math.rsqrt(variance + norm.config.epsilon) * scale

    def _output(self, x, norm, training):
        """Merges the heads of x [B, L, H, E] and applies a batch norm. Returns [B, L, H*E]."""
        return self._normalize(tf.reshape(x, [-1, x.shape[1], self.spec.value_channels]), norm, training)

    def _normalize(self, x, norm, training):
        """Applies a batch norm to x [B, L, C], with the weights of a `BatchNorm`."""
        mean, variance = norm.moving_mean, norm.moving_variance
        dtype, x = x.dtype, tf.cast(x, tf.float32)
        if training:
            mean, variance = tf.nn.moments(x, [0, 1])
            count = tf.cast(tf.reduce_prod(tf.shape(x)[:-1]), tf.float32)
            update_moving(
                norm.config, norm.moving_mean, norm.moving_variance, mean=mean, variance=variance, count=count
            )
        scale = norm.gamma * tf.math.rsqrt(variance + norm.config.epsilon)
        return tf.cast((x - mean) * scale + norm.beta, dtype)


class TextbookPair(AxialPair):
    """`AxialPair` whose two layers are `TextbookAttention`."""

    def __init__(self, key_channels, value_channels, norm, strides=1, name=None):
        super().__init__(key_channels, value_channels, norm, strides, name=name)
        self.height, self.width = (
            TextbookAttention(key_channels, value_channels, axis, norm=norm, name=axis) for axis in ("height", "width")
        )
