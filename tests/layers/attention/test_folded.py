"""Folding, and both attention layers as plain Keras layers that are cloned, saved and loaded."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.layers.attention.reference import TERMS
from tests.conftest import randomize, relative_error
from tests.layers.test_axial_attention import folded_copy, make


@pytest.mark.parametrize(
    "terms,silent",
    [(TERMS, 0.0), (("query", "key"), -1e-3)],
)
def test_a_silent_term_is_folded(backend, terms, silent):
    """The folded layer is equal even if a head's scale of a term is zero, although folding divides by it.

    No term leaves a weight that float16 cannot hold.
    """
    source = make(terms=terms, backend=backend)
    x = tf.random.normal([2, 6, 20, 4], seed=7)
    source(x)
    randomize(source)
    gamma = source.logit_norm.gamma
    gamma.assign(gamma * [[silent, 1.0]])
    folded = folded_copy(source, x)
    assert relative_error(folded(x), source(x)) < 1e-5
    for weight in folded.weights:
        assert "norm" not in weight.name
        weight.assign(tf.cast(tf.cast(weight, tf.float16), tf.float32))
    assert relative_error(folded(x), source(x)) < 1e-2


def test_layers_saved_before_each_term_had_a_scale_are_loaded(tmp_path):
    """Their kernels hold the scales of the query and the key term."""
    layer = make(span=5).folded()
    inputs = keras.Input([9, 6, 4])
    model = keras.Model(inputs, layer(inputs))
    randomize(model)
    layer.query_scale.assign([1.0, 1.0]), layer.key_scale.assign([1.0, 1.0])

    def save_own_variables(store):
        old = [w for w in layer.weights if not w.name.endswith(("query_scale:0", "key_scale:0"))]
        for i, weight in enumerate(old):
            store[str(i)] = weight.numpy()

    layer.save_own_variables = save_own_variables
    model.save(tmp_path / "model.keras")
    x = tf.random.stateless_normal([2, 9, 6, 4], [0, 1])
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(x), model(x))
