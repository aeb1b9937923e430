"""Lists items of COCO's panoptic layout (https://cocodataset.org/#format-data) for `convert_split`.

    input_dir/annotations/panoptic_SPLIT.json      images, annotations, categories
    input_dir/annotations/panoptic_SPLIT/*.png     segment id = R + 256 G + 65536 B
    input_dir/SPLIT/*.jpg

and, if it exists, of COCO's detection layout, with the boxes and masks of objects:

    input_dir/annotations/instances_SPLIT.json     images, annotations, categories

The test splits have no labels:

    input_dir/annotations/image_info_SPLIT.json    test2017 or test-dev2017
    input_dir/test2017/*.jpg
"""

import functools
import os

import numpy as np
import tensorflow as tf

from axial.data.convert import convert_sample
from axial.data.converters.boxes import read_instances
from axial.data.files import PHOTOS, check_decodes, check_ids, labelled_items, listed_paths, tell_left_out
from axial.data.labels import Labels, decode_rgb, encode_rgb, open_label
from axial.data.specs import ANOTHER_SPEC, COCO, boxes_alone, check_categories
from axial.errors import InputError, nearest
from axial.io import gfile, schemas
from axial.io.paths import inside
from axial.io.read import check_unique, read_file, read_json

SAMPLE_DIR = os.path.join(os.path.dirname(os.path.dirname(__file__)), "sample")


def coco_items(input_dir, split, spec=COCO):
    """Items of a split in order of their image ids, and the bytes of its JSON files.

    Raises:
        InputError: a folder or file is missing (the message names the nearest split); see also `panoptic_items`.
    """
    folder = os.path.join(input_dir, "annotations")
    path = inside(folder, f"image_info_{split}.json", "--split")
    if tf.io.gfile.exists(path):
        return _unlabelled_items(path, inside(input_dir, split.replace("-dev", ""), "--split"))
    path = inside(folder, f"panoptic_{split}.json", "--split")
    if not tf.io.gfile.exists(path):
        patterns = "panoptic_*.json", "image_info_*.json"
        names = [os.path.basename(p) for pattern in patterns for p in gfile.glob(os.path.join(folder, ""), pattern)]
        splits = [name.removeprefix("panoptic_").removeprefix("image_info_").removesuffix(".json") for name in names]
        has = f"splits here: {', '.join(sorted(splits))}{nearest(split, splits)}" if splits else "no split is here"
        raise InputError(f"{path}: no such file{boxes_alone(input_dir, split) or f'; {has}'}")
    items, source = panoptic_items(path, inside(input_dir, split, "--split"), path.removesuffix(".json"), spec)
    path = inside(folder, f"instances_{split}.json", "--split")
    if any(spec.things) and tf.io.gfile.exists(path):
        boxes, data = read_instances(path, spec)
        source += data
        for image_id, item in items.items():
            if image_id not in boxes:
                raise InputError(f"{path}: image {image_id!r} of the panoptic JSON is missing")
            item["boxes"] = boxes[image_id]
    return list(items.values()), source


def check_annotations(path, annotations, spec, category_ids):
    """Raises InputError if annotations repeat an image or a segment, or have a category not in `category_ids`."""
    check_unique(path, "annotations: image_id", (annotation.image_id for annotation in annotations))
    for annotation in annotations:
        where = f"{path}: image {annotation.image_id}"
        check_unique(where, "segments_info: id", (segment.id for segment in annotation.segments_info))
        for segment in annotation.segments_info:
            if segment.category_id not in category_ids:
                raise InputError(f"{where} has category_id {segment.category_id}, which the spec {spec.name!r} lacks")


