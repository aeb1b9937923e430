"""What every position-sensitive attention layer is made of: its weights, its batch norms, its folded twin.

The arithmetic is in axial/layers/attend.py; a layer says which windows its queries see and which tables
it looks positions up in.
"""

import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers import device
from axial.layers.attend import attend_in_parts
from axial.layers.batch_norm import BatchNorm, BatchNormConfig, all_reduce_sums, update_moving

PROJECTIONS = ("query", "key", "value")


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

        def weight(name, initializer, **kwargs):
            return self.add_weight(name, self.shape, tf.float32, initializer, experimental_autocast=False, **kwargs)

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
        update_moving(self.config, self.moving_mean, self.moving_variance, mean, variance, pairs)
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
        norm: `BatchNormConfig`, or None for the folded layer: no batch norm, a bias on q, k and v,
            and fixed scales of the content term and of the position output.
        inner_norm: whether batch norms also stand on q, k, v and on the logit terms.
        softmax: as of `attend`.

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
        softmax="keep",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if key_channels % heads or value_channels % heads:
            raise ValueError(
                f"{heads} heads must divide key_channels and value_channels: got {key_channels} and {value_channels}"
            )
        self.key_channels, self.value_channels, self.heads = key_channels, value_channels, heads
        self.sizes = key_channels, key_channels, value_channels  # of what PROJECTIONS name
        self.terms, self.norm, self.inner_norm, self.softmax = terms, norm, inner_norm, softmax
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
        def projection(name, channels):
            return self.add_weight(
                name, [shape[-1], channels], initializer=keras.initializers.VarianceScaling(1.0, "fan_in")
            )

        if self.norm is None:  # three products, so that nothing splits what comes out
            self.kernels = [projection(f"{name}_kernel", n) for name, n in zip(PROJECTIONS, self.sizes)]
            self.biases = [self.add_weight(f"{name}_bias", [n]) for name, n in zip(PROJECTIONS, self.sizes)]
        else:
            self.kernel = projection("kernel", sum(self.sizes))
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
            if "content" in self.terms:
                self.content_scale = self.add_weight("content_scale", [self.heads])
            if self.value_position:
                self.position_scale = self.add_weight("position_scale", [self.value_channels])
            return
        norms = {"content_output_norm": self.value_channels}
        if self.inner_norm:
            norms |= {"qkv_norm": sum(self.sizes), "logit_norm": None}
        if self.value_position:
            norms["position_output_norm"] = self.value_channels
        for name, channels in norms.items():  # here, as not every way through `call` calls all
            with tf.name_scope(name):
                getattr(self, name).build([channels])
                getattr(self, name).built = True

    def call(self, x, training=False):
        _, height, width, _ = x.shape
        if height is None or width is None:
            raise ValueError(f"attention needs a static height and width: got {x.shape}")
        windows = self.windows(height, width)
        rows = tf.cast(tf.shape(x)[0], tf.float32) * windows.rows
        if training and self._kernels_serve(x, windows):
            with tf.name_scope(windows.scope):
                return self._call_kernels(x, windows, windows.pairs * rows)
        q, k, v = self._project(x, training)
        scales = self._scales(windows.pairs * rows, training)
        with tf.name_scope(windows.scope):
            content, position = attend_in_parts(
                q,
                k,
                v,
                self.heads,
                self.lookup_tables(),
                windows,
                scales,
                self.terms,
                self.softmax,
            )
        if self.norm is None:
            return content if position is None else content + position * self.position_scale
        output = self.content_output_norm(content, training=training)
        if position is not None:
            output += self.position_output_norm(position, training=training)
        return output

    def _kernels_serve(self, x, windows):
        if self.softmax != "kernel" or self.norm is None or not self.inner_norm or not device.on_tpu():
            return False
        return _kernels().can_attend(
            x, self.kernel, self.heads, self.value_channels, self.table_shapes, windows, self.terms
        )

    def _call_kernels(self, x, windows, pairs):
        """What `call` returns in training, by kernels."""
        pixels = tf.cast(tf.reduce_prod(tf.shape(x)[:3]), tf.float32)

        def affine(norm, sums):
            return norm.affine(*tf.unstack(sums), pixels)

        *outputs, sums = _kernels().attend(
            x,
            tf.convert_to_tensor(self.kernel),
            self.heads,
            self.value_channels,
            self.lookup_tables(),
            windows,
            lambda sums: tf.stack(affine(self.qkv_norm, sums)),
            lambda sums: self.logit_norm(sums, pairs),
        )
        total = 0.0
        norms = self.content_output_norm, self.position_output_norm
        for norm, y, sums in zip(norms, outputs, tf.unstack(sums)):
            scale, shift = affine(norm, sums)
            total += tf.cast(y, tf.float32) * scale + shift
        return tf.cast(total, x.dtype)

    def _project(self, x, training):
        if self.norm is None:
            return [tf.nn.bias_add(_product(x, kernel), bias) for kernel, bias in zip(self.kernels, self.biases)]
        qkv = _product(x, self.kernel)
        if self.inner_norm:
            qkv = self.qkv_norm(qkv, training=training)
        return tf.split(qkv, self.sizes, 3)

    def _scales(self, pairs, training):
        if self.norm is None:
            return {"content": self.content_scale} if "content" in self.terms else {}
        if not self.inner_norm:
            return dict.fromkeys(self.terms, tf.ones([self.heads]))

        def by_term(scales):
            return dict(zip(self.terms, tf.unstack(scales)))

        if not training:
            return by_term(self.logit_norm.stored_scales())
        return lambda sums: by_term(self.logit_norm(sums, pairs))

    def folded_weights(self):
        """Values for the weights of the same layer with norm None.

        The batch norm of q, k and v goes into the projections. So do the scale of the query term into q,
        that of the key term into k (what the content term then needs besides stays a number a head), the
        scale of the content output into v, and, as weights of a softmax sum to one, what the output norms
        add into v's bias. The scale of the position output stays, as all heads share its table.
        """
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = tf.ones([self.kernel.shape[1]]), tf.zeros([self.kernel.shape[1]])
        scales = tf.ones([len(self.terms), self.heads])
        if self.inner_norm:
            scale, shift = self.qkv_norm.folded()
            scales = self.logit_norm.stored_scales()
        # A scale that is all but zero stays a divisor.
        scales = dict(zip(self.terms, tf.unstack(tf.where(tf.abs(scales) < 1e-6, 1e-6, scales))))
        on_q, on_k = (scales.get(term, tf.ones([self.heads])) for term in ("query", "key"))
        rest = [scales["content"] / (on_q * on_k)] if "content" in self.terms else []
        output_scale, output_shift = self.content_output_norm.folded()
        if self.value_position:
            position_scale, position_shift = self.position_output_norm.folded()
            output_shift += position_shift
            rest.append(position_scale)
        depth = self.key_channels // self.heads
        on_columns = tf.concat([tf.repeat(on_q, depth), tf.repeat(on_k, depth), output_scale], 0)
        kernels = tf.split(self.kernel * scale * on_columns, self.sizes, 1)
        q_bias, k_bias, v_bias = tf.split(shift * on_columns, self.sizes)
        return [*kernels, q_bias, k_bias, v_bias + output_shift, *self.tables.values(), *rest]


def _product(x, kernel):
    # As a convolution: a product's gradient would meet transposed operands, at half the speed.
    return tf.nn.conv2d(x, kernel[None, None], 1, "VALID")


def _kernels():
    try:
        from axial.layers.kernels import layer
    except ImportError as error:
        raise InputError(f"memory = 'kernel' wants pip install 'axial[kernel]' ({error})") from None
    return layer
