"""Position-sensitive axial attention as its equation is written: what the product's form is held against.

Three L x L maps of logits are made, each is batch-normalised by its own mean and variance, and
whatever a layer needs is computed where the equation names it. Slow and large on purpose of
plainness: a twin for tests and for the benchmark, never a choice of a model.
"""

import numpy as np
import tensorflow as tf

from axial.layers.axial_attention import AxialAttention
from axial.layers.batch_norm import update_moving
from axial.layers.blocks import AxialPair
from axial.layers.windows import MASKED, table_rows


class TextbookAttention(AxialAttention):
    """`AxialAttention` with the same weights and moving statistics, on one replica.

    Letters of the shapes: B rows, H heads, L queries, M keys, D key channels, E value channels.
    """

    def call(self, x, training=False):
        if self.axis == "height":
            x = tf.transpose(x, [0, 2, 1, 3])
        _, rows, length, channels = x.shape
        x = tf.reshape(x, [-1, length, channels])
        qkv = self._normalize(tf.einsum("blc,cd->bld", x, self.kernel), self.qkv_norm, [0, 1], training)
        split = tf.split(qkv, [self.key_channels, self.key_channels, self.value_channels], 2)
        q, k, v = (tf.reshape(t, [-1, length, self.heads, t.shape[2] // self.heads]) for t in split)
        offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
        tables = {name: tf.cast(table_rows(table, offsets), q.dtype) for name, table in self.tables.items()}
        logits = self._logits(q, k, tables, offsets, training)  # [B, H, L, M]
        weights = tf.cast(tf.nn.softmax(logits), v.dtype)
        content = tf.einsum("bhlm,bmhe->blhe", weights, v)
        y = self._output(content, self.content_output_norm, training)
        if "value" in tables:
            position = tf.einsum("bhlm,lme->blhe", weights, tables["value"])
            y += self._output(position, self.position_output_norm, training)
        y = tf.reshape(y, [-1, rows, length, self.value_channels])
        return tf.transpose(y, [0, 2, 1, 3]) if self.axis == "height" else y

    def _logits(self, q, k, tables, offsets, training):
        """Sum of the normalised maps, float32 [B, H, L, M], -1e30 beyond the span."""
        norm = self.logit_norm
        maps = []
        for term in self.terms:
            if term == "content":
                maps.append(tf.einsum("blhd,bmhd->bhlm", q, k))
            elif term == "query":
                maps.append(tf.einsum("blhd,lmd->bhlm", q, tables["query"]))
            else:
                maps.append(tf.einsum("bmhd,lmd->bhlm", k, tables["key"]))
        maps = tf.cast(tf.stack(maps), tf.float32)  # [terms, B, H, L, M]
        seen = np.abs(offsets) <= (self.span or 2 * len(offsets)) // 2
        mean, variance = (s[:, None, :, None, None] for s in (norm.moving_mean, norm.moving_variance))
        if training:
            if seen.all():
                mean, variance = tf.nn.moments(maps, [1, 3, 4], keepdims=True)
            else:
                mask = seen.astype(np.float32)
                mean, variance = tf.nn.weighted_moments(maps, [1, 3, 4], mask, keepdims=True)
            count = tf.cast(tf.shape(q)[0] * int(seen.sum()), tf.float32)
            moved = (tf.reshape(s, norm.shape) for s in (mean, variance))
            update_moving(norm.config, norm.moving_mean, norm.moving_variance, *moved, count)
        scale = norm.gamma[:, None, :, None, None]
        maps = (maps - mean) * tf.math.rsqrt(variance + norm.config.epsilon) * scale
        return tf.where(seen, tf.reduce_sum(maps, 0), MASKED)

    def _output(self, x, norm, training):
        """[B, L, H, E] -> [B, L, H*E], normalised."""
        x = tf.reshape(x, [-1, x.shape[1], self.value_channels])
        return self._normalize(x, norm, [0, 1], training)

    def _normalize(self, x, norm, axes, training):
        """A batch norm over `axes` by the weights of a `BatchNorm`."""
        if not norm.built:
            with tf.name_scope(norm.name):
                norm.build(x.shape)
                norm.built = True
        mean, variance = norm.moving_mean, norm.moving_variance
        dtype, x = x.dtype, tf.cast(x, tf.float32)
        if training:
            mean, variance = tf.nn.moments(x, axes)
            count = tf.cast(tf.reduce_prod(tf.shape(x)[:-1]), tf.float32)
            update_moving(norm.config, norm.moving_mean, norm.moving_variance, mean, variance, count)
        scale = norm.gamma * tf.math.rsqrt(variance + norm.config.epsilon)
        return tf.cast((x - mean) * scale + norm.beta, dtype)


class TextbookPair(AxialPair):
    """`AxialPair` of `TextbookAttention`."""

    attention_class = TextbookAttention
