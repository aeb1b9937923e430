"""Specs of data sets: classes, colours and refused specs."""

import dataclasses
import json

import numpy as np
import pytest

from axial.data.specs import COCO, NUCLEI, SPECS, DatasetSpec, StoredSpec, difference
from axial.errors import InputError
from axial.io.read import convert


def test_coco_has_its_133_classes():
    assert COCO.num_classes == 133 and sum(COCO.things) == 80
    assert COCO.class_names[COCO.class_of_category[1]] == "person"
    assert COCO.class_names[COCO.class_of_category[200]] == "rug-merged"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_specs_survive_json_and_have_distinct_colors(spec):
    fields = convert("", json.loads(json.dumps(spec.to_json())), StoredSpec)
    assert DatasetSpec.from_schema("spec.json", fields) == spec
    assert len(np.unique(spec.colors, axis=0)) == spec.num_classes


WRONG = {
    "differ": dict(category_ids=(1, 1)),
    "one name, id and thing flag": dict(things=(True,)),
    "at most 255": dict(class_names=tuple(map(str, range(256))), category_ids=tuple(range(256)), things=(True,) * 256),
    "beyond 24 bits": dict(label_divisor=1 << 23),
    "one colour for each class": dict(palette=((1, 2, 3),)),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_specs_are_refused(words):
    fields = dict(name="odd", class_names=("a", "b"), category_ids=(1, 2), things=(True, False)) | WRONG[words]
    with pytest.raises(InputError, match=words):
        DatasetSpec(**fields)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"name": "cells"}, ""),
        ({"class_names": ("rest", "cell"), "category_ids": (4, 3)}, ""),
        ({"things": (False, False)}, "its things[1] is False, not True"),
        ({"ignore": 254, "ignored_ids": (0, 9), "label_divisor": 1000, "palette": ()}, ""),
    ],
)
def test_the_first_field_in_which_specs_differ_is_named(changes, words):
    assert difference(dataclasses.replace(NUCLEI, **changes), NUCLEI) == words


def test_names_and_ids_of_several_things_must_agree():
    names, ids = list(COCO.class_names), list(COCO.category_ids)
    names[1], ids[2] = "bike", 500
    renamed = dataclasses.replace(COCO, class_names=tuple(names))
    renumbered = dataclasses.replace(COCO, category_ids=tuple(ids))
    assert difference(renamed, COCO).startswith("its class_names[1] is 'bike'")
    assert difference(renumbered, COCO).startswith("its category_ids[2] is 500")


def test_fewer_classes_are_named():
    less = {name: getattr(COCO, name)[:5] for name in ("class_names", "category_ids", "things")}
    assert difference(dataclasses.replace(COCO, **less), COCO) == "it has 5 class_names, not 133"
