"""Axial-DeepLab with a single axial-decoder in place of the two of Panoptic-DeepLab (appendix B)."""

import tensorflow as tf
import tf_keras as keras

from axial.layers.blocks import AxialPair
from axial.layers.conv import Conv, resize_bilinear
from axial.models.panoptic_deeplab import CENTER, OFFSET, SEMANTIC


class AxialDecoderBlock(keras.layers.Layer):
    """An axial-attention block with an up-sampling and encoder features in it (Fig. 5).

    A 1x1 convolution to 2f channels, upsampled to the encoder's map, plus a 1x1 convolution of that
    map; ReLU; attention along the height and the width; a 1x1 convolution to 4f channels.

    Args:
        filters: f.
        norm: `BatchNormConfig` or None (folded).
        encoder: whether there is an encoder map to add; otherwise nothing is upsampled.
        attention: further arguments of `AxialAttention`.

    Shapes: [N, h, w, C] and the encoder's [N, H, W, E] or None -> [N, H, W, 4f].
    """

    def __init__(self, filters, norm, encoder, attention, **kwargs):
        super().__init__(**kwargs)
        self.reduce = Conv(2 * filters, 1, norm, relu=False, name="reduce")
        self.project = Conv(2 * filters, 1, norm, relu=False, name="project") if encoder else None
        self.pair = AxialPair(filters, 2 * filters, norm, attention=attention, name="attention")
        self.expand = Conv(4 * filters, 1, norm, name="expand")

    def call(self, x, low=None, training=False):
        x = self.reduce(x, training=training)
        if self.project is not None:
            low = self.project(low, training=training)
            x = resize_bilinear(x, low.shape[1:3]) + low
        x = self.pair(tf.nn.relu(x), training=training)
        return self.expand(x, training=training)


class AxialDecoderDeepLab(keras.Model):
    """Backbone, one axial-decoder for all three outputs, and a 1x1 convolution for each.

    The paper prints no channels. Chosen: f = 128 at stride 8, 96 at stride 4 and 48 in a last block
    there, which takes the place of the heads' 5x5 convolutions (three blocks, like those three
    convolutions); output stride 32 adds f = 104 at stride 16. At width 1 and 19 classes this is 1.66M
    parameters and 93.8B multiply-adds over the bare backbone where the published figures leave about
    1.68M and 94.0B; at output stride 32, 2.19M and 94.6B for 2.18M and 94.0B. Multiples of 32 alone
    miss either the parameters or the multiply-adds by a tenth.

    Args:
        backbone: layer from the image to the dict 'res1' .. 'res5'.
        num_classes: channels of the semantic output.
        norm: `BatchNormConfig` or None (folded); the backbone's own.
        output_stride: the backbone's.
        width: multiplies the channels.
        span, heads: of every attention layer.

    Shapes: as of `PanopticDeepLab`.
    """

    def __init__(self, backbone, num_classes, norm, output_stride=16, width=1.0, span=65, heads=8, **kw):
        super().__init__(**kw)
        self.backbone, self.num_classes, self.output_stride = backbone, num_classes, output_stride
        attention = dict(span=span, heads=heads)
        plan = [("res4", 104)] if output_stride == 32 else []
        plan += [("res3", 128), ("res2", 96), (None, 48)]
        self.levels = [level for level, _ in plan]
        self.blocks = [
            AxialDecoderBlock(int(f * width), norm, level is not None, attention, name=f"decoder_{level or 'last'}")
            for level, f in plan
        ]
        small = keras.initializers.TruncatedNormal

        def head(outputs, name):
            return Conv(outputs, 1, None, relu=False, kernel_initializer=small(stddev=0.01), name=name)

        self.semantic_head = head(num_classes, "semantic_head")
        self.center_head = head(1, "center_head")
        self.offset_head = head(2, "offset_head")

    def call(self, images, training=False):
        features = self.backbone(images, training=training)
        x = features["res5"]
        for level, block in zip(self.levels, self.blocks):
            x = block(x, features[level] if level else None, training=training)
        heads = {SEMANTIC: self.semantic_head, CENTER: self.center_head, OFFSET: self.offset_head}
        return {name: tf.cast(head(x), tf.float32) for name, head in heads.items()}
