"""ResNet (He et al., CVPR 2016): the base class of every backbone but Xception, and the convolutional backbone."""

import dataclasses
import functools
import typing
import warnings

import numpy as np
import tensorflow as tf

from axial.errors import InputError
from axial.layers import random
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import BasicBlock, Bottleneck
from axial.layers.configured import Layer
from axial.layers.conv import Conv, max_pool
from axial.layers.rematerialisation import RECOMPUTE

# (mean, standard deviation) of RGB values from 0 to 255, by which a network normalises photos.
PIXELS = {
    "symmetric": ((127.5,) * 3, (127.5,) * 3),
    "torchvision": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),  # of ImageNet
    "caffe": ((123.68, 116.779, 103.939), (1.0,) * 3),  # of tf_keras.applications: ImageNet's mean
}


@dataclasses.dataclass(frozen=True)
class BackboneOptions:
    """Options of all backbones for photos.

    Attributes:
        output_stride: stride of the last map, 16 or 32. With 16 the last stage has no stride, and its blocks after the
            first have dilation 2, as in DeepLab. Some backbones also support 8. With 8 the last two stages have no
            stride, and all of their blocks have dilations 2 and 4, respectively. Attention is never dilated.
        drop_path: stochastic-depth rate of the last block. The rates rise linearly from 0 at the first block.
        recompute: what the backward pass recomputes to save memory: 'none' or 'block'; see `ResidualBlock`.
    """

    output_stride: int = 32
    drop_path: float = 0.0
    recompute: typing.Literal["none", "block"] = "none"


@dataclasses.dataclass(frozen=True)
class ResNetOptions(BackboneOptions):
    """Options of a `ResNet` with any spatial layer.

    Attributes:
        width: multiplies the channels.
        repeats: number of blocks in each stage; ResNet-50 has (3, 4, 6, 3).
        stem: see `make_stem`.
        recompute: one of `RECOMPUTE`. 'softmax' recomputes the softmax of attention.
        pixels: one of `PIXELS`. The network takes values from -1 to 1 and normalises them by this mean and deviation.
    """

    width: float = 1.0
    repeats: tuple[int, ...] = (3, 4, 6, 3)
    stem: typing.Literal["imagenet", "deeplab", "wide"] = "imagenet"
    recompute: typing.Literal[RECOMPUTE] = "none"
    pixels: typing.Literal[tuple(PIXELS)] = "symmetric"


@dataclasses.dataclass(frozen=True)
class ConvResNetOptions(ResNetOptions):
    """Options of `ConvResNet`.

    Attributes:
        recompute: 'none' or 'block'; see `ResidualBlock`.
        stride_first: see `Bottleneck`. The weights of tf_keras.applications need True.
    """

    recompute: typing.Literal["none", "block"] = "none"
    stride_first: bool = False


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """The arguments of a residual block that depend on its position in the network.

    Attributes:
        filters: base channels of the stage; the block returns 4 times as many.
        strides, dilation: stride and dilation of the block's spatial layer.
        input_stride: stride of the block's input relative to the photo.
        drop_path: stochastic-depth rate of the block.
        name: name of the block's layer.
    """

    filters: int
    strides: int
    dilation: int
    input_stride: int
    drop_path: float
    name: str


