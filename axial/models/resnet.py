"""ResNet (He et al., CVPR 2016): the frame of every backbone but Xception, and the convolutional one."""

import tf_keras as keras

from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import Bottleneck
from axial.layers.conv import Conv, max_pool


class ResNet(keras.layers.Layer):
    """A stem and four stages of blocks.

    Args:
        stem: layer from the image to 'res1', at stride 2.
        block: function of (filters, strides, drop_path, name) that makes one block of 4 x filters
            channels.
        filters: base channels of the first stage, doubled from stage to stage.
        repeats: blocks of each stage.
        output_stride: 16 or 32: what the last stage's maps are smaller by than the image.
        pool: whether a max-pool follows the stem; without it the first stage strides instead.
        stem_stride: of the stem; with 4 neither of the two follows.
        drop_path: probability of the last block's stochastic depth; it rises linearly from the
            first block's 0.

    Shapes: [N, h, w, 3] -> dict 'res1' .. 'res5' of maps at strides 2, 4, 8, 16 and output_stride.
    """

    def __init__(
        self,
        stem,
        block,
        filters=64,
        repeats=(3, 4, 6, 3),
        output_stride=32,
        pool=True,
        stem_stride=2,
        drop_path=0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if output_stride not in (16, 32):
            raise ValueError(f"output_stride must be 16 or 32: got {output_stride}")
        if not 0 <= drop_path < 1:
            raise ValueError(f"drop_path must be at least 0 and below 1: got {drop_path}")
        self.stem, self.pool = stem, pool and stem_stride == 2
        self.output_stride = output_stride
        strides = [1 if pool or stem_stride == 4 else 2, 2, 2, output_stride // 16]
        last = max(sum(repeats) - 1, 1)
        self.stages = [
            [
                block(
                    filters * 2**i,
                    strides[i] if j == 0 else 1,
                    drop_path * (sum(repeats[:i]) + j) / last,
                    f"stage{i + 2}_block{j + 1}",
                )
                for j in range(count)
            ]
            for i, count in enumerate(repeats)
        ]

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


class DeepLabStem(keras.layers.Layer):
    """Panoptic-DeepLab's three 3x3 convolutions: 64, 64, 128 channels times the width."""

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
    """'imagenet': one 7x7 convolution, whose 64 channels do not scale; 'deeplab': `DeepLabStem`."""
    if kind == "imagenet":
        return Conv(64, 7, norm, strides=2, name="stem")
    if kind == "deeplab":
        return DeepLabStem(width, norm, name="stem")
    raise ValueError(f"stem must be 'deeplab' or 'imagenet': got {kind!r}")


def base_filters(width, heads=1, least=64):
    """Channels of the first stage at a width.

    Args:
        heads: must divide them.
        least: fewest channels of any block at width 1, which the heads must divide too.

    Raises:
        ValueError: with the nearest widths that fit.
    """
    filters = least * width
    if width <= 0 or filters != int(filters) or int(filters) % heads:
        step = heads / least
        below = max(int(width / step), 0)
        fits = sorted({max(step, below * step), step * (below + 1)})
        raise ValueError(
            f"width {width} gives {filters:g} channels, which {heads} heads do not divide: "
            f"try {' or '.join(f'{w:g}' for w in fits)}"
        )
    return int(64 * width)


def resnet(
    width=1.0,
    repeats=(3, 4, 6, 3),
    stem="imagenet",
    output_stride=32,
    drop_path=0.0,
    norm=BatchNormConfig(),
):
    """ResNet: 3x3 convolutions, the first of a stage with its stride. (3, 4, 6, 3) is ResNet-50."""

    def block(f, strides, drop, name):
        middle = Conv(f, 3, norm, strides, name="middle")
        return Bottleneck(f, 4 * f, middle, norm, strides, drop, name=name)

    stem = make_stem(stem, width, norm)
    return ResNet(stem, block, base_filters(width), repeats, output_stride, drop_path=drop_path, name="backbone")
