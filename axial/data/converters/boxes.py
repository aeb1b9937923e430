"""Reads COCO's instances_SPLIT.json: boxes and masks of objects, as record fields (see `tfrecord`)."""

import collections
import functools

import msgspec
import numpy as np
from PIL import Image
from pycocotools import mask as masks

from axial.data.files import check_ids, tell_left_out
from axial.data.specs import ANOTHER_SPEC, check_categories
from axial.errors import InputError
from axial.io import schemas
from axial.io.read import check_unique, convert, read_json
from axial.io.write import bytes_of

SLACK = 1.0  # pixels by which a box may extend beyond its image, because COCO rounds corners
FARTHEST = 2**17  # largest coordinate of a polygon, in pixels; pycocotools takes time in proportion to its length
SHORTEST = 6  # fewest numbers of a polygon: two points are a line, and pycocotools reads four numbers as a box


def read_instances(path, spec):
    """The objects of a split, and the bytes of its JSON.

    Args:
        path: path of instances_SPLIT.json.
        spec: `DatasetSpec`; objects with its ignored_ids are dropped.

    Returns:
        A dict from each image id to a function of the photo's size (width, height) that returns the image's box fields,
        and the bytes.

    Raises:
        InputError: this is not COCO's JSON; an id is repeated; the JSON lacks an object's image; the spec lacks an
            object's category or gives it another name; an object's class is not a thing; a box extends beyond its
            image; some image ids are text and others numbers. The message names the object.
    """
    data, content = read_annotations(path)
    check_categories(path, content.categories, spec, ANOTHER_SPEC)
    images, objects = {image.id: image for image in content.images}, collections.defaultdict(list)
    for annotation in content.annotations:
        where = f"{path}: annotation {annotation.id}"
        if None in (annotation.bbox, annotation.area):
            raise InputError(f"{where}: bbox and area are needed")
        _check_box(where, annotation.bbox, images[annotation.image_id])
        index = spec.class_index(annotation.category_id)
        if index is None:
            raise InputError(f"{where}: category_id {annotation.category_id}, which the spec {spec.name!r} lacks")
        if index != spec.ignore:
            if not spec.things[index]:
                what = f"category_id {annotation.category_id}: {spec.class_names[index]!r} is not a thing"
                raise InputError(f"{where}: {what} of {spec.name!r}; move the file away to convert without boxes")
            objects[annotation.image_id].append((index, annotation))
    kept = [one for annotated in objects.values() for _, one in annotated]
    short = [f"annotation {one.id}" for one in kept for _ in _short(one)]
    tell_left_out(path, f"polygons of fewer than {SHORTEST} numbers", short)
    unmasked = [f"annotation {one.id}" for one in kept if not _has_mask(one)]
    tell_left_out(path, "objects without a mask, where masks are needed", unmasked)
    return {key: functools.partial(box_fields, path, objects[key]) for key in images}, data


def read_annotations(path):
    """(bytes, `schemas.Instances`) of COCO's instances_SPLIT.json.

    Raises:
        InputError: this is not COCO's JSON; an id is repeated; the JSON lacks an object's image; some image ids are
            text and others numbers.
    """
    data, content = read_json(path, schemas.Instances)
    check_ids(path, content.images)
    check_unique(path, "annotations: id", (annotation.id for annotation in content.annotations))
    images = {image.id for image in content.images}
    if odd := next((one for one in content.annotations if one.image_id not in images), None):
        raise InputError(f"{path}: annotation {odd.id}: image_id {odd.image_id!r} is not in images")
    return data, content


def _check_box(where, box, image):
    """Raises InputError unless a box (x, y, width, height) lies inside an image."""
    x, y, width, height = box
    ends = (x >= -SLACK, y >= -SLACK, x + width <= image.width + SLACK, y + height <= image.height + SLACK)
    if min(width, height) < 0 or not all(ends):
        text = ", ".join(f"{value:g}" for value in box)
        expected = f"expected (x, y, width, height) inside its image of {image.width}x{image.height} pixels"
        raise InputError(f"{where}: bbox ({text}): {expected}")


def _short(one):
    """Polygons of a `schemas.Instance` that are too short. `_mask` reports lists with other values than numbers."""
    lists = [polygon for polygon in one.segmentation or () if isinstance(polygon, list) and len(polygon) < SHORTEST]
    return [polygon for polygon in lists if all(type(number) in (int, float) for number in polygon)]


def _has_mask(one):
    """Whether a `schemas.Instance` has run lengths, or a polygon that is not too short."""
    return len(_short(one)) < len(one.segmentation or ())


