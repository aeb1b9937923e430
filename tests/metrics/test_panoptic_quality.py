"""PQ, compared with the official evaluator and with a slow definition."""

import json
import math

import numpy as np
import pytest

from axial.data.specs import DatasetSpec
from axial.metrics.panoptic_quality import PanopticQuality, split_segments
from conftest import golden_files, read_golden


def make_spec(classes, things, divisor=256, ignore=255):
    names = tuple(f"class {i}" for i in range(classes))
    return DatasetSpec(
        "test", names, tuple(range(classes)), tuple(i in things for i in range(classes)), divisor, ignore
    )


def add(quality, truth, classes, crowd, predicted, predicted_classes):
    return quality.update(truth, predicted, true_classes=classes, true_crowd=crowd, predicted_classes=predicted_classes)


@pytest.mark.parametrize("name", golden_files("pq_*.npz"))
def test_golden(name):
    arrays, meta = read_golden(name)
    spec = make_spec(meta["num_classes"], meta["thing_classes"], meta["label_divisor"], meta["ignored_label"])
    quality = PanopticQuality(spec)
    for truth, prediction in zip(arrays["ground_truth"], arrays["prediction"]):
        segments, classes, _ = split_segments(truth, spec)
        predicted, predicted_classes, _ = split_segments(prediction, spec)
        add(quality, segments, classes, np.zeros(len(classes)), predicted, predicted_classes)
    found = np.stack([quality.iou, quality.tp, quality.fn, quality.fp], 1)
    np.testing.assert_allclose(found, arrays["panopticapi_per_class_iou_tp_fn_fp"], atol=1e-9)
    np.testing.assert_allclose(found, arrays["per_class_iou_tp_fn_fp"], atol=1e-5)
    result = quality.result()
    rows = [[result[g][q] for q in ("pq", "sq", "rq")] for g in ("all", "things", "stuff")]
    np.testing.assert_allclose(rows, arrays["panopticapi_pq_sq_rq_all_things_stuff"], atol=1e-9)


def test_a_listed_segment_without_pixels_does_not_count():
    quality = PanopticQuality(make_spec(2, [0, 1]))
    truth, predicted = np.array([[1, 1, 1, 0]]), np.array([[2, 2, 2, 0]])
    add(quality, truth, [0, 1], [False, False], predicted, [1, 0, 1])
    np.testing.assert_array_equal(
        np.stack([quality.iou, quality.tp, quality.fn, quality.fp], 1), [[1, 1, 0, 0], [0] * 4]
    )


def slow_counts(spec, truth, true_classes, true_crowd, predicted, predicted_classes):
    """[iou, tp, fn, fp] of each class, from sets of pixels by the published rule."""

    def pixels(segments, i):
        return set(np.flatnonzero(segments.ravel() == i + 1).tolist())

    void = set(np.flatnonzero(truth.ravel() == 0).tolist())
    true = [pixels(truth, i) for i in range(len(true_classes))]
    found = [pixels(predicted, j) for j in range(len(predicted_classes))]
    counts = np.zeros([spec.num_classes, 4])
    matched_true, matched_found = set(), set()
    for i, t in enumerate(true):
        for j, p in enumerate(found):
            if true_crowd[i] or true_classes[i] != predicted_classes[j] or not t or not p:
                continue
            iou = len(t & p) / len((t | p) - (void & p))
            if iou > 0.5:
                counts[true_classes[i], :2] += iou, 1
                matched_true.add(i)
                matched_found.add(j)
    for i, t in enumerate(true):
        if t and not true_crowd[i] and i not in matched_true:
            counts[true_classes[i], 2] += 1
    for j, p in enumerate(found):
        if not p or j in matched_found:
            continue
        crowds = [i for i in range(len(true)) if true_crowd[i] and true_classes[i] == predicted_classes[j]]
        excused = len(p & void) + (len(p & true[crowds[-1]]) if crowds else 0)
        if excused <= 0.5 * len(p):
            counts[predicted_classes[j], 3] += 1
    return counts


