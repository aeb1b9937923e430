"""What a stored evaluation is of is written once, and compared from then on."""

import json

import pytest

from axial.errors import InputError
from axial.io.identity import check_identity, compare_identity

IDENTITY = {"split": "val", "model": {"name": "nano", "scales": (0.5, 1.0), "norm": {"kind": "batch"}}, "photos": 7}


def refused(found, wanted):
    with pytest.raises(InputError) as error:
        compare_identity("run/.state.json", found, wanted, "--results_dir")
    return str(error.value)


def test_the_first_evaluation_writes_it_and_the_next_are_compared(tmp_path):
    path = str(tmp_path / "identity.json")
    check_identity(path, IDENTITY, "--results_dir")
    with open(path, encoding="utf-8") as file:
        assert json.load(file) == json.loads(json.dumps(IDENTITY))
    check_identity(path, IDENTITY, "--results_dir")
    with pytest.raises(
        InputError, match="of another evaluation, its photos is 7 and not 8; delete it or choose another"
    ):
        check_identity(path, {**IDENTITY, "photos": 8}, "--results_dir")
    with open(path, encoding="utf-8") as file:
        assert json.load(file)["photos"] == 7


def test_what_is_wanted_must_be_there_and_the_rest_may_be_there():
    compare_identity("", {**json.loads(json.dumps(IDENTITY)), "more": 1}, IDENTITY, "--results_dir")
    assert "its split is None and not 'val'" in refused({}, IDENTITY)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"split": "test"}, "its split is 'test' and not 'val'"),
        ({"model": None}, "its model is None and not {"),
        ({"model": {**IDENTITY["model"], "scales": [1.0]}}, "its model.scales is [1.0] and not [0.5, 1.0]"),
        (
            {"model": {**IDENTITY["model"], "norm": {"kind": "group"}}},
            "its model.norm.kind is 'group' and not 'batch'",
        ),
    ],
)
def test_the_first_difference_is_named_at_its_depth(change, line):
    found = json.loads(json.dumps({**IDENTITY, **change}))
    assert refused(found, IDENTITY).startswith(f"run/.state.json: of another evaluation, {line}")
    assert refused(found, IDENTITY).endswith("; delete it or choose another --results_dir")
