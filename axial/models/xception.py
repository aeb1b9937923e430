"""Xception-71, the backbone of the published Panoptic-DeepLab (Chollet, CVPR 2017; Qi et al., 2017)."""

import tensorflow as tf

from axial.io.check import check_choice
from axial.layers import random
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import run_block
from axial.layers.configured import Layer
from axial.layers.conv import Conv, SeparableConv
from axial.models.resnet import check_backbone, in_turn


class XceptionBlock(Layer):
    """Three separable 3x3 convolutions, the last one with the stride, plus a shortcut.

    Args:
        filters: channels of the three convolutions.
        norm: `BatchNormConfig`, or None (folded).
        strides: strides of the last convolution and of the shortcut.
        dilation: dilation of all three.
        shortcut: 'conv' (1x1 and batch norm), 'identity' or None.
        relu_after: whether a ReLU follows each depthwise and each 1x1 convolution, as in the last block. Otherwise a
            ReLU precedes each separable convolution.
        drop_path, recompute: see `ResidualBlock`.

    Shapes: [N, h, w, C] -> [N, ceil(h / strides), ceil(w / strides), filters[-1]].

    Raises:
        InputError: drop_path is outside [0, 1).
    """

    def __init__(
        self,
        filters,
        norm,
        *,
        strides=1,
        dilation=1,
        shortcut="conv",
        relu_after=False,
        drop_path=0.0,
        recompute="none",
        **kwargs,
    ):
        super().__init__(**kwargs)
        random.check_rate("drop_path", drop_path)
        self.relu_after, self.drop_path, self.recompute = relu_after, drop_path, recompute
        options = dict(dilation=dilation, inner_norm=True, inner_relu=relu_after, relu=relu_after)
        options |= dict(dtype=self.dtype_policy)
        self.convs = [
            SeparableConv(count, 3, norm, strides if i == 2 else 1, name=f"conv{i + 1}", **options)
            for i, count in enumerate(filters)
        ]
        self.kind, self.shortcut = shortcut, None
        if shortcut == "conv":
            options = dict(relu=False, dtype=self.dtype_policy, name="shortcut")
            self.shortcut = Conv(filters[-1], 1, norm, strides, **options)

    def call(self, x, training=False):
        training = training and self.trainable

        def run(x, *share):
            return self._run(x, training, *share)

        return run_block(self, run, x, training=training, built=self.convs[-1].built)

    def _run(self, x, training, share=None):
        """The output. `share` [N, 1, 1, 1] multiplies the branch."""
        branch = x
        for conv in self.convs:
            branch = conv(branch if self.relu_after else tf.nn.relu(branch), training=training)
        if self.kind is None:
            return branch
        if share is not None:
            branch *= tf.cast(share, branch.dtype)
        return branch + (x if self.shortcut is None else self.shortcut(x, training=training))


class Xception71(Layer):
    """Xception-71 with a batch norm after each depthwise convolution, as DeepLab has it.

    Args:
        norm: `BatchNormConfig`, or None (folded).
        output_stride: stride of 'res5', 8, 16 or 32. With 16 the exit flow has no stride, and its last block has
            dilation 2. With 8 the last block of the entry flow has no stride either, and all dilations after it are
            doubled. A network that is trained at 16 can be used at 8.
        drop_path: stochastic depth of the last block with a shortcut. It rises linearly from 0 in the first block.
        recompute: 'none' or 'block'; see `ResidualBlock`.

    Shapes: [N, h, w, 3] -> dict 'res2' [256] and 'res3' [728] at strides 4 and 8, 'res4' [728] at 16 (8 if
        output_stride is) and 'res5' [2048] at output_stride.

    Raises:
        InputError: output_stride is not 8, 16 or 32, or drop_path is outside [0, 1), or recompute is unknown.
    """

    def __init__(
        self,
        norm=BatchNormConfig(),
        output_stride=16,
        drop_path=0.0,
        recompute="none",
        name="backbone",
        **kwargs,
    ):
        super().__init__(name=name, **kwargs)
        check_backbone(output_stride, drop_path, 8)
        check_choice("recompute", recompute, ("none", "block"))
        self.output_stride = output_stride
        own = dict(dtype=self.dtype_policy)
        self.conv1 = Conv(32, 3, norm, strides=2, name="conv1", **own)
        self.conv2 = Conv(64, 3, norm, name="conv2", **own)
        dilation = 2 if output_stride == 8 else 1  # from the middle flow on
        entry = [(128, 2, None), (256, 1, "res2"), (256, 2, None), (728, 1, "res3"), (728, 2 // dilation, None)]
        count = len(entry) + 16 + 1  # blocks with a shortcut

        def rate(index):
            return drop_path * index / (count - 1)

        def block(filters, name, **options):
            return XceptionBlock(filters, norm, recompute=recompute, name=name, **own, **options)

        self.entry = [
            (block([c] * 3, f"entry{i + 1}", strides=s, drop_path=rate(i)), level)
            for i, (c, s, level) in enumerate(entry)
        ]
        self.middle = [
            block([728] * 3, f"middle{i + 1}", dilation=dilation, shortcut="identity", drop_path=rate(len(entry) + i))
            for i in range(16)
        ]
        stride = max(output_stride // 16, 1)
        options = dict(strides=stride, dilation=dilation, drop_path=rate(count - 1))
        last = dict(dilation=2 * dilation // stride, shortcut=None, relu_after=True)
        self.exit = [block([728, 1024, 1024], "exit1", **options), block([1536, 1536, 2048], "exit2", **last)]

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
