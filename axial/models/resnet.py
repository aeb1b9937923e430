"""ResNet (He et al., CVPR 2016): the frame of every backbone but Xception, and the convolutional backbone."""

import warnings

import numpy as np
import tensorflow as tf

from axial.errors import InputError
from axial.io.check import check_choice
from axial.layers import random
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import BasicBlock, Bottleneck
from axial.layers.configured import Layer, makes_layer
from axial.layers.conv import Conv, max_pool

# Mean and standard deviation of the pixels, from 0 to 255, that a network takes its photos by.
PIXELS = {
    "symmetric": ((127.5,) * 3, (127.5,) * 3),
    "torchvision": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),  # of ImageNet
    "caffe": ((123.68, 116.779, 103.939), (1.0,) * 3),  # tf_keras.applications; mean of ImageNet
}


class ResNet(Layer):
    """A stem and four stages of blocks.

    Args:
        stem: layer from the image to 'res1', at stride 2.
        block: function of (filters, strides, dilation, drop_path, input_stride, dtype, name) that makes a block of 4 x
            filters channels.
        filters: base channels of the first stage; they double from stage to stage.
        repeats: number of blocks in each stage.
        output_stride: 16 or 32. With 16 the last stage has no stride, and its blocks after the first have dilation 2,
            as in DeepLab. With 8 the last two stages have none, and all their blocks have dilation 2 and 4.
        least_stride: the least output stride that the model takes, 16 or 8.
        pool: whether a max-pool follows the stem. Without it the first stage has stride 2.
        stem_stride: stride of the stem. With 4 there is neither a max-pool nor a stride in the first stage.
        drop_path: stochastic depth of the last block. It rises linearly from 0 in the first block.
        pixels: of `PIXELS`. The photo comes with values from -1 to 1 and is brought to this mean and deviation.
        table_photo: side of the largest photo that the blocks' position tables cover, or None. A larger photo is
            warned of, once for each size.

    Shapes: [N, h, w, 3] -> dict 'res1' .. 'res5' of maps at strides 2, 4, 8, 16 (8 if output_stride is) and
        output_stride.

    Raises:
        InputError: output_stride is not among those of `check_backbone`, drop_path is outside [0, 1), or `pixels` is
            unknown.
    """

    def __init__(
        self,
        stem,
        block,
        *,
        filters=64,
        repeats=(3, 4, 6, 3),
        output_stride=32,
        least_stride=16,
        pool=True,
        stem_stride=2,
        drop_path=0.0,
        pixels="symmetric",
        table_photo=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_backbone(output_stride, drop_path, least_stride)
        check_choice("pixels", pixels, PIXELS)
        self.pixels, self.table_photo = pixels, table_photo
        self.stem, self.pool = stem, pool and stem_stride == 2
        self.output_stride = output_stride
        first = 1 if pool or stem_stride == 4 else 2
        strides = [first, 2, max(min(output_stride // 8, 2), 1), max(output_stride // 16, 1)]
        last = max(sum(repeats) - 1, 1)
        input_stride = 4 // strides[0]
        self.stages = []
        for i, count in enumerate(repeats):
            dilation = {8: (1, 1, 2, 4), 16: (1, 1, 1, 2)}.get(output_stride, (1,) * 4)[i]
            blocks = []
            for j in range(count):
                stride = strides[i] if j == 0 else 1
                own = dict(strides=stride, dilation=1 if j == 0 and output_stride > 8 else dilation)
                own |= dict(drop_path=drop_path * (sum(repeats[:i]) + j) / last, input_stride=input_stride)
                name = f"stage{i + 2}_block{j + 1}"
                blocks.append(block(filters * 2**i, dtype=self.dtype_policy, name=name, **own))
                input_stride *= stride
            self.stages.append(blocks)

    def call(self, x, training=False):
        training = training and self.trainable
        if self.table_photo and max(x.shape[1:3]) > self.table_photo:
            warnings.warn(
                f"a photo of {x.shape[1]}x{x.shape[2]} pixels, and position tables for {self.table_photo}: pixels that "
                "are farther apart share the last row of a table",
                stacklevel=2,
            )
        x = self.stem(normalize(x, self.pixels), training=training)
        endpoints = {"res1": x}
        if self.pool:
            x = max_pool(x)
        for index, stage in enumerate(self.stages):
            endpoints[f"res{index + 2}"] = x = in_turn(stage, x, training)
        return endpoints


def normalize(x, pixels):
    """A photo with values from -1 to 1, [N, h, w, 3], brought to a mean and deviation of `PIXELS`."""
    if pixels == "symmetric":
        return x
    mean, deviation = np.array(PIXELS[pixels])
    return x * tf.constant(127.5 / deviation, x.dtype) + tf.constant((127.5 - mean) / deviation, x.dtype)


def check_backbone(output_stride, drop_path, least_stride=16):
    """Raises InputError unless output_stride is 16 or 32, or 8 if that is the least, and drop_path is in [0, 1)."""
    known = [stride for stride in (8, 16, 32) if stride >= least_stride]
    if output_stride not in known:
        raise InputError(f"output_stride must be {' or '.join(str(n) for n in known)}: got {output_stride}")
    random.check_rate("drop_path", drop_path)


def in_turn(layers, x, training):
    """What the last of some layers makes of x, each of what the one before it has made."""
    for layer in layers:
        x = layer(x, training=training)
    return x


class DeepLabStem(Layer):
    """Panoptic-DeepLab's three 3x3 convolutions of 64, 64 and 128 channels times the width."""

    def __init__(self, width, norm, activation="relu", **kwargs):
        super().__init__(**kwargs)
        options = dict(norm=norm, activation=activation, dtype=self.dtype_policy)
        sizes = (64, 2), (64, 1), (128, 1)
        self.convs = [
            Conv(int(filters * width), 3, strides=strides, name=f"conv{i}", **options)
            for i, (filters, strides) in enumerate(sizes, 1)
        ]

    def call(self, x, training=False):
        return in_turn(self.convs, x, training and self.trainable)


class WideStem(Layer):
    """SWideRNet's 3x3 convolution of 64 channels and three `BasicBlock`s of 128, times the width, at stride 2.

    DeepLab2 has the stride in the convolution, where the paper (Chen et al., 2020) has it in the last block.
    """

    def __init__(self, width, norm, activation="relu", recompute="none", **kwargs):
        super().__init__(**kwargs)
        options = dict(activation=activation, dtype=self.dtype_policy)
        self.conv = Conv(int(64 * width), 3, norm, strides=2, name="conv", **options)
        options |= dict(recompute=recompute)
        self.blocks = [BasicBlock(int(128 * width), norm, name=f"block{i + 1}", **options) for i in range(3)]

    def call(self, x, training=False):
        return in_turn([self.conv, *self.blocks], x, training and self.trainable)


def make_stem(kind, width, norm, *, stem_width=None, activation="relu", recompute="none"):
    """The stem of a kind.

    Args:
        kind: 'imagenet' for one 7x7 convolution of 64 channels; 'deeplab' for `DeepLabStem`; 'wide' for `WideStem`.
        width: multiplies the channels of 'deeplab' and 'wide'.
        norm: `BatchNormConfig`, or None (folded).
        stem_width: multiplies the channels of every kind, in place of `width`.
        activation: see `Conv`.
        recompute: of the blocks of `WideStem`; see `ResidualBlock`.

    Raises:
        InputError: the kind is unknown.
    """
    check_choice("stem", kind, ("imagenet", "deeplab", "wide"))
    if kind == "imagenet":
        filters = int(64 * (1 if stem_width is None else stem_width))
        return Conv(filters, 7, norm, strides=2, activation=activation, name="stem")
    width = width if stem_width is None else stem_width
    if kind == "deeplab":
        return DeepLabStem(width, norm, activation, name="stem")
    return WideStem(width, norm, activation, recompute, name="stem")


def base_filters(width, heads=1, least=64):
    """Channels of the first stage at a width.

    Args:
        width: multiplies all channels.
        heads: number of heads, which must divide the channels.
        least: fewest channels of any block at width 1. The heads must divide them too.

    Raises:
        InputError: the heads do not divide the channels. The message names the nearest widths that fit.
    """
    filters = least * width
    if width <= 0 or filters != int(filters) or int(filters) % heads:
        step = heads / least
        below = max(int(width / step), 0)
        fits = sorted({max(step, below * step), step * (below + 1)})
        raise InputError(
            f"width {width} gives {filters:g} channels, which {heads} heads do not divide: "
            f"try {' or '.join(f'{w:g}' for w in fits)}"
        )
    return int(64 * width)


def bottlenecks(middle, norm, recompute, inner=1, **options):
    """The `block` of a `ResNet` whose blocks are `Bottleneck`s.

    Args:
        middle: function of (filters, strides, dilation, input_stride, dtype) that makes a block's middle layer.
        norm: `BatchNormConfig`, or None for the folded network.
        recompute: see `ResidualBlock`.
        inner: channels around the middle layer, in units of filters.
        **options: further arguments of `Bottleneck`.
    """

    def block(filters, *, strides, dilation, input_stride, dtype, **own):
        inside = dict(strides=1 if options.get("stride_first", False) else strides, dilation=dilation, dtype=dtype)
        around = dict(strides=strides, recompute=recompute, dtype=dtype, **own, **options)
        layer = middle(filters, input_stride=input_stride, **inside)
        return Bottleneck(inner * filters, 4 * filters, layer, norm, **around)

    return block


def basic_blocks(norm, recompute, activation="relu"):
    """The `block` of a `ResNet` whose blocks are `BasicBlock`s."""

    def block(filters, *, input_stride, **own):
        del input_stride
        return BasicBlock(4 * filters, norm, recompute=recompute, activation=activation, **own)

    return block


def convolutions(norm, activation="relu"):
    """The `middle` of `bottlenecks` that is a 3x3 convolution."""

    def middle(filters, *, strides, dilation, input_stride, dtype):
        del input_stride
        options = dict(dilation=dilation, activation=activation, dtype=dtype, name="middle")
        return Conv(filters, 3, norm, strides, **options)

    return middle


@makes_layer
def resnet(
    width=1.0,
    repeats=(3, 4, 6, 3),
    stem="imagenet",
    output_stride=32,
    drop_path=0.0,
    recompute="none",
    stride_first=False,
    pixels="symmetric",
    norm=BatchNormConfig(),
):
    """ResNet with 3x3 convolutions; the first one of a stage has the stride. Repeats (3, 4, 6, 3) give ResNet-50.

    Args:
        width: multiplies the channels.
        repeats, output_stride, drop_path, pixels: see `ResNet`.
        stem: see `make_stem`.
        recompute: 'none' or 'block'; see `ResidualBlock`.
        stride_first: see `Bottleneck`.
        norm: `BatchNormConfig`, or None for the folded network.
    """
    check_choice("recompute", recompute, ("none", "block"))
    frame = dict(repeats=repeats, output_stride=output_stride, drop_path=drop_path, pixels=pixels, name="backbone")
    block = bottlenecks(convolutions(norm), norm, recompute, stride_first=stride_first)
    return ResNet(make_stem(stem, width, norm), block, filters=base_filters(width), **frame)
