"""Convolutions, pooling and resizing: padding, folding, and implementations for TPUs."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers import configured, device
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.conv import Conv, SeparableConv, max_pool, resize_antialiased, resize_bilinear, step_of, subsample
from tests.conftest import built, relative_error


@pytest.mark.parametrize("kernel,shape", [(1, (2, 5, 5, 3)), (3, (2, 9, 7, 6)), (5, (3, 8, 11, 4)), (5, (1, 3, 2, 3))])
def test_depthwise_gradients_equal_tensorflows(kernel, shape):
    layer = Conv(None, kernel, None, relu=False, use_bias=False)
    x, d = (tf.random.stateless_normal(shape, [0, i]) for i in (0, 1))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = layer(x)
        expected = tf.nn.depthwise_conv2d(x, layer.weights[0], [1] * 4, "SAME")
    for source in (x, *layer.weights):
        assert relative_error(*(tape.gradient(z, source, d) for z in (y, expected))) < 1e-5


@pytest.mark.parametrize("size,kernel,strides", [(1, 3, 2), (7, 3, 1), (7, 3, 2), (8, 7, 2), (8, 1, 2)])
def test_padding_is_symmetric(size, kernel, strides):
    x = np.random.default_rng(0).normal(size=[1, size, size, 2]).astype(np.float32)
    layer = Conv(3, kernel, None, strides, relu=False)
    y = layer(x)
    pad = kernel // 2
    padded = np.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    weights = layer.weights[0].numpy()
    expected = np.zeros(y.shape)
    for i in range(y.shape[1]):
        for j in range(y.shape[2]):
            window = padded[0, i * strides : i * strides + kernel, j * strides : j * strides + kernel]
            expected[0, i, j] = np.einsum("abc,abcd->d", window, weights)
    assert y.shape[1] == -(-size // strides)
    assert relative_error(y, expected) < 1e-5


@pytest.mark.parametrize("filters", [None, 5])
def test_folding_keeps_the_function(filters):
    x = tf.random.normal([2, 9, 9, 4], seed=0)
    source, folded = built(Conv(filters, 3, BatchNormConfig()), x), built(Conv(filters, 3, None), x)
    for weight, value in zip(folded.weights, source.folded_weights(), strict=True):
        weight.assign(value)
    assert relative_error(folded(x), source(x)) < 1e-5


@pytest.mark.usefixtures("kind_of_device")
@pytest.mark.parametrize("size", [(33, 65), (32, 64), (33, 64)])
def test_resizing_undoes_strides(size):
    """After two strides of 2, resizing restores a ramp. The sides have 16k + 1 or 16k pixels."""
    ramp = np.arange(size[0])[:, None] + 100.0 * np.arange(size[1])
    x = tf.constant(ramp[None, :, :, None], tf.float32)
    kept = subsample(subsample(x, 2, 2), 2, 2)
    y = resize_bilinear(kept, size).numpy()[0, ..., 0]
    inside = tuple(slice((side - 1) // 4 * 4 + 1) for side in size)  # pixels up to the last one that the strides keep
    np.testing.assert_allclose(y[inside], ramp[inside], rtol=1e-6)
    assert [step_of(*pair) for pair in zip(kept.shape[1:3], size)] == [4.0, 4.0]


@pytest.mark.parametrize("size", [(9, 17), (4, 5), (7, 1), (14, 36), (14, 25)])
def test_resizing_is_the_same_on_an_accelerator(monkeypatch, size):
    x = tf.random.stateless_normal([2, 7, 12, 3], [0, 0])

    def run(exact):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = resize_bilinear(x, size, exact)
            loss = tf.reduce_sum(tf.sin(y))
        return y, tape.gradient(loss, x)

    expected = run(exact=False)
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    for exact in (False, True):
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), run(exact), expected)


def test_exact_resizing_has_no_product_that_a_tpu_would_round(monkeypatch):
    """With `exact`, the forward pass has no Einsum, whose products a TPU would round."""
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    for exact in (False, True):
        function = tf.function(lambda x, exact=exact: resize_bilinear(x, (25, 45), exact))
        graph = function.get_concrete_function(tf.TensorSpec([2, 7, 12, 2])).graph
        assert exact != any(op.type == "Einsum" for op in graph.get_operations())


@pytest.mark.parametrize("size", [7, 8])
def test_max_pool_pads_by_one(size):
    x = np.random.default_rng(0).uniform(size=[1, size, size, 1]).astype(np.float32)
    y = max_pool(tf.constant(x)).numpy()[0, :, :, 0]
    padded = np.pad(x[0, :, :, 0], 1)
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            assert y[i, j] == padded[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max()


@pytest.mark.parametrize("size,rows,columns", [((7, 10), 1, 2), ((7, 10), 4, 2), ((1, 2), 2, 2)])
def test_subsample_is_a_slice_to_the_last_bit(rows, columns, size):
    x = tf.random.stateless_normal([2, *size, 5], [3, 4])

    def run(pick):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = pick(x)
            loss = tf.reduce_sum(y**3)
        return y, tape.gradient(loss, x)

    actual = run(lambda x: subsample(x, rows, columns))
    expected = run(lambda x: x[:, ::rows, ::columns])
    for ours, theirs in zip(actual, expected):
        np.testing.assert_array_equal(ours, theirs)


def check_on_a_tpu(monkeypatch, function, x, weights=()):
    """Asserts that a function's result and gradients are the same with the implementation for TPUs."""

    def run():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            loss = tf.reduce_sum(y * tf.cos(tf.reshape(tf.range(tf.cast(tf.size(y), tf.float32)), y.shape)))
        return [y, *tape.gradient(loss, [x, *weights])]

    expected = run()
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    # jit_compile, because without XLA the gradient of a dilated convolution needs a CPU with AVX-512.
    for ours, theirs in zip(tf.function(run, jit_compile=True)(), expected, strict=True):
        assert ours.shape == theirs.shape and relative_error(ours, theirs) < 1e-5


