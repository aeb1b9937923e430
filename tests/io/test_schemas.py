"""What files may hold: ranges, what a file may leave out, and what nobody knows."""

import msgspec
import pytest

from axial.io import schemas

SPEC = {"name": "s", "class_names": ["a"], "category_ids": [1], "things": [True]}
PLAN = {"format": 1, "spec": SPEC, "split": "val", "examples": 1, "source": "s"}
NORM = {"momentum": 0.9, "epsilon": 1e-3, "unbiased": True}
# The least that a file of each kind has, and what is taken for what it leaves out.
LEAST = {
    schemas.Segment: ({"id": 1, "category_id": 1}, {"iscrowd": 0, "score": 1.0}),
    schemas.Instance: (
        {"id": 0, "image_id": 0, "category_id": 1, "bbox": [0, 0, 1, 1], "area": 0},
        {"iscrowd": 0, "segmentation": None},
    ),
    schemas.Instances: ({"images": [], "annotations": [], "categories": [{"id": 1}]}, {}),
    schemas.AnyRunLengths: ({"size": [1, 1], "counts": [0]}, {}),
    schemas.Spec: (SPEC, {"label_divisor": 1000, "ignore": 255, "palette": [], "vocabulary": ""}),
    schemas.ClassRow: ({"id": 1, "name": "a"}, {"thing": False, "color": None}),
    schemas.SpecFile: ({"name": "s", "classes": [{"id": 1, "name": "a"}]}, {"label_divisor": 1000, "ignore": 255}),
    schemas.Plan: (PLAN, {"stamps": [], "labels": "panoptic", "permutation": None}),
    schemas.Manifest: ({**PLAN, "shards": [["f", 0, 0]]}, {"hashes": [], "left_out": []}),
    schemas.TrainingSettings: ({"format": 1, "settings": {}}, {"changes": []}),
    schemas.RunStatus: (
        {"state": "done", "step": 0, "steps": 0},
        {"seconds_per_step": None, "images_per_second": None, "input_bound": None},
    ),
    schemas.MatchingCounts: ({"thresholds": [0.5], "tp": [[0]], "fp": [[0]], "fn": [[0]]}, {}),
    schemas.Norm: (NORM, {"group": 0, "frozen": False}),
    schemas.CardSplit: ({"split": "val"}, {"photos": 0}),
    schemas.CardScores: ({"split": "val", "photos": 1, "scores": {}}, {"chosen": False}),
    schemas.WeightsCard: (
        {"format": 1, "model": "m", "num_classes": 1, "arguments": {}, "norm": NORM, "source": "s"},
        {"parameters": 0, "scored_photos": 0, "trained": None},
    ),
    schemas.Arrivals: ({"hosts": 1, "epoch": 0, "examples": 0, "skipped": 0, "arrived": [], "again": []}, {}),
}


def takes(kind, value):
    try:
        return bool(msgspec.convert(value, kind) is not None)
    except msgspec.ValidationError:
        return False


@pytest.mark.parametrize(
    "kind, least, most, below, above",
    [
        (schemas.Text, "a", "a" * 1000, "", "a" * 1001),
        (schemas.ImageId, 0, 2**53, -1, 2**53 + 1),
        (schemas.ImageId, "a", "a" * 1000, "", "a" * 1001),
        (schemas.Side, 1, 2**16, 0, 2**16 + 1),
        (schemas.Category, -(2**31), 2**31 - 1, -(2**31) - 1, 2**31),
        (schemas.SegmentId, 1, 2**24 - 1, 0, 2**24),
        (schemas.Color, [0, 0, 0], [255, 255, 255], [0, 0, -1], [255, 255, 256]),
        (schemas.Count, 0, 2**53, -1, 2**53 + 1),
        (schemas.Flag, 0, 1, -1, 2),
        (schemas.Pixels, 1e-9, 2**16, 0, 2**16 + 1),
        (schemas.Level, 0, 255, -0.1, 255.1),
        (schemas.Divisor, 1, 2**24, 0, 2**24 + 1),
        (schemas.Ignore, 1, 2**15, 0, 2**15 + 1),
    ],
)
def test_a_range_ends_where_it_says(kind, least, most, below, above):
    assert [takes(kind, value) for value in (below, least, most, above)] == [False, True, True, False]


@pytest.mark.parametrize(
    "kind, field, taken, refused",
    [
        (schemas.Segment, "score", [0, 1.5], [-0.1]),
        (schemas.Instance, "area", [0, 1e9], [-0.1]),
        (schemas.Instances, "categories", [[{"id": 1}]], [[]]),
        (schemas.AnyRunLengths, "counts", ["text", [0, 2**32 - 1], []], [[-1], [2**32]]),
        (schemas.SpecFile, "classes", [[{"id": 1, "name": "a"}]], [[]]),
        (schemas.Plan, "format", [1], [0, 2]),
        (schemas.Plan, "examples", [1, 2**40], [0, 2**40 + 1]),
        (schemas.Plan, "permutation", [0, 2**32 - 1, None], [-1, 2**32]),
        (schemas.Manifest, "shards", [[["f", 0, 0]]], [[]]),
        (schemas.TrainingSettings, "format", [1], [0, 2]),
        (schemas.RunStatus, "seconds_per_step", [0, 0.5, None], [-0.1]),
        (schemas.MatchingCounts, "thresholds", [[1e-9, 1]], [[0], [1.01]]),
        (schemas.Norm, "momentum", [0, 0.999], [-0.1, 1]),
        (schemas.Norm, "epsilon", [1e-9, 1], [0]),
        (schemas.WeightsCard, "format", [1], [0, 2]),
        (schemas.WeightsCard, "num_classes", [1, 2**24], [0, 2**24 + 1]),
        (schemas.Arrivals, "hosts", [1], [0]),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_field_takes_its_range(kind, field, taken, refused):
    values = [*taken, *refused]
    right = [takes(kind, {**LEAST[kind][0], field: value}) for value in values]
    assert right == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_what_a_file_leaves_out(kind):
    least, left_out = LEAST[kind]
    read = msgspec.convert(least, kind)
    assert {name: getattr(read, name) for name in left_out} == left_out
    assert takes(kind, {**least, "more": 1}) == (not issubclass(kind, schemas.Strict))  # of others' files
    with pytest.raises(AttributeError):
        read.other = 1
    with pytest.raises(AttributeError):
        setattr(read, next(iter(least)), 1)
