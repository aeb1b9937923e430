"""Our layer equals its textbook form up to 1e-5: outputs, all gradients and moving statistics."""

import numpy as np
import pytest
import tensorflow as tf

from axial.layers.attention.layer import TERMS, AxialAttention
from axial.layers.batch_norm import BatchNormConfig
from tests.conftest import randomize
from textbook import TextbookAttention

TOLERANCE = 1e-5


def error(ours, theirs):
    """Returns the norm of the difference / the norm of `theirs`."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    return np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-12)


def run(layer, x, cotangent, training):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=training)
        loss = tf.reduce_sum(y * cotangent)
    named = {w.name.split("/", 1)[1]: w for w in layer.trainable_weights}
    gradients = tape.gradient(loss, {"x": x, **named})
    return y, {name: tf.convert_to_tensor(g) for name, g in gradients.items()}


@pytest.mark.parametrize(
    "size,axis,span,terms", [((5, 40), "width", None, TERMS), ((40, 3), "height", 21, ("content", "query"))]
)
@pytest.mark.parametrize("training", [False, True])
def test_equals_the_textbook(backend, size, axis, span, terms, training):
    options = dict(span=span, terms=terms, norm=BatchNormConfig(momentum=0.1), backend=backend, name="attention")
    layers = [make(64, 128, axis, **options) for make in (AxialAttention, TextbookAttention)]
    x = tf.random.stateless_normal([2, *size, 48], [0, 1])
    cotangent = tf.random.stateless_normal([2, *size, 128], [0, 2])
    for layer in layers:
        layer(x)
    randomize(layers[0])
    layers[0](x, training=True)  # moves the moving statistics towards the batch's, as in a trained layer
    named = {w.name: w for w in layers[0].weights}
    assert set(named) == {w.name for w in layers[1].weights}
    for weight in layers[1].weights:
        weight.assign(named[weight.name])
    (ours, gradients), (theirs, expected) = (run(layer, x, cotangent, training) for layer in layers)
    assert error(ours, theirs) < TOLERANCE
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        assert error(gradient, expected[name]) < TOLERANCE, name
    moved = {w.name: w for w in layers[1].weights if "moving" in w.name}
    for name, value in moved.items():
        assert error(named[name], value) < TOLERANCE, name
