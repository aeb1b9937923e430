"""Dynamic convolution, compared with float64 loops and with fairseq's golden outputs and gradients."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.layers.spatial_attention.dynamic_conv import DynamicConv, convolve_line
from tests import study_oracles
from tests.conftest import golden_files, read_golden, relative_error
from tests.layers.spatial_attention.mechanism_fixture import check_everywhere, check_layer, randomized

TOLERANCE = 2e-5


def make(shape, **options):
    return randomized(DynamicConv(**{"groups": 2, "axes": len(shape) - 2, **options}), shape)


CASES = [
    ([2, 5, 4, 4], {}),
    ([2, 1, 1, 4], {}),
    ([1, 3, 2, 4], dict(kernel=7)),  # the kernel is larger than the map
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
    mask = np.random.default_rng(1).uniform(size=shape[:-1]) < 0.6
    for key_mask in (None, mask):
        check_layer(layer, x, study_oracles.dynamic_conv, tolerance, key_mask=key_mask)
    masked = np.where(mask[..., None], x, 0).astype(dtype)
    actual = layer(keras.layers.Masking(dtype=dtype)(masked))
    np.testing.assert_array_equal(actual, layer(tf.constant(masked), key_mask=mask))


@pytest.mark.parametrize("file", golden_files("study_dynamic_*.npz"))
def test_agrees_with_fairseq(file):
    """fairseq's layer has only the kernel prediction and the depthwise convolution, without projections."""
    arrays, meta = read_golden(file)
    x, expected, upstream, expected_d_x = (arrays[n].transpose(1, 0, 2) for n in ("x", "y", "cotangent", "grad/x"))
    layer = DynamicConv(meta["kernel"], meta["groups"], axes=1)
    layer.build(x.shape)
    layer.tap_kernel.assign(arrays["w/weight_linear.weight"].T)
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = convolve_line(x, layer.kernels(x), meta["padding_left"])
    d_x, d_taps = tape.gradient(y, [x, layer.tap_kernel], upstream)
    assert relative_error(y, expected) < TOLERANCE
    assert relative_error(d_x, expected_d_x) < TOLERANCE
    assert relative_error(d_taps, arrays["grad/weight_linear.weight"].T) < TOLERANCE


# === Properties ===


@pytest.mark.parametrize("shape", [[2, 6, 5, 4], [2, 6, 4]], ids=str)
def test_eager_graph_xla_and_exported_are_equal(shape, tmp_path):
    layer, x = make(shape)
    check_everywhere(layer, x, tmp_path)
