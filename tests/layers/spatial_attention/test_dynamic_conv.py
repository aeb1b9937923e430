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
    ([2, 1, 1, 4], {}),
    ([1, 3, 2, 4], dict(kernel=7)),  # larger than the map
    ([1, 1, 5, 4], dict(kernel=1, groups=4)),
    ([2, 6, 4], {}),
    ([2, 6, 4], dict(causal=True)),
    ([2, 4, 4], dict(kernel=9, causal=True)),
]


@pytest.mark.parametrize(
    "shape,options,dtype,tolerance",
    [*((*case, "float64", 1e-9) for case in CASES), (*CASES[0], "float32", TOLERANCE)],
    ids=str,
)
def test_matches_the_oracle(shape, options, dtype, tolerance):
    layer, x = make(shape, dtype=dtype, **options)
    rng = np.random.default_rng(1)
    upstream = rng.normal(size=shape)
    mask = rng.uniform(size=shape[:-1]) < 0.6
    for key_mask in (None, mask):
        source = tf.constant(x, dtype)
        with tf.GradientTape() as tape:
            tape.watch(source)
            y = layer(source, key_mask=key_mask)
        weights = {"x": source} | {name_of(weight): weight for weight in layer.trainable_weights}
        gradients = tape.gradient(y, weights, tf.constant(upstream, dtype))
        wanted, of_wanted = wanted_of(layer, x, upstream, key_mask)
        assert relative_error(y, wanted) < tolerance
        assert set(gradients) == set(of_wanted)
        for name, gradient in gradients.items():
            assert np.abs(gradient - of_wanted[name]).max() < tolerance * max(np.abs(of_wanted[name]).max(), 1), name
    masked = np.where(mask[..., None], x, 0).astype(dtype)
    found = layer(keras.layers.Masking(dtype=dtype)(masked))
    np.testing.assert_array_equal(found, layer(tf.constant(masked), key_mask=mask))


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


@pytest.mark.parametrize("shape", [[2, 6, 5, 4], [2, 6, 4]], ids=str)
def test_eager_graph_xla_and_exported_are_equal(shape, tmp_path):
    layer, x = make(shape)
    check_everywhere(layer, x, tmp_path)


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
