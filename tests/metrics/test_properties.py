"""On random photos, metrics equal the official tools' scores. The order of photos and the shards change no score."""

import contextlib
import copy
import functools
import io
import json
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from axial.data.labels import colors_of
from axial.data.specs import CITYSCAPES, DatasetSpec
from axial.metrics.coco_ap import InstanceAP
from axial.metrics.matching import MatchingAccuracy
from axial.metrics.mean_iou import MeanIoU
from axial.metrics.panoptic_quality import PanopticQuality, Segments

SPEC = DatasetSpec("test", ("car", "dog", "sky", "road"), (3, 7, 20, 41), (True, True, False, False))
RUNS = settings(max_examples=60, deadline=None, derandomize=True)  # derandomized: each run tests the same examples
LONG = [60, pytest.param(3000, marks=pytest.mark.slow)]

# === Random photos ===


class Photo(typing.NamedTuple):
    """Ground truth and prediction: maps of segments (0 is unlabelled, i + 1 is segment i) and the segments' classes."""

    truth: np.ndarray
    classes: list
    crowd: list
    predicted: np.ndarray
    predicted_classes: list
    scores: list


@st.composite
def painted(draw, canvas, first):
    """A copy of the map with up to six random rectangles painted on it, whose labels are `first`, `first` + 1, ..."""
    canvas = canvas.copy()
    for number in range(first, first + draw(st.integers(0, 6))):
        (top, bottom), (left, right) = (sorted(draw(st.tuples(*[st.integers(0, s - 1)] * 2))) for s in canvas.shape)
        canvas[top : bottom + 1, left : right + 1] = number
    return canvas


def numbered(canvas):
    """Renumbers the labels of a map from 1 without gaps; 0 stays 0. Returns (new map, old labels from label 1 on)."""
    old, new = np.unique(np.append(0, canvas), return_inverse=True)
    return new[1:].reshape(canvas.shape), old[1:]


def several(values, count):
    return st.lists(values, min_size=count, max_size=count)


@st.composite
def photos(draw):
    """Photos with sides of 1 to 40 pixels, crowds and void. Predictions are partly right. Some have no segments."""
    size = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    truth, labels = numbered(draw(painted(np.zeros(size, int), 1)))
    kinds = st.integers(0, SPEC.num_classes - 1)
    classes = draw(several(kinds, len(labels)))
    crowd = [draw(st.integers(0, 3)) == 0 for _ in classes]
    predicted = draw(st.sampled_from([truth, truth, np.roll(truth, 1, 1), np.zeros_like(truth)]))
    predicted, labels = numbered(draw(painted(predicted, len(classes) + 1)))
    guesses = [draw(kinds) if i > len(classes) or draw(st.integers(0, 7)) == 0 else classes[i - 1] for i in labels]
    scores = [draw(st.integers(1, 4)) / 4 for _ in guesses]  # many scores are equal
    return Photo(truth, classes, crowd, predicted, guesses, scores)


@st.composite
def semantic_maps(draw):
    """(ground truth, prediction): two int arrays [h, w] of Cityscapes' class indices, with void pixels."""
    size = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    truth, labels = numbered(draw(painted(np.zeros(size, int), 1)))
    predicted = draw(painted(draw(st.sampled_from([truth, np.zeros_like(truth)])), len(labels) + 1))
    kinds = st.one_of(st.just(CITYSCAPES.ignore), st.integers(0, CITYSCAPES.num_classes - 1))
    class_of = np.array(draw(several(kinds, 13)))  # label 0 and up to six labels of each map
    return class_of[truth], class_of[predicted]


SETS = st.lists(photos(), min_size=1, max_size=4)


# === Our scores ===

MATCHING = functools.partial(MatchingAccuracy, thresholds=(0.05, 0.2, 1 / 3, 0.5, 0.6, 0.75, 1.0))


def update(metric, photo, number):
    truth = Segments(photo.truth, photo.classes, crowd=photo.crowd)
    predicted = Segments(photo.predicted, photo.predicted_classes, photo.scores)
    metric.update(truth, predicted, *([number] if isinstance(metric, InstanceAP) else []))


def metric_of(kind, numbered_photos):
    metric = kind(SPEC)
    for number, photo in numbered_photos:
        update(metric, photo, number)
    return metric


