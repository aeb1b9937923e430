"""The losses of segmentation, compared with loops over pixels."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.layers.device import portable
from axial.models.outputs import AUXILIARY, CENTER, OFFSET, SEMANTIC
from axial.tasks.segmentation import losses

SPEC = DatasetSpec("test", ("a", "b", "c"), (1, 2, 3), (True, False, False))


def f32(a):
    return tf.constant(a, tf.float32)


@pytest.mark.parametrize("top_k,ignored", [(0.15, 0.2), (0.2, 0.2), (1.0, 0.3), (0.2, 0.9), (0.2, 1.0)])
def test_cross_entropy_is_the_mean_of_the_hardest_labelled_pixels(top_k, ignored):
    """`top_k` is a fraction of all pixels, but pixels without a label do not count in the mean."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=[2, 8, 10, 3]), rng.integers(0, 3, [2, 8, 10])
    labels[rng.uniform(size=labels.shape) < ignored] = SPEC.ignore
    weights = rng.uniform(0.5, 3, labels.shape)
    expected = []
    for n in range(2):
        pixel = []
        for y in range(8):
            for x in range(10):
                if labels[n, y, x] != SPEC.ignore:
                    p = np.exp(logits[n, y, x]) / np.exp(logits[n, y, x]).sum()
                    pixel.append(-np.log(p[labels[n, y, x]]) * weights[n, y, x])
        hardest = sorted(pixel)[::-1][: round(top_k * 80)]
        expected.append(np.mean(hardest) if hardest else 0.0)
    actual = losses.bootstrapped_cross_entropy(
        f32(logits), tf.constant(labels, tf.int32), f32(weights), ignore=SPEC.ignore, top_k=top_k
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("device", [contextlib.nullcontext, portable])
@pytest.mark.parametrize("most", [1, 3, 40, 99, 100, 1000])
def test_the_mean_of_the_largest_has_the_value_and_the_gradient_of_a_sort(most, device):
    """Four images of 10x10 values: random, half 0, tiny with ties, and without a valid value."""
    rng = np.random.default_rng(most)
    values, valid = rng.exponential(size=[4, 100]).astype("f4"), rng.uniform(size=[4, 100]) < 0.7
    values[1, :50] = 0.0
    values[2] = np.float32(1e-30) * rng.integers(0, 9, 100)  # tiny, with ties
    valid[3] = False
    x = tf.constant(values.reshape(4, 10, 10))
    with device(), tf.GradientTape() as tape:
        tape.watch(x)
        actual = losses.mean_of_largest(x, tf.constant(valid.reshape(4, 10, 10)), most)
    gradient = tape.gradient(actual, x).numpy().reshape(4, 100)
    for row, (value, use) in enumerate(zip(values, valid)):
        largest = np.sort(value[use].astype(np.float64))[::-1][:most]
        np.testing.assert_allclose(actual[row], largest.mean() if largest.size else 0.0, rtol=1e-6)
        expected = np.zeros(100)
        for number in np.unique(largest):  # tied values share the gradient
            equal = use & (value == number)
            expected[equal] = np.sum(largest == number) / np.sum(equal) / largest.size
        np.testing.assert_allclose(gradient[row], expected, rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_pixel_that_is_no_number_is_among_the_largest(sign):
    values = tf.constant([[[1.0, 2.0], [np.copysign(np.nan, sign), 4.0]]])
    assert np.isnan(losses.mean_of_largest(values, tf.ones([1, 2, 2], bool), 1))
    assert losses.mean_of_largest(values, tf.constant([[[True, True], [False, True]]]), 1) == 4.0


def test_the_auxiliary_loss_has_its_weight():
    maps = {SEMANTIC: tf.random.normal([1, 4, 4, 3], seed=0), AUXILIARY: tf.random.normal([1, 4, 4, 3], seed=1)}
    targets = {"semantic": tf.ones([1, 4, 4], tf.int32), "semantic_weight": tf.ones([1, 4, 4])}
    actual = losses.panoptic_losses(maps, targets, SPEC)
    alone = losses.panoptic_losses({SEMANTIC: maps[AUXILIARY]}, targets, SPEC)
    assert actual.keys() == {"semantic", "auxiliary", "total"} and alone.keys() == {"semantic", "total"}
    np.testing.assert_allclose(actual["auxiliary"], 0.4 * alone["semantic"], rtol=1e-5)
    np.testing.assert_allclose(actual["total"], actual["semantic"] + actual["auxiliary"], rtol=1e-6)


@pytest.mark.parametrize("size,old,stride", [(1024, 256, 8), (1025, 257, 3)])
def test_a_stride_that_shifts_maps_is_refused(size, old, stride):
    outputs = {SEMANTIC: tf.zeros([1, old, old, 1])}
    targets = {"semantic": tf.zeros([1, size, size], tf.int32)}
    with pytest.raises(InputError, match=f"LossConfig.stride = {stride}: does not suit a crop of {size} pixels"):
        losses.panoptic_losses(outputs, targets, SPEC, losses.LossConfig(stride))


@pytest.mark.parametrize("stride", [1, 4])
def test_terms_and_weights(stride):
    """Maps of 5x5 and a crop of 17x17 pixels. The second image has no instances."""
    rng = np.random.default_rng(1)
    size = 17
    outputs = {
        SEMANTIC: rng.normal(size=[2, 5, 5, 3]),
        CENTER: rng.normal(size=[2, 5, 5, 1]),
        OFFSET: rng.normal(size=[2, 5, 5, 2]),
    }
    targets = {
        "semantic": rng.integers(0, 3, [2, size, size]).astype(np.int32),
        "semantic_weight": np.ones([2, size, size]),
        "center": rng.uniform(size=[2, size, size]),
        "center_weight": rng.integers(0, 2, [2, size, size]),
        "offset": rng.normal(size=[2, size, size, 2]),
        "offset_weight": rng.integers(0, 2, [2, size, size]),
    }
    targets["offset_weight"][1] = 0  # an image without instances

    def cast(d):
        return {k: tf.constant(v, tf.int32 if v.dtype == np.int32 else tf.float32) for k, v in d.items()}

    actual = losses.panoptic_losses(cast(outputs), cast(targets), SPEC, losses.LossConfig(stride))
    positions = np.arange(0, size, stride) / 4  # of the pixels that count, on the grid of the outputs
    weights = np.maximum(0.0, 1.0 - np.abs(positions[:, None] - np.arange(5)))
    maps = {name: np.einsum("yh,xw,nhwc->nyxc", weights, weights, x) for name, x in outputs.items()}

    def at(k):
        return targets[k][:, ::stride, ::stride]

    center = [
        (((maps[CENTER][n, ..., 0] - at("center")[n]) ** 2) * at("center_weight")[n]).sum()
        / at("center_weight")[n].sum()
        for n in range(2)
    ]
    np.testing.assert_allclose(actual["center"], 200 * np.mean(center), rtol=1e-4)
    distance = np.abs(4 * maps[OFFSET] - at("offset")).mean(-1) * at("offset_weight")
    expected = 0.01 * distance[0].sum() / at("offset_weight")[0].sum() / 2
    np.testing.assert_allclose(actual["offset"], expected, rtol=1e-4)
    log_sums = np.log(np.exp(maps[SEMANTIC]).sum(-1))
    labels = at("semantic")
    hardest = [
        np.sort((log_sums[n] - np.take_along_axis(maps[SEMANTIC][n], labels[n][..., None], -1)[..., 0]).ravel())
        for n in range(2)
    ]
    most = round(losses.LossConfig().top_k * labels[0].size)
    np.testing.assert_allclose(actual["semantic"], np.mean([x[-most:].mean() for x in hardest]), rtol=1e-4)
    np.testing.assert_allclose(actual["total"], actual["semantic"] + actual["center"] + actual["offset"], rtol=1e-6)
