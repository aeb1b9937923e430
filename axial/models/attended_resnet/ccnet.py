"""CCNet's head (Huang et al., ICCV 2019) with any mechanism in place of criss-cross attention.

The spatial-attention study (Zhu et al., ICCV 2019, Sec. 4.1) uses this segmentation network. Two 3x3 convolutions, with
an optional mechanism between them, follow the last map of a dilated ResNet-50. A third 3x3 convolution takes the output
of the second, concatenated with the last map.
"""

import dataclasses

import tensorflow as tf

from axial.layers import random
from axial.layers.configured import Layer
from axial.layers.conv import Conv, make_logits
from axial.layers.spatial_attention.attended import Attended, Mechanism
from axial.layers.spatial_attention.generalized_attention import VISION
from axial.models.base import Network, NetworkOptions
from axial.models.outputs import AUXILIARY, SEMANTIC


@dataclasses.dataclass(frozen=True)
class CCNetOptions(NetworkOptions):
    """Options of `CCNet`.

    Attributes:
        context: channels of the head.
        mechanism: the head's `Mechanism`.
        dropout: rate of dropout on the head's last map, as in CCNet's code.
    """

    context: int = 512
    mechanism: Mechanism = Mechanism()
    dropout: float = 0.1


class CCNet(Network):
    """Backbone, a head with an attention module on 'res5', and an auxiliary head on 'res4'.

    Args:
        backbone: layer that returns a dict with the maps 'res4' and 'res5'. The paper uses output stride 8.
        num_classes: number of classes, from the `DatasetSpec`.
        norm: `BatchNormConfig`, or None for a folded model, which has no auxiliary head. The backbone has the same
            batch norms.
        options: `CCNetOptions`.

    Shapes: images [N, h, w, 3], from -1 to 1 -> dict of float32 'semantic_logits' [N, h / s, w / s, num_classes] at the
        backbone's output stride s. Training adds 'auxiliary_logits' of the same shape.
    """

    task, title, hub = "segmentation", "semantic segmentation", "image-segmentation"
    classes = 19  # of Cityscapes
    maps = ((SEMANTIC, "[N, h / 8, w / 8, C]"),)

    defaults = CCNetOptions()

    def __init__(self, backbone, num_classes, norm, options=defaults, name="ccnet"):
        super().__init__(backbone, num_classes, norm, options, name=name)
        random.check_rate("dropout", options.dropout)
        self.reduce = Conv(options.context, 3, norm, name="reduce")
        attention = options.mechanism.layer(**VISION)
        self.attended = attention and Attended(attention, name="attended")
        self.smooth = Conv(options.context, 3, norm, name="smooth")
        self.fuse = Conv(options.context, 3, norm, name="fuse")
        self.logits = make_logits(self, num_classes, "logits")
        self.auxiliary_head = norm and Auxiliary(options.context, num_classes, norm, name="auxiliary_head")

    def call(self, images, training=False):
        learns = training and self.trainable
        features = self.backbone(images, training=learns)
        x = self.reduce(features["res5"], training=learns)
        if self.attended is not None:
            x = self.attended(x, training=learns)
        x = self.smooth(x, training=learns)
        x = self.fuse(tf.concat([tf.cast(features["res5"], x.dtype), x], -1), training=learns)
        x = random.dropout(x, self.options.dropout) if learns and self.options.dropout else x
        maps = {SEMANTIC: self.logits(x)}
        if self.auxiliary_head is not None:  # also called in inference, so that every built model has its weights
            auxiliary = self.auxiliary_head(features["res4"], training=learns)
            if training:
                maps[AUXILIARY] = auxiliary
        return maps

    def folding_units(self):
        """The layers that have `folded_weights`, without the auxiliary head, which only training needs."""
        unused = self.auxiliary_head.submodules if self.auxiliary_head else ()
        return [layer for layer in super().folding_units() if not any(layer is other for other in unused)]


class Auxiliary(Layer):
    """A 3x3 convolution and a 1x1 convolution to the classes.

    Args:
        filters: channels of the 3x3 convolution.
        num_classes: channels of the output.
        norm: `BatchNormConfig`.
    """

    def __init__(self, filters, num_classes, norm, name=None):
        super().__init__(name=name)
        self.hidden = Conv(filters, 3, norm, name="hidden")
        self.logits = make_logits(self, num_classes, "logits")

    def call(self, x, training=False):
        return self.logits(self.hidden(x, training=training and self.trainable))
