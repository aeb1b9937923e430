"""Mask AP, computed image by image, compared with pycocotools on all images at once."""

import contextlib
import io
import json

import numpy as np
from pycocotools import mask as masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from axial.data.specs import DatasetSpec
from axial.metrics.instance_ap import InstanceAP, run_lengths

SPEC = DatasetSpec("test", ("a", "b", "stuff"), (1, 2, 3), (True, True, False))


def add(metric, truth, classes, crowd, predicted, predicted_classes, scores, image):
    labels = dict(true_classes=classes, true_crowd=crowd, predicted_classes=predicted_classes)
    metric.update(truth, predicted, scores=scores, image=image, **labels)


def random_image(rng):
    truth = np.kron(rng.integers(0, 6, [5, 6]), np.ones([20, 20], int))
    classes = rng.integers(0, 3, 5)
    crowd = rng.uniform(size=5) < 0.2
    predicted = np.roll(truth, rng.integers(0, 6, 2), (0, 1))
    noise = rng.uniform(size=truth.shape) < 0.1
    predicted[noise] = 0
    predicted_classes = np.where(rng.uniform(size=5) < 0.2, rng.integers(0, 3, 5), classes)
    return truth, classes, crowd, predicted, predicted_classes, rng.uniform(size=5)


def at_once(images):
    truth, found = [], []
    for number, (segments, classes, crowd, predicted, predicted_classes, scores) in enumerate(images):
        for target, maps, kinds in ((truth, segments, classes), (found, predicted, predicted_classes)):
            for i, category in enumerate(kinds):
                if category == 2:
                    continue
                mask = np.asfortranarray(maps == i + 1, np.uint8)
                entry = {
                    "image_id": number,
                    "category_id": int(category),
                    "segmentation": masks.encode(mask),
                    "area": int(mask.sum()),
                    "iscrowd": int(crowd[i]) if target is truth else 0,
                    "id": len(target) + 1,
                }
                if target is found:
                    entry["score"] = float(scores[i])
                target.append(entry)
    with contextlib.redirect_stdout(io.StringIO()):
        sides = []
        for annotations in (truth, found):
            coco = COCO()
            coco.dataset = {
                "images": [{"id": i, "height": 100, "width": 120} for i in range(len(images))],
                "categories": [{"id": 0}, {"id": 1}],
                "annotations": annotations,
            }
            coco.createIndex()
            sides.append(coco)
        evaluation = COCOeval(*sides, "segm")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[:6]


def test_matches_pycocotools_on_the_whole_set():
    rng = np.random.default_rng(0)
    images = [random_image(rng) for _ in range(12)]
    metric, other = InstanceAP(SPEC), InstanceAP(SPEC)
    for i, image in enumerate(images):
        add(metric if i % 3 else other, *image, i)
    again = InstanceAP(SPEC)
    again.restore(json.loads(json.dumps(other.state())))
    metric.merge(again)
    found = list(metric.result().values())
    wanted = [np.nan if v < 0 else v for v in at_once(images)]
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert 0.1 < found[0] < 0.9


def test_truth_scores_one_and_nothing_scores_nan():
    truth, classes, _crowd, *_ = random_image(np.random.default_rng(1))
    metric = InstanceAP(SPEC)
    add(metric, truth, classes, np.zeros(5), truth, classes, np.ones(5), 0)
    assert metric.result()["ap"] == 1.0
    empty = InstanceAP(SPEC)
    add(empty, np.zeros([4, 4], int), [], [], np.zeros([4, 4], int), [], [], 0)
    assert np.isnan(empty.result()["ap"])


def test_equal_scores_count_in_the_order_of_the_images():
    """Parts that are merged in any order give the same bits as the whole."""
    rng = np.random.default_rng(2)
    images = [(*random_image(rng)[:5], np.full(5, 0.5)) for _ in range(9)]
    whole, parts = InstanceAP(SPEC), [InstanceAP(SPEC) for _ in range(3)]
    for i, image in enumerate(images):
        add(whole, *image, i)
        add(parts[i % 3], *image, i)
    for part in parts[1::-1]:
        parts[2].merge(part)
    np.testing.assert_array_equal(list(parts[2].result().values()), list(whole.result().values()))
    wanted = [np.nan if v < 0 else v for v in at_once(images)]
    np.testing.assert_allclose(list(whole.result().values()), wanted, atol=1e-12)


def test_run_lengths_are_pycocotools_own():
    rng = np.random.default_rng(3)
    segments = np.kron(rng.integers(0, 6, [5, 6]), np.ones([3, 4], int))
    segments[2, 2] = 7  # segment 7 has one pixel, segment 6 has none
    for i, encoded in zip(range(7), run_lengths(segments, range(7)), strict=True):
        np.testing.assert_array_equal(masks.decode(encoded), segments == i + 1)
        assert encoded["counts"] == masks.encode(np.asfortranarray(segments == i + 1, np.uint8))["counts"]
