"""Lists items of outlined objects for `convert_split`: of COCO's instances, of LabelMe's files, or of YOLO's.

    input_dir/annotations/instances_SPLIT.json    COCO; the photos are in SPLIT/, images/SPLIT/, images/ or input_dir
    input_dir/SPLIT/_annotations.coco.json        COCO as Roboflow exports it, beside the photos
    input_dir/SPLIT/NAME.json                     LabelMe, beside the photo NAME.jpg
    input_dir/data.yaml, labels/SPLIT/NAME.txt    YOLO; the photos are in images/SPLIT/. Or SPLIT/labels/, SPLIT/images/

pycocotools decides which pixels are inside an outline. The parts of an object outside the photo are left out. If
several objects cover a pixel, it belongs to the object with the fewest pixels, and among equals to the last. Pixels
without an object belong to the stuff class `rest`, or are unlabelled. Objects are numbered in the order of the
annotations; a crowd has the number 0.
"""

import base64
import contextlib
import functools
import math
import os
import typing

import numpy as np
from PIL import Image
from pycocotools import mask as masks

from axial.data import files
from axial.data.converters.boxes import FARTHEST, as_json, encoded, read_annotations, run_lengths
from axial.data.converters.coco import photo_items
from axial.data.labels import Labels, labels_of, segment
from axial.data.specs import bare, plain_spec
from axial.errors import InputError
from axial.io import gfile, schemas
from axial.io.images import open_image, upright
from axial.io.paths import inside
from axial.io.read import check_unique, read_file, read_json, read_text, read_yaml

NONE = "none"  # value of `rest` if pixels without an object are unlabelled
UNDER = "under smaller objects: pixels ({}), objects that lose pixels ({}), objects that lose all pixels ({})"
EMPTY = "objects without a pixel ({}): tiny, points or lines, or outside the photo"
BOXES = "a detector learns boxes, by recipes such as coco/faster_rcnn.gin; see docs/own_data.md"
CIRCLE = 64  # corners of the polygon that replaces LabelMe's circles
_COCO, _ROBOFLOW, _YOLO = "annotations/instances_{}.json", "{}/_annotations.coco.json", "data.yaml"


class Outline(typing.NamedTuple):
    """An object: its location in the annotations, for messages, and its category id.

    `pieces` are polygons or run lengths (see `boxes.run_lengths`); their union is the object.
    """

    where: str
    category: int
    pieces: list
    crowd: bool = False


class Shape(schemas.Struct):
    """A shape of LabelMe. Shapes with the same label and group_id are one object."""

    label: schemas.Text
    points: list[tuple[float, float]]
    shape_type: str = "polygon"
    group_id: int | None = None
    mask: str | None = None


class LabelMe(schemas.Struct):
    """LabelMe's JSON of a photo."""

    shapes: list[Shape]
    imageWidth: schemas.Side
    imageHeight: schemas.Side


class YoloData(schemas.Struct):
    """data.yaml. Its paths are not read, because programs resolve them in different ways."""

    names: list[schemas.Text] | dict[schemas.Count, schemas.Text]


def instances_items(input_dir, split, spec, rest, labels=None):
    """Items of a split, and bytes that identify this input.

    Args:
        input_dir, split: see the module.
        spec: `DatasetSpec`. It has the categories by their names.
        rest: name of the stuff class of pixels without an object, or `NONE`.
        labels: 'stored' if outlines of YOLO are fractions of the stored photo, not of the photo turned by its EXIF tag.

    Raises:
        InputError: no annotations are there; a photo is missing; an id is repeated; an object has no mask; `rest` is
            not a stuff class of the spec. Reading the labels raises it for a category that the spec lacks.
    """
    names, items, source = _listed(input_dir, split, labels == "stored")
    index = {bare(name): i for i, name in enumerate(spec.class_names)}
    stuff = None if rest.lower() == NONE else index.get(bare(rest))
    if rest.lower() != NONE and (stuff is None or spec.things[stuff]):
        raise InputError(f"--rest={rest}: expected a stuff class of the spec {spec.name!r}, or {NONE}")
    classes = {category: index.get(bare(name)) for category, name in names.items()}
    for item in items:
        item["labels"] = functools.partial(_paint, spec, classes, stuff, item["labels"])
    return items, source + f" rest {rest}".encode()


def instances_spec(input_dir, splits, rest):
    """The `DatasetSpec` of the categories: `rest`, unless it is `NONE`, and a thing class for each category.

    Raises:
        InputError: no annotations are there; two categories have one name; a category is named like `rest`.
    """
    names, stuff = _listed(input_dir, splits[0])[0], None if rest.lower() == NONE else rest
    twin = next((name for name in names.values() if stuff is not None and bare(name) == bare(stuff)), None)
    if twin is not None:
        raise InputError(f"--rest={rest}: the annotations have a category {twin!r}; choose another name, or {NONE}")
    check_unique(input_dir, "categories, without case and hyphens:", map(bare, names.values()))
    return plain_spec(input_dir, names, stuff)


