"""Panoptic-DeepLab (Cheng et al., CVPR 2020) on any backbone: dual decoder and three heads."""

import tensorflow as tf
import tf_keras as keras

from axial.layers.conv import Conv, SeparableConv, resize_bilinear

SEMANTIC = "semantic_logits"
CENTER = "center_heatmap"
OFFSET = "offset_map"


def upsample(outputs, canvas, stride=1):
    """The heads' maps on every `stride`-th pixel of the canvas, offsets in pixels of the canvas.

    Args:
        outputs: dict of maps of a `PanopticDeepLab`.
        canvas: (H, W) of its input.

    Returns:
        dict of float32 maps [N, ceil(H / stride), ceil(W / stride), C].
    """
    size = [-(-side // stride) for side in canvas]
    maps = {name: resize_bilinear(tf.cast(x, tf.float32), size) for name, x in outputs.items()}
    if OFFSET not in maps:
        return maps
    rows, columns = outputs[OFFSET].shape[1:3]
    maps[OFFSET] *= tf.constant([(canvas[0] - 1) / max(rows - 1, 1), (canvas[1] - 1) / max(columns - 1, 1)])
    return maps


class ASPP(keras.layers.Layer):
    """Atrous spatial pyramid pooling (Chen et al., 2017), as Panoptic-DeepLab has it.

    A 1x1 convolution, separable 3x3 convolutions of the rates and the mean of the map, side by side;
    a 1x1 convolution mixes them.

    Args:
        filters: channels of each of the five and of the output.
        norm: `BatchNormConfig` or None (folded).
        rates: dilations.
    """

    def __init__(self, filters, norm, rates=(6, 12, 18), **kwargs):
        super().__init__(**kwargs)
        self.point = Conv(filters, 1, norm, name="point")
        self.atrous = [SeparableConv(filters, 3, norm, dilation=r, name=f"rate{r}") for r in rates]
        self.pool = Conv(filters, 1, norm, name="pool")
        self.mix = Conv(filters, 1, norm, name="mix")

    def call(self, x, training=False):
        branches = [branch(x, training=training) for branch in (self.point, *self.atrous)]
        pooled = self.pool(tf.reduce_mean(x, [1, 2], keepdims=True), training=training)
        branches.append(tf.broadcast_to(pooled, tf.shape(branches[0])))
        return self.mix(tf.concat(branches, -1), training=training)


class Decoder(keras.layers.Layer):
    """Upsamples 'res5' to stride 4, adding projected low-level maps on the way.

    Args:
        filters: channels of every fusing 5x5 separable convolution.
        projections: channels of the projected low-level maps, from the smallest map to 'res2'.
        norm: `BatchNormConfig` or None (folded).
        projection: channels of a 1x1 convolution on 'res5' first, as in DeepLab2; the paper's counts
            have none (None).
        inner_norm: as of `SeparableConv`.
        aspp: channels of an `ASPP` on 'res5' in its place.

    Shapes: dict 'res2' .. 'res5' -> [N, h / 4, w / 4, filters].
    """

    def __init__(self, filters, projections, norm, projection=None, inner_norm=False, aspp=None, **kwargs):
        super().__init__(**kwargs)
        self.context = projection and Conv(projection, 1, norm, name="context")
        if aspp:
            self.context = ASPP(aspp, norm, name="context")
        self.levels = [f"res{1 + len(projections) - i}" for i in range(len(projections))]
        self.projections = [Conv(c, 1, norm, name=f"project_{n}") for c, n in zip(projections, self.levels)]
        self.fusions = [SeparableConv(filters, 5, norm, inner_norm=inner_norm, name=f"fuse_{n}") for n in self.levels]

    def call(self, features, training=False):
        x = features["res5"]
        if self.context is not None:
            x = self.context(x, training=training)
        for level, project, fuse in zip(self.levels, self.projections, self.fusions):
            low = project(features[level], training=training)
            x = tf.concat([resize_bilinear(x, low.shape[1:3]), low], -1)
            x = fuse(x, training=training)
        return x


class Head(keras.layers.Layer):
    """5x5 separable convolution and a 1x1 convolution to `outputs` channels, in float32."""

    def __init__(self, filters, outputs, norm, inner_norm=False, **kwargs):
        super().__init__(**kwargs)
        self.hidden = SeparableConv(filters, 5, norm, inner_norm=inner_norm, name="hidden")
        self.logits = Conv(
            outputs,
            1,
            None,
            relu=False,
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.01),
            name="logits",
        )

    def call(self, x, training=False):
        return tf.cast(self.logits(self.hidden(x, training=training)), tf.float32)


class PanopticDeepLab(keras.Model):
    """Backbone, a semantic and an instance decoder, and three heads, all at stride 4.

    Args:
        backbone: layer from the image to the dict 'res1' .. 'res5'.
        num_classes: channels of the semantic head, from the `DatasetSpec`.
        norm: `BatchNormConfig` or None (folded); the backbone's own.
        output_stride: the backbone's; 32 adds a projection of 'res4' to both decoders.
        decoder_width: multiplies the channels of decoders and heads.
        projection, inner_norm, aspp: as of `Decoder`.

    Shapes: images [N, h, w, 3], from -1 to 1 -> dict of float32 maps [N, (h + 3) // 4, (w + 3) // 4, .]:
        'semantic_logits' [num_classes], 'center_heatmap' [1], 'offset_map' [2]: from a pixel to the
        centre of its instance, (y, x), in pixels of the map.
    """

    def __init__(
        self,
        backbone,
        num_classes,
        norm,
        output_stride=16,
        decoder_width=1.0,
        projection=None,
        inner_norm=False,
        aspp=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.backbone = backbone
        self.num_classes, self.output_stride = num_classes, output_stride

        def scaled(*channels):
            return [int(c * decoder_width) for c in channels][-2 - output_stride // 32 :]

        options = dict(norm=norm, projection=projection, inner_norm=inner_norm, aspp=aspp)
        self.semantic_decoder = Decoder(*scaled(256), scaled(128, 64, 32), name="semantic_decoder", **options)
        self.instance_decoder = Decoder(*scaled(128), scaled(64, 32, 16), name="instance_decoder", **options)
        head = dict(norm=norm, inner_norm=inner_norm)
        self.semantic_head = Head(*scaled(256), num_classes, name="semantic_head", **head)
        self.center_head = Head(*scaled(32), 1, name="center_head", **head)
        self.offset_head = Head(*scaled(32), 2, name="offset_head", **head)

    def drop_instances(self):
        """Takes the instance branch away before weights are made: 'semantic_logits' remain."""
        self.instance_decoder = self.center_head = self.offset_head = None

    def call(self, images, training=False):
        features = self.backbone(images, training=training)
        semantic = self.semantic_decoder(features, training=training)
        if self.instance_decoder is None:
            return {SEMANTIC: self.semantic_head(semantic, training=training)}
        instance = self.instance_decoder(features, training=training)
        return {
            SEMANTIC: self.semantic_head(semantic, training=training),
            CENTER: self.center_head(instance, training=training),
            OFFSET: self.offset_head(instance, training=training),
        }
