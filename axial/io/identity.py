"""Whether a stored evaluation is of the same as another one."""

import json

from axial.errors import InputError


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
