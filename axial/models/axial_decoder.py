"""Axial-DeepLab with a single axial-decoder in place of Panoptic-DeepLab's two decoders (appendix B)."""

import tensorflow as tf

from axial.layers.blocks import AxialPair
from axial.layers.configured import Layer
from axial.layers.conv import Conv, make_logits, resize_bilinear
from axial.models.base import Network
from axial.models.outputs import CENTER, OFFSET, SEMANTIC
from axial.models.panoptic_deeplab import PanopticDeepLab


class AxialDecoderBlock(Layer):
    """An axial-attention block that upsamples and adds encoder features (Fig. 5).

    1. A 1x1 convolution to 2f channels, upsampled to the encoder's map, plus a 1x1 convolution of that map. ReLU.
    2. Attention along the height, then along the width.
    3. A 1x1 convolution to 4f channels, plus the upsampled shortcut. ReLU.

    Args:
        filters: f.
        norm: `BatchNormConfig`, or None (folded).
        encoder: whether there is an encoder map. Without one the block does not upsample.
        attention: further arguments of `AxialAttention`.

    Shapes: [N, h, w, C] and the encoder's [N, H, W, E] or None -> [N, H, W, 4f].
    """

    def __init__(self, filters, norm, encoder, attention, **kwargs):
        super().__init__(**kwargs)
        own = dict(dtype=self.dtype_policy)
        options = dict(relu=False, **own)
        self.reduce = Conv(2 * filters, 1, norm, name="reduce", **options)
        self.project = Conv(2 * filters, 1, norm, name="project", **options) if encoder else None
        self.pair = AxialPair(filters, 2 * filters, norm, attention=attention, name="attention", **own)
        self.expand = Conv(4 * filters, 1, norm, name="expand", **options)
        self.shortcut = Conv(4 * filters, 1, norm, name="shortcut", **options)

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


class AxialDecoderDeepLab(Network):
    """Backbone, one axial-decoder for all three outputs, and a 1x1 convolution for each output.

    The paper does not print the channels. This model has f = 64 at stride 8, 96 at stride 4, and 48 in a last block at
    stride 4. The last block replaces the heads' 5x5 convolutions (the paper has three blocks for these three
    convolutions). Output stride 32 adds a block with f = 72 at stride 16. With these channels and a shortcut in each
    block, the parameters and multiply-adds match Table 9: `experiments/paper/tables.py` prints both. Blocks without a
    shortcut would match as well, with f = 128, 96, 48 (with the shortcut these have 1.3 M parameters too many). So
    Table 9 does not show whether there is a shortcut. The paper calls the block an axial-attention block, and those are
    residual.

    Args:
        backbone: layer from the image to the dict 'res1' .. 'res5'.
        num_classes: channels of the semantic output.
        norm: `BatchNormConfig`, or None (folded); the same as the backbone's.
        width: multiplies the channels.
        span, whole_up_to_span, heads, recompute, backend: arguments of every attention layer.
        instances: False omits the centre and offset outputs.

    Shapes: see `PanopticDeepLab`.
    """

    task, title, hub = PanopticDeepLab.task, PanopticDeepLab.title, PanopticDeepLab.hub
    classes, maps = PanopticDeepLab.classes, PanopticDeepLab.maps

    def __init__(
        self,
        backbone,
        num_classes,
        norm,
        *,
        width=1.0,
        span=65,
        whole_up_to_span=False,
        heads=8,
        recompute="none",
        backend="auto",
        instances=True,
        name="axial_deeplab",
        **kwargs,
    ):
        super().__init__(name=name, **kwargs)
        self.backbone, self.num_classes, self.instances = backbone, num_classes, instances
        attention = dict(span=span, whole_up_to_span=whole_up_to_span, heads=heads)
        attention |= dict(recompute=recompute, backend=backend)
        plan = [("res4", 72)] if backbone.output_stride == 32 else []
        plan += [("res3", 64), ("res2", 96), (None, 48)]
        self.levels, own = [level for level, _ in plan], dict(dtype=self.dtype_policy)
        self.blocks = [
            AxialDecoderBlock(
                int(f * width), norm, level is not None, attention, name=f"decoder_{level or 'last'}", **own
            )
            for level, f in plan
        ]
        self.semantic_head = make_logits(self, num_classes, "semantic_head")
        if instances:
            self.center_head = make_logits(self, 1, "center_head")
            self.offset_head = make_logits(self, 2, "offset_head")

    def call(self, images, training=False):
        training = training and self.trainable
        features = self.backbone(images, training=training)
        x = features["res5"]
        for level, block in zip(self.levels, self.blocks):
            x = block(x, features[level] if level else None, training=training)
        maps = {SEMANTIC: self.semantic_head(x)}
        if self.instances:
            maps |= {CENTER: self.center_head(x), OFFSET: self.offset_head(x)}
        return maps
