"""Panoptic-DeepLab (Cheng et al., CVPR 2020) on any backbone: two decoders and three heads."""

import dataclasses
import functools
import typing

import tensorflow as tf

from axial.io.check import check_choice
from axial.layers import random
from axial.layers.configured import Layer
from axial.layers.conv import Conv, SeparableConv, make_logits, resize_bilinear
from axial.layers.device import BACKENDS
from axial.models.base import Network, NetworkOptions
from axial.models.outputs import CENTER, OFFSET, SEMANTIC


class ASPP(Layer):
    """Atrous spatial pyramid pooling (Chen et al., 2017), as in Panoptic-DeepLab.

    There are five parallel branches: a 1x1 convolution, a separable 3x3 convolution for each rate, and global average
    pooling. A 1x1 convolution mixes them, and dropout follows.

    Args:
        filters: channels of each branch and of the output.
        norm: `BatchNormConfig`, or None for the folded layer.
        rates: dilations of the 3x3 convolutions at output stride 16.
        dropout: rate of dropout on the output.
        backend: see `SeparableConv`.
        widen: factor of the rates.
    """

    def __init__(self, filters, norm, rates=(6, 12, 18), dropout=0.1, backend="auto", widen=1, name=None):
        super().__init__(name=name)
        random.check_rate("aspp_dropout", dropout)
        self.dropout = dropout
        self.point = Conv(filters, 1, norm, name="point")
        atrous = functools.partial(SeparableConv, filters, 3, norm, backend=backend)
        self.atrous = [atrous(dilation=widen * rate, name=f"rate{rate}") for rate in rates]
        self.pool = Conv(filters, 1, norm, name="pool")
        self.mix = Conv(filters, 1, norm, name="mix")

    def call(self, x, training=False):
        training = training and self.trainable
        branches = [branch(x, training=training) for branch in (self.point, *self.atrous)]
        pooled = self.pool(tf.reduce_mean(x, [1, 2], keepdims=True), training=training)
        branches.append(tf.broadcast_to(pooled, tf.shape(branches[0])))
        y = self.mix(tf.concat(branches, -1), training=training)
        return random.dropout(y, self.dropout) if training and self.dropout else y


@dataclasses.dataclass(frozen=True)
class DecoderOptions:
    """Options of both decoders and of the heads.

    Attributes:
        projection: channels of a 1x1 convolution on 'res5', as in DeepLab2; None for no convolution, which matches the
            paper's counts.
        inner_norm, backend: see `SeparableConv`.
        aspp: channels of an `ASPP` on 'res5' in place of the projection, or None.
        aspp_dropout: dropout rate of the `ASPP`.
    """

    projection: int | None = None
    inner_norm: bool = False
    aspp: int | None = None
    aspp_dropout: float = 0.1
    backend: typing.Literal[BACKENDS] = "auto"


