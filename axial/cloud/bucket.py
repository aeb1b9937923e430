"""Finds the region of a bucket, because reading photos from another region is slow and costs money."""

import subprocess

from axial.errors import InputError

# Maps a multi-region to the first word of its regions' names: https://docs.cloud.google.com/storage/docs/locations
CONTINENTS = {"US": "us", "EU": "europe", "ASIA": "asia"}


def names(paths):
    """List of the names of the buckets in the paths that start with gs://, each once. Ignores other paths."""
    return list(dict.fromkeys(path[5:].partition("/")[0] for path in paths if path.startswith("gs://")))


def warning(name, region):
    """A warning if a bucket's region is unknown or differs from the slice's region; else None.

    Raises:
        InputError: gcloud has no credentials, or there is no such bucket.
    """
    command = ["gcloud", "storage", "buckets", "describe", f"gs://{name}", "--format=value(location,location_type)"]
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"gs://{name}: its region is not known ({type(error).__name__} of gcloud)"
    message = " ".join(result.stderr.split())
    if "not found: 404" in message:
        raise InputError(f"gs://{name}: there is no such bucket")
    if "active account" in message or "gcloud auth" in message:
        raise InputError("no credentials: gcloud auth login")
    location, _, kind = result.stdout.strip().partition("\t")
    if result.returncode or not kind:
        return f"gs://{name}: its region is not known ({message[:200]})"
    near = region.startswith(CONTINENTS.get(location, region)) if kind == "multi-region" else location.lower() == region
    if near or kind == "dual-region":
        return None
    return f"gs://{name}: the bucket is in {location.lower()}, the slice in {region}; reads are slow and cost"
