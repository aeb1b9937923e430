"""The segmentation losses, compared with loops over pixels."""

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
    """`top_k` is a fraction of all pixels, including pixels without a label. The mean is over labelled pixels only."""
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
    """The four images of 10x10 values are random, half zeros, tiny with ties, and without a valid value."""
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
        for number in np.unique(largest):  # equal values share the gradient
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


def maps_and_targets():
    """(outputs of 5x5 pixels, targets of 17x17 pixels) for two images. The second image has no instances."""
    rng, crop = np.random.default_rng(1), [2, 17, 17]
    depths = {SEMANTIC: 3, CENTER: 1, OFFSET: 2}
    targets = {
        "semantic_weight": np.ones(crop),
        "center": rng.uniform(size=crop),
        "center_weight": rng.integers(0, 2, crop),
        "offset": rng.normal(size=[*crop, 2]),
        "offset_weight": rng.integers(0, 2, crop) * np.reshape([1, 0], [2, 1, 1]),
    }
    maps = {name: rng.normal(size=[2, 5, 5, depth]) for name, depth in depths.items()}
    maps, targets = ({name: x.astype(np.float32) for name, x in arrays.items()} for arrays in (maps, targets))
    return maps, {**targets, "semantic": rng.integers(0, 3, crop).astype(np.int32)}


@pytest.mark.parametrize("stride", [1, 4])
def test_terms_and_weights(stride):
    """Each term equals its definition on every stride-th pixel of the crop. The outputs are resized bilinearly."""
    outputs, targets = maps_and_targets()
    actual = losses.panoptic_losses(
        *tf.nest.map_structure(tf.constant, (outputs, targets)), SPEC, losses.LossConfig(stride)
    )
    positions = np.arange(0, 17, stride) / 4  # in pixels of the outputs
    weights = np.maximum(0.0, 1.0 - np.abs(positions[:, None] - np.arange(5)))
    maps = {name: np.einsum("yh,xw,nhwc->nyxc", weights, weights, x) for name, x in outputs.items()}
    truth = {name: x[:, ::stride, ::stride] for name, x in targets.items()}

    squares = (maps[CENTER][..., 0] - truth["center"]) ** 2
    means = [np.average(squares[n], weights=truth["center_weight"][n]) for n in range(2)]
    np.testing.assert_allclose(actual["center"], 200 * np.mean(means), rtol=1e-4)
    distance = np.abs(4 * maps[OFFSET] - truth["offset"]).mean(-1)  # in pixels of the crop
    means = [np.average(distance[0], weights=truth["offset_weight"][0]), 0]
    np.testing.assert_allclose(actual["offset"], 0.01 * np.mean(means), rtol=1e-4)
    true_logits = np.take_along_axis(maps[SEMANTIC], truth["semantic"][..., None], -1)[..., 0]
    entropy = (np.log(np.exp(maps[SEMANTIC]).sum(-1)) - true_logits).reshape(2, -1)
    hardest = np.sort(entropy)[:, -round(losses.LossConfig().top_k * entropy.shape[1]) :]
    np.testing.assert_allclose(actual["semantic"], hardest.mean(), rtol=1e-4)
    np.testing.assert_allclose(actual["total"], actual["semantic"] + actual["center"] + actual["offset"], rtol=1e-6)
