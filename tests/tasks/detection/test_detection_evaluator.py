"""Detection metrics: scores of the ground truth, comparison with pycocotools, and masks."""

import contextlib
import io

import numpy as np
import pytest
import tensorflow as tf
from pycocotools import mask as masks
from pycocotools.coco import COCO as CocoIndex
from pycocotools.cocoeval import COCOeval

from axial.data.converters.boxes import encoded
from axial.data.specs import COCO
from axial.data.tfrecord import read_manifest
from axial.metrics.coco_ap import FIGURES
from axial.tasks.detection.evaluator import DETECTION, DetectionMetrics, paste_mask, true_objects
from axial.tasks.detection.input_pipeline import record_masks
from tests.data.record_fixture import png

SPLIT = "val2017"


@pytest.fixture(scope="module")
def photos(sample_dir):
    """The eight evaluation examples of the sample. The first one has the most objects, two of them crowds."""
    assert read_manifest(sample_dir, SPLIT)["spec"] == COCO
    examples = list(DETECTION.examples(sample_dir, SPLIT, COCO))
    examples.sort(key=lambda e: -len(e["object/class"]))
    crowd = np.arange(len(examples[0]["object/class"])) < 2
    examples[0] = {**examples[0], "object/crowd": tf.constant(crowd.astype(np.int64))}
    return examples


def truth(example, masked=False):
    """Predictions that are the true objects of an example, each with a score of 1."""
    objects = true_objects(example, COCO, masked)
    fields = ("bbox", "segmentation") if masked else ("bbox",)
    return [
        {
            "image_id": int(example["image/id"]),
            "category_id": COCO.category_ids[one["category_id"]],
            "score": 1.0,
            **{name: one[name] for name in fields},
        }
        for one in objects
    ]


