"""Scores and results of a split do not depend on the order of its records."""

import json

import numpy as np
import pytest
import tensorflow as tf

from axial.data import convert, imagenet, text
from axial.data.classification import evaluation_photos as classified_photos
from axial.data.coco import SAMPLE_DIR, coco_items
from axial.data.detection import evaluation_photos as photos_with_boxes
from axial.data.pipeline import evaluation_dataset, segment_map
from axial.data.specs import COCO
from axial.data.tfrecord import read_manifest
from axial.evaluation.classification import CLASSIFICATION
from axial.evaluation.detection import DETECTION, true_objects
from axial.evaluation.panoptic import PANOPTIC
from axial.evaluation.split_run import SplitRun, merge
from axial.evaluation.translation import TRANSLATION


def coco_split(folder, **_):
    items, source = coco_items(SAMPLE_DIR, "val2017")
    options = dict(output_dir=folder, source=source, progress=False)
    convert.convert_split(items, convert.encode_item, COCO, "val2017", **options)
    return "val2017"


def colours_split(folder, colours, **_):
    root = colours.removesuffix("data") + "photos"
    items, source = imagenet.imagenet_items(root, "val")
    options = dict(output_dir=folder, source=source, progress=False)
    convert.convert_split(items, convert.encode_item, imagenet.imagenet_spec(root), "val", **options)
    return "val"


def texts_split(folder, texts, **_):
    spec = read_manifest(texts, "val")["spec"]
    items, source = text.listed_pairs(texts.removesuffix("data") + "texts", "val", ("en", "de"), spec)
    options = dict(output_dir=folder, source=source, progress=False)
    convert.convert_split(items, text.encode_pair, spec, "val", **options)
    return "val"


def named_wrongly(example):
    """The true segments, half of them as persons. All have one score."""
    segments, classes = segment_map(example).numpy(), example["segment/class"].numpy()
    rng = np.random.default_rng(int(example["image/id"]))
    named = np.where(rng.random(len(classes)) < 0.5, classes, 0)
    semantic = np.concatenate([[COCO.ignore], named])[segments]
    return {"table": (segments, named, np.ones(len(classes))), "semantic": semantic}


def moved(example):
    """The true objects, half of them moved by their width. All have one score."""
    objects, rng = true_objects(example, COCO), np.random.default_rng(int(example["image/id"]))
    found = []
    for one in objects:
        x, y, width, height = one["bbox"]
        box = [x + width * int(rng.integers(0, 2)), y, width, height]
        category = COCO.category_ids[one["category_id"]]
        found.append({"image_id": int(example["image/id"]), "category_id": category, "bbox": box, "score": 0.5})
    return {"objects": found}


def guessed(example):
    rng = np.random.default_rng(int(example["image/id"]))
    return {"probability": rng.dirichlet(np.ones(3))}


def translated(example):
    return {"translation": example["reference"].numpy().decode()[: int(example["id"]) + 3]}


CASES = {
    "panoptic": (PANOPTIC, coco_split, evaluation_dataset, (17, 17), named_wrongly),
    "detection": (DETECTION, coco_split, photos_with_boxes, (64, 64), moved),
    "classification": (CLASSIFICATION, colours_split, classified_photos, (8, 8), guessed),
    "translation": (TRANSLATION, texts_split, text.evaluation_text, (64,), translated),
}


def rounded(scores):
    """The scores without the last bits of sums, and without orders of equal things."""
    if isinstance(scores, dict):
        return {name: rounded(value) for name, value in scores.items()}
    if isinstance(scores, list):
        return sorted(map(rounded, scores), key=json.dumps)
    return round(scores, 12) if isinstance(scores, float) else scores


@pytest.mark.parametrize("name", CASES)
def test_permuted_records_have_the_scores_and_results_of_records_in_order(
    name, colours_dir, texts_dir, tmp_path, monkeypatch
):
    """The whole split in the old order, the whole permuted split, and two shards of it, which are merged."""
    kind, make_split, photos, canvas, predict = CASES[name]
    found, orders = {}, {}
    for order, seed in (("older", None), ("permuted", convert.PERMUTATION)):
        monkeypatch.setattr(convert, "PERMUTATION", seed)
        data, results = str(tmp_path / order), str(tmp_path / f"{order}_results")
        split = make_split(data, colours=colours_dir, texts=texts_dir)
        spec = read_manifest(data, split)["spec"]

        def examples(shard, skip, place=(data, split, spec, canvas)):
            return photos(*place, shard=shard, skip=skip)

        def predictions(examples):
            return ((example, predict(example)) for example in examples)

        run = SplitRun(kind, spec, split, results_dir=results)
        found[order] = rounded(run.run(examples, predictions)), written(results)
        orders[order] = [name for _, name, _ in run.scores.photos]
        parts = str(tmp_path / f"{order}_parts")
        for i in range(2):
            SplitRun(kind, spec, split, results_dir=parts, shard=(i, 2)).run(examples, predictions)
        merged = merge(parts, split)
        assert (rounded(merged.scores.result()), written(parts)) == found[order]
    assert sorted(orders["older"]) == sorted(orders["permuted"]) and orders["older"] != orders["permuted"]
    assert found["older"] == found["permuted"]


def written(folder):
    """Dict from the names of the JSON results in a folder to their bytes."""
    names = [name for name in tf.io.gfile.listdir(folder) if name.endswith(".json") and name[0] != "."]
    assert names
    return {name: tf.io.gfile.GFile(f"{folder}/{name}", "rb").read() for name in names}
