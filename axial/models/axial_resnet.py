"""Axial-ResNet: ResNet-50 with axial attention in place of its 3x3 convolutions (Axial-DeepLab, Sec. 3.2)."""

from axial.io.check import check_choice
from axial.layers.attention.reference import TERMS
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair
from axial.layers.configured import Layer, makes_layer
from axial.layers.conv import ACTIVATIONS
from axial.layers.recompute import RECOMPUTE
from axial.models.resnet import ResNet, base_filters, basic_blocks, bottlenecks, convolutions, in_turn, make_stem


class AxialStem(Layer):
    """The stem of Full Axial-ResNet: three axial blocks of 128 x width channels, the first with stride 2."""

    def __init__(self, block, filters, **kwargs):
        super().__init__(**kwargs)
        options = dict(dilation=1, drop_path=0.0, dtype=self.dtype_policy)
        self.blocks = [
            block(filters, strides=1 if i else 2, input_stride=2 if i else 1, name=f"block{i + 1}", **options)
            for i in range(3)
        ]

    def call(self, x, training=False):
        return in_turn(self.blocks, x, training and self.trainable)


@makes_layer
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
    stem_width=None,
    average_pool=False,
    table_photo=None,
    attention_stride=1,
    whole_up_to_span=False,
    conv_block="bottleneck",
    attention_width=1,
    activation="relu",
    pixels="symmetric",
    norm=BatchNormConfig(),
):
    """Axial-ResNet as a `ResNet` layer. The widths 0.5, 0.75, 1 and 2 are the paper's S, M, L and XL.

    Args:
        width: multiplies the channels.
        repeats, output_stride, drop_path: see `ResNet`. Attention is never dilated.
        stem: 'deeplab' for segmentation, 'imagenet' for classification with a conv stem, 'wide' for SWideRNet, 'axial'
            for Full Axial-ResNet. With 'axial' the first stage has a stride in place of the max-pool.
        span: span of every attention layer; None for the whole axis.
        whole_up_to_span: whether an axis that is not longer than the span is seen whole; see `AxialAttention`.
        heads: heads of every attention layer.
        pool: whether a max-pool follows the stem.
        terms, value_position: position-sensitivity of every attention layer; see `AxialAttention`.
        recompute: what the backward pass recomputes to save memory, of `RECOMPUTE`.
        backend: what computes attention, of `device.BACKENDS`.
        stem_width: see `make_stem`.
        average_pool: see `AxialPair`.
        table_photo: side of the largest photo whose offsets the position tables hold; None for 255 distances at every
            stride. A larger photo is warned of.
        attention_stride: blocks whose input has a smaller stride convolve in place of attending. DeepLab2 has 16.
        conv_block: what those are: 'bottleneck' as in ResNet, 'basic' as in SWideRNet (Chen et al., 2020).
        attention_width: multiplies the channels of the attention inside each block. DeepLab2's SWideRNets have 2.
        activation: see `Conv`.
        pixels: see `ResNet`.
        norm: `BatchNormConfig`, or None for the folded network.

    Raises:
        InputError: the heads do not divide the channels of this width, or a name is unknown.
    """
    filters = base_filters(width, heads, 32 if stem == "axial" else 64)
    check_choice("recompute", recompute, RECOMPUTE)
    check_choice("stem", stem, ("imagenet", "deeplab", "wide", "axial"))
    check_choice("conv_block", conv_block, ("bottleneck", "basic"))
    check_choice("activation", activation, ACTIVATIONS)
    attention = dict(span=span, whole_up_to_span=whole_up_to_span, heads=heads, terms=terms)
    attention |= dict(value_position=value_position, recompute=recompute, backend=backend)

    def middle(filters, *, strides, dilation, input_stride, dtype):
        del dilation  # attention is never dilated
        own = {} if table_photo is None else dict(max_distance=max(-(-table_photo // input_stride), 1))
        options = dict(average_pool=average_pool, attention=attention | own, activation=activation)
        options |= dict(dtype=dtype, name="attention")
        channels = attention_width * filters
        return AxialPair(channels, 2 * channels, norm, strides, **options)

    attending = bottlenecks(middle, norm, recompute, 2 * attention_width, activation=activation)
    if conv_block == "basic":
        convolving = basic_blocks(norm, recompute, activation)
    else:
        convolving = bottlenecks(convolutions(norm, activation), norm, recompute, activation=activation)

    def block(filters, *, input_stride, **options):
        make = attending if input_stride >= attention_stride else convolving
        return make(filters, input_stride=input_stride, **options)

    if stem == "axial":
        first, pool = AxialStem(block, filters // 2, name="stem"), False
    else:
        options = dict(stem_width=stem_width, activation=activation, recompute=recompute)
        first = make_stem(stem, width, norm, **options)
    frame = dict(repeats=repeats, output_stride=output_stride, drop_path=drop_path, pixels=pixels, name="backbone")
    return ResNet(first, block, filters=filters, pool=pool, table_photo=table_photo, **frame)
