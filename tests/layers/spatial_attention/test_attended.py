"""Residual blocks with spatial attention, and Transformer layers with each spatial attention mechanism."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import Bottleneck
from axial.layers.spatial_attention.attended import Attended, AttendedMiddle, Mechanism
from axial.layers.spatial_attention.deformable_conv import DeformableConv
from axial.layers.spatial_attention.dynamic_conv import DynamicConv
from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from axial.layers.spatial_attention.transformer import DecoderLayer, EncoderLayer
from axial.models.attended_resnet.network import AttendedResNet, AttendedResNetOptions
from tests.conftest import built, randomize


def mechanism(name, **options):
    return Mechanism(name, heads=2, groups=2, **options)


def test_gamma_zero_is_the_identity_bit_for_bit():
    x = tf.random.stateless_normal([2, 5, 4, 8], [0, 1])
    layer = Attended(mechanism("1111").layer())
    np.testing.assert_array_equal(layer(x), x)
    randomize(layer)
    attended = layer(x)
    assert np.abs(attended - x).max() > 0.01
    np.testing.assert_allclose(attended, x + layer.gamma * layer.attention(x), rtol=1e-6)


@pytest.mark.parametrize("name,spatial", [("1111", "regular"), ("dynamic", "none"), ("0010", "deformable")])
def test_a_block_starts_as_the_block_without_attention(name, spatial):
    """At initialisation gamma and offsets are 0, so the block equals the bottleneck with a regular 3x3 convolution."""
    x = tf.random.stateless_normal([2, 6, 5, 8], [0, 1])
    norm = BatchNormConfig()

    def block(name, spatial):
        middle = AttendedMiddle(8, norm, 2, mechanism=mechanism(name), spatial=spatial, name="middle")
        block = Bottleneck(8, 32, middle, norm, strides=2)
        block(x)
        rng = np.random.default_rng(0)
        for weight in block.weights:
            if not ("attended" in weight.name or "offset" in weight.name):
                weight.assign(rng.uniform(0.5, 1.5, weight.shape))
        return block

    ours = block(name, spatial)(x)
    assert ours.shape == (2, 3, 3, 32)
    expected = block("none", "none" if spatial == "none" else "regular")(x)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_attention_and_deformable_convolution_are_in_the_last_stages():
    options = AttendedResNetOptions(width=0.25, repeats=(1, 1, 1, 1), mechanism=mechanism("0010"), spatial="deformable")
    backbone = AttendedResNet(options)
    middles = [stage[0].middle for stage in backbone.stages]
    assert [m.spatial for m in middles] == ["regular", "regular", "deformable", "deformable"]
    assert [m.attended is not None for m in middles] == [False, False, True, True]


# === Transformer ===

KINDS = [("1111", False), ("dynamic", True), ("none", True)]


def make_encoder(name, deformable, **options):
    return built(EncoderLayer(8, 16, mechanism(name), deformable, **options), tf.zeros([1, 6, 8]))


def make_decoder(name, deformable):
    layer = DecoderLayer(8, 16, mechanism(name), deformable, memory=mechanism("1111"))
    return built(layer, tf.zeros([1, 6, 8]), tf.zeros([1, 5, 8]))


@pytest.mark.parametrize("name,deformable", KINDS)
def test_padded_tokens_change_nothing(name, deformable):
    layer = make_encoder(name, deformable)
    x = tf.random.stateless_normal([2, 6, 8], [0, 1])
    mask = tf.constant([[True] * 4 + [False] * 2] * 2)
    changed = tf.concat([x[:, :4], 100 * x[:, 4:]], 1)
    actual = layer(changed, key_mask=mask)[:, :4]
    masked = keras.layers.Masking()(tf.where(mask[..., None], x, 0.0))  # with a Keras mask
    np.testing.assert_allclose(layer(masked)[:, :4], actual, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(actual, layer(x[:, :4]), rtol=1e-4, atol=1e-5)
    decoder, target = make_decoder(name, deformable), tf.random.stateless_normal([2, 6, 8], [2, 3])
    np.testing.assert_allclose(
        decoder(target, changed, memory_mask=mask), decoder(target, x[:, :4]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name,deformable", KINDS)
def test_cached_decoding_equals_full_decoding(name, deformable):
    layer = make_decoder(name, deformable)
    x, memory = tf.random.stateless_normal([2, 6, 8], [0, 1]), tf.random.stateless_normal([2, 5, 8], [2, 3])
    mask = tf.constant([[True] * 5, [True] * 3 + [False] * 2])
    full = layer(x, memory, memory_mask=mask)
    changed = layer(tf.concat([x[:, :3], 100 * x[:, 3:]], 1), memory, memory_mask=mask)
    np.testing.assert_array_equal(changed[:, :3], full[:, :3])  # no token sees later tokens
    cache, constants = layer.new_cache(memory, 6, mask), layer.constants(6, 5)
    assert all(a.shape[0] == 2 for a in tf.nest.flatten(cache))

    @tf.function(autograph=False)
    def step(token, index, cache):
        return layer.step(token, index, cache, constants)

    for i in range(6):
        y, cache = step(x[:, i : i + 1], tf.constant(i), cache)
        np.testing.assert_allclose(y[:, 0], full[:, i], rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="index = 6: expected fewer tokens than the 6 of the cache"):
        layer.step(x[:, :1], 6, cache, constants)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_keras_masks_reach_the_attention(policy):
    """The mask is used even if Keras casts the input, which removes the mask from the tensor."""
    layer = Attended(GeneralizedAttention("1111", 2, axes=1, dtype=policy), dtype=policy)
    x = keras.layers.Embedding(9, 8, mask_zero=True)(tf.constant([[3, 1, 0, 0], [2, 5, 4, 0]]))
    layer(x)
    layer.gamma.assign(1.0)
    plain, mask = tf.identity(x), tf.constant([[1, 1, 0, 0], [1, 1, 1, 0]]) > 0
    np.testing.assert_array_equal(layer(x), layer(plain, mask=mask))
    assert not np.array_equal(layer(x), layer(plain))


MAP, MAP_OF_6 = tf.zeros([1, 4, 4, 8]), tf.zeros([1, 4, 4, 6])


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: Mechanism("mean"), "mechanism = 'mean': expected four bits"),
        (lambda: Mechanism("dynamic", window=4), "kernel = 4: expected an odd number"),
        (lambda: Mechanism("1111", window=4), "window = 4: expected an odd number"),
        (lambda: GeneralizedAttention("0000"), "setting = '0000': expected four bits, '0001' to"),
        (lambda: GeneralizedAttention(window=3, key_stride=2), "window = 3: expected key_stride = 1"),
        (lambda: GeneralizedAttention(heads=3)(MAP), "heads = 3: expected a divisor of the 8 channels"),
        (lambda: GeneralizedAttention(key_stride=5)(MAP), "key_stride = 5: expected at most the size of the keys, 4x4"),
        (lambda: GeneralizedAttention(causal=True), "causal = True: expected axes = 1"),
        (lambda: GeneralizedAttention(axes=3), "axes = 3: expected 1 for sequences or 2"),
        (lambda: DynamicConv(groups=3)(MAP), "groups = 3: expected a divisor of the 8 channels"),
        (lambda: DeformableConv(4, 2, None), "kernel = 2: expected an odd number"),
        (lambda: DeformableConv(4, 3, None, groups=4)(MAP_OF_6), "groups = 4: expected a divisor of the 6 channels"),
        (lambda: DeformableConv(4, 3, None, offset_groups=4)(MAP_OF_6), "offset_groups = 4: expected a divisor of"),
        (lambda: DeformableConv(4, 3, None, modulation="sigmoids"), "modulation must be one of .*mean 'sigmoid'"),
    ],
)
def test_what_is_refused_says_so(make, words):
    with pytest.raises(InputError, match=words):
        make()
