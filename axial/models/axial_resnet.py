"""Axial-ResNet: ResNet-50 with axial attention in place of its 3x3 convolutions (Sec. 3.2)."""

import tf_keras as keras

from axial.layers.attend import TERMS
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair, Bottleneck
from axial.models.resnet import ResNet, base_filters, make_stem


class AxialStem(keras.layers.Layer):
    """Full Axial-ResNet's three axial blocks of 128 x width channels, the first of stride 2."""

    def __init__(self, block, filters, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [block(filters, 1 if i else 2, 0.0, f"block{i + 1}") for i in range(3)]

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x, training=training)
        return x


# What training keeps of the forward pass: everything; all but the softmax; the input of each block; all but the
# softmax, and where the model runs on a TPU kernels make that and all it comes from, and never write them to memory.
MEMORY = ("keep", "recompute_softmax", "recompute_block", "kernel")


def axial_resnet(
    width=1.0,
    repeats=(3, 4, 6, 3),
    stem="deeplab",
    output_stride=16,
    span=65,
    heads=8,
    pool=True,
    terms=TERMS,
    value_position=True,
    drop_path=0.0,
    norm=BatchNormConfig(),
    memory="keep",
):
    """Axial-ResNet as a `ResNet` layer: width 0.5, 0.75, 1, 2 are S, M, L, XL.

    Args:
        width: multiplies the channels.
        repeats: blocks of each stage.
        stem: 'deeplab' for segmentation, 'imagenet' for classification with a conv stem, 'axial' for
            Full Axial-ResNet: its first stage strides in place of a max-pool.
        output_stride: 16 or 32.
        span: of every attention layer; None for the whole axis.
        heads: of every attention layer.
        pool: whether a max-pool follows the stem.
        terms, value_position: position-sensitivity of every attention layer, as of `AxialAttention`.
        drop_path: of `ResNet`.
        norm: `BatchNormConfig`, or None for the folded network.
        memory: of `MEMORY`: what the backward pass finds kept and what it computes again.

    Raises:
        ValueError: a width whose channels the heads do not divide.
    """
    filters = base_filters(width, heads, 32 if stem == "axial" else 64)
    if memory not in MEMORY:
        raise ValueError(f"memory must be one of {MEMORY}: got {memory!r}")
    attention = dict(
        span=span,
        heads=heads,
        terms=terms,
        value_position=value_position,
        softmax={"recompute_softmax": "recompute", "kernel": "kernel"}.get(memory, "keep"),
    )
    again = memory == "recompute_block"

    def block(f, strides, drop, name):
        middle = AxialPair(f, 2 * f, norm, strides, attention=attention, name="attention")
        return Bottleneck(2 * f, 4 * f, middle, norm, strides, drop, again, name=name)

    if stem == "axial":
        first, pool = AxialStem(block, filters // 2, name="stem"), False
    else:
        first = make_stem(stem, width, norm)
    return ResNet(first, block, filters, repeats, output_stride, pool, drop_path=drop_path, name="backbone")