def _listed(input_dir, split, stored=False):
    """(dict from category ids to names, items, bytes). An item's 'labels' returns ((width, height), `Outline`s)."""
    coco, roboflow = (inside(input_dir, name.format(split), "--split") for name in (_COCO, _ROBOFLOW))
    if gfile.exists(coco):
        return _list_coco(coco, [os.path.join(input_dir, name) for name in (split, f"images/{split}", "images", "")])
    if gfile.exists(roboflow):
        return _list_coco(roboflow, [os.path.dirname(roboflow)])
    if others := gfile.glob(os.path.join(input_dir, "annotations/instances_"), "*.json"):
        raise InputError(f"{coco}: no such file; here: {', '.join(map(os.path.basename, others))}")
    if gfile.exists(os.path.join(input_dir, _YOLO)):
        return _list_yolo(input_dir, split, stored)
    return _list_labelme(input_dir, split)


def _paint(spec, classes, rest, outlines):
    """`Labels` of a photo.

    Args:
        spec: `DatasetSpec`.
        classes: dict from category ids to class indices, None for categories that the spec lacks.
        rest: class index of pixels without an object, or None.
        outlines: function that returns ((width, height), list of `Outline`s).
    """
    size, objects = outlines()
    for one in objects:
        if classes.get(one.category) is None:
            lacks = f"the spec {spec.name!r}" if one.category in classes else "the annotations' list of classes"
            raise InputError(f"{one.where}: category {one.category}, which {lacks} does not have")
    runs = [masks.merge([run_lengths(one.where, piece, size[::-1]) for piece in one.pieces]) for one in objects]
    areas, numbers = np.array([masks.area(one) for one in runs], int), np.zeros(size[::-1], np.int64)
    for i in np.argsort(-areas, kind="stable"):
        x, y, width, height = masks.toBbox(runs[i]).astype(int)
        box = np.s_[y : y + height, x : x + width]
        numbers[box][masks.decode(runs[i])[box] > 0] = i + 1
    visible = np.bincount(numbers.ravel(), minlength=len(runs) + 1)[1:]
    covered, empty = (visible < areas).sum(), (areas == 0).sum()
    under = [(areas - visible).sum(), covered, ((visible == 0) & (areas > 0)).sum()]

    def describe(number):
        if not number:
            return (0, spec.ignore, 0) if rest is None else segment(spec, "", spec.category_ids[rest], 0)
        one = objects[number - 1]
        return segment(spec, one.where, spec.category_ids[classes[one.category]], 0 if one.crowd else number)

    remarks = [(UNDER, [int(count) for count in under])] * bool(covered) + [(EMPTY, [int(empty)])] * bool(empty)
    return Labels(*labels_of(numbers, describe)[:3], remarks)


# === COCO ===


def _list_coco(path, folders):
    """See `_listed`. The photos are in the first of the folders that has the JSON's first photo."""
    data, content = read_annotations(path)
    check_unique(path, "images: file_name", (image.file_name for image in content.images))
    check_unique(path, "categories: id", (row.id for row in content.categories))
    objects = {image.id: [] for image in content.images}
    for one in content.annotations:
        where = f"{path}: annotation {one.id}"
        if not one.segmentation:
            raise InputError(f"{where}: a box without a mask; {BOXES}")
        objects[one.image_id].append(Outline(where, one.category_id, [one.segmentation], bool(one.iscrowd)))
    names = [image.file_name for image in content.images[:1]]
    folder = next((f for f in folders for name in names if gfile.exists(inside(f, name, path))), folders[0])
    photos, others = files.listed_paths(path, "images", folder, content.images)
    unlisted = [name for name in others if name.lower().endswith(files.PHOTOS)]
    files.tell_left_out(folder, f"photos that {path} does not name", unlisted)
    images = sorted(content.images, key=lambda image: image.id)
    items = photo_items(images, photos)
    for image, item in zip(images, items):
        item["labels"] = functools.partial(tuple, ((image.width, image.height), objects[image.id]))
    # Roboflow's first category only groups the others.
    rows, used = content.categories, {one.category_id for one in content.annotations}
    groups = {row.supercategory for row in rows}
    rows = [row for row in rows if row.id in used or row.supercategory != "none" or row.name not in groups]
    if not content.images or not all(row.name for row in rows):
        raise InputError(f"{path}: {'categories: one has no name' if content.images else 'images: empty'}")
    return {row.id: str(row.name) for row in rows}, items, data


# === YOLO ===


