"""ResNet (He et al., CVPR 2016): the frame of every backbone but Xception, and the convolutional backbone."""

import tf_keras as keras

from axial.errors import InputError
from axial.layers.attention.backend import check_choice
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import Bottleneck
from axial.layers.conv import Conv, max_pool


class ResNet(keras.layers.Layer):
    """A stem and four stages of blocks.

    Args:
        stem: layer from the image to 'res1', at stride 2.
        block: function of (filters, strides, dilation, drop_path, name) that makes a block of 4 x filters channels.
        filters: base channels of the first stage; they double from stage to stage.
        repeats: number of blocks in each stage.
        output_stride: 16 or 32. With 16 the last stage has no stride, and its blocks after the first have dilation 2,
            as in DeepLab.
        pool: whether a max-pool follows the stem. Without it the first stage has stride 2.
        stem_stride: stride of the stem. With 4 there is neither a max-pool nor a stride in the first stage.
        drop_path: stochastic depth of the last block. It rises linearly from 0 in the first block.

    Shapes: [N, h, w, 3] -> dict 'res1' .. 'res5' of maps at strides 2, 4, 8, 16 and output_stride.

    Raises:
        InputError: output_stride is neither 16 nor 32, or drop_path is outside [0, 1).
    """

    def __init__(
        self,
        stem,
        block,
        *,
        filters=64,
        repeats=(3, 4, 6, 3),
        output_stride=32,
        pool=True,
        stem_stride=2,
        drop_path=0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_backbone(output_stride, drop_path)
        self.stem, self.pool = stem, pool and stem_stride == 2
        self.output_stride = output_stride
        strides = [1 if pool or stem_stride == 4 else 2, 2, 2, output_stride // 16]
        last = max(sum(repeats) - 1, 1)
        self.stages = []
        for i, count in enumerate(repeats):
            dilation = 2 if i == 3 and output_stride == 16 else 1
            blocks = []
            for j in range(count):
                drop = drop_path * (sum(repeats[:i]) + j) / last
                first = j == 0
                name = f"stage{i + 2}_block{j + 1}"
                blocks.append(
                    block(
                        filters * 2**i,
                        strides=strides[i] if first else 1,
                        dilation=1 if first else dilation,
                        drop_path=drop,
                        name=name,
                    )
                )
            self.stages.append(blocks)

    def call(self, x, training=False):
        x = self.stem(x, training=training)
        endpoints = {"res1": x}
        if self.pool:
            x = max_pool(x)
        for index, stage in enumerate(self.stages):
            for block in stage:
                x = block(x, training=training)
            endpoints[f"res{index + 2}"] = x
        return endpoints


def check_backbone(output_stride, drop_path):
    """Raises InputError unless output_stride is 16 or 32 and drop_path is in [0, 1)."""
    if output_stride not in (16, 32):
        raise InputError(f"output_stride must be 16 or 32: got {output_stride}")
    if not 0 <= drop_path < 1:
        raise InputError(f"drop_path must be at least 0 and below 1: got {drop_path}")


class DeepLabStem(keras.layers.Layer):
    """Panoptic-DeepLab's three 3x3 convolutions of 64, 64 and 128 channels times the width."""

    def __init__(self, width, norm, **kwargs):
        super().__init__(**kwargs)
        self.convs = [
            Conv(int(64 * width), 3, norm, strides=2, name="conv1"),
            Conv(int(64 * width), 3, norm, name="conv2"),
            Conv(int(128 * width), 3, norm, name="conv3"),
        ]

    def call(self, x, training=False):
        for conv in self.convs:
            x = conv(x, training=training)
        return x


def make_stem(kind, width, norm):
    """The stem of a kind.

    Args:
        kind: 'imagenet' for one 7x7 convolution with 64 channels at every width; 'deeplab' for `DeepLabStem`.
        width: multiplies the channels of `DeepLabStem`.
        norm: `BatchNormConfig`, or None (folded).

    Raises:
        InputError: the kind is unknown.
    """
    check_choice("stem", kind, ("imagenet", "deeplab"))
    if kind == "imagenet":
        return Conv(64, 7, norm, strides=2, name="stem")
    return DeepLabStem(width, norm, name="stem")


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


def bottlenecks(middle, norm, recompute, inner=1):
    """The `block` of a `ResNet` whose blocks are `Bottleneck`s.

    Args:
        middle: function of (filters, strides, dilation) that makes a block's middle layer.
        norm: `BatchNormConfig`, or None for the folded network.
        recompute: see `Bottleneck`.
        inner: channels around the middle layer, in units of filters.
    """

    def block(filters, *, strides, dilation, drop_path, name):
        return Bottleneck(
            inner * filters,
            4 * filters,
            middle(filters, strides, dilation),
            norm,
            strides=strides,
            drop_path=drop_path,
            recompute=recompute,
            name=name,
        )

    return block


def resnet(
    width=1.0,
    repeats=(3, 4, 6, 3),
    stem="imagenet",
    output_stride=32,
    drop_path=0.0,
    recompute="none",
    norm=BatchNormConfig(),
):
    """ResNet with 3x3 convolutions; the first one of a stage has the stride. Repeats (3, 4, 6, 3) give ResNet-50.

    Args:
        width: multiplies the channels.
        repeats, output_stride, drop_path: see `ResNet`.
        stem: see `make_stem`.
        recompute: 'none' or 'block'; see `Bottleneck`.
        norm: `BatchNormConfig`, or None for the folded network.
    """
    check_choice("recompute", recompute, ("none", "block"))

    def middle(filters, strides, dilation):
        return Conv(filters, 3, norm, strides, dilation=dilation, name="middle")

    return ResNet(
        make_stem(stem, width, norm),
        bottlenecks(middle, norm, recompute),
        filters=base_filters(width),
        repeats=repeats,
        output_stride=output_stride,
        drop_path=drop_path,
        name="backbone",
    )
