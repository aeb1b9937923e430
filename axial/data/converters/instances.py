"""COCO's instances_SPLIT.json: the boxes and masks of objects, as fields of records (see `tfrecord`)."""

import collections
import functools
import io

import msgspec
import numpy as np
from PIL import Image
from pycocotools import mask as masks

from axial.data.files import check_ids, tell_left_out
from axial.data.specs import ANOTHER_SPEC, check_categories
from axial.errors import InputError
from axial.io import schemas
from axial.io.read import check_unique, convert, read_json

SLACK = 1.0  # pixels that a box may reach beyond its image: COCO's corners are rounded
SHORTEST = 6  # numbers of a polygon: two points are a line, and pycocotools takes four numbers for a box


def read_instances(path, spec):
    """The objects of a split, and the bytes of its JSON.

    Args:
        path: instances_SPLIT.json.
        spec: `DatasetSpec`; objects of its ignored_ids are dropped.

    Returns:
        A dict from image id to a function of the photo's size that returns the fields of the image's boxes, and the
        bytes.

    Raises:
        InputError: not COCO's JSON; an id that is there twice; an object of an image or a category that the JSON or the
            spec does not have; an object of a class that is no thing; a box with a negative side, or outside its image.
            The message names the object. Ids of two kinds; a category that the spec calls otherwise.
    """
    data, content = read_json(path, schemas.Instances)
    check_categories(path, content.categories, spec, ANOTHER_SPEC)
    check_ids(path, content.images)
    check_unique(path, "annotations: id", (annotation.id for annotation in content.annotations))
    images = {image.id: image for image in content.images}
    known, objects = {category.id for category in content.categories}, collections.defaultdict(list)
    for annotation in content.annotations:
        where = f"{path}: annotation {annotation.id}"
        if annotation.image_id not in images:
            raise InputError(f"{where}: of image {annotation.image_id!r}, which images do not have")
        if annotation.category_id not in known:
            raise InputError(f"{where}: category_id {annotation.category_id}, which categories do not have")
        _check_box(where, annotation.bbox, images[annotation.image_id])
        index = spec.class_index(annotation.category_id)
        if index is None:
            raise InputError(f"{where}: category_id {annotation.category_id}, which the spec {spec.name!r} lacks")
        if index != spec.ignore and not spec.things[index]:
            name = spec.class_names[index]
            raise InputError(
                f"{where}: category_id {annotation.category_id}: {name!r} is no thing of {spec.name!r}; move the file "
                "away to convert without boxes"
            )
        if index != spec.ignore:
            objects[annotation.image_id].append((index, annotation))
    kept = [one for of_image in objects.values() for _, one in of_image]
    short = [f"annotation {one.id}" for one in kept for _ in _short(one)]
    tell_left_out(path, f"polygons of fewer than {SHORTEST} numbers", short)
    unmasked = [f"annotation {one.id}" for one in kept if not _has_mask(one)]
    tell_left_out(path, "objects without a mask, in what needs masks", unmasked)
    fields = {key: functools.partial(_fields_of, path, image, objects[key]) for key, image in images.items()}
    return fields, data


def _fields_of(path, image, objects, photo):
    del photo  # whose size the JSON has
    return box_fields(path, (image.height, image.width), objects)


def _check_box(where, box, image):
    """Raises InputError unless a box (x, y, width, height) lies inside an image."""
    x, y, width, height = box
    text = ", ".join(f"{value:g}" for value in box)
    if width < 0 or height < 0:
        raise InputError(f"{where}: bbox ({text}): expected (x, y, width, height) with sides of at least 0")
    if x < -SLACK or y < -SLACK or x + width > image.width + SLACK or y + height > image.height + SLACK:
        raise InputError(f"{where}: bbox ({text}): outside its image of {image.width}x{image.height} pixels")


def _short(one):
    """The polygons of a `schemas.Instance` that are too short. What is no list of numbers is none; `_mask` names it."""
    lists = [part for part in one.segmentation or () if isinstance(part, list) and len(part) < SHORTEST]
    return [part for part in lists if all(type(number) in (int, float) for number in part)]


