"""Folding, and both attention layers as plain Keras layers that are cloned, saved and loaded."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.layers.attention.folded import FoldedAttention
from axial.layers.attention.layer import (
    TERMS,
    AttentionOptions,
    AttentionSpec,
    AxialAttention,
    LocalAttention,
    local_options,
)
from axial.layers.batch_norm import BatchNormConfig
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


LAYERS = {
    "axial": (AxialAttention, dict(axis="height", heads=2, span=5, max_distance=9, recompute="softmax")),
    "local": (LocalAttention, dict(heads=2, span=3, batch_norm=False, backend="xla")),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_folded_layers_are_cloned_saved_and_loaded(kind, tmp_path):
    """A clone and a saved copy of a functional model have its configuration and its outputs."""
    make, options = LAYERS[kind]
    spec = make(8, 12, norm=BatchNormConfig(0.9, 1e-4, unbiased=True), **options).spec
    layer = FoldedAttention(spec, name="attention")
    inputs = keras.Input([9, 6, 3])
    model = keras.Model(inputs, keras.layers.ReLU()(layer(inputs)))
    randomize(model)
    x = tf.random.stateless_normal([2, 9, 6, 3], [0, 1])
    wanted = model(x)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for other in (clone, loaded):
        twin = other.get_layer("attention")
        assert type(twin) is type(layer) and twin.get_config() == layer.get_config()
        np.testing.assert_array_equal(other(x), wanted)


def test_layers_saved_before_each_term_had_a_scale_are_loaded(tmp_path):
    """Their kernels hold the scales of the query and the key term."""
    layer = FoldedAttention(make(span=5).spec)
    inputs = keras.Input([9, 6, 4])
    model = keras.Model(inputs, layer(inputs))
    randomize(model)
    for scale in layer.scales[1:]:  # of the query and the key term
        scale.assign([1.0, 1.0])

    def save_own_variables(store):
        old = [w for w in layer.weights if not w.name.endswith(("query_scale:0", "key_scale:0"))]
        for i, weight in enumerate(old):
            store[str(i)] = weight.numpy()

    layer.save_own_variables = save_own_variables
    model.save(tmp_path / "model.keras")
    x = tf.random.stateless_normal([2, 9, 6, 4], [0, 1])
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(x), model(x))


def test_a_config_of_an_earlier_version():
    """Files of axial 0.2 have the neighbourhood apart."""
    for spec in (
        AttentionSpec("width", 8, 12, AttentionOptions(2, 5), 9),
        AttentionSpec("square", 8, 8, local_options(3)),
    ):
        options = spec.options
        near = {"axis": spec.axis, "max_distance": spec.max_distance, "whole_up_to_span": False, "kind": "axis"}
        near = {"span": options.span, **(near if spec.axis == "width" else {"kind": "square"})}
        old = {"neighborhood": near, "key_channels": 8, "value_channels": spec.value_channels, "heads": options.heads}
        old |= {"terms": list(options.terms), "value_position": options.value_position}
        config = {"name": "a", "trainable": True, "dtype": "float32", "spec": old, "backend": "xla"}
        wanted = dataclasses.replace(spec, options=dataclasses.replace(options, backend="xla"))
        assert FoldedAttention.from_config(config).spec == wanted
