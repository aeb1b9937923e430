"""Scores and results of a split do not depend on the order of its records."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from axial.data import convert
from axial.data.converters import imagenet, text
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.specs import COCO
from axial.data.tfrecord import read_manifest
from axial.errors import InputError
from axial.evaluation.split_run import SplitRun, merge
from axial.tasks.classification.evaluation import CLASSIFICATION
from axial.tasks.classification.feed import evaluation_photos as classified_photos
from axial.tasks.detection.evaluation import DETECTION, true_objects
from axial.tasks.detection.feed import evaluation_photos as photos_with_boxes
from axial.tasks.registry import find_evaluation
from axial.tasks.segmentation.evaluation import PANOPTIC
from axial.tasks.segmentation.feed import evaluation_dataset, segment_map
from axial.tasks.translation import feed
from axial.tasks.translation.evaluation import TRANSLATION


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
    "translation": (TRANSLATION, texts_split, feed.evaluation_text, (64,), translated),
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
        merged = merge(parts, split, find_evaluation)
        assert (rounded(merged.scores.result()), written(parts)) == found[order]
    assert sorted(orders["older"]) == sorted(orders["permuted"]) and orders["older"] != orders["permuted"]
    assert found["older"] == found["permuted"]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Function of a folder and more arguments that evaluates the sample with `named_wrongly`."""
    data = str(tmp_path_factory.mktemp("named"))
    split = coco_split(data)

    def examples(shard, skip):
        return evaluation_dataset(data, split, COCO, (17, 17), shard=shard, skip=skip)

    def predictions(examples):
        return ((example, named_wrongly(example)) for example in examples)

    def run(folder, **options):
        one = SplitRun(PANOPTIC, COCO, split, results_dir=str(folder), identity={"weights": "a"}, **options)
        return one.run(examples, predictions)

    return run


def state_of(folder, shard):
    return json.loads((folder / f".val2017.{shard}.state.json").read_text())


def test_shards_keep_their_thresholds_and_add_up(named, tmp_path):
    at = (0.5, 0.75)
    whole = named(tmp_path / "whole", thresholds=at)
    assert set(whole["matching"]) == {"0.5", "0.75"} and whole["matching"]["0.5"]["tp"] > 0
    assert named(tmp_path / "whole", thresholds=at) == whole  # from the state, without a prediction
    parts = [named(tmp_path / "parts", shard=(i, 3), thresholds=at)["matching"] for i in range(3)]
    for threshold, row in whole["matching"].items():
        for name in ("tp", "fp", "fn"):
            assert row[name] == sum(part[threshold][name] for part in parts)
    merged = merge(str(tmp_path / "parts"), "val2017", find_evaluation)
    np.testing.assert_equal(merged.scores.result(), whole)
    again = merge(str(tmp_path / "parts"), "val2017", find_evaluation)  # from the state of the whole
    np.testing.assert_equal(again.scores.result(), whole)
    states = state_of(tmp_path / "whole", "0-of-1"), state_of(tmp_path / "parts", "0-of-1")
    assert states[0]["scores"]["matching"] == states[1]["scores"]["matching"]
    assert states[0]["identity"] == states[1]["identity"] == {"weights": "a", "thresholds": [0.5, 0.75]}


def test_without_thresholds_a_state_knows_nothing_of_them(named, tmp_path):
    assert "matching" not in named(tmp_path)
    state = state_of(tmp_path, "0-of-1")
    assert "matching" not in state["scores"] and state["identity"] == {"weights": "a"}


@pytest.mark.parametrize("first,second", [((), (0.5,)), ((0.5,), ()), ((0.5,), (0.5, 0.6))])
def test_a_state_of_other_thresholds_is_refused(named, tmp_path, first, second):
    words = f"its thresholds is {list(first) or None} and not {list(second) or None}"
    named(tmp_path / "whole", thresholds=first)
    for options in ({}, {"shard": (0, 2)}):
        with pytest.raises(InputError, match=re.escape(words)):
            named(tmp_path / "whole", thresholds=second, **options)
    for i, thresholds in enumerate((second, first)):
        named(tmp_path / "parts", shard=(i, 2), thresholds=thresholds)
    with pytest.raises(InputError, match=re.escape(words)):
        merge(str(tmp_path / "parts"), "val2017", find_evaluation)


def test_a_state_without_its_counts_is_refused(named, tmp_path):
    named(tmp_path, thresholds=(0.5,))
    path = tmp_path / ".val2017.0-of-1.state.json"
    state = json.loads(path.read_text())
    for field, value in (("tp", [[1]]), ("tp", [[-1] * COCO.num_classes]), ("thresholds", [0]), ("fp", None)):
        broken = json.loads(json.dumps(state))
        broken["scores"]["matching"][field] = value
        path.write_text(json.dumps(broken))
        with pytest.raises(InputError, match="scores: not those of an evaluation .*matching"):
            named(tmp_path, thresholds=(0.5,))
        with pytest.raises(InputError, match="scores: not those of an evaluation .*matching"):
            merge(str(tmp_path), "val2017", find_evaluation)


def written(folder):
    """Dict from the names of the JSON results in a folder to their bytes."""
    names = [name for name in tf.io.gfile.listdir(folder) if name.endswith(".json") and name[0] != "."]
    assert names
    return {name: tf.io.gfile.GFile(f"{folder}/{name}", "rb").read() for name in names}
