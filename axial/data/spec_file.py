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

COCO's panoptic JSON has classes too; `json_spec` takes them.

Colours are optional: either all classes have one, or none has. ignored_ids are the ids of unlabelled pixels.
label_divisor and ignore are optional too and mean the same as in `DatasetSpec`.
"""

import json
import os
import runpy

from axial.data.specs import SPECS, DatasetSpec, named_file
from axial.errors import InputError, nearest
from axial.io import gfile, schemas
from axial.io.paths import inside
from axial.io.read import convert, read_file, read_json


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
        return DatasetSpec.from_yaml(name)
    raise InputError(f"--spec={name}: {', '.join(SPECS)}, or a .yaml or .py file of your own{nearest(name, SPECS)}")


def json_spec(input_dir, splits):
    """The `DatasetSpec` of the categories in the panoptic JSON of the first of the splits that has one.

    Raises:
        InputError: no such JSON; a category without a name, or that does not say whether it is a thing; see also
            `DatasetSpec`.
    """
    paths = [inside(input_dir, f"annotations/panoptic_{split}.json", "--split") for split in splits]
    path = next((path for path in paths if gfile.exists(path)), None)
    if path is None:
        raise InputError(f"--spec=json: {paths[0]}: no such file{boxes_alone(input_dir, splits[0])}")
    rows = read_json(path, schemas.Panoptic)[1].categories
    if not rows:
        raise InputError(f"--spec=json: {path}: categories: empty")
    for row in rows:
        missing = next((field for field in ("name", "isthing") if getattr(row, field) is None), None)
        if missing:
            raise InputError(f"--spec=json: {path}: category {row.id}: is missing the field {missing}")
    colors = [row.color for row in rows]
    with named_file(f"--spec=json: {path}"):
        return DatasetSpec(
            name=os.path.basename(os.path.abspath(input_dir)) or "json",
            class_names=tuple(str(row.name) for row in rows),
            category_ids=tuple(row.id for row in rows),
            things=tuple(bool(row.isthing) for row in rows),
            palette=tuple(convert("categories: color: ", colors, list[schemas.Color])) if all(colors) else (),
            ignore=max(255, len(rows)),
        )


def boxes_alone(input_dir, split):
    """What to say of a split that has no COCO JSON but that of detection, which most tools export alone; else ''."""
    path = inside(input_dir, f"annotations/instances_{split}.json", "--split")
    how = "panopticapi's detection2panoptic_coco_format.py makes both from it"
    return f"; {path} is there, but axial needs the panoptic JSON and its PNGs; {how}" if gfile.exists(path) else ""


def _from_python(path):
    read_file(path)
    try:
        spec = runpy.run_path(path).get("SPEC")
    except (Exception, SystemExit) as error:  # the file may even end the process
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"{path}: {kind}{error}") from None
    if not isinstance(spec, DatasetSpec):
        raise InputError(f"{path}: it sets no SPEC, a DatasetSpec")
    fields = json.loads(json.dumps(spec.to_json(), default=str))
    return DatasetSpec.from_schema(path, convert(f"{path}: SPEC: ", fields, schemas.Spec))
