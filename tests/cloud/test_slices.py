"""Slices, software versions, what a run costs, where its bucket is."""

import math

import pytest

import stand_ins
from axial.cloud import bucket, estimate, slices
from axial.cloud.backend import Request
from axial.cloud.calls import Calls, Refused
from axial.errors import InputError
from axial.io import schemas


# (name, topology, chips, hosts, machine), of the tables of https://docs.cloud.google.com/tpu/docs/v5e and its like.
@pytest.mark.parametrize(
    "name, topology, chips, hosts, accelerator, machine",
    [
        ("v2-8", "2x2", 4, 1, "v2-8", ""),
        ("v3-32", "4x4", 16, 4, "v3-32", ""),
        ("v4-8", "2x2x1", 4, 1, "v4-8", "ct4p-hightpu-4t"),
        ("v4-32", "2x2x4", 16, 4, "v4-32", "ct4p-hightpu-4t"),
        ("v5e-8", "2x4", 8, 1, "v5litepod-8", "ct5lp-hightpu-8t"),
        ("v5litepod-16", "4x4", 16, 4, "v5litepod-16", "ct5lp-hightpu-4t"),
        ("v5p-2048", "8x8x16", 1024, 256, "v5p-2048", "ct5p-hightpu-4t"),
        ("v6e-1", "1x1", 1, 1, "v6e-1", "ct6e-standard-1t"),
        ("V6E-256", "16x16", 256, 64, "v6e-256", "ct6e-standard-4t"),
        ("tpu7x-128", "4x4x4", 64, 16, "", "tpu7x-standard-4t"),
    ],
)
def test_slices_are_those_of_the_tables(name, topology, chips, hosts, accelerator, machine):
    found = slices.find_slice(name)
    assert (found.topology, found.chips, found.hosts) == (topology, chips, hosts)
    assert (found.accelerator_type, found.machine_type) == (accelerator, machine)


def test_every_slice_is_consistent():
    for name, found in slices.SLICES.items():
        assert found.name == name and slices.find_slice(name) is found
        assert math.prod(map(int, found.topology.split("x"))) == found.chips == found.hosts * found.chips_per_host
        assert slices.find_slice(f"{found.generation}-{found.topology}") is found
        assert found.backends and bool(found.accelerator_type) == (slices.QUEUED in found.backends)
        assert bool(found.machine_type) == (slices.GKE in found.backends)


@pytest.mark.parametrize(
    "name, near",
    [("v5e-17", "v5e-16"), ("v4-100", "v4-128"), ("v6-16", "v6e-16"), ("v5litepod-9", "v5e-8"), ("v3-2", "v3-8")],
)
def test_an_unknown_slice_names_the_nearest(name, near):
    with pytest.raises(InputError, match=rf"^--slice={name}: no such slice \(did you mean '{near}'\?\)"):
        slices.find_slice(name)


@pytest.mark.parametrize("name", ["", "-", "v5e-", "v5e-0", "v5e-x", "pod", "é-1"])
def test_what_is_no_slice_at_all(name):
    with pytest.raises(InputError, match="no such slice"):
        slices.find_slice(name)


def test_a_back_end_that_does_not_serve_the_slice():
    with pytest.raises(InputError, match="--backend=queued_resources does not serve tpu7x; use --backend=compute_eng"):
        slices.find_slice("tpu7x-8", "queued_resources")
    with pytest.raises(InputError, match="compute_engine does not serve v4; use --backend=queued_resources or"):
        slices.find_slice("v4-8", "compute_engine")


@pytest.mark.parametrize(
    "name, runtime, said",
    [
        ("v5e-16", "tpu-vm-tf-2.18.0-pjrt", "has 4 hosts; expected tpu-vm-tf-2.18.0-pod-pjrt"),
        ("v5e-8", "tpu-vm-tf-2.18.0-pod-pjrt", "has 1 host; expected tpu-vm-tf-2.18.0-pjrt"),
        ("v5e-8", "tpu-vm-tf-2.15.1-pjrt", "axial runs on TensorFlow 2.18 to 2.20"),
        ("v5e-8", "tpu-vm-tf-2.18.0-se", "ends in -pjrt"),
        ("v5e-8", "tpu-vm-tf-nightly", "expected tpu-vm-tf-x.y.z"),
        ("v5e-8", "TF 2.18", "not the name of a TPU software version"),
    ],
)
def test_software_that_does_not_fit(name, runtime, said):
    with pytest.raises(InputError, match=said):
        slices.check_runtime(slices.find_slice(name), runtime)


