"""The region of a bucket."""

import pytest

from axial.cloud import bucket
from axial.errors import InputError

# Output of `gcloud storage buckets describe`: googlecloudsdk/command_lib/storage/resources/gcs_resource_reference.py
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
