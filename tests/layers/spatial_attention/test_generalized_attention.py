"""Generalised attention, compared with float64 loops and with mmcv's golden outputs and gradients."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers.spatial_attention import attention_terms
from axial.layers.spatial_attention.attention_terms import SETTINGS
from axial.layers.spatial_attention.generalized_attention import TEXT, GeneralizedAttention
from tests.conftest import golden_files, read_golden, relative_error
from tests.layers.spatial_attention.mechanism_fixture import (
    check_everywhere,
    check_layer,
    largest_tensor,
    name_of,
    randomized,
)
from tests.study_oracles import generalized_attention

TOLERANCE = 2e-5


def make(setting, shape, **options):
    return randomized(GeneralizedAttention(setting, **{"heads": 2, **options}), shape)


def output_and_gradients(layer, x, upstream):
    """Returns (y, dict of the gradients of x and the weights by name). `upstream` is the gradient of y."""
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
    weights = {name_of(weight): weight for weight in layer.trainable_weights}
    return y, tape.gradient(y, {"x": x, **weights}, tf.constant(upstream, x.dtype), unconnected_gradients="zero")


def check(layer, x, tolerance=TOLERANCE, **inputs):
    check_layer(layer, x, generalized_attention, tolerance, **inputs)


# === Outputs and gradients ===

FORMS = {"stride1": {}, "stride2": dict(key_stride=2), "window": dict(window=3)}
# Tests on maps: every attention type without stride and window, and a few types with them.
FEW = [("1111", "stride2"), ("0011", "window"), ("1111", "window")]
MAPS = [*((setting, "stride1") for setting in SETTINGS), *FEW]


@pytest.mark.parametrize("setting,form", MAPS)
def test_maps(setting, form):
    sizes = [(3, 4)] if form == "stride2" else [(3, 4), (1, 1)]  # a stride larger than the map is an error
    for size in sizes:
        check(*make(setting, [1, *size, 8], dtype="float64", **FORMS[form]), 1e-9)
    if setting == "1111":
        check(*make(setting, [2, 2, 3, 8], recompute="softmax", **FORMS[form]))  # in float32


SEQUENCES = {
    "plain": {},
    "causal": dict(causal=True),
    "causal_window": dict(causal=True, window=5),
    "window": dict(window=3),
    "stride2": dict(key_stride=2),
}


@pytest.mark.parametrize("setting,form", [(s, form) for form in SEQUENCES for s in ("0110", "1111")])
def test_sequences(setting, form):
    for length in (5, 1) if form != "stride2" else (5,):
        check(*make(setting, [1, length, 8], **TEXT, **SEQUENCES[form]))


@pytest.mark.parametrize("setting", ("0010", "1111"))
def test_keys_of_another_sequence_and_padding(setting):
    layer, x = make(setting, [2, 3, 8], **TEXT)
    keys = np.random.default_rng(3).normal(size=[2, 5, 8]).astype(np.float32)
    mask = np.arange(5) < np.array([[5], [2]])
    check(layer, x, keys=keys, key_mask=mask)
    layer, x = make(setting, [2, 5, 8], **TEXT, causal=True)
    check(layer, x, key_mask=mask)
    changed = np.where(mask[..., None], x, 100)
    np.testing.assert_array_equal(layer(changed, key_mask=mask)[1, :2], layer(x, key_mask=mask)[1, :2])


def test_keys_of_another_map():
    """The queries and keys are maps of different sizes. With the window, each query still sees a key."""
    for setting, size, options in (("0110", (5, 4), {"key_stride": 2}), ("0010", (4, 7), {"window": 3})):
        layer, x = make(setting, [1, 4, 8, 8], **options)
        check(layer, x, keys=np.random.default_rng(3).normal(size=[1, *size, 8]).astype(np.float32))


@pytest.mark.parametrize("setting,form", [("0110", "stride1"), ("1111", "window")])
def test_chunks_of_the_queries(setting, form, monkeypatch):
    """The layer computes large maps in chunks of rows. Here the last chunk has fewer rows than the others."""
    layer, x = make(setting, [1, 14, 2, 8], **FORMS[form])
    upstream = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    monkeypatch.setattr(attention_terms, "LEAST_ROWS", 100)
    whole = output_and_gradients(layer, x, upstream)
    for least, largest in ((4, 2**24), (4, 150), (100, 150)):
        monkeypatch.setattr(attention_terms, "LEAST_ROWS", least)
        monkeypatch.setattr(attention_terms, "LARGEST_MAP", largest)
        chunks = output_and_gradients(layer, x, upstream)
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), chunks, whole)


# === Another implementation ===

MMCV = {
    "query_kernel": "query_conv.weight",
    "key_kernel": "key_conv.weight",
    "value_kernel": "value_conv.weight",
    "row_position_kernel": "appr_geom_fc_y.weight",
    "column_position_kernel": "appr_geom_fc_x.weight",
    "key_vector": "appr_bias",
    "position_vector": "geom_bias",
    "output_kernel": "proj_conv.weight",
    "output_bias": "proj_conv.bias",
}


@pytest.mark.parametrize("file", golden_files("study_ga_*.npz"))
def test_agrees_with_mmcv(file):
    """mmcv's window extends one pixel further down and to the right than its argument says."""
    arrays, meta = read_golden(file)
    layer = GeneralizedAttention(meta["setting"], meta["heads"], key_stride=meta["kv_stride"])
    span = meta["spatial_range"]
    if span >= 0:
        layer.reach = span, span + 1
    x, expected, upstream, expected_d_x = (arrays[n].transpose(0, 2, 3, 1) for n in ("x", "y", "cotangent", "grad/x"))
    layer.build(x.shape)

    def as_ours(array, shape):
        return array.reshape(shape) if array.ndim < 2 else array.reshape(array.shape[:2]).T

    for weight in layer.weights:
        weight.assign(as_ours(arrays[f"w/{MMCV[name_of(weight)]}"], weight.shape))
    y, gradients = output_and_gradients(layer, x, upstream * meta["gamma"])
    assert relative_error(x + meta["gamma"] * y, expected) < TOLERANCE
    assert relative_error(gradients.pop("x") + upstream, expected_d_x) < TOLERANCE
    for name, gradient in gradients.items():
        assert relative_error(gradient, as_ours(arrays[f"grad/{MMCV[name]}"], gradient.shape)) < 5e-5, name