KERNELS = [
    *[(5, 1, 1, 1), (5, 3, 2, 1), (5, 3, 1, 4), (5, 7, 2, 1)],
    *[(None, 5, 1, 1), (None, 3, 1, 2), (None, 3, 2, 1)],
]


@pytest.mark.parametrize("images,options", [*((2, k) for k in KERNELS), *((8, k) for k in KERNELS[1:2])])
def test_rows_as_a_batch_give_the_same_convolution(monkeypatch, images, options):
    """On TPUs, a convolution has the same results for a few images and for a full batch."""
    filters, kernel, strides, dilation = options
    x = tf.random.stateless_normal([images, 9, 12, 4], [0, 0])
    layer = built(Conv(filters, kernel, None, strides, dilation, relu=False), x)
    check_on_a_tpu(monkeypatch, layer, x, layer.trainable_weights)


@pytest.mark.parametrize("size", [(9, 17), (8, 6)])
@pytest.mark.parametrize("pool", [lambda x: max_pool(tf.nn.relu(x)), lambda x: subsample(x, 2, 3)])
def test_pools_are_the_same_on_a_tpu(monkeypatch, size, pool):
    check_on_a_tpu(monkeypatch, pool, tf.random.stateless_normal([2, *size, 3], [0, 0]))


def test_maps_of_unknown_size_keep_the_plain_form(monkeypatch):
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    for layer in (Conv(5, 3, None), Conv(None, 5, None), max_pool):
        layer(tf.zeros([1, 9, 9, 4]))
        run = tf.function(layer, input_signature=[tf.TensorSpec([None, None, None, 4])])
        x = tf.random.stateless_normal([1, 7, 11, 4], [0, 0])
        assert relative_error(run(x), layer(x)) < 1e-5


@pytest.mark.parametrize("resize", [resize_bilinear, resize_antialiased])
def test_resizing_to_or_from_an_unknown_size_is_refused(resize):
    dynamic, static = keras.Input([None, 5, 3]), keras.Input([9, 7, 3])
    for x, size, words in ((static, (None, 5), r"9x7 pixels to resize to \?x5"), (dynamic, (9, 7), r"\?x5 .* to 9x7")):
        with pytest.raises(InputError, match=f"resizing needs static sizes: got a map of {words}"):
            resize(x, size)


def test_channels_are_last_whatever_keras_says():
    """~/.keras/keras.json may set 'channels_first', which axial's layers ignore."""
    keras.backend.set_image_data_format("channels_first")
    try:
        assert SeparableConv(8, 3, BatchNormConfig(), strides=2)(tf.ones([1, 9, 7, 16])).shape == (1, 5, 4, 8)
    finally:
        keras.backend.set_image_data_format("channels_last")


def test_floats_of_keras_settings_are_named(capsys):
    configured._tell_type.cache_clear()
    Conv(4, 1, None, dtype="float64")
    assert not capsys.readouterr().err
    keras.mixed_precision.set_global_policy("float64")
    assert Conv(4, 1, None)(tf.ones([1, 2, 2, 3])).dtype == tf.float64
    assert "compute in float64, as Keras is set" in capsys.readouterr().err
