"""Lists items of the user's own data for `convert_split`: photos beside label images with the same names.

    input_dir/SPLIT/photos/NAME.jpg         or images/
    input_dir/SPLIT/instance/NAME.png       or masks/ or labels/. One channel: 0, and n for the object n
    input_dir/SPLIT/semantic/NAME.png       one channel: category
    or
    input_dir/SPLIT/panoptic/NAME.png       RGB: R + 256 G + 65536 B = category x label_divisor + instance

`instance` alone suffices if the spec has one thing class and at most one stuff class: 0 is the stuff class, or
unlabelled if there is none. `semantic` alone suffices if the spec has no things. With both, instance 0 in a thing class
is a crowd. The panoptic value 0 is category 0 if the spec has it, otherwise unlabelled. A split without labels has only
photos. Label images of one channel are PNGs of at most 16 bits or TIFFs of at most 32.

Photos and instance images may also lie in one folder, as Cellpose writes them. The names in `MASKS` are also read from
the folder of instance images, so that axial-predict may write its label images there:

    input_dir/SPLIT/NAME.tif                or NAME_img.tif
    input_dir/SPLIT/NAME_masks.tif          or NAME_cp_masks.png, NAME.labels.tif

axial-predict's PHOTO.panoptic.png and PHOTO.json can be read as panoptic/NAME.png and panoptic/NAME.json. A folder
annotations/ means COCO's panoptic layout (see `axial.data.converters.coco`).
"""

import functools
import itertools
import os

import numpy as np
import tensorflow as tf

from axial.data.converters.coco import check_annotations, checked_labels, coco_items
from axial.data.files import PHOTOS, by_name, check_paired, labelled_items, list_folder, split_folder, tell_left_out
from axial.data.labels import labels_of, numbered, read_ids, read_panoptic, same_size, segment
from axial.data.specs import check_categories
from axial.errors import InputError, nearest
from axial.io import gfile, schemas
from axial.io.read import read_json
from axial.io.show import counted, say

FOLDERS = {  # kind of image -> names of its folder
    "photos": ("photos", "images"),
    "panoptic": ("panoptic",),
    "semantic": ("semantic",),
    "instance": ("instance", "masks", "labels"),
}
NAMES = tuple(itertools.chain(*FOLDERS.values()))
MASKS = (".labels", "_cp_masks", "_masks")  # endings of instance images' names: axial-predict's and Cellpose's
LABELS = (".png", ".tif", ".tiff")


def folder_items(input_dir, split, spec):
    """Items of a split in order of their names, and bytes that identify this input.

    Raises:
        InputError: there are no photos; a photo has no label image, or a label image no photo; the label images do not
            suffice for the spec.
    """
    if tf.io.gfile.isdir(os.path.join(input_dir, "annotations")):
        return coco_items(input_dir, split, spec)
    folder = split_folder(input_dir, split)
    listed = list_folder(folder)
    names = {kind: next(filter(listed.__contains__, names), None) for kind, names in FOLDERS.items()}
    folders = {kind: os.path.join(folder, name or kind) for kind, name in names.items()}
    kinds = [kind for kind, name in names.items() if name and kind != "photos"]
    others = [name for name in listed if name not in names.values()]
    if not any(names.values()) and any(os.path.splitext(name)[0].endswith(MASKS) for name in listed):
        masks, photos = _masks(by_name(folder, PHOTOS))
        for name in [name for name in photos if name.endswith("_img")]:
            if (stem := name.removesuffix("_img")) in photos:
                raise InputError(f"{photos[stem]}: {os.path.basename(photos[name])} is there too; expected one photo")
            photos[stem] = photos.pop(name)
        folders, kinds, others = {"photos": folder, "instance": folder}, ["instance"], []
    else:
        photos, masks = by_name(folders["photos"], PHOTOS), None
    kinds = _kinds(folder, kinds, spec, others)
    files = {name: [] for name in sorted(photos)} if kinds else {}
    for kind in kinds:
        images = masks or by_name(folders[kind], LABELS, (".json",))
        if kind == "instance" and not masks and not images.keys() <= photos.keys() and (masks := _masks(images)[0]):
            rest = sorted(os.path.basename(path) for path in set(images.values()) - set(masks.values()))
            tell_left_out(folders[kind], "names without .labels, _cp_masks or _masks", rest)
            images = masks
        ending = next((path.rpartition(name)[2] for name, path in images.items()), ".png")
        check_paired(photos, images, folders["photos"], folders[kind], ending=ending)
        for name, image in images.items():
            files[name].append(image)
    read = {"panoptic": _read_panoptic, "instance": _read_instances}.get(",".join(kinds), _read_semantic)
    items = labelled_items(dict(sorted(photos.items())), files, functools.partial(read, spec))
    return items, "\n".join([*kinds, *(os.path.basename(item["photo"]) for item in items)]).encode()


