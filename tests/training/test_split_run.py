"""Scores and results of a split do not depend on the order of its records, on shards or on interruptions."""

import contextlib
import functools
import json
import pathlib
import re

import numpy as np
import pytest

from axial.data import convert
from axial.data.converters import imagenet, text
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.specs import COCO
from axial.data.tfrecord import read_manifest
from axial.errors import InputError
from axial.metrics.panoptic_quality import Segments
from axial.tasks.classification.task import CLASSIFICATION
from axial.tasks.registry import find_evaluator
from axial.tasks.segmentation.evaluator import PANOPTIC
from axial.tasks.segmentation.input_pipeline import segment_map
from axial.tasks.translation.task import TRANSLATION
from axial.training import split_run
from axial.training.split_run import SplitRun, merge


def converted(folder, split, spec, items, encode=convert.encode_item):
    """Converts a split and returns its name. `items` are the first arguments of a `Conversion`."""
    convert.convert_split(convert.Conversion(*items, spec, split, folder, encode=encode, progress=False))
    return split


def coco_split(folder, **_):
    return converted(folder, "val2017", COCO, coco_items(SAMPLE_DIR, "val2017"))


def colours_split(folder, colours, **_):
    root = colours.removesuffix("data") + "photos"
    return converted(folder, "val", imagenet.imagenet_spec(root), imagenet.imagenet_items(root, "val"))


def texts_split(folder, texts, **_):
    spec, root = read_manifest(texts, "val")["spec"], texts.removesuffix("data") + "texts"
    pairs, _, digest = text.read_pairs(root, "val", ("en", "de"))
    return converted(folder, "val", spec, (text.pair_items(pairs, spec), digest), text.encode_pair)


def named_wrongly(example):
    """Predicts the ground truth's segments with equal scores. A random half of them gets the class person."""
    segments, classes = segment_map(example).numpy(), example["segment/class"].numpy()
    rng = np.random.default_rng(int(example["image/id"]))
    named = np.where(rng.random(len(classes)) < 0.5, classes, 0)
    semantic = np.concatenate([[COCO.ignore], named])[segments]
    return {"table": Segments(segments, named, np.ones(len(classes))), "semantic": semantic}


def guessed(example):
    rng = np.random.default_rng(int(example["image/id"]))
    return {"probability": rng.dirichlet(np.ones(3))}


def translated(example):
    return {"translation": example["reference"].numpy().decode()[: int(example["id"]) + 3]}


CASES = {  # dict from name to (evaluator, function that converts the split, function that predicts an example)
    "panoptic": (PANOPTIC, coco_split, named_wrongly),
    "classification": (CLASSIFICATION, colours_split, guessed),
    "translation": (TRANSLATION, texts_split, translated),
}


def evaluated(case, data, split, folder, until=None, **options):
    """Evaluates at most `until` examples of a split. Returns (`SplitRun`, result or None, number of predictions)."""
    kind, _, predict = case
    spec, asked = read_manifest(data, split)["spec"], []

    def predictions(examples):
        for number, example in enumerate(examples):
            if number == until:
                raise Stopped
            asked.append(number)
            yield example, predict(example)

    run, result = SplitRun(kind, spec, split, results_dir=str(folder), **options), None
    with contextlib.suppress(Stopped):
        result = run.run(lambda shard, skip: kind.examples(data, split, spec, shard=shard, skip=skip), predictions)
    return run, result, len(asked)


class Stopped(Exception):
    """Ends an evaluation early."""


def unordered(scores):
    """Returns the scores with every list sorted."""
    if isinstance(scores, dict):
        return {name: unordered(value) for name, value in scores.items()}
    return sorted(map(unordered, scores), key=json.dumps) if isinstance(scores, list) else scores


