"""What a stored evaluation is of is compared with the next one."""

import json

import pytest

from axial.errors import InputError
from axial.io.identity import compare_identity

IDENTITY = {"split": "val", "model": {"name": "nano", "scales": (0.5, 1.0), "norm": {"kind": "batch"}}, "photos": 7}


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