class ResNet(Layer):
    """A stem and four stages of residual blocks, which subclasses define by `make_stem` and `make_block`.

    Args:
        options: `ResNetOptions`.
        norm: `BatchNormConfig`, or None for the folded network.
        filters: base channels of the first stage; they double from stage to stage.
        pool: whether a max-pool follows the stem. Without it the first stage has stride 2.
        stem_stride: stride of the stem. With 4 there is neither a max-pool nor a stride in the first stage.
        table_photo: side of the largest photo that the blocks' position tables cover, or None. A larger photo causes a
            warning, once for each size.

    Shapes: [N, h, w, 3] -> dict 'res1' .. 'res5' of maps at strides 2, 4, 8, 16 (8 with output stride 8) and
        output_stride.

    Attributes:
        least_stride: smallest output stride that the class supports.

    Raises:
        InputError: the network does not support output_stride, or drop_path is outside [0, 1).
    """

    least_stride = 16

    def __init__(self, options, norm, filters, pool=True, stem_stride=2, table_photo=None, name="backbone"):
        super().__init__(name=name)
        check_backbone(options, self.least_stride)
        self.options, self.norm, self.output_stride = options, norm, options.output_stride
        self.filters, self.table_photo = filters, table_photo
        self.pool = pool and stem_stride == 2
        self.stem = self.make_stem()
        first = 1 if pool or stem_stride == 4 else 2
        strides = [first, 2, max(min(options.output_stride // 8, 2), 1), max(options.output_stride // 16, 1)]
        dilations = {8: (1, 1, 2, 4), 16: (1, 1, 1, 2)}.get(options.output_stride, (1,) * 4)
        blocks = [(i, j) for i, count in enumerate(options.repeats) for j in range(count)]
        input_stride = 4 // first
        self.stages = [[] for _ in options.repeats]
        for index, (i, j) in enumerate(blocks):
            spec = BlockSpec(
                filters * 2**i,
                strides=1 if j else strides[i],
                dilation=1 if j == 0 and options.output_stride > 8 else dilations[i],
                input_stride=input_stride,
                drop_path=options.drop_path * index / max(len(blocks) - 1, 1),
                name=f"stage{i + 2}_block{j + 1}",
            )
            self.stages[i].append(self.make_block(spec))
            input_stride *= spec.strides

    def make_stem(self):
        """The layer that computes 'res1' from the photo."""
        return make_stem(self.options.stem, self.options.width, self.norm)

    def make_block(self, spec):
        """The residual block with the arguments of a `BlockSpec`."""
        raise InputError(f"{type(self).__name__} does not define make_block")

    def bottleneck(self, spec, middle, inner=1, stride_first=False, activation="relu"):
        """The `Bottleneck` of a `BlockSpec`, whose spatial layer `middle` takes `inner` times the base channels."""
        return Bottleneck(
            inner * spec.filters,
            4 * spec.filters,
            middle,
            self.norm,
            strides=spec.strides,
            stride_first=stride_first,
            drop_path=spec.drop_path,
            recompute=self.options.recompute,
            activation=activation,
            name=spec.name,
        )

    def conv_bottleneck(self, spec, stride_first=False, activation="relu"):
        """The `bottleneck` whose spatial layer is a 3x3 convolution."""
        strides = 1 if stride_first else spec.strides
        conv = Conv(spec.filters, 3, self.norm, strides, dilation=spec.dilation, activation=activation, name="middle")
        return self.bottleneck(spec, conv, stride_first=stride_first, activation=activation)

    def call(self, x, training=False):
        training = training and self.trainable
        if self.table_photo and max(x.shape[1:3]) > self.table_photo:
            sizes = f"a photo of {x.shape[1]}x{x.shape[2]} pixels, and position tables for {self.table_photo}"
            warnings.warn(f"{sizes}: pixels that are farther apart share the last row of a table", stacklevel=2)
        x = self.stem(normalize(x, self.options.pixels), training=training)
        endpoints = {"res1": x}
        if self.pool:
            x = max_pool(x)
        for index, stage in enumerate(self.stages):
            endpoints[f"res{index + 2}"] = x = in_turn(stage, x, training)
        return endpoints


def normalize(x, pixels):
    """Normalises a photo [N, h, w, 3] with values from -1 to 1 by a mean and deviation of `PIXELS`."""
    if pixels == "symmetric":
        return x
    mean, deviation = np.array(PIXELS[pixels])
    return x * tf.constant(127.5 / deviation, x.dtype) + tf.constant((127.5 - mean) / deviation, x.dtype)


def check_backbone(options, least_stride=16):
    """Raises InputError unless output_stride is 8, 16 or 32, at least `least_stride`, and drop_path is in [0, 1)."""
    strides = [stride for stride in (8, 16, 32) if stride >= least_stride]
    if options.output_stride not in strides:
        raise InputError(f"output_stride must be {' or '.join(str(n) for n in strides)}: got {options.output_stride}")
    random.check_rate("drop_path", options.drop_path)


def in_turn(layers, x, training):
    """Applies layers to x one after the other."""
    for layer in layers:
        x = layer(x, training=training)
    return x


class DeepLabStem(Layer):
    """Panoptic-DeepLab's three 3x3 convolutions of 64, 64 and 128 channels times the width."""

    def __init__(self, width, norm, activation="relu", name=None):
        super().__init__(name=name)
        conv = functools.partial(Conv, kernel=3, norm=norm, activation=activation)
        sizes = (64, 2), (64, 1), (128, 1)
        self.convs = [conv(int(n * width), strides=s, name=f"conv{i}") for i, (n, s) in enumerate(sizes, 1)]

    def call(self, x, training=False):
        return in_turn(self.convs, x, training and self.trainable)


class WideStem(Layer):
    """SWideRNet's 3x3 convolution of 64 channels and three `BasicBlock`s of 128 channels, times the width, at stride 2.

    The convolution has the stride, as in DeepLab2. In the paper (Chen et al., 2020) the last block has the stride.
    """

    def __init__(self, width, norm, activation="relu", recompute="none", name=None):
        super().__init__(name=name)
        self.conv = Conv(int(64 * width), 3, norm, strides=2, activation=activation, name="conv")
        block = functools.partial(BasicBlock, int(128 * width), norm, activation=activation, recompute=recompute)
        self.blocks = [block(name=f"block{i + 1}") for i in range(3)]

    def call(self, x, training=False):
        return in_turn([self.conv, *self.blocks], x, training and self.trainable)


def make_stem(kind, width, norm, *, stem_width=None, activation="relu", recompute="none"):
    """Makes a stem.

    Args:
        kind: 'imagenet' for one 7x7 convolution with 64 channels, 'deeplab' for `DeepLabStem`, 'wide' for `WideStem`.
        width: multiplies the channels of 'deeplab' and 'wide'.
        norm: `BatchNormConfig`, or None for the folded stem.
        stem_width: overrides `width`, and also multiplies the channels of 'imagenet'.
        activation: see `Conv`.
        recompute: for the blocks of `WideStem`; see `ResidualBlock`.
    """
    if kind == "imagenet":
        filters = int(64 * (1 if stem_width is None else stem_width))
        return Conv(filters, 7, norm, strides=2, activation=activation, name="stem")
    width = width if stem_width is None else stem_width
    if kind == "deeplab":
        return DeepLabStem(width, norm, activation, name="stem")
    return WideStem(width, norm, activation, recompute, name="stem")


def base_filters(width, heads=1, least=64):
    """Base channels of the first stage.

    Args:
        width: multiplies all channels.
        heads: number of heads, which must divide `least` x `width`.
        least: smallest number of channels of any block at width 1.

    Raises:
        InputError: the number of heads does not divide the channels. The message names the nearest widths that fit.
    """
    filters = least * width
    if width <= 0 or filters != int(filters) or int(filters) % heads:
        step = heads / least
        below = max(int(width / step), 0)
        fits = sorted({max(step, below * step), step * (below + 1)})
        near = " or ".join(f"{w:g}" for w in fits)
        raise InputError(f"width {width} gives {filters:g} channels, which {heads} heads do not divide: try {near}")
    return int(64 * width)


class ConvResNet(ResNet):
    """ResNet with 3x3 convolutions. The first 3x3 convolution of a stage has the stride, unless `stride_first` is set.

    Args:
        options: `ConvResNetOptions`.
        norm: `BatchNormConfig`, or None for the folded network.
    """

    defaults = ConvResNetOptions()

    def __init__(self, options=defaults, norm=BatchNormConfig(), name="backbone"):
        super().__init__(options, norm, base_filters(options.width), name=name)

    def make_block(self, spec):
        return self.conv_bottleneck(spec, self.options.stride_first)
