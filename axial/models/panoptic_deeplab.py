"""Panoptic-DeepLab (Cheng et al., CVPR 2020) on any backbone: two decoders and three heads."""

import tensorflow as tf

from axial.io.check import check_choice
from axial.layers import random
from axial.layers.configured import Layer
from axial.layers.conv import Conv, SeparableConv, make_logits, resize_bilinear
from axial.models.base import Network
from axial.models.outputs import CENTER, OFFSET, SEMANTIC


class ASPP(Layer):
    """Atrous spatial pyramid pooling (Chen et al., 2017), as in Panoptic-DeepLab.

    Five branches in parallel: a 1x1 convolution, a separable 3x3 convolution for each rate, and the mean of the map. A
    1x1 convolution mixes them, and dropout follows.

    Args:
        filters: channels of each branch and of the output.
        norm: `BatchNormConfig`, or None (folded).
        rates: dilations of the 3x3 convolutions at output stride 16.
        dropout: share of the output that training zeroes.
        backend: see `SeparableConv`.
        widen: multiplies the rates.
    """

    def __init__(self, filters, norm, rates=(6, 12, 18), dropout=0.1, backend="auto", widen=1, **kwargs):
        super().__init__(**kwargs)
        random.check_rate("aspp_dropout", dropout)
        self.dropout = dropout
        own = dict(dtype=self.dtype_policy)
        self.point = Conv(filters, 1, norm, name="point", **own)
        options = dict(norm=norm, backend=backend, **own)
        self.atrous = [SeparableConv(filters, 3, dilation=widen * r, name=f"rate{r}", **options) for r in rates]
        self.pool = Conv(filters, 1, norm, name="pool", **own)
        self.mix = Conv(filters, 1, norm, name="mix", **own)

    def call(self, x, training=False):
        training = training and self.trainable
        branches = [branch(x, training=training) for branch in (self.point, *self.atrous)]
        pooled = self.pool(tf.reduce_mean(x, [1, 2], keepdims=True), training=training)
        branches.append(tf.broadcast_to(pooled, tf.shape(branches[0])))
        y = self.mix(tf.concat(branches, -1), training=training)
        return random.dropout(y, self.dropout) if training and self.dropout else y