def test_software_that_fits():
    for found in slices.SLICES.values():
        for runtime in slices.supported_runtimes(found):
            if found.accelerator_type:
                slices.check_runtime(found, runtime)


@pytest.mark.parametrize(
    "field, value",
    [("name", "Run"), ("name", "a" * 41), ("name", "-a"), ("zone", "us-west4"), ("zone", "zone"), ("project", "A B")],
)
def test_names_that_google_refuses(field, value):
    good = {"name": "run", "project": "p", "zone": "us-west4-a", "slice": slices.find_slice("v5e-8")}
    Request(**good)
    with pytest.raises(InputError, match=f"--{field}="):
        Request(**{**good, field: value})


def test_estimates_say_where_they_are_from():
    v5e, v2 = slices.find_slice("v5e-16"), slices.find_slice("v2-8")
    status = schemas.RunStatus("training", 10, 100, seconds_per_step=0.5, updated="2026-11-23T12:00:00Z")
    assert estimate.step_time(v5e) is None
    assert estimate.step_time(v5e, given=2.0, status=status, cycles=1e9).source == "--seconds_per_step"
    assert estimate.step_time(v5e, status=status, cycles=1e9).source.startswith("measured by this run, 2026-11-23")
    modelled = estimate.step_time(v5e, cycles=3e9)
    assert modelled.seconds == pytest.approx(3e9 / 1.503e9, rel=1e-3) and "cost model" in modelled.source
    with pytest.raises(InputError, match="no source says the clock of v2"):
        estimate.step_time(v2, cycles=1e9)
    # 7200 steps of half a second are an hour on 16 chips
    said = estimate.describe(v5e, 7200, estimate.StepTime(0.5, "a source"))
    assert "7200 steps of 0.5 s are 1.0 hours and 16 chip-hours" in said and "a source" in said
    assert "no step time is known" in estimate.describe(v5e, 10, None)
    assert "the number of steps is unknown" in estimate.describe(v5e, None, None)


def test_buckets_of_other_regions_are_named(tmp_path):
    cloud = stand_ins.TpuApi(tmp_path, [])
    cloud.faults = [("b/lost$", 500)] * 2 + [("b/secret$", 403)]
    with stand_ins.serving(cloud) as address:
        calls = Calls(tries=2, first_wait=0.01, timeout=5)

        def warning(name, region="us-west4"):
            return bucket.warning(name, region, calls, address)

        assert bucket.names(["gs://near/data", "ram://far", "gs://near", "gs://far/a/b"]) == ["near", "far"]
        assert warning("near") is None
        assert "the bucket is in europe-west4, the slice in us-west4" in warning("far")
        assert "the bucket is in EU" in warning("eu") and warning("eu", "europe-west4") is None
        assert "its region is not known" in warning("lost") and "not known" in warning("secret")
        with pytest.raises(InputError, match="gs://none: there is no such bucket"):
            warning("none")


def test_no_credentials_are_one_line(monkeypatch, tmp_path):
    from axial.cloud.calls import credentials

    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="no credentials: gcloud auth application-default login"):
        credentials()


def test_refused_credentials_are_one_line_without_them():
    from google.auth import exceptions

    def send():
        raise exceptions.RefreshError("invalid_grant: token 1//secret has been revoked")

    with pytest.raises(Refused, match="no credentials that are valid now") as found:
        Calls()("GET", "https://x", send)
    assert "secret" not in str(found.value)


def test_a_fault_of_ours_is_not_taken_for_one_of_the_network():
    with pytest.raises(KeyError):
        Calls(wait=lambda seconds: pytest.fail("tried again"))("GET", "https://x", {}.popitem)
