"""What every position-sensitive attention layer is made of: its weights, its batch norms, its folded twin.

The arithmetic is in axial/layers/attend.py; a layer says which windows its queries see and which tables
it looks positions up in.
"""

import tensorflow as tf
import tf_keras as keras

from axial.layers.attend import attend_in_parts
from axial.layers.batch_norm import BatchNorm, BatchNormConfig, all_reduce_sums, update_moving


class LogitNorm(keras.layers.Layer):
    """The scales [terms, H] that batch norms put on logits, gamma / sqrt(variance + epsilon).

    The moving mean is kept for implementations that subtract it; softmax ignores it.
    """

    def __init__(self, terms, heads, config, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        self.shape, self.config = [terms, heads], config

    def build(self, _):
        moving = dict(
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
        weight = lambda name, initializer, **kwargs: self.add_weight(
            name, self.shape, tf.float32, initializer, experimental_autocast=False, **kwargs
        )
        self.gamma = weight("gamma", "ones")
        self.moving_mean = weight("moving_mean", "zeros", **moving)
        self.moving_variance = weight("moving_variance", "ones", **moving)

    def stored_scales(self):
        return self.gamma * tf.math.rsqrt(self.moving_variance + self.config.epsilon)

    def call(self, sums, pairs):
        """From the sums [terms, H, 2] over `pairs` logits; moves the moving statistics."""
        sums, pairs = all_reduce_sums(sums, pairs)
        mean, square = tf.unstack(sums / pairs, axis=2)
        variance = tf.maximum(square - mean * mean, 0.0)
        update_moving(
            self.config, self.moving_mean, self.moving_variance, mean, variance, pairs
        )
        return self.gamma * tf.math.rsqrt(variance + self.config.epsilon)


class Attention(keras.layers.Layer):
    """Multi-head attention of every pixel of an image to those of its window.

    Where tables are sums of weights, a subclass says how they are looked up (`lookup_tables`).

    Args:
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        heads: number of heads; divides both channel counts.
        terms: logit terms in use, of `TERMS`.
        tables: dict from the name of a table's weight to its rows, its term or 'value', and the
            variance of its first values times the channels of a head.
        windows: function of height and width that returns an image's `Windows` or `SquareWindows`.
        norm: `BatchNormConfig`, or None for the folded layer: no batch norm, a bias on q, k, v and
            on the output, and fixed scales.
        inner_norm: whether batch norms also stand on q, k, v and on the logit terms.
        keep_softmax: as of `attend`.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        ValueError: channels that heads do not divide.
    """

    def __init__(
        self,
        key_channels,
        value_channels,
        heads,
        terms,
        tables,
        windows,
        norm=BatchNormConfig(),
        inner_norm=True,
        keep_softmax=True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if key_channels % heads or value_channels % heads:
            raise ValueError(
                f"{heads} heads must divide key_channels and value_channels: "
                f"got {key_channels} and {value_channels}"
            )
        self.key_channels, self.value_channels, self.heads = key_channels, value_channels, heads
        self.terms, self.norm, self.inner_norm, self.keep_softmax = terms, norm, inner_norm, keep_softmax
        self.table_shapes, self.windows = tables, windows
        self.value_position = any(use == "value" for _, use, _ in tables.values())
        if norm is None:
            return
        if inner_norm:
            self.qkv_norm = BatchNorm(norm, name="qkv_norm")
            self.logit_norm = LogitNorm(len(terms), heads, norm, name="logit_norm")
        self.content_output_norm = BatchNorm(norm, name="content_output_norm")
        if self.value_position:
            self.position_output_norm = BatchNorm(norm, name="position_output_norm")

    def lookup_tables(self):
        """dict of the tables that `attend` takes."""
        return self.tables

    def build(self, shape):
        channels = 2 * self.key_channels + self.value_channels
        self.kernel = self.add_weight(
            "kernel",
            [shape[-1], channels],
            initializer=keras.initializers.VarianceScaling(1.0, "fan_in"),
        )
        self.tables = {}
        for name, (rows, use, variance) in self.table_shapes.items():
            depth = (self.value_channels if use == "value" else self.key_channels) // self.heads
            self.tables[name] = self.add_weight(
                f"{name}_table",
                [rows, depth],
                initializer=keras.initializers.TruncatedNormal(stddev=(variance / depth) ** 0.5),
                experimental_autocast=False,
            )
        if self.norm is None:
            self.qkv_bias = self.add_weight("qkv_bias", [channels])
            self.logit_scales = self.add_weight("logit_scales", [len(self.terms), self.heads])
            self.position_scale = self.add_weight("position_scale", [self.value_channels])
            self.bias = self.add_weight("bias", [self.value_channels])
        elif self.inner_norm:  # the only sublayer that a first call in inference would not build
            with tf.name_scope(self.logit_norm.name):
                self.logit_norm.build(None)
                self.logit_norm.built = True

    def call(self, x, training=False):
        _, height, width, _ = x.shape
        if height is None or width is None:
            raise ValueError(f"attention needs a static height and width: got {x.shape}")
        windows = self.windows(height, width)
        # As a convolution: a product's gradient would meet transposed operands, at half the speed.
        qkv = tf.nn.conv2d(x, self.kernel[None, None], 1, "VALID")
        if self.norm is None:
            qkv = tf.nn.bias_add(qkv, self.qkv_bias)
        elif self.inner_norm:
            qkv = self.qkv_norm(qkv, training=training)
        q, k, v = tf.split(qkv, [self.key_channels, self.key_channels, self.value_channels], 3)
        rows = tf.cast(tf.shape(x)[0], tf.float32) * windows.rows
        scales = self._scales(windows.pairs * rows, training)
        with tf.name_scope(windows.scope):
            content, position = attend_in_parts(
                q, k, v, self.heads, self.lookup_tables(), windows, scales, self.terms,
                self.keep_softmax or not training,
            )
        if self.norm is None:
            output = content + self.bias
            return output if position is None else output + position * self.position_scale
        output = self.content_output_norm(content, training=training)
        if position is not None:
            output += self.position_output_norm(position, training=training)
        return output

    def _scales(self, pairs, training):
        if self.norm is None:
            return self.logit_scales
        if not self.inner_norm:
            return tf.ones([len(self.terms), self.heads])
        if not training:
            return self.logit_norm.stored_scales()
        return lambda sums: self.logit_norm(sums, pairs)

    def folded_weights(self):
        """Values for the weights of the same layer with norm None.

        The batch norm of q, k and v goes into the projection, and with it the scale of the content
        output into v's columns; the logit scales and the position output's scale stay as numbers
        beside the tables, which all heads share; what the output norms add is one bias.
        """
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = tf.ones([self.kernel.shape[1]]), tf.zeros([self.kernel.shape[1]])
        scales = tf.ones([len(self.terms), self.heads])
        if self.inner_norm:
            scale, shift = self.qkv_norm.folded()
            scales = self.logit_norm.stored_scales()
        output_scale, bias = self.content_output_norm.folded()
        position_scale = tf.ones([self.value_channels])
        if self.value_position:
            position_scale, position_bias = self.position_output_norm.folded()
            bias = bias + position_bias
        on_values = tf.concat([tf.ones([2 * self.key_channels]), output_scale], 0)
        return [
            self.kernel * scale * on_values,
            *self.tables.values(),
            shift * on_values,
            scales,
            position_scale,
            bias,
        ]
