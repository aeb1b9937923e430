"""Axial-ResNet: ResNet-50 with axial attention in place of its 3x3 convolutions (Axial-DeepLab, Sec. 3.2)."""

import tf_keras as keras

from axial.layers.attention.backend import RECOMPUTE, check_choice
from axial.layers.attention.reference import TERMS
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair
from axial.models.resnet import ResNet, base_filters, bottlenecks, make_stem


class AxialStem(keras.layers.Layer):
    """The stem of Full Axial-ResNet: three axial blocks of 128 x width channels, the first with stride 2."""

    def __init__(self, block, filters, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [
            block(filters, strides=1 if i else 2, dilation=1, drop_path=0.0, name=f"block{i + 1}") for i in range(3)
        ]

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x, training=training)
        return x


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
    recompute="none",
    backend="auto",
    norm=BatchNormConfig(),
):
    """Axial-ResNet as a `ResNet` layer. The widths 0.5, 0.75, 1 and 2 are the paper's S, M, L and XL.

    Args:
        width: multiplies the channels.
        repeats, output_stride, drop_path: see `ResNet`. Attention is never dilated.
        stem: 'deeplab' for segmentation, 'imagenet' for classification with a conv stem, 'axial' for Full Axial-ResNet.
            With 'axial' the first stage has a stride in place of the max-pool.
        span: span of every attention layer; None for the whole axis.
        heads: heads of every attention layer.
        pool: whether a max-pool follows the stem.
        terms, value_position: position-sensitivity of every attention layer; see `AxialAttention`.
        recompute: what the backward pass recomputes to save memory, of `RECOMPUTE`.
        backend: what computes attention, of `attention.backend.BACKENDS`.
        norm: `BatchNormConfig`, or None for the folded network.

    Raises:
        InputError: the heads do not divide the channels of this width, or a name is unknown.
    """
    filters = base_filters(width, heads, 32 if stem == "axial" else 64)
    check_choice("recompute", recompute, RECOMPUTE)
    check_choice("stem", stem, ("imagenet", "deeplab", "axial"))
    attention = dict(
        span=span,
        heads=heads,
        terms=terms,
        value_position=value_position,
        recompute=recompute,
        backend=backend,
    )

    def middle(filters, strides, dilation):
        del dilation  # attention is never dilated
        return AxialPair(filters, 2 * filters, norm, strides, attention=attention, name="attention")

    block = bottlenecks(middle, norm, recompute, inner=2)
    if stem == "axial":
        first, pool = AxialStem(block, filters // 2, name="stem"), False
    else:
        first = make_stem(stem, width, norm)
    return ResNet(
        first,
        block,
        filters=filters,
        repeats=repeats,
        output_stride=output_stride,
        pool=pool,
        drop_path=drop_path,
        name="backbone",
    )
