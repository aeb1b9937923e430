"""Convolutions with batch norm and activation, and aligned-corners resizing."""

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.layers import device
from axial.layers.batch_norm import BatchNorm


def subsample(x, rows, columns):
    """Every rows-th row and columns-th column of [N, h, w, C]: a pool of one pixel.

    Exact, and 3 to 30 times as fast on a CPU as a slice with a stride, gradient included.
    """
    if rows == columns == 1:
        return x
    return tf.nn.avg_pool2d(x, 1, [rows, columns], "VALID")


class Conv(keras.layers.Layer):
    """Convolution, batch norm, ReLU.

    Padding is symmetric, (kernel - 1) / 2 on each side, for every stride and size: on maps of
    16k + 1 this is TensorFlow's SAME, on even ones it is PyTorch's.

    Args:
        filters: output channels; None for a depthwise convolution.
        kernel: side of the kernel, odd.
        norm: `BatchNormConfig`; None for a bias in its place (the last layer of a head, and every
            layer of a folded model).
        strides, dilation: of the convolution.
        relu: whether a ReLU follows.
        use_bias: False with norm None leaves a bare convolution.
        gamma_initializer, kernel_initializer: of the batch norm and of the kernel.

    Shapes: [N, h, w, C] -> [N, ceil(h / strides), ceil(w / strides), filters or C].
    """

    def __init__(
        self,
        filters,
        kernel,
        norm,
        strides=1,
        dilation=1,
        relu=True,
        use_bias=True,
        gamma_initializer="ones",
        kernel_initializer="he_normal",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.relu = relu
        self.pad = dilation * (kernel - 1) // 2 if strides > 1 else 0
        # oneDNN's gradient of a strided 1x1 convolution of three channels writes outside its memory.
        self.step = strides if kernel == 1 else 1
        options = dict(
            kernel_size=kernel,
            strides=strides // self.step,
            dilation_rate=dilation,
            padding="valid" if self.pad else "same",
            use_bias=use_bias and norm is None,
            name="conv",
        )
        if filters is None:
            options["depthwise_initializer"] = kernel_initializer
            self.conv = keras.layers.DepthwiseConv2D(**options)
        else:
            options["kernel_initializer"] = kernel_initializer
            self.conv = keras.layers.Conv2D(filters, **options)
        self.norm = norm and BatchNorm(norm, gamma_initializer, name="norm")

    def call(self, x, training=False):
        if self.pad:
            x = tf.pad(x, [[0, 0], [self.pad] * 2, [self.pad] * 2, [0, 0]])
        x = self.conv(subsample(x, self.step, self.step))
        if self.norm is not None:
            x = self.norm(x, training=training)
        return tf.nn.relu(x) if self.relu else x

    def folded_weights(self):
        """Values for the weights of the same layer with norm None."""
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = self.norm.folded()
        depthwise = isinstance(self.conv, keras.layers.DepthwiseConv2D)
        kernel = self.conv.weights[0]
        return [kernel * (scale[:, None] if depthwise else scale), shift]


class SeparableConv(keras.layers.Layer):
    """Depthwise convolution, 1x1 convolution, batch norm, ReLU.

    Args:
        filters, kernel, norm, dilation: as of `Conv`.
        inner_norm: whether batch norm also stands between the two, as in DeepLab2. The paper's
            parameter counts of the decoders have nothing there.
        inner_relu: whether a ReLU follows it; None: where there is a norm.
        relu: whether a ReLU follows at the end.
    """

    def __init__(
        self,
        filters,
        kernel,
        norm,
        strides=1,
        dilation=1,
        inner_norm=False,
        inner_relu=None,
        relu=True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.depthwise = Conv(
            None,
            kernel,
            norm if inner_norm else None,
            strides,
            dilation,
            relu=inner_norm if inner_relu is None else inner_relu,
            use_bias=inner_norm,
            name="depthwise",
        )
        self.pointwise = Conv(filters, 1, norm, relu=relu, name="pointwise")

    def call(self, x, training=False):
        return self.pointwise(self.depthwise(x, training=training), training=training)


def resize_bilinear(x, size):
    """Bilinear with aligned corners, [N, h, w, C] -> [N, *size, C]: maps of 16k + 1 keep their grid.

    On an accelerator two products with constant matrices: XLA makes of TensorFlow's operation one that needs 205
    GB for the gradient of COCO's classes from 257 to 1025 pixels a side, where products need 0.7.
    """
    if tuple(x.shape[1:3]) == tuple(size):
        return x
    if not device.on_processor():
        return _resize_by_products(x, size, antialias=False)
    resized = tf.raw_ops.ResizeBilinear(images=x, size=size, align_corners=True)
    return tf.cast(resized, x.dtype)


def resize_antialiased(x, size):
    """Aligned corners like `resize_bilinear`; shrinking averages all pixels under a triangle.

    The two products with constant matrices run on every device.
    """
    if tuple(x.shape[1:3]) == tuple(size):
        return x
    return _resize_by_products(x, size, antialias=True)


def _resize_by_products(x, size, antialias):
    rows, columns = (triangle_weights(a, b, antialias) for a, b in zip(x.shape[1:3], size))
    x = tf.einsum("yh,nhwc->nywc", tf.constant(rows, x.dtype), x)
    return tf.einsum("xw,nywc->nyxc", tf.constant(columns, x.dtype), x)


def triangle_weights(old, new, antialias=True):
    """float64 [new, old]: what each old pixel of an axis gives to a new one; rows sum to 1.

    `antialias`: whether the triangle is as wide as the step between new pixels, where these are fewer.
    """
    step = (old - 1) / max(new - 1, 1)  # old pixels from one new pixel to the next
    distance = np.arange(new)[:, None] * step - np.arange(old)[None, :]
    weights = np.maximum(1 - np.abs(distance) / (max(step, 1) if antialias else 1), 0)
    return weights / weights.sum(1, keepdims=True)


def max_pool(x):
    """3x3 maximum at every second position, padded by one on each side: stands after a ReLU."""
    x = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
    return tf.nn.max_pool2d(x, 3, 2, "VALID")
