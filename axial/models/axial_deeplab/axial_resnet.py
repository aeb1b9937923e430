"""Axial-ResNet: ResNet-50 with axial attention in place of its 3x3 convolutions (Axial-DeepLab, Sec. 3.2)."""

import dataclasses
import functools
import typing

from axial.layers.attention.layer import AttentionOptions
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair, BasicBlock
from axial.layers.configured import Layer
from axial.layers.conv import ACTIVATIONS
from axial.models.resnet.network import BlockSpec, ResNet, ResNetOptions, base_filters, in_turn, make_stem


@dataclasses.dataclass(frozen=True)
class AxialResNetOptions(ResNetOptions):
    """Options of `AxialResNet`. The widths 0.5, 0.75, 1 and 2 are the paper's S, M, L and XL.

    Attributes:
        stem: 'deeplab' for segmentation, 'imagenet' for classification with a conv stem, 'wide' for SWideRNet, 'axial'
            for Full Axial-ResNet. With 'axial' the first stage has a stride in place of the max-pool.
        attention: `AttentionOptions` of all attention layers.
        pool: whether a max-pool follows the stem.
        stem_width: see `make_stem`.
        average_pool: see `AxialPair`.
        table_photo: side in pixels of the largest photo whose offsets the position tables cover; None for
            `max_distance` 255 at every stride. A larger photo causes a warning.
        attention_stride: smallest stride of the input of a block with attention; 16 in DeepLab2. Earlier blocks have
            convolutions.
        conv_block: kind of blocks without attention: 'bottleneck' (ResNet) or 'basic' (SWideRNet, Chen et al., 2020).
        attention_width: factor of the attention's channels inside each block; 2 in DeepLab2's SWideRNets.
        activation: see `Conv`.
    """

    output_stride: int = 16
    stem: typing.Literal["imagenet", "deeplab", "wide", "axial"] = "deeplab"
    attention: AttentionOptions = AttentionOptions(span=65)
    pool: bool = True
    stem_width: float | None = None
    average_pool: bool = False
    table_photo: int | None = None
    attention_stride: int = 1
    conv_block: typing.Literal["bottleneck", "basic"] = "bottleneck"
    attention_width: int = 1
    activation: typing.Literal[tuple(ACTIVATIONS)] = "relu"


class AxialStem(Layer):
    """The stem of Full Axial-ResNet: three axial blocks with 128 x width channels, the first with stride 2.

    Args:
        make_block: function that makes a block from its `BlockSpec`.
        filters: base channels of the blocks.
    """

    def __init__(self, make_block, filters, name=None):
        super().__init__(name=name)
        spec = functools.partial(BlockSpec, filters, dilation=1, drop_path=0.0)
        first = spec(strides=2, input_stride=1, name="block1")
        rest = [spec(strides=1, input_stride=2, name=f"block{i}") for i in (2, 3)]
        self.blocks = [make_block(one) for one in (first, *rest)]

    def call(self, x, training=False):
        return in_turn(self.blocks, x, training and self.trainable)


class AxialResNet(ResNet):
    """Axial-ResNet.

    Args:
        options: `AxialResNetOptions`.
        norm: `BatchNormConfig`, or None for the folded network.

    Raises:
        InputError: the number of heads does not divide the channels at this width.
    """

    defaults = AxialResNetOptions()

    def __init__(self, options=defaults, norm=BatchNormConfig(), name="backbone"):
        axial = options.stem == "axial"
        filters = base_filters(options.width, options.attention.heads, 32 if axial else 64)
        pool = options.pool and not axial
        super().__init__(options, norm, filters, pool=pool, table_photo=options.table_photo, name=name)

    def make_stem(self):
        options = self.options
        if options.stem == "axial":
            return AxialStem(self.make_block, self.filters // 2, name="stem")
        stem = functools.partial(make_stem, activation=options.activation, recompute=options.recompute)
        return stem(options.stem, options.width, self.norm, stem_width=options.stem_width)

    def make_block(self, spec):
        options = self.options
        if spec.input_stride >= options.attention_stride:
            pair = self.make_pair(options.attention_width * spec.filters, spec)
            return self.bottleneck(spec, pair, 2 * options.attention_width, activation=options.activation)
        if options.conv_block == "bottleneck":
            return self.conv_bottleneck(spec, activation=options.activation)
        block = functools.partial(BasicBlock, drop_path=spec.drop_path, recompute=options.recompute, name=spec.name)
        return block(4 * spec.filters, self.norm, spec.strides, spec.dilation, activation=options.activation)

    def make_pair(self, channels, spec):
        """A block's `AxialPair`: attention along the height, then along the width."""
        side = self.options.table_photo
        return AxialPair(
            channels,
            2 * channels,
            self.norm,
            spec.strides,
            average_pool=self.options.average_pool,
            attention=self.options.attention,
            activation=self.options.activation,
            max_distance=255 if side is None else max(-(-side // spec.input_stride), 1),
            name="attention",
        )
