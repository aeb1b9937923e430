"""An image classifier on any backbone."""

import tensorflow as tf
import tf_keras as keras

from axial.layers.conv import Conv

LOGITS = "logits"


class Classifier(keras.Model):
    """Backbone, mean of its last map, one linear layer.

    Args:
        backbone: layer from the image to a dict with 'res5'.
        num_classes: ImageNet's 1000, say.

    Shapes: images [N, h, w, 3], from -1 to 1 -> dict 'logits' float32 [N, num_classes].
    """

    def __init__(self, backbone, num_classes, **kwargs):
        super().__init__(**kwargs)
        self.backbone, self.num_classes = backbone, num_classes
        self.output_stride = 32  # of the backbone, as classifiers have it
        initializer = keras.initializers.TruncatedNormal(stddev=0.01)
        self.logits = Conv(num_classes, 1, None, relu=False, kernel_initializer=initializer, name="logits")

    def call(self, images, training=False):
        features = self.backbone(images, training=training)["res5"]
        mean = tf.reduce_mean(features, [1, 2], keepdims=True)
        return {LOGITS: tf.cast(tf.squeeze(self.logits(mean), [1, 2]), tf.float32)}
