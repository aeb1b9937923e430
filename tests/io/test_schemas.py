"""The schemas of files: required fields, defaults of other fields, and unknown fields."""

import msgspec
import pytest

from axial.data import specs, tfrecord
from axial.io import schemas
from axial.training import continuing
from axial.weights import interchange

SPEC = {"name": "s", "class_names": ["a"], "category_ids": [1], "things": [True]}
PLAN = {"format": 1, "spec": SPEC, "split": "val", "examples": 1, "source": "s"}
NORM = {"momentum": 0.9, "epsilon": 1e-3, "unbiased": True}
# dict from each schema to its required fields and the defaults of its other fields.
LEAST = {
    schemas.Segment: ({"id": 1, "category_id": 1}, {"iscrowd": 0, "score": 1.0}),
    schemas.Instance: (
        {"id": 0, "image_id": 0, "category_id": 1},
        {"iscrowd": 0, "segmentation": None, "bbox": None, "area": None},
    ),
    specs.StoredSpec: (SPEC, {"label_divisor": 1000, "ignore": 255, "palette": [], "vocabulary": ""}),
    specs.SpecFile: ({"name": "s", "classes": [{"id": 1, "name": "a"}]}, {"label_divisor": 1000, "ignore": 255}),
    tfrecord.Plan: (PLAN, {"stamps": [], "labels": "panoptic", "permutation": None}),
    tfrecord.Manifest: ({**PLAN, "shards": [["f", 0, 0]]}, {"hashes": [], "left_out": []}),
    continuing.TrainingSettings: ({"format": 1, "settings": {}}, {"changes": []}),
    schemas.RunStatus: (
        {"state": "done", "step": 0, "steps": 0},
        {"seconds_per_step": None, "images_per_second": None, "input_bound": None},
    ),
    interchange.StoredNorm: (NORM, {"group": 0, "frozen": False}),
    interchange.CardSplit: ({"split": "val"}, {"photos": 0}),
    interchange.WeightsCard: (
        {"format": 1, "model": "m", "num_classes": 1, "arguments": {}, "norm": NORM, "source": "s"},
        {"parameters": 0, "scored_photos": 0, "trained": None},
    ),
}


def takes(kind, value):
    try:
        return bool(msgspec.convert(value, kind) is not None)
    except msgspec.ValidationError:
        return False


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_defaults_and_unknown_fields(kind):
    least, left_out = LEAST[kind]
    read = msgspec.convert(least, kind)
    assert {name: getattr(read, name) for name in left_out} == left_out
    # Only `Strict` schemas refuse unknown fields.
    assert takes(kind, {**least, "more": 1}) == (not issubclass(kind, schemas.Strict))
    with pytest.raises(AttributeError):
        read.other = 1
    with pytest.raises(AttributeError):
        setattr(read, next(iter(least)), 1)


@pytest.mark.parametrize(
    "kind,least,most",
    [
        (schemas.Category, -(2**31), 2**31 - 1),
        (schemas.Count, 0, 2**53),
        (schemas.Side, 1, 2**16),
        (schemas.SegmentId, 1, 2**24 - 1),
        (schemas.Byte, 0, 255),
    ],
)
def test_the_limits_of_numbers(kind, least, most):
    assert [takes(kind, value) for value in (least - 1, least, most, most + 1)] == [False, True, True, False]