@pytest.mark.parametrize("name", CASES)
def test_permuted_records_have_the_scores_and_results_of_records_in_order(
    name, colours_dir, texts_dir, tmp_path, monkeypatch
):
    """A split in its items' order, and two merged shards of the permuted split, have equal scores and results."""
    data, outcomes, orders = tmp_path / "older", [], []
    monkeypatch.setattr(convert, "Conversion", functools.partial(convert.Conversion, permutation=None))
    split = CASES[name][1](str(data), colours=colours_dir, texts=texts_dir)
    run, result, _ = evaluated(CASES[name], str(data), split, tmp_path / "whole")
    outcomes.append((unordered(result), written(tmp_path / "whole")))
    orders.append([name for _, name, _ in run.metrics.photos])
    monkeypatch.undo()
    CASES[name][1](str(tmp_path / "permuted"), colours=colours_dir, texts=texts_dir)
    for i in range(2):
        evaluated(CASES[name], str(tmp_path / "permuted"), split, tmp_path / "parts", shard=(i, 2))
    merged = merge(str(tmp_path / "parts"), split, find_evaluator)
    outcomes.append((unordered(merged.metrics.result()), written(tmp_path / "parts")))
    orders.append([name for _, name, _ in sorted(merged.metrics.photos)])
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    assert outcomes[0] == outcomes[1]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A function of a folder that evaluates predictions of `named_wrongly` on the sample. It returns the scores."""
    data = str(tmp_path_factory.mktemp("named"))
    split = coco_split(data)

    def run(folder, thresholds=(), **options):
        identity = {"weights": "a", **({"thresholds": list(thresholds)} if thresholds else {})}
        return evaluated(CASES["panoptic"], data, split, folder, identity=identity, **options)[1]

    return run


def state_of(folder, shard):
    return json.loads((folder / f".val2017.{shard}.state.json").read_text())


# === The state ===


@pytest.fixture(scope="module")
def interrupted(colours_dir, tmp_path_factory):
    """A function of a folder that evaluates a classifier's split. It returns (result, number of predictions)."""
    data = str(tmp_path_factory.mktemp("interrupted"))
    case, split = CASES["classification"], colours_split(data, colours=colours_dir)

    def run(folder, **options):
        return evaluated(case, data, split, folder, **options)[1:]

    run.split = split
    return run


@pytest.fixture
def each_photo(monkeypatch):
    """Makes evaluations write their state after each example."""
    monkeypatch.setattr(split_run, "INTERVAL", 0)
    monkeypatch.setattr(split_run, "RARELY", 0)


def test_an_evaluation_goes_on_to_the_bits_of_the_whole(interrupted, tmp_path, each_photo):
    """After a stop at two examples, the second run predicts the others, and the third run none. Results are equal."""
    whole, count = interrupted(tmp_path / "whole")
    assert interrupted(tmp_path / "resumed", until=2) == (None, 2)
    for left in (count - 2, 0):
        result, predicted = interrupted(tmp_path / "resumed")
        assert json.dumps(result) == json.dumps(whole) and predicted == left
    assert written(tmp_path / "resumed") == written(tmp_path / "whole")


def test_shards_merge_to_the_bits_of_the_whole(interrupted, tmp_path, each_photo):
    """`merge` refuses an unfinished shard. Merged scores equal the whole split's. `merge` removes shards' states."""
    whole, _ = interrupted(tmp_path / "whole")
    interrupted(tmp_path / "shards", shard=(0, 2), until=1)
    interrupted(tmp_path / "shards", shard=(1, 2))
    with pytest.raises(InputError, match=r"0-of-2.state.json: not finished; evaluate --shard=0/2 first"):
        merge(str(tmp_path / "shards"), interrupted.split, find_evaluator)
    interrupted(tmp_path / "shards", shard=(0, 2))
    for _ in range(2):  # from the shards' states, then from the whole split's state
        merged = merge(str(tmp_path / "shards"), interrupted.split, find_evaluator)
        np.testing.assert_equal(unordered(merged.metrics.result()), unordered(whole))
        names = [path.name for path in (tmp_path / "shards").glob(".*")]
        assert names == [f".{interrupted.split}.0-of-1.state.json"]


def test_a_state_of_an_older_version_goes_on(interrupted, tmp_path, each_photo):
    """A state of an older version has only the sum of the confidences in each calibration bin."""
    whole, count = interrupted(tmp_path / "whole")
    interrupted(tmp_path / "older", until=2)
    path = tmp_path / "older" / f".{interrupted.split}.0-of-1.state.json"
    state = json.loads(path.read_text())
    right, confidences = state["scores"]["bins"]
    state["scores"]["bins"] = [list(map(float, right)), list(map(sum, confidences))]
    path.write_text(json.dumps(state))
    result, left = interrupted(tmp_path / "older")
    np.testing.assert_equal(result, whole)
    assert left == count - 2 and written(tmp_path / "older") == written(tmp_path / "whole")


