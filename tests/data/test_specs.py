"""Specs of data sets: classes, colours and what is refused."""

import json

import numpy as np
import pytest

from axial.data.specs import COCO, SPECS, DatasetSpec
from axial.errors import InputError
from axial.io import schemas
from axial.io.read import convert


def test_coco_has_its_133_classes():
    assert COCO.num_classes == 133 and sum(COCO.things) == 80
    assert COCO.class_names[COCO.class_of_category[1]] == "person"
    assert COCO.class_names[COCO.class_of_category[200]] == "rug-merged"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_specs_survive_json_and_have_distinct_colors(spec):
    fields = convert("", json.loads(json.dumps(spec.to_json())), schemas.Spec)
    assert DatasetSpec.from_schema("spec.json", fields) == spec
    assert len(np.unique(spec.colors, axis=0)) == spec.num_classes


def test_wrong_specs_are_refused():
    with pytest.raises(InputError, match="differ"):
        DatasetSpec("twice", ("a", "b"), (1, 1), (True, False))
    with pytest.raises(InputError, match="one name, id and thing flag"):
        DatasetSpec("short", ("a", "b"), (1, 2), (True,))
    with pytest.raises(InputError, match="at most 255"):
        DatasetSpec("long", tuple(map(str, range(256))), tuple(range(256)), (True,) * 256)
    with pytest.raises(InputError, match="beyond 24 bits"):
        DatasetSpec("deep", ("a", "b"), (1, 2), (True, False), label_divisor=1 << 23)
    with pytest.raises(InputError, match="one colour for each class"):
        DatasetSpec("pale", ("a", "b"), (1, 2), (True, False), palette=((1, 2, 3),))