class Decoder(Layer):
    """Upsamples 'res5' to stride 4 and fuses it with projected low-level maps on the way.

    Args:
        filters: channels of every 5x5 separable convolution that fuses two maps.
        low: channels of the projected low-level maps, from the smallest map to 'res2'.
        projection: channels of the 1x1 convolution on 'res5', or None. This value overrides `options.projection`.
        norm: `BatchNormConfig`, or None for the folded layer.
        options: `DecoderOptions`.
        widen: factor of the rates of the `ASPP`.

    Shapes: dict 'res2' .. 'res5' -> [N, h / 4, w / 4, filters].
    """

    def __init__(self, filters, low, projection, norm, options, widen=1, name=None):
        super().__init__(name=name)
        self.context = projection and Conv(projection, 1, norm, name="context")
        if options.aspp:
            aspp = functools.partial(ASPP, dropout=options.aspp_dropout, backend=options.backend, widen=widen)
            self.context = aspp(options.aspp, norm, name="context")
        self.levels = [f"res{1 + len(low) - i}" for i in range(len(low))]
        self.projections = [Conv(c, 1, norm, name=f"project_{n}") for c, n in zip(low, self.levels)]
        fuse = functools.partial(SeparableConv, filters, 5, norm)
        fuse = functools.partial(fuse, inner_norm=options.inner_norm, backend=options.backend)
        self.fusions = [fuse(name=f"fuse_{level}") for level in self.levels]

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

    The 1x1 convolution computes in float32, or in float64 under a float64 policy. In bfloat16 many pixels of a heat map
    would be equal, and an instance's centre could not be told from its neighbours.

    Args:
        filters: channels between the two convolutions.
        outputs: channels of the output.
        norm: `BatchNormConfig`, or None for the folded layer.
        options: `DecoderOptions`.
    """

    def __init__(self, filters, outputs, norm, options, name=None):
        super().__init__(name=name)
        inner_norm, backend = options.inner_norm, options.backend
        self.hidden = SeparableConv(filters, 5, norm, inner_norm=inner_norm, backend=backend, name="hidden")
        self.logits = make_logits(self, outputs, "logits")

    def call(self, x, training=False):
        return self.logits(self.hidden(x, training=training and self.trainable))


CHANNELS = dict(semantic=256, semantic_low=(128, 64, 32), semantic_head=256)
CHANNELS |= dict(instance=128, instance_low=(64, 32, 16), center_head=32, offset_head=32)


@dataclasses.dataclass(frozen=True)
class PanopticDeepLabOptions(NetworkOptions):
    """Options of `PanopticDeepLab`.

    Attributes:
        decoder_width: factor of `CHANNELS`, the channels of decoders and heads.
        channels: dict of channels that override `CHANNELS` and are not multiplied. The keys 'semantic_projection' and
            'instance_projection' override `projection`.
        decoder: `DecoderOptions`.
        instances: False omits the instance decoder and its two heads.
    """

    decoder_width: float = 1.0
    channels: dict | None = None
    decoder: DecoderOptions = DecoderOptions()
    instances: bool = True


class PanopticDeepLab(Network):
    """Backbone, a semantic and an instance decoder, and three heads, all at stride 4.

    Args:
        backbone: layer that returns the dict of maps 'res1' .. 'res5'. With output stride 32 both decoders also
            project 'res4'.
        num_classes: channels of the semantic head, from the `DatasetSpec`.
        norm: `BatchNormConfig`, or None for a folded model. The backbone has the same batch norms.
        options: `PanopticDeepLabOptions`.

    Shapes: images [N, h, w, 3], from -1 to 1 -> dict of float32 maps [N, (h + 3) // 4, (w + 3) // 4, .]:
        'semantic_logits' [num_classes], 'center_heatmap' [1], 'offset_map' [2]. An offset is the vector (y, x) from a
        pixel to the centre of its instance, in pixels of the map. Without instances there is only 'semantic_logits'.
    """

    task, title, hub = "panoptic", "panoptic segmentation", "image-segmentation"
    classes = 19  # of Cityscapes
    maps = tuple((name, f"[N, h / 4, w / 4, {n}]") for name, n in ((SEMANTIC, "C"), (CENTER, 1), (OFFSET, 2)))

    defaults = PanopticDeepLabOptions()

    def __init__(self, backbone, num_classes, norm, options=defaults, name="panoptic_deeplab"):
        super().__init__(backbone, num_classes, norm, options, name=name)
        levels = max(1 + backbone.output_stride // 16, 2)  # number of low-level maps that the decoders project
        # At output stride 8, doubled rates keep the receptive field in pixels, as in DeepLabv3 (Chen et al., 2017).
        widen = max(16 // backbone.output_stride, 1)
        sizes = _channels(options)

        def decoder(task):
            low, projection = sizes[f"{task}_low"][-levels:], sizes[f"{task}_projection"]
            make = functools.partial(Decoder, options=options.decoder, widen=widen, name=f"{task}_decoder")
            return make(sizes[task], low, projection, norm)

        def head(name, outputs):
            return Head(sizes[name], outputs, norm, options.decoder, name=name)

        self.semantic_decoder = decoder("semantic")
        self.semantic_head = head("semantic_head", num_classes)
        if options.instances:
            self.instance_decoder = decoder("instance")
            self.center_head = head("center_head", 1)
            self.offset_head = head("offset_head", 2)

    def call(self, images, training=False):
        training = training and self.trainable
        features = self.backbone(images, training=training)
        semantic = self.semantic_decoder(features, training=training)
        maps = {SEMANTIC: self.semantic_head(semantic, training=training)}
        if self.options.instances:
            instance = self.instance_decoder(features, training=training)
            maps[CENTER] = self.center_head(instance, training=training)
            maps[OFFSET] = self.offset_head(instance, training=training)
        return maps


def _channels(options):
    """dict of `CHANNELS` times the width and of both decoders' projections, overridden by `options.channels`."""
    width, changes = options.decoder_width, options.channels or {}

    def scaled(channels):
        return [int(c * width) for c in channels] if isinstance(channels, tuple) else int(channels * width)

    sizes = {name: scaled(channels) for name, channels in CHANNELS.items()}
    sizes |= dict.fromkeys(("semantic_projection", "instance_projection"), options.decoder.projection)
    for name in changes:
        check_choice("channels", name, sizes)
    return {**sizes, **changes}