# === Properties ===


@pytest.mark.parametrize("setting,form", [("0010", "stride1"), *FEW])
def test_no_tensor_of_pairs_and_channels(setting, form):
    """No tensor is [pixels, pixels, D] per head. Terms of the keys or offsets alone need no [pixels, pixels] either."""
    pixels, depth, heads = 24 * 24, 8, 2
    layer, _ = make(setting, [1, 24, 24, heads * depth], **FORMS[form])
    largest = largest_tensor(layer, [1, 24, 24, heads * depth])
    keys = pixels // layer.key_stride**2
    assert largest <= 2 * heads * pixels * keys  # with a window, chunks include padding rows
    if setting in ("0010", "0001"):
        assert largest < pixels * keys


# === Keras' masks ===


@pytest.mark.parametrize("setting", ("0010", "1111"))
def test_keras_masks_are_masks_of_keys(setting):
    layer, _ = make(setting, [2, 6, 8], **TEXT)
    embedding = keras.layers.Embedding(9, 8, mask_zero=True)
    padded, ids = np.array([[3, 4, 5, 0, 0, 0], [1, 2, 3, 4, 5, 6]]), keras.Input([6], dtype="int32")
    model = keras.Model(ids, layer(embedding(ids)))
    x, mask = tf.constant(embedding(padded).numpy()), padded != 0  # has no Keras mask
    expected = layer(x, key_mask=mask)
    assert np.any(layer(x).numpy()[0] != expected.numpy()[0])
    np.testing.assert_allclose(model(padded), expected, atol=1e-6)
    np.testing.assert_array_equal(layer(embedding(padded))._keras_mask, mask)  # the output has the mask
    # `key_mask` and a Keras mask are combined. Separate keys use their own Keras mask.
    first = np.arange(6) < np.array([[2], [6]])
    np.testing.assert_allclose(layer(embedding(padded), key_mask=first), layer(x, key_mask=first & mask), atol=1e-6)
    other = np.random.default_rng(5).normal(size=[2, 4, 8]).astype(np.float32)
    np.testing.assert_allclose(layer(other, keys=embedding(padded)), layer(other, keys=x, key_mask=mask), atol=1e-6)
    np.testing.assert_allclose(layer(embedding(padded), keys=other), layer(x, keys=other), atol=1e-6)