def _list_yolo(input_dir, split, stored):
    names = read_yaml(os.path.join(input_dir, _YOLO), YoloData).names
    names = names if isinstance(names, dict) else dict(enumerate(names))
    forms = [("images/{}", "labels/{}"), ("{}/images", "{}/labels")]
    pairs = [[inside(input_dir, form.format(split), "--split") for form in pair] for pair in forms]
    photo_folder, folder = next((pair for pair in pairs if gfile.isdir(pair[0])), (None, None))
    if photo_folder is None:
        raise InputError(f"{' and '.join(pair[0] for pair in pairs)}: no such folder, expected one of them")
    photos, texts = files.by_name(photo_folder, files.PHOTOS), files.by_name(folder, (".txt",))
    files.check_paired(photos, {**photos, **texts}, photo_folder, folder)  # a photo may lack a file of outlines
    lines = {name: [texts[name]] if name in texts else [] for name in photos}
    items = files.labelled_items(photos, lines, functools.partial(_read_yolo, stored))
    return names, items, "\n".join(["yolo", *names.values(), *photos]).encode()


def _read_yolo(stored, photo, path=None):
    """The size and the `Outline`s of a photo. A photo without a file of outlines has no object."""
    image, objects = open_image(photo, read_file(photo)), []
    size = image.size if stored else upright(image).size
    for number, line in enumerate(read_text(path).splitlines() if path else (), 1):
        where, fields = f"{path}: line {number}", line.split()
        try:
            values = [float(field) for field in fields[1:]]
            category = int(fields[0]) if fields else 0
        except ValueError:
            values = [math.nan]
        if len(values) == 4:
            raise InputError(f"{where}: a box without a mask; {BOXES}")
        if fields and (len(values) < 6 or len(values) % 2 or not all(-1 <= value <= 2 for value in values)):
            raise InputError(f"{where}: expected a class and at least three points, x y from 0 to 1")
        if fields:
            objects.append(Outline(where, category, [[(np.reshape(values, [-1, 2]) * size).ravel().tolist()]]))
    return size, objects


# === LabelMe ===


def _list_labelme(input_dir, split):
    """See `_listed`. The categories are the labels in all splits, so that all splits get the same spec."""
    folder = files.split_folder(input_dir, split)
    paths = files.by_name(folder, (".json",), files.PHOTOS)
    if not paths:
        forms = ", ".join(name.format(split) for name in (_COCO, _ROBOFLOW, _YOLO))
        raise InputError(f"{folder}: no JSON of LabelMe; {input_dir} has none of {forms} either")
    photos = files.by_name(folder, files.PHOTOS, (".json",))
    files.check_paired(photos, {**photos, **paths}, folder, folder)
    files.tell_left_out(folder, "photos without a JSON", [name for name in photos if name not in paths])
    folders, labels = [os.path.join(input_dir, name) for name in files.list_folder(input_dir)], set()
    for path in [os.path.join(one, name) for one in folders if gfile.isdir(one) for name in files.list_folder(one)]:
        if path.lower().endswith(".json"):
            with contextlib.suppress(InputError):  # of another program, or damaged; `_read_labelme` names it
                labels |= {shape.label for shape in read_json(path, LabelMe)[1].shapes}
    names = dict(enumerate(sorted(labels), 1))
    read = functools.partial(_read_labelme, {name: category for category, name in names.items()})
    photos = {name: photos[name] for name in paths}
    items = files.labelled_items(photos, {name: [path] for name, path in paths.items()}, read)
    return names, items, "\n".join(["labelme", *names.values(), *paths]).encode()


def _read_labelme(categories, _, path):
    """The size and the `Outline`s of a photo."""
    content, objects = read_json(path, LabelMe)[1], {}
    size = content.imageWidth, content.imageHeight
    for number, shape in enumerate(content.shapes):
        where = f"{path}: shapes[{number}]"
        key = number if shape.group_id is None else (shape.label, shape.group_id)
        outline = objects.setdefault(key, Outline(where, categories[shape.label], []))
        outline.pieces.append(_piece(where, shape, size))
    return size, list(objects.values())


def _piece(where, shape, size):
    """Polygons or run lengths of a `Shape` in a photo of `size` (width, height). Points and lines have no polygon."""
    points = np.array(shape.points, float).reshape([-1, 2])
    if shape.shape_type == "mask" and len(points):
        try:
            png = base64.b64decode(shape.mask or "", validate=True)
        except ValueError:
            raise InputError(f"{where}: mask: not base64") from None
        mask = Image.new("L", size)
        corner = tuple(np.clip(points[0], -FARTHEST, FARTHEST).round().astype(int).tolist())
        mask.paste(open_image(f"{where}: mask", png).convert("L").point(bool), corner)
        return as_json(encoded(np.asarray(mask)))
    if shape.shape_type == "rectangle" and len(points) == 2:
        points = np.stack([points[[0, 1, 1, 0], 0], points[[0, 0, 1, 1], 1]], 1)  # all four corners
    elif shape.shape_type == "circle" and len(points) == 2:
        angles = np.arange(CIRCLE) * 2 * math.pi / CIRCLE
        radius = np.hypot(*(points[1] - points[0]))
        points = points[0] + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    elif shape.shape_type in ("point", "points", "line", "linestrip"):
        return []
    elif len(points) < 3:
        raise InputError(f"{where}: shape_type {shape.shape_type!r}, {len(points)} points: expected a polygon")
    return [points.ravel().tolist()]
