"""Where a bucket is: reading photos from another region is slow and costs."""

from axial.cloud.calls import Absent, Refused, credentials

ENDPOINT = "https://storage.googleapis.com"
# Multi-regions of Cloud Storage by the first word of their regions.
# https://docs.cloud.google.com/storage/docs/locations
CONTINENTS = {"US": ("us",), "EU": ("europe",), "ASIA": ("asia",)}


def warning(path, region, calls, endpoint=""):
    """A line if the bucket of a gs:// path is in another region than a slice or if that cannot be known, else None.

    Args:
        path: gs://BUCKET/...; another path has no bucket.
        region: of the slice.
        calls: a `Calls`.
        endpoint: see `Backend`.
    """
    if not path or not path.startswith("gs://"):
        return None
    bucket = path.removeprefix("gs://").partition("/")[0]
    url = f"{endpoint or ENDPOINT}/storage/v1/b/{bucket}?fields=location,locationType"

    def send():
        from google.auth.transport.requests import AuthorizedSession

        answer = AuthorizedSession(credentials(endpoint)).get(url, timeout=calls.timeout)
        answer.raise_for_status()
        return answer.json()

    try:
        found = calls("GET", url, send)
    except Absent:
        return f"{path}: there is no bucket {bucket}"
    except Refused as error:
        return f"{path}: its region is not known ({error})"
    if found is None:
        return None
    location, kind = str(found.get("location", "")), found.get("locationType")
    if kind == "region" and location.lower() != region:
        return f"{path}: the bucket is in {location.lower()}, the slice in {region}; reads are slow and cost"
    if kind == "multi-region" and not region.startswith(CONTINENTS.get(location, (region,))):
        return f"{path}: the bucket is in {location}, the slice in {region}; reads are slow and cost"
    return None
