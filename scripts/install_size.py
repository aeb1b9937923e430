"""Prints the size of axial's installation, and of the packages that only tf-models-official needs.

    python scripts/install_size.py

It looks at the packages of the Python that runs it.
"""

import importlib.metadata
import os

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OWN, OFFICIAL = "axial-deeplab-tf", "tf-models-official"


def megabytes(name):
    """Size of a package's files."""
    paths = importlib.metadata.files(name) or ()
    return sum(os.path.getsize(path.locate()) for path in paths if os.path.exists(path.locate())) / 1e6


def needed(name, without=()):
    """The names of a package and of all packages that it needs, as far as they are installed."""
    names, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in names or name in without:
            continue
        try:
            lines = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        names.add(name)
        found = [Requirement(line) for line in lines]
        waiting += [canonicalize_name(r.name) for r in found if not r.marker or r.marker.evaluate({"extra": ""})]
    return names


def main():
    everything, rest = needed(OWN), needed(OWN, without=(OFFICIAL,))
    for names, what in ((everything, OWN), (everything - rest, f"of these only for {OFFICIAL}")):
        print(f"{sum(map(megabytes, names)):5.0f} MB  {len(names)} packages {what}")
    for name in sorted(everything, key=megabytes, reverse=True)[:8]:
        print(f"{megabytes(name):5.0f} MB  {name}")


if __name__ == "__main__":
    main()