# === The weights of one query ===


@pytest.mark.parametrize("setting,form", [("0110", "stride1"), *FEW])
def test_the_weights_of_a_query_give_its_output(setting, form):
    """The attention weights of a query sum to 1. The values weighted with them give the query's output."""
    layer, x = make(setting, [2, 5, 4, 8], **FORMS[form])
    weights = layer.query_weights(x, (3, 1))
    stride = layer.key_stride
    keys = x[:, ::stride, ::stride]
    assert weights.shape == (2, 2, *keys.shape[1:3])
    np.testing.assert_allclose(tf.reduce_sum(weights, [2, 3]), np.ones([2, 2]), rtol=1e-5)
    value = (keys @ layer.value_kernel.numpy()).reshape(*keys.shape[:3], 2, 4)
    mixed = np.einsum("bmyx,byxmd->bmd", weights, value).reshape(2, 8)
    expected = layer(x)[:, 3, 1]
    np.testing.assert_allclose(mixed @ layer.output_kernel + layer.output_bias, expected, rtol=1e-4, atol=1e-5)


def test_the_weights_of_a_term_alone():
    """`terms` gives the attention weights of a layer that has only these terms and the same variables."""
    layer, x = make("1111", [1, 5, 4, 8])
    weights = {name_of(weight): weight for weight in layer.weights}
    for setting in ("1000", "0110"):
        twin, _ = make(setting, [1, 5, 4, 8])
        for weight in twin.weights:
            weight.assign(weights[name_of(weight)])
        actual = layer.query_weights(x, (2, 2), terms=setting)
        np.testing.assert_allclose(actual, twin.query_weights(x, (2, 2)), rtol=1e-5, atol=1e-7)
    assert layer.setting == "1111"
    with pytest.raises(InputError, match="terms = '1000': expected some of the terms of setting '0110'"):
        make("0110", [1, 5, 4, 8])[0].query_weights(x, (2, 2), terms="1000")
    with pytest.raises(InputError, match="expected a pixel of the map of 5x4"):
        layer.query_weights(x, (5, 0))


@pytest.mark.parametrize(
    "setting,options", [("0010", {}), *(("1111", more) for more in ({}, {"window": 3}, {"key_stride": 2}))], ids=str
)
def test_cached_decoding_equals_full_decoding(setting, options):
    layer, x = make(setting, [2, 5, 8], causal=True, **options, **TEXT)
    cache, positions, full = layer.new_cache(2, 5), layer.positions(5), layer(x)
    for i in range(5):
        y, cache = layer.step(x[:, i : i + 1], i if i % 2 else tf.constant(i), cache, positions)
        np.testing.assert_allclose(y[:, 0], full[:, i], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="index = 5: expected fewer tokens than the 5 of the cache"):
        layer.step(x[:, :1], 5, cache, positions)


# === Execution modes and precision ===


@pytest.mark.parametrize("setting,form", [("1111", "whole"), ("0011", "parts")])
def test_eager_graph_xla_and_exported_are_equal(setting, form, monkeypatch, tmp_path):
    layer, x = make(setting, [2, 6, 5, 8], window=3 if form == "parts" else None)
    if form == "parts":
        monkeypatch.setattr(attention_terms, "LEAST_ROWS", 2)
        monkeypatch.setattr(attention_terms, "LARGEST_MAP", 200)
    check_everywhere(layer, x, tmp_path)


@pytest.mark.parametrize("setting", ("0010", "1111"))
def test_mixed_precision(setting):
    layer, x = make(setting, [1, 5, 4, 32])
    expected = layer(x)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    half = GeneralizedAttention(setting, 2)
    half.build(x.shape)
    for ours, theirs in zip(half.weights, layer.weights, strict=True):
        ours.assign(theirs)
    graph = tf.function(half, autograph=False).get_concrete_function(tf.TensorSpec(x.shape)).graph
    soft = [op for op in graph.get_operations() if op.type in ("Softmax", "Exp")]
    assert soft and all(op.outputs[0].dtype == tf.float32 for op in soft)
    y = half(x)
    assert y.dtype == tf.bfloat16 and relative_error(tf.cast(y, tf.float32), expected) < 0.1
