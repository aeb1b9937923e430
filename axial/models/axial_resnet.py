"""Axial-ResNet: ResNet-50 with axial attention in place of its 3x3 convolutions (Sec. 3.2)."""

import tensorflow as tf
import tf_keras as keras

from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair, Bottleneck
from axial.layers.conv import Conv, max_pool


class ResNet(keras.layers.Layer):
    """A stem and four stages of blocks.

    Args:
        stem: layer from the image to 'res1', at stride 2.
        block: function of (filters, strides, name) that makes one block of 4 x filters channels.
        filters: base channels of the first stage, doubled from stage to stage.
        repeats: blocks of each stage.
        output_stride: 16 or 32: what the last stage's maps are smaller by than the image.
        pool: whether a max-pool follows the stem; without it the first stage strides instead.

    Shapes: [N, h, w, 3] -> dict 'res1' .. 'res5' of maps at strides 2, 4, 8, 16 and output_stride.
    """

    def __init__(self, stem, block, filters=64, repeats=(3, 4, 6, 3), output_stride=32, pool=True, **kw):
        super().__init__(**kw)
        if output_stride not in (16, 32):
            raise ValueError(f"output_stride must be 16 or 32: got {output_stride}")
        self.stem, self.pool = stem, pool
        strides = [1 if pool else 2, 2, 2, output_stride // 16]
        self.stages = [
            [
                block(filters * 2**i, strides[i] if j == 0 else 1, f"stage{i + 2}_block{j + 1}")
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


def imagenet_stem(norm):
    """ResNet's 7x7 convolution; its 64 channels do not scale with the width."""
    return Conv(64, 7, norm, strides=2, name="stem")


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


# What training keeps of the forward pass: everything; all but the softmax; the input of each block.
MEMORY = ("keep", "recompute_softmax", "recompute_block")


def axial_resnet(
    width=1.0,
    repeats=(3, 4, 6, 3),
    stem="deeplab",
    output_stride=16,
    span=65,
    heads=8,
    pool=True,
    norm=BatchNormConfig(),
    memory="keep",
):
    """Axial-ResNet as a `ResNet` layer: width 0.5, 0.75, 1, 2 are S, M, L, XL.

    Args:
        width: multiplies the channels.
        repeats: blocks of each stage.
        stem: 'deeplab' for segmentation, 'imagenet' for classification with a conv stem.
        output_stride: 16 or 32.
        span: of every attention layer; None for the whole axis.
        heads: of every attention layer.
        pool: whether a max-pool follows the stem.
        norm: `BatchNormConfig`, or None for the folded network.
        memory: of `MEMORY`: what the backward pass finds kept and what it computes again.

    Raises:
        ValueError: a width whose channels the heads do not divide.
    """
    filters = 64 * width
    if filters != int(filters) or int(filters) % heads:
        step = heads / 64
        fits = sorted({max(step, round(width / step) * step), step * (int(width / step) + 1)})
        raise ValueError(
            f"width {width} gives {filters:g} channels, which {heads} heads do not divide: "
            f"try {' or '.join(f'{w:g}' for w in fits)}"
        )
    filters = int(filters)
    if memory not in MEMORY:
        raise ValueError(f"memory must be one of {MEMORY}: got {memory!r}")
    attention = dict(span=span, heads=heads, keep_softmax=memory != "recompute_softmax")
    again = memory == "recompute_block"

    def block(f, strides, name):
        middle = AxialPair(f, 2 * f, norm, strides, attention=attention, name="attention")
        return Bottleneck(2 * f, 4 * f, middle, norm, strides, again, name=name)

    if stem not in ("deeplab", "imagenet"):
        raise ValueError(f"stem must be 'deeplab' or 'imagenet': got {stem!r}")
    first = DeepLabStem(width, norm, name="stem") if stem == "deeplab" else imagenet_stem(norm)
    return ResNet(first, block, filters, repeats, output_stride, pool, name="backbone")