def _has_mask(one):
    """Whether a `schemas.Instance` has a segmentation with more than polygons that are too short."""
    return len(_short(one)) < len(one.segmentation or ())


def box_fields(path, size, objects):
    """The fields 'box/' of an image's record.

    Args:
        path: the JSON, for messages.
        size: (height, width) of the image.
        objects: list of (class index, `schemas.Instance`).

    Raises:
        InputError: a segmentation that is not COCO's, of another size than the image, or whose run lengths are of
            another number of pixels.
    """
    fields = {
        "box/known": 1,
        "box/class": tuple(index for index, _ in objects),
        "box/crowd": tuple(int(one.iscrowd) for _, one in objects),
        "box/numbers": np.array([[*one.bbox, one.area] for _, one in objects], "<f8").tobytes(),
    }
    if any(_has_mask(one) for _, one in objects):
        none = _png(np.zeros([1, 1], np.uint8))
        fields["box/mask"] = tuple(
            _mask(f"{path}: annotation {one.id}", one.segmentation, size) if _has_mask(one) else none
            for _, one in objects
        )
    return fields


def _mask(where, segmentation, size):
    """PNG of an object's mask, 255 inside, from COCO's polygons or run lengths."""
    if isinstance(segmentation, list):
        try:
            polygons = convert("", segmentation, list[list[float]])
        except InputError as error:
            raise InputError(f"{where}: segmentation: not COCO's polygons, lists of x, y, ... ({error})") from None
        polygons = [polygon for polygon in polygons if len(polygon) >= SHORTEST]
        runs = masks.merge(masks.frPyObjects(polygons, *size))
    else:
        runs = convert(f"{where}: segmentation: ", segmentation, schemas.AnyRunLengths)
        check_runs(f"{where}: segmentation", runs, size)
        runs = msgspec.structs.asdict(runs)
        if isinstance(runs["counts"], list):
            runs = masks.frPyObjects(runs, *size)
    return _png(masks.decode(runs))


def _png(pixels):
    encoded = io.BytesIO()
    Image.fromarray(255 * pixels).convert("1").save(encoded, "PNG")
    return encoded.getvalue()


def as_json(runs):
    """pycocotools' run lengths, whose counts are bytes, in the form that a JSON has and `check_runs` takes."""
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode()}


def check_runs(where, runs, size):
    """Raises InputError unless a `schemas.AnyRunLengths` is of an image's (height, width), and fills it."""
    if runs.size != tuple(size):
        found, wanted = (f"{width}x{height}" for height, width in (runs.size, size))
        raise InputError(f"{where}: of {found} pixels, the photo has {wanted}")
    counts = runs.counts if isinstance(runs.counts, list) else _unpacked(where, runs.counts)
    if min(counts, default=0) < 0 or sum(counts) != size[0] * size[1]:
        raise InputError(f"{where}: counts: run lengths of {sum(counts)} pixels, the photo has {size[0] * size[1]}")


def _unpacked(where, text):
    """The run lengths in pycocotools' text (maskApi.c, rleFrString), as a list. Raises InputError.

    A character has five bits of a number and whether more follow. The last one has the sign. From the fourth on, a
    number is the difference from the one before the last.
    """
    if not text:
        return []
    bits = np.frombuffer(text.encode(), np.uint8).astype(np.int64) - 48
    last = bits & 32 == 0
    starts = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    digits = np.diff([*starts, len(bits)])
    if ((bits < 0) | (bits > 63)).any() or digits.max() > 7:
        raise InputError(f"{where}: counts: not pycocotools' text of run lengths")
    if not last[-1]:
        raise InputError(f"{where}: counts: pycocotools' text of run lengths is cut short")
    places = np.arange(len(bits)) - np.repeat(starts, digits)
    counts = np.add.reduceat((bits & 31) << 5 * places, starts) - ((bits[last] & 16) << 5 * digits - 4)
    counts[1::2], counts[2::2] = np.cumsum(counts[1::2]), np.cumsum(counts[2::2])
    return counts.tolist()
