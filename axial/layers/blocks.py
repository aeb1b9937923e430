"""Residual blocks: bottlenecks with any spatial layer, and basic blocks of two 3x3 convolutions."""

import functools

import tensorflow as tf

from axial.layers import random
from axial.layers.attention.folded import FoldedAttention
from axial.layers.attention.layer import Attention, AttentionOptions, AttentionSpec, local_options
from axial.layers.batch_norm import Norm
from axial.layers.configured import Layer
from axial.layers.conv import ACTIVATIONS, Conv, subsample
from axial.layers.rematerialisation import rematerialised


def make_attention(spec, norm, name, inner_norm=True):
    """The attention layer of an `AttentionSpec`, folded if `norm` is None."""
    return FoldedAttention(spec, name=name) if norm is None else Attention(spec, norm, inner_norm, name=name)


class AxialPair(Layer):
    """Attention along the height, then along the width, then ReLU (Axial-DeepLab, Fig. 2).

    Args:
        key_channels, value_channels: see `AxialAttention`.
        norm: `BatchNormConfig`, or None for the folded layers.
        strides: stride along both axes. With stride 2, the block drops every second row after the height layer and
            every second column after the width layer, as in the paper.
        average_pool: whether the block averages 2x2 pixels after the width layer and drops no pixels, as in the
            authors' PyTorch code.
        attention: `AttentionOptions`, or a dict of its fields.
        activation: see `Conv`.
        max_distance: see `AttentionSpec`.

    Shapes:
        - x: [N, h, w, C], h and w static
        - output: [N, ceil(h / strides), ceil(w / strides), value_channels]

    Examples:
        >>> from axial.layers import AxialPair, BatchNormConfig
        >>> x = tf.ones([2, 9, 7, 16])
        >>> y = AxialPair(16, 32, BatchNormConfig())(x)
    """

    def __init__(
        self,
        key_channels: int,
        value_channels: int,
        norm: Norm,
        strides: int = 1,
        average_pool: bool = False,
        attention: AttentionOptions | dict = AttentionOptions(),
        activation: str = "relu",
        max_distance: int = 255,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.strides, self.average_pool, self.activation = strides, average_pool, activation
        options = AttentionOptions(**attention) if isinstance(attention, dict) else attention
        spec = functools.partial(AttentionSpec, options=options, max_distance=max_distance)
        specs = (spec(axis, key_channels, value_channels) for axis in ("height", "width"))
        self.height, self.width = (make_attention(spec, norm, spec.axis) for spec in specs)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return ACTIVATIONS[self.activation](self.before_relu(x, training))

    def before_relu(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        """The output before the activation."""
        training = training and self.trainable
        drop = 1 if self.average_pool else self.strides
        x = subsample(self.height(x, training=training), drop, 1)
        x = subsample(self.width(x, training=training), 1, drop)
        if self.average_pool and self.strides > 1:
            x = tf.nn.avg_pool2d(x, self.strides, self.strides, "SAME")  # averages only real pixels at odd borders
        return x


class StridedLocalAttention(Layer):
    """Local attention, then every `strides`-th row and column, then ReLU.

    Args:
        channels: channels of the queries, of the keys and of the values.
        norm: `BatchNormConfig`, or None for the folded layer.
        strides: stride along both axes.
        attention: `AttentionOptions`, or a dict of the arguments of `local_options`. None means its defaults.
        batch_norm: see `LocalAttention`.

    Shapes:
        - x: [N, h, w, C], h and w static
        - output: [N, ceil(h / strides), ceil(w / strides), channels]

    Examples:
        >>> from axial.layers import BatchNormConfig, StridedLocalAttention
        >>> x = tf.ones([2, 9, 7, 16])
        >>> y = StridedLocalAttention(16, BatchNormConfig())(x)
    """

    def __init__(
        self,
        channels: int,
        norm: Norm,
        strides: int = 1,
        attention: AttentionOptions | dict | None = None,
        batch_norm: bool = True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        options = attention if isinstance(attention, AttentionOptions) else local_options(**(attention or {}))
        self.strides = strides
        self.local = make_attention(AttentionSpec("square", channels, channels, options), norm, "local", batch_norm)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        training = training and self.trainable
        return tf.nn.relu(subsample(self.local(x, training=training), self.strides, self.strides))


def run_block(block, run, x, *, training, built):
    """The result of run(x), or of run(x, branch_scale) in training with `drop_path`.

    The scale [N, 1, 1, 1] of the branch is random. It is drawn outside of `run`, so that rematerialisation uses the
    same random numbers. Training rematerialises a built block if `block.recompute` is 'block'.
    """
    inputs = [x, random.drop_images(x, block.drop_path)] if training and block.drop_path else [x]
    if training and block.recompute == "block" and built:
        return rematerialised(run, *inputs)
    return run(*inputs)


class ResidualBlock(Layer):
    """A branch plus the shortcut, then the activation. Subclasses define `branch`, which applies the strides.

    Args:
        filters: channels of the output.
        norm: `BatchNormConfig`, or None for the folded block.
        strides: strides of the branch and of the shortcut.
        drop_path: probability with which training drops the branch of an image (stochastic depth, Huang et al., ECCV
            2016). A branch that is kept is divided by the probability of keeping it.
        recompute: with 'block', training stores only the block's input and recomputes the rest in the backward pass,
            except in the call that builds the block.
        activation: see `Conv`.

    Shapes:
        - x: [N, h, w, C]
        - output: [N, ceil(h / strides), ceil(w / strides), filters]

    Raises:
        InputError: drop_path is outside [0, 1).
    """

    def __init__(self, filters, norm, strides=1, *, drop_path=0.0, recompute="none", activation="relu", **kwargs):
        super().__init__(**kwargs)
        random.check_rate("drop_path", drop_path)
        self.filters, self.strides, self.norm = filters, strides, norm
        self.drop_path, self.recompute, self.activation = drop_path, recompute, activation

    def build(self, shape: tf.TensorShape) -> None:
        self.shortcut = None
        if shape[-1] != self.filters:
            conv = functools.partial(Conv, relu=False, dtype=self.dtype_policy, name="shortcut")
            self.shortcut = conv(self.filters, 1, self.norm, self.strides)
        super().build(shape)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        training = training and self.trainable

        def run(x, *branch_scale):
            return ACTIVATIONS[self.activation](self.before_relu(x, training, *branch_scale))

        return run_block(self, run, x, training=training, built=self.expand.built)

    def before_relu(self, x: tf.Tensor, training: bool = False, branch_scale: tf.Tensor | None = None) -> tf.Tensor:
        """The output before the activation. `branch_scale` [N, 1, 1, 1] multiplies the branch."""
        branch = self.branch(x, training)
        if branch_scale is not None:
            branch *= tf.cast(branch_scale, branch.dtype)
        if self.shortcut is not None:
            return branch + self.shortcut(x, training=training)
        return branch + subsample(x, self.strides, self.strides)


class Bottleneck(ResidualBlock):
    """1x1 convolution, spatial layer, 1x1 convolution, plus the shortcut, then the activation.

    Args:
        inner_filters: channels after the first convolution.
        filters, norm, strides: see `ResidualBlock`.
        middle: the spatial layer. It applies the strides and ends with an activation.
        stride_first: whether the first convolution applies the strides in place of `middle` (He et al., CVPR 2016).
        **kwargs: further arguments of `ResidualBlock`.

    Shapes:
        - x: [N, h, w, C]
        - output: [N, ceil(h / strides), ceil(w / strides), filters]

    Examples:
        >>> from axial.layers import AxialPair, BatchNormConfig, Bottleneck
        >>> norm = BatchNormConfig()
        >>> x = tf.ones([2, 9, 7, 16])
        >>> y = Bottleneck(16, 32, AxialPair(8, 16, norm), norm)(x)
    """

    def __init__(
        self,
        inner_filters: int,
        filters: int,
        middle: Layer,
        norm: Norm,
        strides: int = 1,
        stride_first: bool = False,
        **kwargs,
    ):
        super().__init__(filters, norm, strides, **kwargs)
        first = strides if stride_first else 1
        self.reduce = Conv(inner_filters, 1, norm, first, activation=self.activation, name="reduce")
        self.middle = middle
        # The branch starts at zero, so that a deep stack starts as the identity.
        self.expand = Conv(filters, 1, norm, relu=False, gamma_initializer="zeros", name="expand")

    def branch(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        branch = self.reduce(x, training=training)
        return self.expand(self.middle(branch, training=training), training=training)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions, the first with the strides, plus the shortcut, then the activation.

    Args:
        filters, norm, strides: see `ResidualBlock`.
        dilation: dilation rate of both convolutions.
        **kwargs: further arguments of `ResidualBlock`.

    Shapes:
        - x: [N, h, w, C]
        - output: [N, ceil(h / strides), ceil(w / strides), filters]

    Examples:
        >>> from axial.layers import BasicBlock, BatchNormConfig
        >>> x = tf.ones([2, 9, 7, 16])
        >>> y = BasicBlock(8, BatchNormConfig())(x)
    """

    def __init__(self, filters: int, norm: Norm, strides: int = 1, dilation: int = 1, **kwargs):
        super().__init__(filters, norm, strides, **kwargs)
        conv = functools.partial(Conv, filters, 3, norm, dilation=dilation)
        self.first = conv(strides=strides, activation=self.activation, name="first")
        self.expand = conv(relu=False, gamma_initializer="zeros", name="expand")

    def branch(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        return self.expand(self.first(x, training=training), training=training)
