"""Xception-71, the backbone of the published Panoptic-DeepLab (Chollet, CVPR 2017; Qi et al., 2017)."""

import functools

import tensorflow as tf

from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import run_block
from axial.layers.configured import Layer
from axial.layers.conv import Conv, SeparableConv
from axial.models.resnet.network import BackboneOptions, check_backbone, in_turn


class XceptionBlock(Layer):
    """Three separable 3x3 convolutions, the last one with the stride, plus a shortcut.

    Args:
        filters: channels of the three convolutions.
        norm: `BatchNormConfig`, or None for the folded layer.
        strides: strides of the last convolution and of the shortcut.
        dilation: dilation of all three convolutions.
        shortcut: 'conv' (1x1 and batch norm), 'identity', or None for the last block. Without a shortcut, a ReLU
            follows each depthwise and each 1x1 convolution; with one, a ReLU precedes each separable convolution.
        drop_path, recompute: see `ResidualBlock`.

    Shapes: [N, h, w, C] -> [N, ceil(h / strides), ceil(w / strides), filters[-1]].
    """

    def __init__(
        self, filters, norm, *, strides=1, dilation=1, shortcut="conv", drop_path=0.0, recompute="none", name=None
    ):
        super().__init__(name=name)
        self.relu_after, self.drop_path, self.recompute = shortcut is None, drop_path, recompute
        conv = functools.partial(SeparableConv, kernel=3, norm=norm, dilation=dilation, inner_norm=True)
        conv = functools.partial(conv, relu=self.relu_after)
        self.convs = [conv(n, strides=strides if i == 2 else 1, name=f"conv{i + 1}") for i, n in enumerate(filters)]
        self.kind, self.shortcut = shortcut, None
        if shortcut == "conv":
            self.shortcut = Conv(filters[-1], 1, norm, strides, relu=False, name="shortcut")

    def call(self, x, training=False):
        training = training and self.trainable
        run = functools.partial(self._run, training=training)
        return run_block(self, run, x, training=training, built=self.convs[-1].built)

    def _run(self, x, keep_mask=None, *, training):
        """The block's output. `keep_mask` [N, 1, 1, 1] multiplies the branch."""
        branch = x
        for conv in self.convs:
            branch = conv(branch if self.relu_after else tf.nn.relu(branch), training=training)
        if self.kind is None:
            return branch
        if keep_mask is not None:
            branch *= tf.cast(keep_mask, branch.dtype)
        return branch + (x if self.shortcut is None else self.shortcut(x, training=training))


class Xception71(Layer):
    """Xception-71 with a batch norm after each depthwise convolution, as in DeepLab.

    With output stride 16 the exit flow has no stride, and its last block has dilation 2. With output stride 8 the last
    block of the entry flow has no stride either, and all dilations after it are doubled. A network that was trained at
    output stride 16 can be used at 8.

    Args:
        options: `BackboneOptions`.
        norm: `BatchNormConfig`, or None for the folded network.

    Shapes: [N, h, w, 3] -> dict of maps: 'res2' with 256 channels at stride 4, 'res3' with 728 at 8, 'res4' with 728 at
        16 (8 with output stride 8), 'res5' with 2048 at output_stride.

    Raises:
        InputError: output_stride is not 8, 16 or 32, or drop_path is outside [0, 1).
    """

    defaults = BackboneOptions(output_stride=16)

    def __init__(self, options=defaults, norm=BatchNormConfig(), name="backbone"):
        super().__init__(name=name)
        check_backbone(options, 8)
        self.output_stride = options.output_stride
        self.conv1 = Conv(32, 3, norm, strides=2, name="conv1")
        self.conv2 = Conv(64, 3, norm, name="conv2")
        dilation = 2 if self.output_stride == 8 else 1  # from the middle flow on
        entry = [(128, 2, None), (256, 1, "res2"), (256, 2, None), (728, 1, "res3"), (728, 2 // dilation, None)]
        count = len(entry) + 16 + 1  # blocks with a shortcut
        block = functools.partial(XceptionBlock, norm=norm, recompute=options.recompute)

        def rate(index):
            return options.drop_path * index / (count - 1)

        self.entry = [
            (block([c] * 3, strides=s, drop_path=rate(i), name=f"entry{i + 1}"), level)
            for i, (c, s, level) in enumerate(entry)
        ]
        middle = functools.partial(block, [728] * 3, dilation=dilation, shortcut="identity")
        self.middle = [middle(drop_path=rate(len(entry) + i), name=f"middle{i + 1}") for i in range(16)]
        stride = max(self.output_stride // 16, 1)
        first = functools.partial(block, [728, 1024, 1024], strides=stride, dilation=dilation, name="exit1")
        last = functools.partial(block, [1536, 1536, 2048], dilation=2 * dilation // stride, name="exit2")
        self.exit = [first(drop_path=rate(count - 1)), last(shortcut=None)]

    def call(self, x, training=False):
        training = training and self.trainable
        x = self.conv2(self.conv1(x, training=training), training=training)
        endpoints = {}
        for block, level in self.entry:
            x = block(x, training=training)
            if level:
                endpoints[level] = x
        x = in_turn(self.middle, x, training)
        return {**endpoints, "res4": x, "res5": in_turn(self.exit, x, training)}
