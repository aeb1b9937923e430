"""What a stored evaluation is of, and whether another one is of the same."""

import json
import typing

from axial.errors import InputError
from axial.io import gfile
from axial.io.read import read_json
from axial.io.write import write_json


def check_identity(path, identity, flag):
    """Writes `identity`, a dict, to a JSON file, or compares it with what is there.

    Raises:
        InputError: the file holds another identity. The message names the first difference.
    """
    if gfile.exists(path):
        compare_identity(path, read_json(path, dict[str, typing.Any])[1], identity, flag)
    else:
        write_json(path, identity)


def compare_identity(path, found, wanted, flag):
    """Raises InputError, which names the first difference, unless `found` has every entry of `wanted`."""
    place, there, here = [], found, json.loads(json.dumps(wanted))
    while isinstance(there, dict) and isinstance(here, dict):
        differing = [key for key, value in here.items() if there.get(key) != value]
        if not differing:
            return
        place.append(differing[0])
        there, here = there.get(place[-1]), here[place[-1]]
    raise InputError(
        f"{path}: of another evaluation, its {'.'.join(place)} is {there!r} and not {here!r}; delete it or choose "
        f"another {flag}"
    )