def test_a_state_that_does_not_fit_is_refused_in_one_line(interrupted, tmp_path, each_photo):
    """A truncated state, a state of another evaluation, or one without annotations or scores raises InputError."""
    interrupted(tmp_path, until=2)
    path = tmp_path / f".{interrupted.split}.0-of-1.state.json"
    text, state = path.read_text(), json.loads(path.read_text())
    for content, words in (
        (text[: len(text) // 2], "state.json: not JSON"),
        (json.dumps({**state, "identity": {"thresholds": [0.5]}}), "state.json: of another evaluation"),
        (json.dumps({**state, "annotations": []}), "not of the first 0 photos of the shard; delete it"),
        (json.dumps({**state, "scores": {}}), "state.json: scores: not the scores of an evaluation"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=words) as error:
            interrupted(tmp_path)
        assert "\n" not in str(error.value)


def test_shards_keep_their_thresholds_and_add_up(named, tmp_path):
    """The matches of three shards at two thresholds add up to the whole split's matches. States store thresholds."""
    at = (0.5, 0.75)
    whole = named(tmp_path / "whole", thresholds=at)
    assert set(whole["matching"]) == {"0.5", "0.75"} and whole["matching"]["0.5"]["tp"] > 0
    assert named(tmp_path / "whole", thresholds=at) == whole  # from the state, without predictions
    shards = [named(tmp_path / "parts", shard=(i, 3), thresholds=at)["matching"] for i in range(3)]
    for threshold, row in whole["matching"].items():
        for name in ("tp", "fp", "fn"):
            assert row[name] == sum(shard[threshold][name] for shard in shards)
    merged = merge(str(tmp_path / "parts"), "val2017", find_evaluator)
    np.testing.assert_equal(merged.metrics.result(), whole)
    again = merge(str(tmp_path / "parts"), "val2017", find_evaluator)  # from the state of the whole split
    np.testing.assert_equal(again.metrics.result(), whole)
    states = state_of(tmp_path / "whole", "0-of-1"), state_of(tmp_path / "parts", "0-of-1")
    assert states[0]["scores"]["matching"] == states[1]["scores"]["matching"]
    assert states[0]["identity"] == states[1]["identity"] == {"weights": "a", "thresholds": [0.5, 0.75]}


def test_a_state_of_other_thresholds_is_refused(named, tmp_path):
    """A state without thresholds refuses a run or a shard with a threshold, and does not merge with such a shard."""
    first, second = (), (0.5,)
    words = f"its thresholds is {list(first) or None} and not {list(second) or None}"
    named(tmp_path / "whole", thresholds=first)
    for options in ({}, {"shard": (0, 2)}):
        with pytest.raises(InputError, match=re.escape(words)):
            named(tmp_path / "whole", thresholds=second, **options)
    for i, thresholds in enumerate((second, first)):
        named(tmp_path / "parts", shard=(i, 2), thresholds=thresholds)
    with pytest.raises(InputError, match=re.escape(words)):
        merge(str(tmp_path / "parts"), "val2017", find_evaluator)


def written(folder):
    """Returns a dict from the names of the JSON results in a folder to their bytes."""
    contents = {path.name: path.read_bytes() for path in pathlib.Path(folder).glob("[!.]*.json")}
    assert contents
    return contents


# === The identity of a state ===

IDENTITY = {"split": "val", "model": {"name": "nano", "scales": (0.5, 1.0), "norm": {"kind": "batch"}}, "photos": 7}


@pytest.mark.parametrize(
    "change, line",
    [
        ({"split": None}, "its split is None and not 'val'"),
        ({"model": {**IDENTITY["model"], "scales": [1.0]}}, "its model.scales is [1.0] and not [0.5, 1.0]"),
        ({"model": {**IDENTITY["model"], "norm": {}}}, "its model.norm.kind is None and not 'batch'"),
    ],
)
def test_the_first_difference_is_named_at_its_depth(change, line):
    with pytest.raises(InputError, match=f"^state.json: of another evaluation, {re.escape(line)};.* --results_dir$"):
        split_run._compare("state.json", json.loads(json.dumps({**IDENTITY, **change})), IDENTITY)
