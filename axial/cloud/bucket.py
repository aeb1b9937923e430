"""Where a bucket is: reading photos from another region is slow and costs."""

from axial.cloud.calls import Absent, Refused, credentials
from axial.errors import InputError

ENDPOINT = "https://storage.googleapis.com"
# Multi-regions of Cloud Storage by the first word of their regions.
# https://docs.cloud.google.com/storage/docs/locations
CONTINENTS = {"US": ("us",), "EU": ("europe",), "ASIA": ("asia",)}


def names(paths):
    """The buckets of gs:// paths, each once; other paths have none."""
    return list(dict.fromkeys(path[5:].partition("/")[0] for path in paths if path.startswith("gs://")))


def warning(name, region, calls, endpoint=""):
    """A line if a bucket is in another region than a slice or if that cannot be known, else None.

    Args:
        name: of the bucket.
        region: of the slice.
        calls: a `Calls`.
        endpoint: see `Backend`.

    Raises:
        InputError: there is no such bucket.
    """
    url = f"{endpoint or ENDPOINT}/storage/v1/b/{name}?fields=location,locationType"

    def send():
        from google.auth.transport.requests import AuthorizedSession

        answer = AuthorizedSession(credentials(endpoint)).get(url, timeout=calls.timeout)
        answer.raise_for_status()
        return answer.json()

    try:
        found = calls("GET", url, send)
    except Absent:
        raise InputError(f"gs://{name}: there is no such bucket") from None
    except Refused as error:
        return f"gs://{name}: its region is not known ({error})"
    if found is None:
        return None
    location, kind = str(found.get("location", "")), found.get("locationType")
    elsewhere = f"gs://{name}: the bucket is in {{}}, the slice in {region}; reads are slow and cost"
    if kind == "region" and location.lower() != region:
        return elsewhere.format(location.lower())
    if kind == "multi-region" and not region.startswith(CONTINENTS.get(location, (region,))):
        return elsewhere.format(location)
    return None