def score(kind, samples):
    return metric_of(kind, enumerate(samples)).result()


def mean_iou(pairs):
    metric = MeanIoU(CITYSCAPES)
    for truth, predicted in pairs:
        metric.update(truth, predicted)
    return metric


# === The official tools ===


def official_counts(folder, samples):
    """cityscapesscripts' (array of rows [iou, tp, fp, fn] per class, dict of mean PQ, SQ, RQ per group of classes)."""
    official = pytest.importorskip("cityscapesscripts.evaluation.evalPanopticSemanticLabeling")
    pairs = []
    for number, photo in enumerate(samples):
        sides = (photo.truth, photo.classes, photo.crowd), (photo.predicted, photo.predicted_classes, None)
        entries = []
        for name, (segments, classes, crowd) in zip(("truth", "predicted"), sides):
            ids = np.arange(len(classes) + 1) * 70001  # ids of more than 16 bits
            Image.fromarray(colors_of(ids[segments])).save(folder / f"{name}{number}.png")
            rows = [
                {
                    "id": int(ids[i + 1]),
                    "category_id": SPEC.category_ids[c],
                    "iscrowd": int(bool(crowd and crowd[i])),
                    "area": int(np.sum(segments == i + 1)),
                }
                for i, c in enumerate(classes)
            ]
            entries.append({"image_id": number, "file_name": f"{name}{number}.png", "segments_info": rows})
        pairs.append(entries)
    categories = {i: {"id": i, "isthing": int(t)} for i, t in zip(SPEC.category_ids, SPEC.things)}
    with contextlib.redirect_stdout(io.StringIO()):
        stat = official.pq_compute_single_core(0, pairs, str(folder), str(folder), categories=categories)
    counts = [[getattr(stat[i], name) for name in ("iou", "tp", "fp", "fn")] for i in SPEC.category_ids]
    means = {}
    for name, things in (("all", None), ("things", True), ("stuff", False)):
        with contextlib.suppress(ZeroDivisionError):  # the tool divides by the number of classes, which may be 0
            means[name] = stat.pq_average(categories, things)[0]
    return np.array(counts, float), means


def annotations_of(segments, classes, number):
    """Yields (segment index, COCO annotation) for each thing of a map of segments."""
    for i, category in enumerate(classes):
        if SPEC.things[category]:
            encoded = masks.encode(np.asfortranarray(segments == i + 1, np.uint8))
            encoded["counts"] = encoded["counts"].decode()
            yield i, {"image_id": number, "category_id": SPEC.category_ids[category], "segmentation": encoded}


