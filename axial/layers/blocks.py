"""Residual blocks: a bottleneck around any spatial layer."""

import tensorflow as tf
import tf_keras as keras

from axial.layers.axial_attention import AxialAttention
from axial.layers.batch_norm import recompute
from axial.layers.conv import Conv, subsample
from axial.layers.local_attention import LocalAttention


class AxialPair(keras.layers.Layer):
    """Attention along the height, then along the width, then ReLU (paper, Fig. 2).

    Args:
        key_channels, value_channels, norm: as of `AxialAttention`.
        strides: with 2, every second row is dropped after the height layer and every second column
            after the width layer, as the paper says.
        average_pool: instead average 2x2 pixels after the width layer, as the authors' PyTorch code.
        attention: further arguments of `AxialAttention`.

    Shapes: [N, h, w, C] -> [N, ceil(h / strides), ceil(w / strides), value_channels].
    """

    attention_class = AxialAttention

    def __init__(self, key_channels, value_channels, norm, strides=1, average_pool=False, attention=None, **kwargs):
        super().__init__(**kwargs)
        self.strides, self.average_pool = strides, average_pool
        options = dict(norm=norm, **(attention or {}))
        make = self.attention_class
        self.height = make(key_channels, value_channels, "height", name="height", **options)
        self.width = make(key_channels, value_channels, "width", name="width", **options)

    def call(self, x, training=False):
        return tf.nn.relu(self.before_relu(x, training))

    def before_relu(self, x, training=False):
        drop = 1 if self.average_pool else self.strides
        x = subsample(self.height(x, training=training), drop, 1)
        x = subsample(self.width(x, training=training), 1, drop)
        if self.average_pool and self.strides > 1:
            x = tf.nn.avg_pool2d(x, self.strides, self.strides, "VALID")
        return x


class StridedLocalAttention(keras.layers.Layer):
    """Local attention, of which every `strides`-th row and column stays, then ReLU.

    Args:
        channels, norm: of the queries, keys and values of `LocalAttention`.
        strides: of the rows and columns.
        attention: further arguments of `LocalAttention`.

    Shapes: [N, h, w, C] -> [N, ceil(h / strides), ceil(w / strides), channels].
    """

    def __init__(self, channels, norm, strides=1, attention=None, **kwargs):
        super().__init__(**kwargs)
        self.strides = strides
        options = dict(norm=norm, **(attention or {}))
        self.local = LocalAttention(channels, channels, name="local", **options)

    def call(self, x, training=False):
        return tf.nn.relu(subsample(self.local(x, training=training), self.strides, self.strides))


class Bottleneck(keras.layers.Layer):
    """1x1 convolution, spatial layer, 1x1 convolution, plus the shortcut, then ReLU.

    Args:
        inner_filters: channels after the first convolution.
        filters: channels of the output.
        middle: the spatial layer, which strides and ends in a ReLU.
        strides: of `middle`, for the shortcut.
        norm: `BatchNormConfig` or None (folded).
        drop_path: probability that training leaves the branch out for an image (stochastic depth,
            Huang et al., ECCV 2016); what stays is divided by the probability of staying.
        recompute: whether training keeps only the block's input and computes the rest again in the
            backward pass. A block whose weights are not made yet is not recomputed.

    Shapes: [N, h, w, C] -> [N, ceil(h / strides), ceil(w / strides), filters].
    """

    def __init__(self, inner_filters, filters, middle, norm, strides=1, drop_path=0.0, recompute=False, **kwargs):
        super().__init__(**kwargs)
        self.filters, self.strides, self.norm = filters, strides, norm
        self.drop_path, self.recompute = drop_path, recompute
        self.reduce = Conv(inner_filters, 1, norm, name="reduce")
        self.middle = middle
        # The branch starts as zero, so that a deep stack starts as the identity.
        self.expand = Conv(filters, 1, norm, relu=False, gamma_initializer="zeros", name="expand")

    def build(self, shape):
        self.shortcut = None
        if shape[-1] != self.filters:
            self.shortcut = Conv(self.filters, 1, self.norm, self.strides, relu=False, name="shortcut")

    def call(self, x, training=False):
        def run(*inputs):
            return tf.nn.relu(self.before_relu(inputs[0], training, *inputs[1:]))

        inputs = [x]
        if training and self.drop_path:  # drawn here, so that a branch computed again is not drawn again
            inputs.append(draw_images(x, self.drop_path))
        return recompute(run, *inputs) if training and self.recompute and self.expand.built else run(*inputs)

    def before_relu(self, x, training=False, share=None):
        branch = self.reduce(x, training=training)
        branch = self.expand(self.middle(branch, training=training), training=training)
        if share is not None:
            branch *= tf.cast(share, branch.dtype)
        if self.shortcut is not None:
            return branch + self.shortcut(x, training=training)
        return branch + subsample(x, self.strides, self.strides)


def draw_images(x, probability):
    """float32 [N, 1, 1, 1]: 0 for images drawn with `probability`, for others 1 / (1 - probability)."""
    stays = tf.random.uniform([tf.shape(x)[0], 1, 1, 1]) >= probability
    return tf.cast(stays, tf.float32) / (1 - probability)
