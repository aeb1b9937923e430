"""Lists items of the user's own data for `convert_split`, in one of three layouts.

One is COCO's panoptic layout (see `axial.data.converters.coco`). The others are photos beside label images with the
same names:

    input_dir/SPLIT/photos/NAME.jpg
    input_dir/SPLIT/panoptic/NAME.png       RGB: R + 256 G + 65536 B = category x label_divisor + instance
    or
    input_dir/SPLIT/semantic/NAME.png       one channel, 8 or 16 bits: category
    input_dir/SPLIT/instance/NAME.png       one channel: instance; not read if the spec has no things

Instances are numbered from 1; 0 in a thing class is a crowd. The panoptic value 0 is category 0 if the spec has it,
otherwise unlabelled. A split without labels has only photos. axial-predict's PHOTO.panoptic.png and PHOTO.json can be
read as panoptic/NAME.png and panoptic/NAME.json.
"""

import functools
import os

import numpy as np
import tensorflow as tf

from axial.data.converters.coco import check_annotations, checked_labels, coco_items
from axial.data.files import PHOTOS, by_name, check_paired, labelled_items, list_folder, split_folder
from axial.data.labels import labels_of, read_ids, read_panoptic, same_size, segment
from axial.data.specs import check_categories
from axial.errors import InputError, nearest
from axial.io import gfile, schemas
from axial.io.read import read_file, read_json
from axial.io.show import say

LAYERS = ("panoptic", "semantic", "instance")


def folder_items(input_dir, split, spec):
    """Items of a split in order of their names, and bytes that identify this input.

    Raises:
        InputError: there are no photos; a photo has no label image, or a label image no photo; the spec has things but
            there are no instance images; there are both panoptic and semantic images.
    """
    if tf.io.gfile.isdir(os.path.join(input_dir, "annotations")):
        return coco_items(input_dir, split, spec)
    folder = split_folder(input_dir, split)
    photos = by_name(os.path.join(folder, "photos"), PHOTOS)
    others = [name for name in list_folder(folder) if name not in ("photos", *LAYERS)]
    there = [layer for layer in LAYERS if tf.io.gfile.isdir(os.path.join(folder, layer))]
    if any(spec.things) and there == ["semantic"]:
        things = [name for name, thing in zip(spec.class_names, spec.things) if thing]
        raise InputError(
            f"{folder}: {things[0]!r} is a thing in the spec {spec.name!r}, but there are no instances; "
            f"add a folder instance/ or give the class thing: false{nearest('instance', others)}"
        )
    if there not in ([], ["panoptic"], ["semantic"], ["semantic", "instance"]):
        has = f"{', '.join(there)}{nearest('semantic', others)}"
        raise InputError(f"{folder}: either panoptic/, or semantic/ and instance/; here: {has}")
    if "instance" in there and not any(spec.things):
        there.remove("instance")
        say(f"{folder}/instance: left out: no class of the spec {spec.name!r} is a thing", error=True)
    if others:
        shown = [f"{name}{nearest(name.lower(), LAYERS)}" for name in others[:5]] + ["..."] * (len(others) > 5)
        say(f"{folder}: left out: {', '.join(shown)}; photos, {', '.join(LAYERS)} are read", error=True)
    files = {name: [] for name in sorted(photos)} if there else {}
    for layer in there:
        path = os.path.join(folder, layer)
        images = by_name(path, (".png",), (".json",) if layer == "panoptic" else ())
        check_paired(photos, images, os.path.join(folder, "photos"), path)
        for name, image in images.items():
            files[name].append(image)
    read = _read_panoptic if there == ["panoptic"] else _read_semantic
    items = labelled_items(dict(sorted(photos.items())), files, functools.partial(read, spec))
    return items, "\n".join([*there, *(os.path.basename(item["photo"]) for item in items)]).encode()


def _read_panoptic(spec, _, path):
    """`Labels` of a panoptic image.

    The value 0 is category 0, instance 0. If the spec lacks category 0, it marks unlabelled pixels.
    """
    divisor, ids = spec.label_divisor, read_panoptic(path)
    present = np.setdiff1d(ids, 0)
    if present.size and (present[-1] < divisor or present[-1] == present.size):  # ids look like numbered segments
        described = f"{os.path.splitext(path)[0]}.json"
        if gfile.exists(described):
            return _read_predicted(path, described, spec)
        if spec.class_index(0) in (None, spec.ignore):
            raise InputError(
                f"{path}: label 0 (of pixels that are {present[0]}), which the spec {spec.name!r} does not "
                f"have as a class; ids of segments, as axial-predict writes them, need its JSON as {described}"
            )

    def describe(key):
        if not key and spec.class_index(0) is None:
            return 0, spec.ignore, 0
        return segment(spec, path, key // divisor, key % divisor, pixel=key)

    return labels_of(ids, describe)


def _read_semantic(spec, _, semantic, instance=None):
    """`Labels` of a semantic image and, optionally, an instance image."""
    keys = read_ids(semantic)
    if instance:
        numbers = read_ids(instance)
        same_size(instance, numbers, semantic, keys)
        keys = keys + 65536 * numbers.astype("int64")
    return labels_of(keys, lambda key: segment(spec, semantic, key % 65536, key // 65536))


def _read_predicted(png, path, spec):
    """`Labels` of a panoptic PNG and the JSON that axial-predict wrote with it. Raises InputError."""
    rows = read_json(path, schemas.Predicted)[1].segments
    check_categories(path, [schemas.CategoryRow(row.category_id, row.name, row.thing) for row in rows], spec)
    check_annotations(path, [schemas.Annotation(0, png, rows)], spec, {*spec.category_ids, *spec.ignored_ids})
    return checked_labels(png, read_file(png), None, rows, spec=spec)