def random_pair(rng, spec):
    """A truth with crowds and void, and a prediction that partly agrees with it."""
    size = (18, 20)
    count = rng.integers(0, 8)
    coarse = rng.integers(0, count + 1, [6, 5])
    truth = np.kron(coarse, np.ones([3, 4], int))
    classes = rng.integers(0, spec.num_classes, count)
    crowd = rng.uniform(size=count) < 0.25
    predicted, predicted_classes = truth.copy(), classes.copy()
    noise = rng.uniform(size=size) < rng.uniform(0, 0.5)
    predicted[noise] = rng.integers(0, count + 1, noise.sum())
    if count and rng.uniform() < 0.5:
        predicted_classes[rng.integers(count)] = rng.integers(spec.num_classes)
    extra = rng.uniform(size=size) < 0.1
    predicted[extra] = count + 1
    predicted_classes = np.append(predicted_classes, rng.integers(spec.num_classes))
    return truth, classes, crowd, predicted, predicted_classes


def test_matches_a_slow_definition_on_random_maps():
    rng, spec = np.random.default_rng(0), make_spec(4, (0, 1))
    quality, wanted = PanopticQuality(spec), np.zeros([4, 4])
    for _ in range(200):
        pair = random_pair(rng, spec)
        one = add(quality, *pair)
        counts = slow_counts(spec, *pair)
        np.testing.assert_allclose(np.stack([one.iou, one.tp, one.fn, one.fp], 1), counts, atol=1e-9)
        wanted += counts
    np.testing.assert_allclose(np.stack([quality.iou, quality.tp, quality.fn, quality.fp], 1), wanted)
    assert wanted[:, 1:].min() > 0  # every kind of outcome occurred


def test_parts_add_up():
    rng, spec = np.random.default_rng(1), make_spec(4, (0, 1))
    pairs = [random_pair(rng, spec) for _ in range(10)]
    whole, halves = PanopticQuality(spec), [PanopticQuality(spec), PanopticQuality(spec)]
    for i, pair in enumerate(pairs):
        add(whole, *pair)
        add(halves[i % 2], *pair)
    restored = PanopticQuality(spec)
    restored.restore(json.loads(json.dumps(halves[1].state())))
    restored.merge(halves[0])
    for name in ("iou", "tp", "fp", "fn"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(whole, name))


def test_as_many_segments_as_a_photo_can_hold():
    """Truth and prediction have 65,000 each, most of one pixel. Time and memory do not grow with the product."""
    spec = make_spec(4, (0, 1))
    truth = np.arange(256 * 256).reshape(256, 256) % 65001
    classes = np.arange(65000) % 2
    quality = PanopticQuality(spec)
    add(quality, truth, classes, np.zeros(65000), truth, classes)
    assert quality.result()["all"]["pq"] == 1.0 and quality.tp.sum() == 65000
    add(quality, truth, classes, np.zeros(65000), truth, 1 - classes)
    assert quality.fp.sum() == quality.fn.sum() == 65000


def test_truth_against_itself_is_perfect_and_nothing_is_nan():
    spec = make_spec(4, (0, 1))
    truth = np.kron(np.arange(6).reshape(2, 3), np.ones([4, 4], int))
    classes = [0, 0, 1, 2, 3]
    quality = PanopticQuality(spec)
    add(quality, truth, classes, [0] * 5, truth, classes)
    assert quality.result()["all"] == {"pq": 1.0, "sq": 1.0, "rq": 1.0, "classes": 4}
    empty = PanopticQuality(spec)
    add(empty, np.zeros([4, 4], int), [], [], np.zeros([4, 4], int), [])
    assert all(math.isnan(empty.result()[group][key]) for group in ("all", "things") for key in ("pq", "sq", "rq"))
