"""Which TPU a machine has, and whether XLA compiles a step there."""

import pytest

from axial.io import metadata
from axial.layers import device


@pytest.mark.parametrize(
    "ours,theirs,attribute,generation",
    [
        (None, None, "", None),
        (None, "v5litepod-16", "v4-32", 5),
        ("v6e", "v5litepod-16", "", 6),
        ("other", None, "", None),
    ],
)
def test_generation_of_the_tpu(monkeypatch, ours, theirs, attribute, generation):
    for name, value in (("AXIAL_TPU", ours), ("TPU_ACCELERATOR_TYPE", theirs)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(metadata, "tpu_environment", lambda: {"ACCELERATOR_TYPE": attribute})
    assert device.tpu_generation.__wrapped__() == generation
