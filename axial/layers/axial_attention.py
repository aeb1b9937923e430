"""Position-sensitive axial attention (Axial-DeepLab, ECCV 2020, Eq. 4).

Along one axis of an image, for each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})

with a batch norm on q, k, v, on each of the three logit terms (one scale per head) and on each of
the two output terms (one scale per channel). p runs over the whole axis, or over the keys with
|p - o| <= span // 2.

The arithmetic is in axial/layers/attend.py; here are the weights.
"""

import tensorflow as tf
import tf_keras as keras

from axial.layers.attend import TERMS, Windows, attend_in_parts
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


class AxialAttention(keras.layers.Layer):
    """Multi-head position-sensitive attention along the height or the width of an image.

    The same weights serve every image size and every span: tables are looked up by p - o.

    Args:
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        axis: 'height' or 'width'.
        heads: number of heads; divides both channel counts.
        span: odd; a query sees the keys with |p - o| <= span // 2. None: the whole axis.
        terms: logit terms in use, of 'content', 'query', 'key'.
        value_position: whether r^v is in use.
        max_distance: the tables hold offsets below it, 2 max_distance - 1 rows; positions farther
            apart share the end rows.
        norm: `BatchNormConfig`, or None for the folded layer: no batch norm, a bias on q, k, v and
            on the output, and fixed scales.
        keep_softmax: as of `attend`; False saves one map and costs a third of the products.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        ValueError: an even span, channels that heads do not divide, no logit term.

    Example:
        >>> layer = AxialAttention(64, 128, axis="width", span=65)
        >>> layer(tf.random.normal([1, 33, 129, 128])).shape
        TensorShape([1, 33, 129, 128])
    """

    def __init__(
        self,
        key_channels,
        value_channels,
        axis,
        heads=8,
        span=None,
        terms=TERMS,
        value_position=True,
        max_distance=255,
        norm=BatchNormConfig(),
        keep_softmax=True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if key_channels % heads or value_channels % heads:
            raise ValueError(
                f"{heads} heads must divide key_channels and value_channels: "
                f"got {key_channels} and {value_channels}"
            )
        if not terms or not set(terms) <= set(TERMS):
            raise ValueError(f"terms must be some of {TERMS}: got {terms}")
        if axis not in ("height", "width"):
            raise ValueError(f"axis must be 'height' or 'width': got {axis!r}")
        Windows(1, span)  # refuses an even span
        self.key_channels, self.value_channels, self.heads = key_channels, value_channels, heads
        self.axis, self.span, self.norm = axis, span, norm
        self.terms = tuple(t for t in TERMS if t in terms)
        self.tables_in_use = {t: key_channels for t in self.terms if t != "content"}
        if value_position:
            self.tables_in_use["value"] = value_channels
        self.max_distance, self.keep_softmax = max_distance, keep_softmax
        if norm is not None:
            self.qkv_norm = BatchNorm(norm, name="qkv_norm")
            self.logit_norm = LogitNorm(len(self.terms), heads, norm, name="logit_norm")
            self.content_output_norm = BatchNorm(norm, name="content_output_norm")
            if value_position:
                self.position_output_norm = BatchNorm(norm, name="position_output_norm")

    def build(self, shape):
        channels = 2 * self.key_channels + self.value_channels
        self.kernel = self.add_weight(
            "kernel",
            [shape[-1], channels],
            initializer=keras.initializers.VarianceScaling(1.0, "fan_in"),
        )
        self.tables = {
            name: self.add_weight(
                f"{name}_table",
                [2 * self.max_distance - 1, total // self.heads],
                initializer=keras.initializers.TruncatedNormal(
                    stddev=(self.heads / total) ** 0.5
                ),
                experimental_autocast=False,
            )
            for name, total in self.tables_in_use.items()
        }
        if self.norm is None:
            self.qkv_bias = self.add_weight("qkv_bias", [channels])
            self.logit_scales = self.add_weight("logit_scales", [len(self.terms), self.heads])
            self.position_scale = self.add_weight("position_scale", [self.value_channels])
            self.bias = self.add_weight("bias", [self.value_channels])
        else:  # the only sublayer that a first call in inference would not build
            with tf.name_scope(self.logit_norm.name):
                self.logit_norm.build(None)
                self.logit_norm.built = True

    def call(self, x, training=False):
        _, height, width, _ = x.shape
        if height is None or width is None:
            raise ValueError(f"axial attention needs a static height and width: got {x.shape}")
        windows = Windows(height if self.axis == "height" else width, self.span)
        # As a convolution: a product's gradient would meet transposed operands, at half the speed.
        qkv = tf.nn.conv2d(x, self.kernel[None, None], 1, "VALID")
        qkv = tf.reshape(qkv, [-1, qkv.shape[3]])
        qkv = qkv + self.qkv_bias if self.norm is None else self.qkv_norm(qkv, training=training)
        qkv = tf.split(qkv, [self.key_channels, self.key_channels, self.value_channels], 1)
        q, k, v = (self._split_heads(t, height, width) for t in qkv)
        scales = self._scales(windows.pairs * tf.cast(tf.shape(q)[0], tf.float32), training)
        keep = self.keep_softmax or not training
        with tf.name_scope(windows.scope):
            outputs = attend_in_parts(q, k, v, self.tables, windows, scales, self.terms, keep)
        content, position = (t if t is None else self._join_heads(t, height, width) for t in outputs)
        if self.norm is None:
            output = content + self.bias
            if position is not None:
                output += position * self.position_scale
        else:
            output = self.content_output_norm(content, training=training)
            if position is not None:
                output += self.position_output_norm(position, training=training)
        return tf.reshape(output, [-1, height, width, self.value_channels])

    def _scales(self, pairs, training):
        if self.norm is None:
            return self.logit_scales
        if not training:
            return self.logit_norm.stored_scales()
        return lambda sums: self.logit_norm(sums, pairs)

    def _split_heads(self, x, height, width):
        """[N*h*w, H*D] -> [B, H, L, D]."""
        depth = x.shape[1] // self.heads
        x = tf.reshape(x, [-1, height, width, self.heads, depth])
        order, length = ([0, 2, 3, 1, 4], height) if self.axis == "height" else ([0, 1, 3, 2, 4], width)
        return tf.reshape(tf.transpose(x, order), [-1, self.heads, length, depth])

    def _join_heads(self, x, height, width):
        """[B, H, L, E] -> [N*h*w, H*E]."""
        depth = x.shape[3]
        if self.axis == "height":
            x = tf.transpose(tf.reshape(x, [-1, width, self.heads, height, depth]), [0, 3, 1, 2, 4])
        else:
            x = tf.transpose(tf.reshape(x, [-1, height, self.heads, width, depth]), [0, 1, 3, 2, 4])
        return tf.reshape(x, [-1, self.heads * depth])

    def folded_weights(self):
        """Values for the weights of the same layer with norm None.

        The batch norm of q, k and v goes into the projection, and with it the scale of the content
        output into v's columns; the logit scales and the position output's scale stay as numbers
        beside the tables, which all heads share; what the output norms add is one bias.
        """
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = self.qkv_norm.folded()
        output_scale, bias = self.content_output_norm.folded()
        position_scale = tf.ones([self.value_channels])
        if "value" in self.tables:
            position_scale, position_bias = self.position_output_norm.folded()
            bias = bias + position_bias
        on_values = tf.concat([tf.ones([2 * self.key_channels]), output_scale], 0)
        return [
            self.kernel * scale * on_values,
            *self.tables.values(),
            shift * on_values,
            self.logit_norm.stored_scales(),
            position_scale,
            bias,
        ]
