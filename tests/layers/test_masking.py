"""Masked keys have the attention weight 0 for logits of any size. Masks do not spoil int8 quantisation."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from ai_edge_litert.interpreter import Interpreter

from axial.layers.attention.layer import AxialAttention
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.masking import hide
from tests.layers.test_axial_attention import folded_copy

KEYS = 300


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "dtype,offset,kind",
    [
        *(("float32", offset, kind) for offset in (-5000.0, 5000.0) for kind in ("hidden are larger", "equal")),
        ("float64", 0.0, "normal"),
        ("float64", 5000.0, "hidden are smaller"),
    ],
)
def test_hidden_keys_have_no_weight(training, dtype, offset, kind):
    rng = np.random.default_rng(0)
    visible = np.arange(KEYS) <= np.arange(9)[:, None]  # query 0 sees one key
    logits = offset + {"equal": 0.0, "normal": 10.0}.get(kind, 1.0) * rng.normal(size=[2, 9, KEYS])
    logits += {"hidden are larger": 2000.0, "hidden are smaller": -2000.0}.get(kind, 0.0) * ~visible
    logits = tf.constant(logits, dtype)
    weights = tf.nn.softmax(hide(logits, visible, training)).numpy()
    largest = np.max(np.where(visible, logits, -np.inf), -1, keepdims=True)
    expected = np.where(visible, np.exp(np.where(visible, logits - largest, 0.0)), 0.0)
    expected /= expected.sum(-1, keepdims=True)
    epsilon = np.finfo(dtype).eps
    assert weights[np.broadcast_to(~visible, weights.shape)].max() == 0
    np.testing.assert_allclose(weights, expected, atol=100 * epsilon)


@pytest.mark.parametrize("training", [False, True])
def test_a_row_without_visible_keys_is_finite(training):
    logits = tf.random.stateless_normal([2, 3, 7], [0, 1])
    weights = tf.nn.softmax(hide(logits, np.zeros([3, 7], bool), training))
    np.testing.assert_allclose(tf.reduce_sum(weights, -1), np.ones([2, 3]), rtol=1e-6)


# === TFLite files ===


NORM = BatchNormConfig(momentum=0.0)  # one batch sets the moving statistics


def folded(layer):
    layer(photos(), training=True)
    return folded_copy(layer, photos(1))


SIZE = 33, 9, 16


def photos(count=20):
    return tf.random.stateless_normal([count, *SIZE], [0, 3])


def lite(layer, precision):
    """Converts a layer to TFLite. Returns a function that runs the TFLite model."""
    inputs = keras.Input(SIZE, batch_size=1)
    converter = tf.lite.TFLiteConverter.from_keras_model(keras.Model(inputs, layer(inputs)))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if precision == "int8":
        converter.representative_dataset = lambda: ([x[None]] for x in photos())
    interpreter = Interpreter(model_content=converter.convert())
    interpreter.allocate_tensors()

    def run(x):
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])

    return run


@pytest.mark.parametrize("precision,bound", [("int8", 0.1), pytest.param("float16", 2e-3, marks=pytest.mark.slow)])
def test_a_file_with_a_mask_equals_the_layer(precision, bound):
    """With a large mask value, the quantisation scale of int8 would be too coarse for the logits."""
    keras.utils.set_random_seed(0)
    layer, x = folded(AxialAttention(16, 32, "height", heads=4, span=5, norm=NORM)), photos(1)
    expected = layer(x).numpy()
    assert np.abs(lite(layer, precision)(x) - expected).mean() / np.abs(expected).mean() < bound