def official_ap(path, samples):
    """pycocotools' six mask APs as a list. NaN stands for its value -1. `path` is the JSON file to write."""
    truth, predicted = [], []
    for number, photo in enumerate(samples):
        for i, entry in annotations_of(photo.truth, photo.classes, number):
            area = int(np.sum(photo.truth == i + 1))
            truth.append({"id": len(truth) + 1, "area": area, "iscrowd": int(photo.crowd[i]), **entry})
        for i, entry in annotations_of(photo.predicted, photo.predicted_classes, number):
            predicted.append({"score": photo.scores[i], **entry})
    sizes = [photo.truth.shape for photo in samples]
    content = {
        "images": [{"id": i, "height": h, "width": w} for i, (h, w) in enumerate(sizes)],
        "categories": [{"id": i} for i, thing in zip(SPEC.category_ids, SPEC.things) if thing],
        "annotations": truth,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        path.write_text(json.dumps(content))
        api = COCO(str(path))
        path.write_text(json.dumps(content | {"annotations": []}))
        results = api.loadRes(predicted) if predicted else COCO(str(path))  # loadRes fails on an empty list
        evaluation = COCOeval(api, results, "segm")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [np.nan if value < 0 else value for value in evaluation.stats[:6]]


def official_iou(folder, pairs):
    """cityscapesscripts' (mean IoU, list of each class's IoU, NaN for absent classes). Writes PNGs to the folder."""
    official = pytest.importorskip("cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling")
    args = copy.copy(official.args)
    args.evalInstLevelScore = False
    confusion = official.generateMatrix(args)
    ids = np.zeros(CITYSCAPES.ignore + 1, np.uint8)  # id 0 means unlabelled
    ids[: CITYSCAPES.num_classes] = CITYSCAPES.category_ids
    for pair in pairs:
        paths = [str(folder / name) for name in ("truth.png", "predicted.png")]
        for path, classes in zip(paths, pair):
            Image.fromarray(ids[classes]).save(path)
        official.evaluatePair(paths[1], paths[0], confusion, None, perImageStats={}, args=args)
    scores = {i: official.getIouScoreForLabel(i, confusion, args) for i in args.evalLabels}
    return official.getScoreAverage(scores, args), [scores[i] for i in CITYSCAPES.category_ids]


# === Equality with the official tools ===


@pytest.mark.parametrize("examples", LONG)
def test_pq_is_the_official_tools(tmp_path, examples):
    outcomes = np.zeros(4)

    @settings(RUNS, max_examples=examples)
    @given(SETS)
    def check(samples):
        expected, means = official_counts(tmp_path, samples)
        quality = metric_of(PanopticQuality, enumerate(samples))
        actual = np.stack([quality.iou, quality.tp, quality.fp, quality.fn], 1)
        np.testing.assert_array_equal(actual[:, 1:], expected[:, 1:])
        np.testing.assert_allclose(actual[:, 0], expected[:, 0], rtol=1e-12)
        result = quality.result()
        for group in ("all", "things", "stuff"):
            theirs = means.get(group, {"pq": 0, "sq": 0, "rq": 0, "n": 0})
            for name in ("pq", "sq", "rq"):
                mean = theirs[name] if theirs["n"] else np.nan  # without classes, the tool gives 0
                np.testing.assert_allclose(result[group][name], mean, rtol=1e-12)
            assert result[group]["classes"] == theirs["n"]
        outcomes[:] += expected.sum(0)

    check()
    assert outcomes.min() > 20  # tp, fp and fn all occurred


@pytest.mark.parametrize("examples", LONG)
def test_ap_is_pycocotools(tmp_path, examples):
    values = []

    @settings(RUNS, max_examples=examples)
    @given(SETS)
    def check(samples):
        actual = list(score(InstanceAP, samples).values())
        np.testing.assert_allclose(actual, official_ap(tmp_path / "truth.json", samples), rtol=1e-12)
        values.append(actual[0])

    check()
    assert np.isnan(values).any() and np.sum((np.array(values) > 0) & (np.array(values) < 1)) > 5


@pytest.mark.parametrize("examples", LONG)
def test_miou_is_cityscapesscripts(tmp_path, examples):
    values = []

    @settings(RUNS, max_examples=examples)
    @given(st.lists(semantic_maps(), min_size=1, max_size=3))
    def check(pairs):
        mean, per_class = official_iou(tmp_path, pairs)
        result = mean_iou(pairs).result()
        actual = [result["per_class"].get(name, np.nan) for name in CITYSCAPES.class_names]
        np.testing.assert_allclose(actual, per_class, rtol=1e-12)
        np.testing.assert_allclose(result["miou"], mean, rtol=1e-12)
        values.append(mean)

    check()
    assert np.isnan(values).any() and np.sum((np.array(values) > 0) & (np.array(values) < 1)) > 5


# === Order and shards ===


@RUNS
@given(SETS, st.data())
def test_order_and_shards_of_photos_change_nothing(samples, data):
    """The scores are bit-identical. Shards are merged from JSON. AP ranks equal scores by the photos' numbers."""
    samples = 3 * samples  # enough matches that a sum with rounding depends on their order
    order = data.draw(st.permutations(list(enumerate(samples))))
    shards = data.draw(several(st.integers(0, 2), len(order)))
    for kind in (PanopticQuality, InstanceAP, MATCHING):
        expected = score(kind, samples)
        np.testing.assert_equal(metric_of(kind, order).result(), expected)
        metrics = [metric_of(kind, shard) for shard in parts(order, shards)]
        np.testing.assert_equal(merged(kind(SPEC), metrics), expected)


def parts(items, shards):
    """Splits the items into three lists, by their shard numbers. A list may be empty."""
    return [[item for item, shard in zip(items, shards) if shard == number] for number in range(3)]


def merged(total, metrics):
    for metric in metrics:
        shard = copy.deepcopy(total)
        shard.restore(json.loads(json.dumps(metric.state())))
        total.merge(shard)
    return total.result()