def panoptic_items(path, photos, labels, spec):
    """Items of a panoptic JSON, in order of their image ids, and the bytes of the JSON.

    All that can be checked without opening a photo is checked here, before the conversion.

    Args:
        path: path of the JSON.
        photos, labels: folders of the photos and of the PNGs that the JSON names.
        spec: `DatasetSpec`; segments with its ignored_ids are dropped.

    Returns:
        dict from the JSON's image ids to items, and the bytes. If the ids are text, an item's 'id' is its position.

    Raises:
        InputError: this is not COCO's panoptic JSON; it has no annotations; an image, annotation or segment is
            repeated; some image ids are text and others numbers; the spec lacks a category or gives it another name;
            an annotation has no image; a photo or PNG is missing.
    """
    data, content = read_json(path, schemas.Panoptic)
    check_categories(path, content.categories, spec, ANOTHER_SPEC)
    check_ids(path, content.images)
    check_annotations(path, content.annotations, spec, {*spec.category_ids, *spec.ignored_ids})
    images = {image.id: image for image in content.images}
    annotations = {annotation.image_id: annotation for annotation in content.annotations}
    if unknown := [image_id for image_id in annotations if image_id not in images]:
        raise InputError(f"{path}: an annotation has image_id {unknown[0]!r}, which is not in images")
    annotated = sorted((image for image in content.images if image.id in annotations), key=lambda image: image.id)
    photo_of, others = listed_paths(path, "images", photos, annotated)
    png_of, _ = listed_paths(path, "annotations", labels, content.annotations)
    listed = {image.file_name: image.id for image in content.images}
    rest = [name for name, image_id in listed.items() if image_id not in annotations]
    rest += [name for name in others if name not in listed and name.lower().endswith(PHOTOS)]
    tell_left_out(photos, f"photos without an annotation in {path}", rest)
    items = photo_items(annotated, photo_of)
    for image, item in zip(annotated, items):
        annotation, size = annotations[image.id], (image.width, image.height)
        png = png_of[annotation.file_name]
        read = functools.partial(checked_labels, png, size, annotation.segments_info, spec=spec)
        item |= {"labels": read, "label_files": [png]}
    return dict(zip((image.id for image in annotated), items)), data


def photo_items(images, paths):
    """Items of images, without labels; `paths` maps file names to paths."""
    items = labelled_items(dict(enumerate(paths[image.file_name] for image in images)), {}, None)
    for image, item in zip(images, items):
        item |= {"name": image.file_name, "id": image.id if isinstance(image.id, int) else item["id"]}
    return items


def _unlabelled_items(path, photos):
    data, content = read_json(path, schemas.ImageInfo)
    check_ids(path, content.images)
    photo_of, _ = listed_paths(path, "images", photos, content.images)
    return photo_items(sorted(content.images, key=lambda image: image.id), photo_of), data


def checked_labels(path, size, segments, *, spec, png=None):
    """`Labels` of a panoptic PNG and its segments_info.

    An RGB PNG keeps its bytes, unless the spec ignores one of its segments. The order of `segments` is kept.

    Args:
        path: path of the PNG.
        size: expected (width, height); None for any.
        segments: `schemas.Segment`s.
        spec: `DatasetSpec`.
        png: bytes of the PNG; by default, they are read from `path`.

    Raises:
        InputError: the PNG is cut short or has a lossy format, or its size or segments differ from the JSON's.
    """
    png = read_file(path) if png is None else png
    label = open_label(path, png)
    if size and label.size != size:
        raise InputError(f"{path}: {label.size[0]}x{label.size[1]} pixels, the JSON says {size[0]}x{size[1]}")
    if (label.format, label.mode) != ("PNG", "RGB"):
        label = label.convert("RGB")
        png = encode_rgb(np.asarray(label))
    else:
        check_decodes(path, png)
    painted = set(np.unique(decode_rgb(label)).tolist()) - {0}
    listed = [segment.id for segment in segments]
    if painted != set(listed):
        odd = min(painted ^ set(listed))
        where = "PNG" if odd in painted else "JSON"
        raise InputError(f"{path}: its segments are not the JSON's: id {odd} is only in the {where}")
    classes = [spec.class_index(segment.category_id) for segment in segments]
    rows = [(s.id, c, int(s.iscrowd)) for s, c in zip(segments, classes) if c != spec.ignore]
    if len(rows) < len(segments):
        rgb, kept = np.asarray(label).copy(), [identity for identity, *_ in rows]
        rgb[~np.isin(decode_rgb(rgb), kept)] = 0
        png = encode_rgb(rgb)
    return Labels(png, label.size, rows)


def sample_data_dir():
    """Folder in the user's cache with the sixteen sample photos as TFRecords. The first call converts them."""
    return convert_sample("sample", ("train2017", "val2017"), functools.partial(coco_items, SAMPLE_DIR), COCO)
