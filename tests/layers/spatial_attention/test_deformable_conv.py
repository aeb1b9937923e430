"""Deformable convolution, compared with float64 loops and with golden outputs of ONNX."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.layers.spatial_attention.deformable_conv import (
    FORMS,
    DeformableConv,
    DeformableConv1D,
    conv_size,
    deformable_conv,
    sample_by_gather,
)
from tests import study_oracles
from tests.conftest import built, golden_files, read_golden, relative_error
from tests.layers.spatial_attention.mechanism_fixture import check_everywhere, check_oracle, randomized

TOLERANCE = 2e-5


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


# height, width, strides, dilation, padding, groups, offset groups, whether it has masks
CASES = [
    (5, 4, 1, 1, 1, 1, 1, True),
    (6, 5, 2, 1, 1, 2, 2, True),
    (4, 7, 1, 2, 2, 1, 4, True),
    (1, 1, 1, 1, 1, 1, 1, True),
    (1, 4, 2, 1, 1, 4, 2, False),
]


@pytest.mark.parametrize(
    "case,dtype,tolerance", [*((case, np.float64, 1e-10) for case in CASES), (CASES[1], np.float32, TOLERANCE)], ids=str
)
def test_matches_the_oracle(form, case, dtype, tolerance):
    height, width, strides, dilation, padding, groups, offset_groups, masked = case
    rng, options = np.random.default_rng(0), dict(strides=strides, dilation=dilation)
    h, w = (conv_size(n, 3, strides, dilation=dilation, padding=padding) for n in (height, width))
    inputs = {
        "x": rng.normal(size=[2, height, width, 4]),
        "kernel": rng.normal(size=[3, 3, 4 // groups, 8]),
        "offsets": rng.normal(0, 1.5, [2, h, w, offset_groups, 9, 2]),
        "masks": rng.uniform(size=[2, h, w, offset_groups, 9]),
    }
    if not masked:
        del inputs["masks"]

    def run(x, kernel, offsets, masks=None):
        offsets, masks = (None if a is None else tf.reshape(a, [2, h, w, -1]) for a in (offsets, masks))
        return deformable_conv(x, kernel, offsets, masks, **options, padding=padding, form=form)

    def oracle(**arrays):
        return study_oracles.deformable_conv(**arrays, **options, padding=(padding, padding))

    check_oracle(run, {name: array.astype(dtype) for name, array in inputs.items()}, oracle, tolerance)


def test_large_maps_are_read_at_the_right_pixels():
    """The map has over 2^24 pixels, so float32 cannot represent every pixel index."""
    height, width = 2**13 + 2, 2**11 + 2
    x = tf.cast(tf.range(height * width) % 251, tf.float16)[None, :, None]
    x = tf.reshape(x, [1, height, width, 1])
    rows, columns = np.meshgrid(height - 1 - np.arange(20), np.arange(0, width, 99), indexing="ij")
    places = ((tf.constant(a.reshape(1, -1, 1, 1), tf.int32), tf.zeros([1, a.size, 1, 1])) for a in (rows, columns))
    (pixels,) = sample_by_gather(x, *places)
    np.testing.assert_array_equal(pixels[0, :, 0], (rows * width + columns).ravel() % 251)


@pytest.mark.parametrize("file", golden_files("study_deform_*.npz"))
def test_agrees_with_onnx(form, file):
    arrays, meta = read_golden(file)
    x, offsets, masks, expected = (arrays[name].transpose(0, 2, 3, 1) for name in ("x", "offset", "mask", "y"))
    y = deformable_conv(
        tf.constant(x, tf.float32),
        tf.constant(arrays["w"].transpose(2, 3, 1, 0), tf.float32),
        tf.constant(offsets, tf.float32),
        tf.constant(masks, tf.float32) if meta["masked"] else None,
        strides=meta["stride"],
        dilation=meta["dilation"],
        padding=meta["pad"],
        form=form,
    )
    assert relative_error(y, expected) < TOLERANCE


# === The layer ===


def test_eager_graph_xla_and_exported_are_equal(form, tmp_path):
    x = tf.random.stateless_normal([2, 6, 5, 4], [0, 1])
    layer = built(DeformableConv(4, 3, None, 2, modulation="sigmoid", form=form), x)
    check_everywhere(layer, x, tmp_path)


def test_positions_are_float32_under_mixed_precision(form):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layer = DeformableConv(4, 3, None, modulation="sigmoid", form=form)
    x = tf.ones([1, 5, 300, 4], tf.bfloat16)
    layer(x)
    assert all(a.dtype == tf.float32 for a in layer.offsets(x))
    # bfloat16 cannot represent 257. Positions in bfloat16 would read wrong pixels.
    x = tf.cast(tf.reshape(tf.range(300) % 2, [1, 1, 300, 1]), tf.bfloat16)
    y = deformable_conv(x, tf.ones([1, 1, 1, 1], tf.bfloat16), tf.zeros([1, 1, 300, 2]), form=form)
    np.testing.assert_array_equal(tf.cast(y, tf.float32), tf.cast(x, tf.float32))


# === Sequences ===


def make_line(causal, form="gather", length=6, kernel=3):
    return randomized(DeformableConv1D(5, kernel, causal, form=form, offset_rate=1.0), [2, length, 4])


@pytest.mark.parametrize("causal,length,kernel", [(True, 6, 3), (False, 3, 5)])
def test_a_sequence_matches_the_oracle(form, causal, length, kernel):
    layer, x = make_line(causal, form, length, kernel)
    before = kernel - 1 if causal else kernel // 2

    def oracle(x, **w):
        near = np.pad(x, [[0, 0], [before, kernel - 1 - before], [0, 0]])
        near = np.stack([near[:, i : i + length] for i in range(kernel)], 2)
        offsets = np.einsum("blkc,kcn->bln", near, w["offset_kernel"]) + w["offset_bias"]
        offsets = np.stack([offsets, np.zeros_like(offsets)], -1)[:, :, None, None]
        options = dict(padding=(before, 0), last=(lambda i: i) if causal else None)
        return study_oracles.deformable_conv(x[:, :, None], w["kernel"][:, None], offsets, **options)[:, :, 0]

    check_oracle(layer, {"x": x}, oracle, TOLERANCE, layer.trainable_weights)


def test_the_future_has_no_gradient(form):
    """The output has no gradient for later tokens, and later tokens do not change the weights' gradients."""
    layer, x = make_line(True, form)
    x = tf.constant(x)
    for scale in (1.0, 0.0):
        layer.offset_kernel.assign(layer.offset_kernel * scale)
        layer.offset_bias.assign(layer.offset_bias * scale)
        changed, gradients = tf.concat([x[:, :3], 100 * x[:, 3:]], 1), []
        for sequence in (x, changed):
            with tf.GradientTape() as tape:
                tape.watch(sequence)
                y = layer(sequence)[:, 2]
            d_sequence, *d_weights = tape.gradient(y, [sequence, *layer.trainable_weights])
            assert (d_sequence.numpy()[:, 3:] == 0).all() and np.abs(d_sequence[:, 2]).max() > 0
            gradients.append(d_weights)
        for a, b in zip(*gradients):
            np.testing.assert_array_equal(a, b)