def guesses(example, seed):
    """Imperfect predictions: boxes are moved, dropped or get a wrong class. Scores are random, with ties."""
    rng, objects = np.random.default_rng([seed, int(example["image/id"])]), truth(example)
    for one in list(objects):
        for _ in range(rng.integers(0, 3)):
            x, y, width, height = one["bbox"]
            x, y = x + rng.normal(0, 0.1 * width), y + rng.normal(0, 0.1 * height)
            moved = [x, y, width * rng.uniform(0.8, 1.2), height]
            category = int(rng.choice(COCO.category_ids[:80])) if rng.random() < 0.2 else one["category_id"]
            objects.append({**one, "bbox": moved, "category_id": category, "score": float(rng.integers(1, 20)) / 20})
    return objects[len(true_objects(example, COCO)) // 2 :]


def scored(photos, predict, masked=False):
    """`DetectionMetrics` of all photos. `predict` is a function from an example to its predictions."""
    scores = DetectionMetrics(COCO)
    for example in photos:
        scores.add(example, predict(example), masked)
    return scores


def test_truth_is_perfect_with_crowds(photos):
    result = scored(photos, lambda e: truth(e, masked=True), masked=True).result()
    for kind in ("box", "mask"):
        assert [result[kind][name] for name in ("ap", "ap50", "ar100")] == pytest.approx([1, 1, 1], abs=1e-12)
    assert all(value == pytest.approx(1) for value in result["per_class"].values() if not np.isnan(value))


def theirs(photos, predict):
    """The twelve box scores of pycocotools. `predict` is a function from an example to its predictions."""
    index, images, annotations = CocoIndex(), [], []
    for example in photos:
        image = int(example["image/id"])
        images.append({"id": image, "width": int(example["image/width"]), "height": int(example["image/height"])})
        annotations += [{**one, "image_id": image} for one in true_objects(example, COCO)]
    annotations = [{"id": i + 1, **one} for i, one in enumerate(annotations)]
    index.dataset = {"images": images, "annotations": annotations, "categories": [{"id": i} for i in range(133)]}
    results = [
        {**one, "category_id": COCO.class_of_category[one["category_id"]]}
        for example in photos
        for one in predict(example)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        index.createIndex()
        evaluator = COCOeval(index, index.loadRes(results), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return evaluator.stats


@pytest.mark.parametrize("seed", range(2))
def test_moved_boxes_have_pycocotools_figures(photos, seed):
    ordered = sorted(photos, key=lambda e: int(e["image/id"]))  # the order of photos ranks equal scores
    ours = scored(ordered, lambda e: guesses(e, seed)).result()["box"]
    expected = theirs(ordered, lambda e: guesses(e, seed))
    assert 0.05 < ours["ap"] < 0.95
    for name, value in zip(FIGURES, expected):
        assert ours[name] == value or (np.isnan(ours[name]) and value == -1), name


def test_pasted_masks():
    """Pasted masks equal a loop over pixels, which interpolates at each pixel's centre and thresholds at 1/2."""
    rng = np.random.default_rng(0)
    mask, (x, y, width, height), size = rng.random([4, 4]), (2.3, 1.7, 9.1, 6.2), (10, 14)
    pasted = paste_mask(mask, (x, y, width, height), size)
    for row in range(size[0]):
        for column in range(size[1]):
            v, u = (row + 0.5 - y) / height * 4 - 0.5, (column + 0.5 - x) / width * 4 - 0.5
            inside = -0.5 <= v < 3.5 and -0.5 <= u < 3.5
            v, u = min(max(v, 0), 3), min(max(u, 0), 3)
            i, j = min(int(v), 2), min(int(u), 2)
            a, b = v - i, u - j
            value = (1 - a) * ((1 - b) * mask[i, j] + b * mask[i, j + 1])
            value += a * ((1 - b) * mask[i + 1, j] + b * mask[i + 1, j + 1])
            assert pasted[row, column] == (inside and value >= 0.5), (row, column)
    whole = paste_mask(np.ones([28, 28]), (0, 0, 14, 10), size)
    assert whole.all() and masks.area(encoded(whole)) == 140
    assert not paste_mask(np.ones([28, 28]), (3, 3, 0, 0), size).any()


@pytest.fixture(scope="module")
def masked(photos):
    """(an example with stored masks of all its objects, the PNGs of these masks, the ground truth as predictions)."""
    example = max(photos[1:], key=lambda e: len(e["object/class"]))
    pixels, has_mask = (x.numpy() for x in record_masks(example, COCO))
    assert has_mask.all()
    boxes = {"box/known": 1, "box/class": example["object/class"], "box/crowd": example["object/crowd"]}
    pngs = [png(255 * mask) for mask in pixels]
    whole = {**example, **boxes, "box/mask": tf.constant(pngs)}
    return whole, pngs, truth(whole, masked=True)


def test_an_object_without_a_mask_is_neither_missed_nor_wrong_in_mask_ap(masked):
    """The object still counts in box AP. Mask AP ignores the object and any prediction on it."""
    whole, pngs, right = masked
    less = {**whole, "box/mask": tf.constant([png(np.zeros([1, 1])), *pngs[1:]])}
    scores = {}
    for name, one, prediction in (
        ("whole", whole, right),
        ("less", less, right),
        ("missed", less, right[1:]),
        ("whole missed", whole, right[1:]),
    ):
        scores[name] = scored([one], lambda _: prediction, masked=True).result()
    for name in ("whole", "less", "missed"):
        assert scores[name]["mask"]["ap"] == pytest.approx(1), name
    assert scores["whole missed"]["mask"]["ap"] < 0.99
    np.testing.assert_equal(scores["less"]["box"], scores["whole"]["box"])
    assert scores["missed"]["box"]["ap"] < 0.99


def test_an_example_without_masks_has_no_mask_ap(masked):
    whole, _, right = masked
    nothing = {**whole, "box/mask": tf.constant([], tf.string)}
    assert "mask" not in scored([nothing], lambda _: right, masked=True).result()
