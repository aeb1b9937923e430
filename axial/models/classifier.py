"""An image classifier on any backbone."""

import tensorflow as tf

from axial.layers.conv import make_logits
from axial.layers.precision import widen
from axial.models.base import Network
from axial.models.outputs import LOGITS


class Classifier(Network):
    """Backbone, global average pooling, one linear layer.

    Args:
        backbone: layer that returns a dict with the map 'res5'.
        num_classes: number of classes, 1000 for ImageNet.

    Shapes: images [N, h, w, 3], from -1 to 1 -> dict 'logits' float32 [N, num_classes].
    """

    task, title, hub = "classification", "classification", "image-classification"
    classes = 1000  # of ImageNet
    maps = ((LOGITS, "[N, C]"),)

    def __init__(self, backbone, num_classes, norm=None, options=Network.defaults, name="classifier"):
        super().__init__(backbone, num_classes, norm, options, name=name)
        self.logits = make_logits(self, num_classes, "logits")

    def call(self, images, training=False):
        features = self.backbone(images, training=training and self.trainable)["res5"]
        return {LOGITS: tf.squeeze(self.logits(tf.reduce_mean(widen(features), [1, 2], keepdims=True)), [1, 2])}
