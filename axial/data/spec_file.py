"""Reads a `DatasetSpec` from the user's own file, YAML or Python.

my_spec.yaml:

    name: mine
    classes:
      - {id: 1, name: road, color: [128, 64, 128]}
      - {id: 2, name: car, thing: true, color: [0, 0, 142]}
    ignored_ids: [0, 255]

my_spec.py:

    from axial.data.specs import DatasetSpec
    SPEC = DatasetSpec("mine", ("road", "car"), (1, 2), (False, True), ignored_ids=(0, 255))

Colours are optional: either all classes have one, or none has. ignored_ids are the ids of unlabelled pixels.
label_divisor and ignore are optional too and mean the same as in `DatasetSpec`.
"""

import os
import runpy

import yaml

from axial.data.files import read_file
from axial.data.specs import SPECS, DatasetSpec
from axial.errors import InputError, nearest

KEYS = ("name", "classes", "ignored_ids", "label_divisor", "ignore")
CLASS_KEYS = ("id", "name", "thing", "color")


def find_spec(name):
    """The published spec called `name`, or the spec in the .yaml, .yml or .py file `name`.

    Raises:
        InputError: neither of the two; a file that is not of the form above. The message names the field.
    """
    if name in SPECS:
        return SPECS[name]
    suffix = os.path.splitext(name)[1]
    if suffix == ".py":
        return _from_python(name)
    if suffix in (".yaml", ".yml"):
        return _from_yaml(name)
    raise InputError(f"--spec={name}: {', '.join(SPECS)}, or a .yaml or .py file of your own{nearest(name, SPECS)}")


def _from_python(path):
    read_file(path)
    try:
        spec = runpy.run_path(path).get("SPEC")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:
        raise InputError(f"{path}: {type(error).__name__}: {error}") from None
    if not isinstance(spec, DatasetSpec):
        raise InputError(f"{path}: it sets no SPEC, a DatasetSpec")
    return spec


def _from_yaml(path):
    try:
        content = yaml.safe_load(read_file(path))
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    _check_keys(path, content, KEYS, ("name", "classes"))
    rows = content["classes"]
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path}: classes is a list with an entry for each class")
    for i, row in enumerate(rows):
        _check_keys(f"{path}: class {i + 1}", row, CLASS_KEYS, ("id", "name"))
        if type(row["id"]) is not int:
            raise InputError(f"{path}: class {i + 1}: id is a whole number, not {row['id']!r}")
        if type(row.get("thing", False)) is not bool:
            raise InputError(f"{path}: class {i + 1}: thing is true or false, not {row['thing']!r}")
        _check_color(f"{path}: class {i + 1}", row.get("color", [0, 0, 0]))
    colors = [tuple(row["color"]) for row in rows if "color" in row]
    rest = {key: content[key] for key in ("label_divisor", "ignore") if key in content}
    try:
        return DatasetSpec(
            name=str(content["name"]),
            class_names=tuple(str(row["name"]) for row in rows),
            category_ids=tuple(row["id"] for row in rows),
            things=tuple(row.get("thing", False) for row in rows),
            palette=tuple(colors),
            ignored_ids=tuple(content.get("ignored_ids", ())),
            **rest,
        )
    except (InputError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None


def _check_color(where, color):
    good = isinstance(color, list) and len(color) == 3
    if not good or not all(type(v) is int and 0 <= v <= 255 for v in color):
        raise InputError(f"{where}: color is [red, green, blue], 0 to 255, not {color!r}")


def _check_keys(where, content, known, needed):
    if not isinstance(content, dict):
        raise InputError(f"{where}: {', '.join(known)} are expected")
    for key in content:
        if key not in known:
            raise InputError(f"{where}: no field is called {key!r}{nearest(key, known)}: {', '.join(known)}")
    for key in needed:
        if key not in content:
            raise InputError(f"{where}: the field {key!r} is missing")
