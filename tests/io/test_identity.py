"""What a stored evaluation is of is written once, and compared from then on."""

import json

import pytest

from axial.errors import InputError
from axial.io.identity import check_identity, compare_identity

IDENTITY = {"split": "val", "model": {"name": "nano", "scales": (0.5, 1.0), "norm": {"kind": "batch"}}, "photos": 7}


def test_the_first_evaluation_writes_it_and_the_next_are_compared(tmp_path):
    path = tmp_path / "identity.json"
    check_identity(str(path), IDENTITY, "--results_dir")
    assert json.loads(path.read_text()) == json.loads(json.dumps(IDENTITY))
    check_identity(str(path), IDENTITY, "--results_dir")
    with pytest.raises(InputError, match="identity.json: of another evaluation, its photos is 7 and not 8; delete it"):
        check_identity(str(path), {**IDENTITY, "photos": 8}, "--results_dir")
    assert json.loads(path.read_text())["photos"] == 7


@pytest.mark.parametrize(
    "change, line",
    [
        ({"split": None}, "its split is None and not 'val'"),
        ({"model": None}, "its model is None and not {"),
        ({"model": {**IDENTITY["model"], "scales": [1.0]}}, "its model.scales is [1.0] and not [0.5, 1.0]"),
        ({"model": {**IDENTITY["model"], "norm": {}}}, "its model.norm.kind is None and not 'batch'"),
    ],
)
def test_the_first_difference_is_named_at_its_depth(change, line):
    with pytest.raises(InputError) as error:
        compare_identity("state.json", json.loads(json.dumps({**IDENTITY, **change})), IDENTITY, "--results_dir")
    assert str(error.value).startswith(f"state.json: of another evaluation, {line}")
    assert str(error.value).endswith("; delete it or choose another --results_dir")