def _masks(paths):
    """Splits a dict from names to paths: names with an ending of `MASKS`, which is removed, and all other names.

    Raises:
        InputError: two names differ only in their endings.
    """
    masks, others = {}, {}
    for name, path in paths.items():
        ending = next(filter(name.endswith, MASKS), "")
        stem = name.removesuffix(ending)
        if ending and stem in masks:
            raise InputError(f"{path}: {masks[stem]} is there too; expected one label image per photo")
        (masks if ending else others)[stem] = path
    return masks, others


def _kinds(folder, kinds, spec, others):
    """The kinds of label images to read, and prints what is left out.

    Args:
        folder: path of the split, for messages.
        kinds: kinds of label images that are there.
        spec: `DatasetSpec`.
        others: names in the folder that are not in `NAMES`.

    Raises:
        InputError: the label images do not suffice for the spec.
    """
    things = [name for name, thing in zip(spec.class_names, spec.things) if thing]
    if kinds == ["semantic"] and things:
        remedy = f"add a folder instance/ or give the class thing: false{nearest('instance', others)}"
        is_thing = f"{things[0]!r} is a thing in the spec {spec.name!r}"
        raise InputError(f"{folder}: {is_thing}, but there are no instances; {remedy}")
    if kinds == ["instance"] and (len(things) != 1 or spec.num_classes > 2):
        why = "instances alone do not say the class of an object and of a pixel without object"
        has = f"{counted(len(things), 'thing')} among {spec.num_classes} classes"
        raise InputError(f"{folder}: {why}, but the spec {spec.name!r} has {has}; add semantic/")
    if kinds not in ([], ["panoptic"], ["semantic"], ["instance"], ["semantic", "instance"]):
        has = f"{', '.join(kinds)}{nearest('semantic', others)}"
        raise InputError(f"{folder}: either panoptic/, or semantic/ and instance/; here: {has}")
    if "instance" in kinds and not things:
        kinds.remove("instance")
        say(f"{folder}/instance: left out: no class of the spec {spec.name!r} is a thing", error=True)
    if others:
        hints = ["" if name in NAMES else nearest(name.lower(), NAMES) for name in others[:5]]
        shown = [name + hint for name, hint in zip(others, hints)] + ["..."] * (len(others) > 5)
        text = f"{folder}: left out: {', '.join(shown)}; {', '.join(NAMES)} are read"
        if not kinds and {name.lower() for name in others} & {*NAMES}:
            raise InputError(f"{text}, and no labels are there")
        say(text, error=True)
    return kinds


def _read_instances(spec, _, path):
    """`Labels` of an instance image alone, for a spec with one thing class and at most one stuff class."""
    numbers = read_ids(path)
    if numbers.max(initial=0) >= spec.label_divisor:  # closes gaps between the numbers
        numbers = numbered(numbers, np.setdiff1d(numbers, 0))
    (thing,) = (category for category, thing in zip(spec.category_ids, spec.things) if thing)
    stuff = next((category for category in spec.category_ids if category != thing), None)

    def describe(number):
        if not number and stuff is None:
            return 0, spec.ignore, 0
        return segment(spec, path, thing if number else stuff, number)

    return labels_of(numbers, describe)


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
            what = f"label 0 (of pixels that are {present[0]}), which the spec {spec.name!r} does not have"
            raise InputError(f"{path}: {what}; axial-predict's ids of segments need its JSON as {described}")

    def describe(key):
        if not key and spec.class_index(0) is None:
            return 0, spec.ignore, 0
        return segment(spec, path, key // divisor, key % divisor, pixel=key)

    return labels_of(ids, describe)


def _read_semantic(spec, _, semantic, instance=None):
    """`Labels` of a semantic image and, optionally, an instance image."""
    keys = read_ids(semantic)
    if keys.max(initial=0) >= 65536:
        raise InputError(f"{semantic}: label {keys.max()}, which the spec {spec.name!r} does not have")
    if instance:
        numbers = read_ids(instance)
        same_size(instance, numbers, semantic, keys)
        keys = keys + 65536 * numbers
    return labels_of(keys, lambda key: segment(spec, semantic, key % 65536, key // 65536))


def _read_predicted(png, path, spec):
    """`Labels` of a panoptic PNG and the JSON that axial-predict wrote with it. Raises InputError."""
    rows = read_json(path, schemas.Predicted)[1].segments
    check_categories(path, [schemas.CategoryRow(row.category_id, row.name, row.thing) for row in rows], spec)
    check_annotations(path, [schemas.Annotation(0, png, rows)], spec, {*spec.category_ids, *spec.ignored_ids})
    return checked_labels(png, None, rows, spec=spec)
