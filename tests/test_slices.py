"""TPU slices, and the TPU software versions of their hosts."""

import math

import pytest

from axial import slices
from axial.errors import InputError


# The values are from https://docs.cloud.google.com/tpu/docs/v5e and the pages of the other generations.
@pytest.mark.parametrize(
    "name, topology, chips, hosts, accelerator",
    [
        ("v3-32", "4x4", 16, 4, "v3-32"),
        ("v4-8", "2x2x1", 4, 1, "v4-8"),
        ("v5e-8", "2x4", 8, 1, "v5litepod-8"),
        ("v5p-2048", "8x8x16", 1024, 256, "v5p-2048"),
        ("V6E-256", "16x16", 256, 64, "v6e-256"),
    ],
)
def test_slices_are_those_of_the_tables(name, topology, chips, hosts, accelerator):
    slice_ = slices.find_slice(name)
    assert (slice_.topology, slice_.chips, slice_.hosts) == (topology, chips, hosts)
    assert slice_.accelerator_type == accelerator
    assert slice_.devices == (2 * chips if name == "v3-32" else chips)


def test_every_slice_is_consistent():
    for name, slice_ in slices.SLICES.items():
        assert slice_.name == name and slices.find_slice(name) is slice_
        assert math.prod(map(int, slice_.topology.split("x"))) == slice_.chips and slice_.chips % slice_.hosts == 0
        assert slices.find_slice(f"{slice_.generation}-{slice_.topology}") is slice_


NEAREST = [("v6-16", "v6e-16"), ("v5e-17", "v5e-16")]
UNKNOWN = [(name, rf"no such slice \(did you mean '{near}'\?\)") for name, near in NEAREST]
UNKNOWN += [(name, "no such slice") for name in ("", "-", "v5e-", "v5e-0", "v5e-x", "pod", "é-1")]
UNKNOWN += [(name, "TensorFlow on TPUs ends at v6e") for name in ("tpu7x-8", "v7x-8", "7x-2x2x1", "TPU7X-16")]


@pytest.mark.parametrize("name, words", UNKNOWN)
def test_an_unknown_slice_is_named_with_the_nearest(name, words):
    with pytest.raises(InputError, match=rf"^--slice={name}: {words}"):
        slices.find_slice(name)


@pytest.mark.parametrize(
    "name, runtime, said",
    [
        ("v5e-16", "tpu-vm-tf-2.18.0-pjrt", "has 4 hosts; expected tpu-vm-tf-2.18.0-pod-pjrt"),
        ("v5e-8", "tpu-vm-tf-2.18.0-pod-pjrt", "has 1 host; expected tpu-vm-tf-2.18.0-pjrt"),
        ("v5e-8", "tpu-vm-tf-2.15.1-pjrt", "axial runs on TensorFlow 2.18 to 2.20"),
        ("v5e-8", "TF 2.18", "not the name of a TPU software version"),
    ],
)
def test_software_that_does_not_fit(name, runtime, said):
    with pytest.raises(InputError, match=said):
        slices.check_runtime(slices.find_slice(name), runtime)
