"""Dynamic convolution, compared with float64 loops and with another implementation's outputs and gradients."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers.spatial_attention.dynamic_conv import DynamicConv, convolve_line
from tests import study_oracles
from tests.conftest import golden_files, randomize, read_golden, relative_error
from tests.layers.spatial_attention.generalized_fixture import check_everywhere
from tests.oracles import numeric_gradient

TOLERANCE = 2e-5


def name_of(weight):
    return weight.name.split("/")[-1].split(":")[0]


def make(shape, **options):
    layer = DynamicConv(**{"groups": 2, "axes": len(shape) - 2, **options})
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    layer.build(x.shape)
    randomize(layer)
    return layer, x


def wanted_of(layer, x, upstream, key_mask=None):
    """(y, gradients by name) of the oracle."""
    w = {name_of(weight): weight.numpy().astype(np.float64) for weight in layer.weights}
    options = dict(groups=layer.groups, side=[layer.side] * 2, before=[layer.before] * 2)
    x, upstream = x.astype(np.float64), upstream.astype(np.float64)
    if layer.axes == 2:
        return study_oracles.dynamic_conv(x, w, upstream, **options, key_mask=key_mask)
    options |= dict(side=(layer.side, 1), before=(layer.before, 0))
    mask = None if key_mask is None else key_mask[:, :, None]
    y, gradients = study_oracles.dynamic_conv(x[:, :, None], w, upstream[:, :, None], **options, key_mask=mask)
    return y[:, :, 0], gradients | {"x": gradients["x"][:, :, 0]}


CASES = [
    ([2, 5, 4, 4], {}),
    ([1, 4, 6, 4], dict(kernel=5)),
    ([2, 1, 1, 4], {}),
    ([1, 3, 2, 4], dict(kernel=7)),  # larger than the map
    ([1, 1, 5, 4], dict(kernel=1, groups=4)),
    ([2, 6, 4], {}),
    ([2, 6, 4], dict(causal=True)),
    ([2, 4, 4], dict(kernel=9)),
    ([2, 4, 4], dict(kernel=9, causal=True)),
    ([2, 1, 4], dict(causal=True)),
]


@pytest.mark.parametrize("shape", [[2, 5, 4, 4], [2, 6, 4]], ids=str)
def test_float64_and_keras_masks_match_the_oracle(shape):
    layer, x = make(shape, dtype="float64")
    mask = np.random.default_rng(1).uniform(size=shape[:-1]) < 0.7
    x = np.where(mask[..., None], x, 0)
    for given, key_mask in ((x, None), (keras.layers.Masking(dtype="float64")(x), mask)):
        wanted, _ = wanted_of(layer, x, np.ones(x.shape), key_mask)
        assert relative_error(layer(given), wanted) < 1e-10


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape,options", CASES, ids=str)
def test_matches_the_oracle(shape, options, masked):
    layer, x = make(shape, **options)
    rng = np.random.default_rng(1)
    upstream = rng.normal(size=shape).astype(np.float32)
    mask = rng.uniform(size=shape[:-1]) < 0.6 if masked else None
    source = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(source)
        y = layer(source, key_mask=mask)
    weights = {"x": source} | {name_of(weight): weight for weight in layer.trainable_weights}
    gradients = tape.gradient(y, weights, upstream)
    wanted, of_wanted = wanted_of(layer, x, upstream, mask)
    assert relative_error(y, wanted) < TOLERANCE
    assert set(gradients) == set(of_wanted)
    for name, gradient in gradients.items():
        assert np.abs(gradient - of_wanted[name]).max() < TOLERANCE * max(np.abs(of_wanted[name]).max(), 1), name


def test_the_oracle_has_the_gradients_of_its_outputs():
    layer, x = make([1, 3, 2, 4])
    w = {name_of(weight): weight.numpy().astype(np.float64) for weight in layer.weights}
    x = x.astype(np.float64)
    upstream = np.random.default_rng(1).normal(size=x.shape)
    options = dict(side=(3, 3), groups=2, before=(1, 1))

    def total():
        return (study_oracles.dynamic_conv(x, w, upstream, **options)[0] * upstream).sum()

    _, gradients = study_oracles.dynamic_conv(x, w, upstream, **options)
    for name, array in [("x", x), *w.items()]:
        for i, value in numeric_gradient(total, array, entries=range(0, array.size, array.size // 4)).items():
            np.testing.assert_allclose(gradients[name].reshape(-1)[i], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("file", golden_files("study_dynamic_*.npz"))
def test_agrees_with_fairseq(file):
    """Its layer is the kernels and the depthwise convolution alone."""
    arrays, meta = read_golden(file)
    x, wanted, upstream, of_x = (arrays[n].transpose(1, 0, 2) for n in ("x", "y", "cotangent", "grad/x"))
    layer = DynamicConv(meta["kernel"], meta["groups"], axes=1)
    layer.build(x.shape)
    layer.tap_kernel.assign(arrays["w/weight_linear.weight"].T)
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = convolve_line(x, layer.kernels(x), meta["padding_left"])
    found, of_taps = tape.gradient(y, [x, layer.tap_kernel], upstream)
    assert relative_error(y, wanted) < TOLERANCE
    assert relative_error(found, of_x) < TOLERANCE
    assert relative_error(of_taps, arrays["grad/weight_linear.weight"].T) < TOLERANCE


# === Properties ===


@pytest.mark.parametrize("tap", range(9))
def test_a_saturated_kernel_is_an_exact_shift(tap):
    """Where one logit is more than 104 above the others, their exponentials are zero in float32."""
    layer, x = make([1, 5, 6, 4])
    h = layer._gated(tf.constant(x))
    layer.tap_kernel.assign(tf.zeros_like(layer.tap_kernel))
    logits = tf.one_hot(tap, 9, 120.0)
    layer.kernels = lambda h: tf.broadcast_to(tf.nn.softmax(logits), [*h.shape[:3], 2, 9])
    layer.output_kernel.assign(tf.eye(4))
    layer.output_bias.assign(tf.zeros([4]))
    row, column = tap // 3, tap % 3
    wanted = np.pad(h, [[0, 0], [1, 1], [1, 1], [0, 0]])[:, row : row + 5, column : column + 6]
    np.testing.assert_array_equal(layer(x), wanted)


def test_causal_sequences_get_no_gradient_from_the_future():
    layer, x = make([1, 7, 4], kernel=5, causal=True)
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)[:, 3]
    gradient = tape.gradient(y, x).numpy()
    assert (gradient[:, 4:] == 0).all() and (np.abs(gradient[:, :4]).max(-1) > 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_padded_tokens_change_nothing(causal):
    layer, x = make([2, 7, 4], kernel=5, causal=causal)
    mask = np.broadcast_to(np.arange(7) < 5, [2, 7])
    changed = x.copy()
    changed[:, 5:] = 100
    found = layer(changed, key_mask=mask)[:, :5]
    np.testing.assert_array_equal(found, layer(x, key_mask=mask)[:, :5])
    np.testing.assert_allclose(found, layer(x[:, :5]), atol=1e-6)


@pytest.mark.parametrize("kernel", [3, 9])
def test_cached_decoding_equals_full_decoding(kernel):
    layer, x = make([2, 5, 4], kernel=kernel, causal=True)
    full, cache = layer(x), layer.new_cache(2, 5, 4)
    for i in range(5):
        y, cache = layer.step(x[:, i : i + 1], i if i % 2 else tf.constant(i), cache)
        np.testing.assert_allclose(y[:, 0], full[:, i], atol=1e-5)
    with pytest.raises(InputError, match="index = 5: expected fewer tokens than the 5 of the cache"):
        layer.step(x[:, :1], 5, cache)


@pytest.mark.parametrize("shape", [[2, 6, 5, 4], [2, 6, 4]], ids=str)
def test_eager_graph_xla_and_exported_are_equal(shape, tmp_path):
    layer, x = make(shape)
    check_everywhere(layer, x, tmp_path)


def test_the_softmax_is_float32_under_mixed_precision():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layer = DynamicConv(3, 2)
    graph = tf.function(layer, autograph=False).get_concrete_function(tf.TensorSpec([1, 5, 4, 8])).graph
    soft = [op for op in graph.get_operations() if op.type == "Softmax"]
    assert soft and all(op.outputs[0].dtype == tf.float32 for op in soft)
    assert layer(tf.ones([1, 5, 4, 8])).dtype == tf.bfloat16


@pytest.mark.parametrize(
    "arguments,words",
    [
        (dict(kernel=4), "kernel = 4: expected an odd number"),
        (dict(groups=3), "groups = 3: expected a divisor of the 8 channels"),
        (dict(axes=2, causal=True), "causal = True: expected axes = 1"),
        (dict(axes=0), "axes = 0: expected 1 for sequences or 2"),
    ],
)
def test_what_is_refused_says_so(arguments, words):
    with pytest.raises(InputError, match=words):
        DynamicConv(**arguments)(tf.zeros([1, 4, 4, 8]))
