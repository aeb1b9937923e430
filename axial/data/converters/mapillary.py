"""Lists items of Mapillary Vistas (https://www.mapillary.com/dataset/vistas) for `convert_split`.

    input_dir/config_v1.2.json, config_v2.0.json         the classes; config.json in older releases
    input_dir/SPLIT/images/KEY.jpg                        SPLIT is training, validation or testing
    input_dir/SPLIT/VERSION/panoptic/KEY.png              and panoptic_2018.json or panoptic_2020.json

Older releases have no VERSION folder. Photos are converted at their original size. Training and evaluation resize them
to the canvas, which is 2177 x 2177 in the paper (see experiments/mapillary/panoptic.gin). Predictions are scored at the
original size.
"""

import os

import tensorflow as tf

from axial.data.converters.coco import panoptic_items
from axial.data.files import PHOTOS, by_name, labelled_items, list_folder, split_folder
from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.io.read import read_json
from axial.io.schemas import Color, Struct, Text

# For each version: number of labels in its configuration, and year in the name of its panoptic JSON.
VERSIONS = {"v1.2": (66, 2018), "v2.0": (124, 2020)}


class Label(Struct):
    name: Text
    readable: Text
    evaluate: bool
    instances: bool
    color: Color


class VistasConfig(Struct):
    """config_VERSION.json."""

    labels: list[Label]


def mapillary_spec(input_dir, version):
    """The `DatasetSpec` of the classes in the configuration file.

    A class's category id is its position in the file, from 1, as in the panoptic annotations. Labels that the file
    marks as not evaluated are ignored.

    Raises:
        InputError: there is no configuration, or it has another number of labels.
    """
    count, _ = VERSIONS[version]
    names = [f"config_{version}.json", "config.json"]
    paths = [path for path in (os.path.join(input_dir, n) for n in names) if tf.io.gfile.exists(path)]
    if not paths:
        here = [n for n in list_folder(input_dir) if n.startswith("config")]
        raise InputError(f"{os.path.join(input_dir, names[0])}: no such file; here: {', '.join(here) or 'none'}")
    labels = read_json(paths[0], VistasConfig)[1].labels
    if len(labels) != count:
        other = [v for v, (n, _) in VERSIONS.items() if n == len(labels)]
        is_it = f"; is it --version={other[0]}?" if other else ""
        raise InputError(f"{paths[0]}: {len(labels)} labels where {version} has {count}{is_it}")
    counted = [(i + 1, label) for i, label in enumerate(labels) if label.evaluate]
    readable = [label.readable for _, label in counted]
    unique = len(set(readable)) == len(readable)
    return DatasetSpec(
        name=f"mapillary_{version}",
        class_names=tuple(readable if unique else (label.name for _, label in counted)),
        category_ids=tuple(number for number, _ in counted),
        things=tuple(label.instances for _, label in counted),
        palette=tuple(label.color for _, label in counted),
        ignored_ids=tuple(i + 1 for i, label in enumerate(labels) if not label.evaluate),
    )


def mapillary_items(input_dir, split, spec, version):
    """Items of a split, and bytes that identify this input. The testing split has no labels.

    Raises:
        InputError: a folder, photo or label is missing; see also `panoptic_items`.
    """
    _, year = VERSIONS[version]
    folder = split_folder(input_dir, split)
    photos, labelled = os.path.join(folder, "images"), os.path.join(folder, version)
    panoptic = os.path.join(labelled if tf.io.gfile.isdir(labelled) else folder, "panoptic")
    if split == "testing":
        paths = by_name(photos, PHOTOS)
        return labelled_items(paths, {}, None), "\n".join([version, "False", *paths]).encode()
    items, source = panoptic_items(os.path.join(panoptic, f"panoptic_{year}.json"), photos, panoptic, spec)
    return list(items.values()), source