def box_fields(path, objects, size):
    """The 'box/' fields of an image's record.

    Args:
        path: path of the JSON, for messages.
        objects: list of (class index, `schemas.Instance`).
        size: (width, height) of the image.

    Raises:
        InputError: a segmentation does not have COCO's form, or its size or number of pixels differs from the image's.
    """
    fields = {
        "box/known": 1,
        "box/class": tuple(index for index, _ in objects),
        "box/crowd": tuple(int(one.iscrowd) for _, one in objects),
        "box/numbers": np.array([[*one.bbox, one.area] for _, one in objects], "<f8").tobytes(),
    }
    if any(_has_mask(one) for _, one in objects):
        masked = [(f"{path}: annotation {one.id}", one.segmentation if _has_mask(one) else None) for _, one in objects]
        fields["box/mask"] = tuple(_mask(where, segmentation, size[::-1]) for where, segmentation in masked)
    return fields


def _mask(where, segmentation, size):
    """PNG of an object's mask, 255 inside, from COCO's polygons or run lengths; one pixel for None."""
    pixels = np.zeros([1, 1], np.uint8)
    if segmentation is not None:
        pixels = masks.decode(run_lengths(where, segmentation, size))
    return bytes_of(lambda file: Image.fromarray(255 * pixels).convert("1").save(file, "PNG"))


def run_lengths(where, segmentation, size):
    """pycocotools' run lengths of a mask of `size` (height, width), from COCO's polygons or run lengths.

    Polygons that are too short, and what lies outside the mask, have no pixels. Raises InputError for another form.
    """
    if isinstance(segmentation, list):
        try:
            polygons = convert("", segmentation, list[list[float]])
        except InputError as error:
            raise InputError(f"{where}: segmentation: not COCO's polygons, lists of x, y, ... ({error})") from None
        polygons = [polygon for polygon in polygons if len(polygon) >= SHORTEST]
        if any(len(polygon) % 2 or max(map(abs, polygon)) > FARTHEST for polygon in polygons):
            raise InputError(f"{where}: segmentation: expected pairs x, y of at most {FARTHEST} pixels")
        return masks.merge(masks.frPyObjects(polygons, *size)) if polygons else encoded(np.zeros(size, np.uint8))
    runs = convert(f"{where}: segmentation: ", segmentation, schemas.AnyRunLengths)
    check_runs(f"{where}: segmentation", runs, size)
    runs = msgspec.structs.asdict(runs)
    return masks.frPyObjects(runs, *size) if isinstance(runs["counts"], list) else runs


def encoded(mask):
    """pycocotools' run lengths of a mask, uint8 [h, w]."""
    return masks.encode(np.asfortranarray(mask))


def as_json(runs):
    """Converts pycocotools' run lengths, whose counts are bytes, to the form for JSON and `check_runs`."""
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode()}


def check_runs(where, runs, size):
    """Raises InputError unless a `schemas.AnyRunLengths` has the (height, width) `size` and as many pixels."""
    if runs.size != tuple(size):
        mask_size, photo_size = (f"{width}x{height}" for height, width in (runs.size, size))
        raise InputError(f"{where}: of {mask_size} pixels, the photo has {photo_size}")
    counts = runs.counts if isinstance(runs.counts, list) else _unpacked(where, runs.counts)
    if min(counts, default=0) < 0 or sum(counts) != size[0] * size[1]:
        raise InputError(f"{where}: counts: run lengths of {sum(counts)} pixels, the photo has {size[0] * size[1]}")


def _unpacked(where, text):
    """List of the run lengths in pycocotools' text (maskApi.c, rleFrString). Raises InputError.

    A character holds five bits of a number, and a flag that more characters follow. The number's last character also
    holds its sign. From the fourth number on, the text has the difference from the run length two positions before.
    """
    if not text:
        return []
    bits = np.frombuffer(text.encode(), np.uint8).astype(np.int64) - 48
    last = bits & 32 == 0
    starts = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    digits = np.diff([*starts, len(bits)])
    if ((bits < 0) | (bits > 63)).any() or digits.max() > 7 or not last[-1]:
        raise InputError(f"{where}: counts: not pycocotools' text of run lengths, or cut short")
    places = np.arange(len(bits)) - np.repeat(starts, digits)
    counts = np.add.reduceat((bits & 31) << 5 * places, starts) - ((bits[last] & 16) << 5 * digits - 4)
    counts[1::2], counts[2::2] = np.cumsum(counts[1::2]), np.cumsum(counts[2::2])
    return counts.tolist()