class Decoder(Layer):
    """Upsamples 'res5' to stride 4 and adds projected low-level maps on the way.

    Args:
        filters: channels of every 5x5 separable convolution that fuses two maps.
        projections: channels of the projected low-level maps, from the smallest map to 'res2'.
        norm: `BatchNormConfig`, or None (folded).
        projection: channels of a 1x1 convolution on 'res5', as in DeepLab2. None for no such convolution, as in the
            paper's counts.
        inner_norm: see `SeparableConv`.
        aspp: channels of an `ASPP` on 'res5' in place of the projection, or None.
        aspp_dropout, widen: of the `ASPP`.
        backend: see `SeparableConv`.

    Shapes: dict 'res2' .. 'res5' -> [N, h / 4, w / 4, filters].
    """

    def __init__(
        self,
        filters,
        projections,
        norm,
        *,
        projection=None,
        inner_norm=False,
        aspp=None,
        aspp_dropout=0.1,
        widen=1,
        backend="auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        own = dict(dtype=self.dtype_policy)
        self.context = projection and Conv(projection, 1, norm, name="context", **own)
        if aspp:
            options = dict(dropout=aspp_dropout, backend=backend, widen=widen, **own)
            self.context = ASPP(aspp, norm, name="context", **options)
        self.levels = [f"res{1 + len(projections) - i}" for i in range(len(projections))]
        self.projections = [Conv(c, 1, norm, name=f"project_{n}", **own) for c, n in zip(projections, self.levels)]
        options = dict(norm=norm, inner_norm=inner_norm, backend=backend, **own)
        self.fusions = [SeparableConv(filters, 5, name=f"fuse_{n}", **options) for n in self.levels]

    def call(self, features, training=False):
        training = training and self.trainable
        x = features["res5"]
        if self.context is not None:
            x = self.context(x, training=training)
        for level, project, fuse in zip(self.levels, self.projections, self.fusions):
            low = project(features[level], training=training)
            x = tf.concat([resize_bilinear(x, low.shape[1:3]), low], -1)
            x = fuse(x, training=training)
        return x


class Head(Layer):
    """5x5 separable convolution, then a 1x1 convolution to `outputs` channels.

    The 1x1 convolution computes in float32 under every policy but float64. In bfloat16 many pixels of a heat map would
    be equal, and the centre of an instance could not be told from its neighbours.

    Args:
        filters: channels between the two convolutions.
        outputs: channels of the output.
        norm: `BatchNormConfig`, or None (folded).
        inner_norm, backend: see `SeparableConv`.
    """

    def __init__(self, filters, outputs, norm, inner_norm=False, backend="auto", **kwargs):
        super().__init__(**kwargs)
        options = dict(inner_norm=inner_norm, backend=backend, dtype=self.dtype_policy)
        self.hidden = SeparableConv(filters, 5, norm, name="hidden", **options)
        self.logits = make_logits(self, outputs, "logits")

    def call(self, x, training=False):
        return self.logits(self.hidden(x, training=training and self.trainable))


CHANNELS = dict(semantic=256, semantic_low=(128, 64, 32), semantic_head=256)
CHANNELS |= dict(instance=128, instance_low=(64, 32, 16), center_head=32, offset_head=32)


class PanopticDeepLab(Network):
    """Backbone, a semantic and an instance decoder, and three heads, all at stride 4.

    Args:
        backbone: layer from the image to the dict 'res1' .. 'res5'. With output stride 32 both decoders also project
            'res4'.
        num_classes: channels of the semantic head, from the `DatasetSpec`.
        norm: `BatchNormConfig`, or None (folded); the same as the backbone's.
        decoder_width: multiplies the channels of decoders and heads, `CHANNELS`.
        channels: dict of channels that replace those of `CHANNELS`, at no width. Those of 'semantic_projection' and
            'instance_projection' replace `projection`.
        projection, inner_norm, aspp, aspp_dropout, backend: see `Decoder`.
        instances: False omits the instance decoder and its two heads.

    Shapes: images [N, h, w, 3], from -1 to 1 -> dict of float32 maps [N, (h + 3) // 4, (w + 3) // 4, .]:
        'semantic_logits' [num_classes], 'center_heatmap' [1], 'offset_map' [2]. An offset is the vector (y, x) from a
        pixel to the centre of its instance, in pixels of the map. Without instances there is only 'semantic_logits'.
    """

    task, title, hub = "panoptic", "panoptic segmentation", "image-segmentation"
    classes = 19  # of Cityscapes
    maps = tuple((name, f"[N, h / 4, w / 4, {n}]") for name, n in ((SEMANTIC, "C"), (CENTER, 1), (OFFSET, 2)))

    def __init__(
        self,
        backbone,
        num_classes,
        norm,
        *,
        decoder_width=1.0,
        channels=None,
        projection=None,
        inner_norm=False,
        aspp=None,
        aspp_dropout=0.1,
        instances=True,
        backend="auto",
        name="panoptic_deeplab",
        **kwargs,
    ):
        super().__init__(name=name, **kwargs)
        self.backbone, self.num_classes, self.instances = backbone, num_classes, instances
        levels = max(1 + backbone.output_stride // 16, 2)  # low-level maps that the decoders project
        # At output stride 8 twice the rates see the same part of the photo, as in DeepLabv3 (Chen et al., 2017).
        widen = max(16 // backbone.output_stride, 1)

        sizes = _channels(decoder_width, projection, channels or {})
        options = dict(norm=norm, inner_norm=inner_norm, backend=backend, dtype=self.dtype_policy)

        def decoder(task):
            low = sizes[f"{task}_low"][-levels:]
            context = dict(aspp=aspp, aspp_dropout=aspp_dropout, widen=widen)
            context["projection"] = sizes[f"{task}_projection"]
            return Decoder(sizes[task], low, name=f"{task}_decoder", **options, **context)

        def head(name, outputs):
            return Head(sizes[name], outputs, name=name, **options)

        self.semantic_decoder = decoder("semantic")
        self.semantic_head = head("semantic_head", num_classes)
        if instances:
            self.instance_decoder = decoder("instance")
            self.center_head = head("center_head", 1)
            self.offset_head = head("offset_head", 2)

    def call(self, images, training=False):
        training = training and self.trainable
        features = self.backbone(images, training=training)
        semantic = self.semantic_decoder(features, training=training)
        maps = {SEMANTIC: self.semantic_head(semantic, training=training)}
        if self.instances:
            instance = self.instance_decoder(features, training=training)
            maps[CENTER] = self.center_head(instance, training=training)
            maps[OFFSET] = self.offset_head(instance, training=training)
        return maps


def _channels(width, projection, changes):
    """`CHANNELS` at a width, with the projections of both decoders, and with the user's changes."""

    def scaled(channels):
        return [int(c * width) for c in channels] if isinstance(channels, tuple) else int(channels * width)

    sizes = {name: scaled(channels) for name, channels in CHANNELS.items()}
    sizes |= dict.fromkeys(("semantic_projection", "instance_projection"), projection)
    for name in changes:
        check_choice("channels", name, sizes)
    return {**sizes, **changes}
