"""COCO's instances_SPLIT.json: the boxes and masks of objects, as fields of records (see `tfrecord`)."""

import collections
import functools
import io

import numpy as np
from PIL import Image
from pycocotools import mask as masks

from axial.errors import InputError
from axial.io import schemas
from axial.io.read import check_unique, read_json

SLACK = 1.0  # pixels that a box may reach beyond its image: COCO's corners are rounded


def read_instances(path, spec):
    """The objects of a split, and the bytes of its JSON.

    Args:
        path: instances_SPLIT.json.
        spec: `DatasetSpec`; objects of its ignored_ids are dropped.

    Returns:
        `schemas.Instances`, a dict from image id to a function without arguments that returns the fields of the
        image's boxes, and the bytes.

    Raises:
        InputError: not COCO's JSON; an id that is there twice; an object of an image or a category that the JSON or the
            spec does not have; an object of a class that is no thing; a box with a negative side, or outside its image.
            The message names the object.
    """
    data, content = read_json(path, schemas.Instances)
    check_unique(path, "images: id", (image.id for image in content.images))
    check_unique(path, "annotations: id", (annotation.id for annotation in content.annotations))
    images = {image.id: image for image in content.images}
    known, objects = {category.id for category in content.categories}, collections.defaultdict(list)
    for annotation in content.annotations:
        where = f"{path}: annotation {annotation.id}"
        if annotation.image_id not in images:
            raise InputError(f"{where}: of image {annotation.image_id}, which images do not have")
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
    fields = {
        key: functools.partial(box_fields, path, (image.height, image.width), objects[key])
        for key, image in images.items()
    }
    return content, fields, data


def _check_box(where, box, image):
    """Raises InputError unless a box (x, y, width, height) lies inside an image."""
    x, y, width, height = box
    text = ", ".join(f"{value:g}" for value in box)
    if width < 0 or height < 0:
        raise InputError(f"{where}: bbox ({text}): expected (x, y, width, height) with sides of at least 0")
    if x < -SLACK or y < -SLACK or x + width > image.width + SLACK or y + height > image.height + SLACK:
        raise InputError(f"{where}: bbox ({text}): outside its image of {image.width}x{image.height} pixels")


def box_fields(path, size, objects):
    """The fields 'box/' of an image's record.

    Args:
        path: the JSON, for messages.
        size: (height, width) of the image.
        objects: list of (class index, `schemas.Instance`).

    Raises:
        InputError: a segmentation that is not COCO's, or of another size than the image.
    """
    fields = {
        "box/known": 1,
        "box/class": tuple(index for index, _ in objects),
        "box/crowd": tuple(int(one.iscrowd) for _, one in objects),
        "box/numbers": np.array([[*one.bbox, one.area] for _, one in objects], "<f8").tobytes(),
    }
    if objects and all(one.segmentation for _, one in objects):
        fields["box/mask"] = tuple(_mask(f"{path}: annotation {one.id}", one.segmentation, size) for _, one in objects)
    return fields


def _mask(where, segmentation, size):
    """PNG of an object's mask, 255 inside, from COCO's polygons or run lengths."""
    try:
        runs = segmentation
        if isinstance(segmentation, list):
            runs = masks.merge(masks.frPyObjects(segmentation, *size))
        elif isinstance(segmentation["counts"], list):
            runs = masks.frPyObjects(segmentation, *size)
        pixels = masks.decode(runs)
    except Exception as error:  # whatever pycocotools raises for what is not a segmentation
        raise InputError(f"{where}: segmentation: not COCO's polygons or run lengths ({error})") from None
    if pixels.shape != size:
        raise InputError(f"{where}: segmentation: of {pixels.shape}, the image has {size}")
    encoded = io.BytesIO()
    Image.fromarray(255 * pixels).convert("1").save(encoded, "PNG")
    return encoded.getvalue()
