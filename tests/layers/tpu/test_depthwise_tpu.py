"""The TPU kernels of depthwise convolution, which jax interprets on a CPU."""

import functools

import numpy as np
import pytest

pytest.importorskip("jax")

import tensorflow as tf
import tf_keras as keras

from axial.layers import device
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.conv import Conv, SeparableConv
from axial.layers.tpu import depthwise as depthwise_tpu
from tests.conftest import relative_error


def oracle(x, kernel, d):
    """Returns float64 (output, gradient of x, gradient of the kernel). `d` is the gradient of the output."""
    side, reach = len(kernel), len(kernel) // 2
    beyond = [(0, 0), (reach, reach), (reach, reach), (0, 0)]
    padded, d_kernel = np.pad(x, beyond), np.zeros_like(kernel)
    y, d_padded = np.zeros_like(x), np.zeros_like(padded)
    for i in range(side):
        for j in range(side):
            window = np.s_[:, i : i + x.shape[1], j : j + x.shape[2]]
            y += padded[window] * kernel[i, j, :, 0]
            d_padded[window] += d * kernel[i, j, :, 0]
            d_kernel[i, j, :, 0] = (padded[window] * d).sum((0, 1, 2))
    return y, d_padded[:, reach : reach + x.shape[1], reach : reach + x.shape[2]], d_kernel


@pytest.mark.parametrize("images,height,width,channels,side", [(1, 19, 21, 40, 5), (2, 16, 8, 136, 3)])
def test_equals_the_oracle(images, height, width, channels, side):
    random = np.random.default_rng(0)
    x, d = random.normal(size=[2, images, height, width, channels])
    kernel = random.normal(size=[side, side, channels, 1])
    inputs = [tf.constant(value, tf.float32) for value in (x, kernel)]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = depthwise_tpu.convolve(*inputs, interpret=True)
    actual = [y, *tape.gradient(y, inputs, tf.constant(d, tf.float32))]
    for ours, expected in zip(actual, oracle(x, kernel, d), strict=True):
        assert relative_error(ours, expected) < 1e-5


def test_bfloat16_is_summed_in_float32():
    x = tf.cast(tf.random.stateless_normal([1, 9, 9, 4], [0, 0]), tf.bfloat16)
    kernel = tf.cast(tf.random.stateless_normal([5, 5, 4, 1], [0, 1]), tf.bfloat16)
    y = depthwise_tpu.convolve(x, kernel, interpret=True)
    expected = tf.nn.depthwise_conv2d(tf.cast(x, tf.float32), tf.cast(kernel, tf.float32), [1] * 4, "SAME")
    np.testing.assert_array_equal(y, tf.cast(expected, tf.bfloat16))


@pytest.fixture
def calls(monkeypatch):
    """Pretends that there is a TPU, whose kernels jax interprets. Returns a list with the input shape of each call."""
    shapes, convolve = [], functools.partial(depthwise_tpu.convolve, interpret=True)
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    monkeypatch.setattr(depthwise_tpu, "convolve", lambda *args: (shapes.append(args[0].shape), convolve(*args))[1])
    return shapes


def test_the_layer_uses_them(calls, monkeypatch):
    layer = SeparableConv(6, 5, BatchNormConfig(), inner_norm=True, backend="kernel")
    x = tf.random.stateless_normal([2, 9, 11, 4], [0, 0])
    y = layer(x, training=True)
    assert calls == [(2, 9, 11, 4)]
    monkeypatch.setattr(device, "on_tpu", lambda: False)
    assert relative_error(y, layer(x, training=True)) < 1e-5


@pytest.mark.parametrize("options", [dict(dilation=2), dict(strides=2), dict(backend="auto")])
def test_other_layers_do_without(calls, options):
    Conv(None, 3, None, **{"backend": "kernel", **options})(tf.zeros([1, 9, 9, 4]))
    assert not calls


@pytest.mark.parametrize(
    "shape,side,generation,served",
    [
        ((1, 545, 545, 288), 5, 4, False),
        ((1, 545, 545, 288), 5, 5, True),
        ((1, 65, 65, 8), 17, None, True),
        ((1, 65, 65, 8), 19, None, False),
        ((None, 65, 65, 8), 5, None, False),
    ],
)
def test_what_the_kernels_can_serve(monkeypatch, shape, side, generation, served):
    monkeypatch.setattr(device, "tpu_generation", lambda: generation)
    assert depthwise_tpu.can_serve(keras.Input(shape[1:], shape[0]), side) == served
