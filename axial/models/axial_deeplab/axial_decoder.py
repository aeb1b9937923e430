"""Axial-DeepLab with one axial-decoder in place of Panoptic-DeepLab's two decoders (appendix B)."""

import dataclasses
import functools

import tensorflow as tf

from axial.layers.attention.layer import AttentionOptions
from axial.layers.blocks import AxialPair
from axial.layers.configured import Layer
from axial.layers.conv import Conv, make_logits, resize_bilinear
from axial.models.axial_deeplab.axial_resnet import AxialResNetOptions
from axial.models.base import Network, NetworkOptions
from axial.models.outputs import CENTER, OFFSET, SEMANTIC
from axial.models.panoptic_deeplab.network import PanopticDeepLab


class AxialDecoderBlock(Layer):
    """An axial-attention block that upsamples and adds encoder features (Fig. 5).

    1. A 1x1 convolution to 2f channels, upsampled to the size of the encoder's map, plus a 1x1 convolution of the
       encoder's map, then ReLU.
    2. Attention along the height, then along the width.
    3. A 1x1 convolution to 4f channels, plus the upsampled shortcut, then ReLU.

    Args:
        filters: f, the base number of channels.
        norm: `BatchNormConfig`, or None for the folded layer.
        encoder: whether the block takes an encoder map. Without one it does not upsample.
        attention: `AttentionOptions`.

    Shapes: [N, h, w, C] and the encoder's [N, H, W, E] or None -> [N, H, W, 4f].
    """

    def __init__(self, filters, norm, encoder, attention, name=None):
        super().__init__(name=name)
        conv = functools.partial(Conv, kernel=1, norm=norm, relu=False)
        self.reduce = conv(2 * filters, name="reduce")
        self.project = conv(2 * filters, name="project") if encoder else None
        self.pair = AxialPair(filters, 2 * filters, norm, attention=attention, name="attention")
        self.expand = conv(4 * filters, name="expand")
        self.shortcut = conv(4 * filters, name="shortcut")

    def call(self, x, low=None, training=False):
        training = training and self.trainable
        shortcut = self.shortcut(x, training=training)
        x = self.reduce(x, training=training)
        if self.project is not None:
            low = self.project(low, training=training)
            size = low.shape[1:3]
            x, shortcut = resize_bilinear(x, size) + low, resize_bilinear(shortcut, size)
        x = self.pair(tf.nn.relu(x), training=training)
        return tf.nn.relu(self.expand(x, training=training) + shortcut)


@dataclasses.dataclass(frozen=True)
class AxialDecoderOptions(NetworkOptions):
    """Options of `AxialDecoderDeepLab`.

    Attributes:
        width: multiplies the channels.
        attention: `AttentionOptions` of all attention layers.
        instances: False omits the centre and offset outputs.
    """

    width: float = 1.0
    attention: AttentionOptions = AxialResNetOptions.attention
    instances: bool = True


class AxialDecoderDeepLab(Network):
    """Backbone, one axial-decoder for all three outputs, and a 1x1 convolution for each output.

    The paper does not give the numbers of channels. This model has f = 64 at stride 8, 96 at stride 4, and 48 in a last
    block at stride 4. The last block replaces the three heads' 5x5 convolutions; the paper has a block for each head.
    Output stride 32 adds a block with f = 72 at stride 16. With these channels and a shortcut in each block, parameters
    and multiply-adds match Table 9; `experiments/paper/tables.py` prints both. Blocks without a shortcut would also
    match, with f = 128, 96, 48; with a shortcut these channels give 1.3 M parameters too many. So Table 9 does not
    decide whether there is a shortcut. We have one because the paper calls the block an axial-attention block, and
    axial-attention blocks are residual.

    Args:
        backbone: layer that returns the dict of maps 'res1' .. 'res5'.
        num_classes: channels of the semantic output.
        norm: `BatchNormConfig`, or None for a folded model. The backbone has the same batch norms.
        options: `AxialDecoderOptions`.

    Shapes: see `PanopticDeepLab`.
    """

    task, title, hub = PanopticDeepLab.task, PanopticDeepLab.title, PanopticDeepLab.hub
    classes, maps = PanopticDeepLab.classes, PanopticDeepLab.maps

    defaults = AxialDecoderOptions()

    def __init__(self, backbone, num_classes, norm, options=defaults, name="axial_deeplab"):
        super().__init__(backbone, num_classes, norm, options, name=name)
        plan = [("res4", 72)] if backbone.output_stride == 32 else []
        plan += [("res3", 64), ("res2", 96), (None, 48)]
        self.levels, self.blocks = [level for level, _ in plan], []
        for level, f in plan:
            name, encoder = f"decoder_{level or 'last'}", level is not None
            self.blocks.append(AxialDecoderBlock(int(f * options.width), norm, encoder, options.attention, name=name))
        self.semantic_head = make_logits(self, num_classes, "semantic_head")
        if options.instances:
            self.center_head = make_logits(self, 1, "center_head")
            self.offset_head = make_logits(self, 2, "offset_head")

    def call(self, images, training=False):
        training = training and self.trainable
        features = self.backbone(images, training=training)
        x = features["res5"]
        for level, block in zip(self.levels, self.blocks):
            x = block(x, features[level] if level else None, training=training)
        maps = {SEMANTIC: self.semantic_head(x)}
        if self.options.instances:
            maps |= {CENTER: self.center_head(x), OFFSET: self.offset_head(x)}
        return maps
