"""What a run costs, and where its bucket is."""

import pytest

from axial import slices
from axial.cloud import bucket, cost
from axial.errors import InputError
from axial.io import schemas


def test_estimates_say_where_they_are_from():
    v5e, v2 = slices.find_slice("v5e-16"), slices.find_slice("v2-8")
    status = schemas.RunStatus("training", 10, 100, seconds_per_step=0.5, updated="2026-11-23T12:00:00Z")
    assert cost.step_time(v5e) is None
    assert cost.step_time(v5e, given=2.0, status=status, cycles=1e9).source == "--seconds_per_step"
    assert cost.step_time(v5e, status=status, cycles=1e9).source.startswith("measured by this run, 2026-11-23")
    modelled = cost.step_time(v5e, cycles=3e9)
    assert modelled.seconds == pytest.approx(3e9 / 1.503e9, rel=1e-3) and "cost model" in modelled.source
    with pytest.raises(InputError, match="no source says the clock of v2"):
        cost.step_time(v2, cycles=1e9)


def test_hours_prices_and_the_deadline():
    v5e = slices.find_slice("v5e-16")
    options = {"steps_left": 7200, "limit": 2.0}
    # 7200 steps of half a second are an hour on 16 chips
    steps, price = cost.describe(v5e, "us-west4", time=cost.StepTime(0.5, "a source"), **options)
    assert "7200 steps of 0.5 s are 1.0 hours and 16 chip-hours" in steps and "a source" in steps
    assert "about 19 USD, at most 38 USD until the deadline in 2 hours: 1.2 USD a chip-hour" in price
    assert "on demand in us-west4 (skypilot-catalog 006059e, read 2026-11-27)" in price
    _, price, warning = cost.describe(v5e, "europe-west9", time=cost.StepTime(2.0, "a source"), **options)
    assert "in us-central1; your region may differ" in price
    assert warning == (
        "warning: 4.0 hours do not fit --time_limit=2: the run ends after 3600 steps, 3600 steps before its last one"
    )
    steps, price = cost.describe(slices.find_slice("v2-8"), "", time=None, **options)
    assert "no step time is known" in steps and "none is known of a v2" in price


def test_every_price_is_of_a_generation_and_a_region():
    for generation, table in cost.PRICES.items():
        assert generation in slices.GENERATIONS and all(0 < price < 10 for price in table.values())


# gcloud storage buckets describe, of googlecloudsdk/command_lib/storage/resources/gcs_resource_reference.py
BUCKETS = {
    "near": "printf 'US-WEST4\\tregion\\n'",
    "far": "printf 'EUROPE-WEST4\\tregion\\n'",
    "eu": "printf 'EU\\tmulti-region\\n'",
    "two": "printf 'NAM4\\tdual-region\\n'",
    "none": "echo 'ERROR: (gcloud.storage.buckets.describe) gs://none not found: 404.' >&2; exit 1",
    "who": "echo 'ERROR: (gcloud.storage.buckets.describe) You do not currently have an active account selected.' >&2"
    "; exit 1",
    "secret": "echo 'ERROR: (gcloud.storage.buckets.describe) HTTPError 403: no storage.buckets.get' >&2; exit 1",
}


def test_buckets_of_other_regions_are_named(tools):
    for name, does in BUCKETS.items():
        tools.answers("gcloud", f"gs://{name} ", does)
    assert bucket.names(["gs://near/data", "ram://far", "gs://near", "gs://far/a/b"]) == ["near", "far"]
    assert bucket.warning("near", "us-west4") is None and bucket.warning("two", "us-west4") is None
    assert "the bucket is in europe-west4, the slice in us-west4" in bucket.warning("far", "us-west4")
    assert "the bucket is in eu" in bucket.warning("eu", "us-west4") and bucket.warning("eu", "europe-west4") is None
    assert "its region is not known" in bucket.warning("secret", "us-west4")
    with pytest.raises(InputError, match="gs://none: there is no such bucket"):
        bucket.warning("none", "us-west4")
    with pytest.raises(InputError, match="no credentials: gcloud auth login"):
        bucket.warning("who", "us-west4")


def test_without_gcloud_the_region_is_not_known(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "its region is not known (FileNotFoundError of gcloud)" in bucket.warning("near", "us-west4")
