"""Mask AP, image by image, against pycocotools on everything at once."""

import contextlib
import io

import numpy as np
from pycocotools import mask as masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from axial.data.specs import DatasetSpec
from axial.metrics.instance_ap import InstanceAP

SPEC = DatasetSpec("test", ("a", "b", "stuff"), (1, 2, 3), (True, True, False))


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
    for image in images[:7]:
        metric.update(*image)
    for image in images[7:]:
        other.update(*image)
    metric.merge(other)
    found = list(metric.result().values())
    wanted = [np.nan if v < 0 else v for v in at_once(images)]
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert 0.1 < found[0] < 0.9


def test_truth_scores_one_and_nothing_scores_nan():
    truth, classes, crowd, *_ = random_image(np.random.default_rng(1))
    metric = InstanceAP(SPEC)
    metric.update(truth, classes, np.zeros(5), truth, classes, np.ones(5))
    assert metric.result()["ap"] == 1.0
    empty = InstanceAP(SPEC)
    empty.update(np.zeros([4, 4], int), [], [], np.zeros([4, 4], int), [], [])
    assert np.isnan(empty.result()["ap"])
