"""Xception-71, the backbone of the published Panoptic-DeepLab (Chollet, CVPR 2017; Qi et al., 2017)."""

import tensorflow as tf
import tf_keras as keras

from axial.layers import random
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.conv import Conv, SeparableConv
from axial.models.resnet import check_backbone


class XceptionBlock(keras.layers.Layer):
    """Three separable 3x3 convolutions, the last one with the stride, plus a shortcut.

    Args:
        filters: channels of the three convolutions.
        norm: `BatchNormConfig`, or None (folded).
        strides: strides of the last convolution and of the shortcut.
        dilation: dilation of all three.
        shortcut: 'conv' (1x1 and batch norm), 'identity' or None.
        relu_after: whether a ReLU follows each depthwise and each 1x1 convolution, as in the last block. Otherwise a
            ReLU precedes each separable convolution.
        drop_path: see `ResidualBlock`.

    Shapes: [N, h, w, C] -> [N, ceil(h / strides), ceil(w / strides), filters[-1]].
    """

    def __init__(
        self, filters, norm, *, strides=1, dilation=1, shortcut="conv", relu_after=False, drop_path=0.0, **kwargs
    ):
        super().__init__(**kwargs)
        self.relu_after, self.drop_path = relu_after, drop_path
        self.convs = [
            SeparableConv(
                count,
                3,
                norm,
                strides=strides if i == 2 else 1,
                dilation=dilation,
                inner_norm=True,
                inner_relu=relu_after,
                relu=relu_after,
                name=f"conv{i + 1}",
            )
            for i, count in enumerate(filters)
        ]
        self.kind, self.shortcut = shortcut, None
        if shortcut == "conv":
            self.shortcut = Conv(filters[-1], 1, norm, strides, relu=False, name="shortcut")

    def call(self, x, training=False):
        branch = x
        for conv in self.convs:
            branch = conv(branch if self.relu_after else tf.nn.relu(branch), training=training)
        if self.kind is None:
            return branch
        if training and self.drop_path:
            branch *= tf.cast(random.drop_images(branch, self.drop_path), branch.dtype)
        return branch + (x if self.shortcut is None else self.shortcut(x, training=training))


class Xception71(keras.layers.Layer):
    """Xception-71 with a batch norm after each depthwise convolution, as DeepLab has it.

    Args:
        norm: `BatchNormConfig`, or None (folded).
        output_stride: stride of 'res5', 8, 16 or 32. With 16 the exit flow has no stride, and its last block has
            dilation 2. With 8 the last block of the entry flow has no stride either, and all dilations after it are
            doubled. A network that is trained at 16 can be used at 8.
        drop_path: stochastic depth of the last block with a shortcut. It rises linearly from 0 in the first block.

    Shapes: [N, h, w, 3] -> dict 'res2' [256] and 'res3' [728] at strides 4 and 8, 'res4' [728] at 16 (8 if
        output_stride is) and 'res5' [2048] at output_stride.

    Raises:
        InputError: output_stride is not 8, 16 or 32, or drop_path is outside [0, 1).
    """

    def __init__(self, norm=BatchNormConfig(), output_stride=16, drop_path=0.0, name="backbone", **kwargs):
        super().__init__(name=name, **kwargs)
        check_backbone(output_stride, drop_path, 8)
        self.output_stride = output_stride
        self.conv1 = Conv(32, 3, norm, strides=2, name="conv1")
        self.conv2 = Conv(64, 3, norm, name="conv2")
        dilation = 2 if output_stride == 8 else 1  # from the middle flow on
        entry = [(128, 2, None), (256, 1, "res2"), (256, 2, None), (728, 1, "res3"), (728, 2 // dilation, None)]
        count = len(entry) + 16 + 1  # blocks with a shortcut

        def rate(index):
            return drop_path * index / (count - 1)

        self.entry = [
            (XceptionBlock([c] * 3, norm, strides=s, drop_path=rate(i), name=f"entry{i + 1}"), level)
            for i, (c, s, level) in enumerate(entry)
        ]
        self.middle = [
            XceptionBlock(
                [728] * 3,
                norm,
                dilation=dilation,
                shortcut="identity",
                drop_path=rate(len(entry) + i),
                name=f"middle{i + 1}",
            )
            for i in range(16)
        ]
        stride = max(output_stride // 16, 1)
        options = dict(strides=stride, dilation=dilation, drop_path=rate(count - 1))
        last = dict(dilation=2 * dilation // stride, shortcut=None, relu_after=True)
        self.exit = [
            XceptionBlock([728, 1024, 1024], norm, name="exit1", **options),
            XceptionBlock([1536, 1536, 2048], norm, name="exit2", **last),
        ]

    def call(self, x, training=False):
        x = self.conv2(self.conv1(x, training=training), training=training)
        endpoints = {}
        for block, level in self.entry:
            x = block(x, training=training)
            if level:
                endpoints[level] = x
        for block in self.middle:
            x = block(x, training=training)
        endpoints["res4"] = x
        for block in self.exit:
            x = block(x, training=training)
        return {**endpoints, "res5": x}
