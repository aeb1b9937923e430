"""COCO's panoptic layout (https://cocodataset.org/#format-data) as items for `convert_split`.

    input_dir/annotations/panoptic_SPLIT.json      images, annotations, categories
    input_dir/annotations/panoptic_SPLIT/*.png     segment id = R + 256 G + 65536 B
    input_dir/SPLIT/*.jpg
"""

import io
import json
import os
import time

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.data.convert import convert_split, open_image, photo_bytes, read_file
from axial.data.specs import COCO
from axial.errors import InputError, nearest

SAMPLE_DIR = os.path.join(os.path.dirname(__file__), "sample")


def read_annotations(input_dir, split):
    """The JSON of a split, checked: (path, bytes, dict).

    Raises:
        InputError: a folder or file that is missing, with the nearest split; not COCO's panoptic
            JSON; no image.
    """
    if not tf.io.gfile.isdir(input_dir):
        raise InputError(f"{input_dir}: no such folder")
    folder = os.path.join(input_dir, "annotations")
    path = os.path.join(folder, f"panoptic_{split}.json")
    if not tf.io.gfile.exists(path):
        found = [os.path.basename(p)[9:-5] for p in tf.io.gfile.glob(os.path.join(folder, "panoptic_*.json"))]
        has = f"splits here: {', '.join(sorted(found))}{nearest(split, found)}" if found else "no split is here"
        raise InputError(f"{path}: no such file; {has}")
    data = read_file(path)
    try:
        content = json.loads(data)
        missing = {"images", "annotations", "categories"} - set(content)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if missing:
        raise InputError(f"{path}: no {', '.join(sorted(missing))}; is it COCO's panoptic JSON?")
    if not content["annotations"]:
        raise InputError(f"{path}: the split is empty")
    return path, data, content


def coco_items(input_dir, split, spec=COCO):
    """Items of a split in the order of their image ids, and the bytes of its JSON.

    All that can be told without opening a photo is checked here, before any work.

    Raises:
        InputError: as `read_annotations`; a category that the spec does not have; an annotation
            without an image; a photo or PNG that is missing.
    """
    path, data, content = read_annotations(input_dir, split)
    photos = os.path.join(input_dir, split)
    labels = os.path.join(input_dir, "annotations", f"panoptic_{split}")
    for folder in (photos, labels):
        if not tf.io.gfile.isdir(folder):
            raise InputError(f"{folder}: no such folder")
    have = {folder: set(tf.io.gfile.listdir(folder)) for folder in (photos, labels)}
    images = {image["id"]: image for image in content["images"]}
    items = []
    for annotation in sorted(content["annotations"], key=lambda a: a["image_id"]):
        if annotation["image_id"] not in images:
            raise InputError(f"{path}: an annotation names image {annotation['image_id']}, images do not")
        image = images[annotation["image_id"]]
        for folder, name in ((photos, image["file_name"]), (labels, annotation["file_name"])):
            if name not in have[folder]:
                raise InputError(f"{os.path.join(folder, name)}: missing, though {path} names it")
        for segment in annotation["segments_info"]:
            if segment["category_id"] not in spec.class_of_category:
                raise InputError(
                    f"{path}: image {image['id']} has category {segment['category_id']}, "
                    f"which the spec {spec.name!r} does not have"
                )
        items.append(
            {
                "image": image,
                "photo": os.path.join(photos, image["file_name"]),
                "label": os.path.join(labels, annotation["file_name"]),
                "segments": sorted(annotation["segments_info"], key=lambda s: s["id"]),
            }
        )
    return items, data


def encode_item(item, spec=COCO):
    """The record of one item and the seconds of each stage, for `convert_split`.

    Raises:
        InputError: a photo or PNG that is cut short, of another size than the JSON says, or with
            other segments.
    """
    seconds, last = {}, time.perf_counter()

    def lap(stage):
        nonlocal last
        now = time.perf_counter()
        seconds[stage], last = now - last, now

    photo, png = read_file(item["photo"]), read_file(item["label"])
    lap("read")
    image = item["image"]
    size = (image["width"], image["height"])
    photo = photo_bytes(item["photo"], photo, size)
    lap("decode the photo")
    label = open_image(item["label"], png)
    if label.size != size:
        raise InputError(
            f"{item['label']}: {label.size[0]}x{label.size[1]} pixels, the JSON says {size[0]}x{size[1]}"
        )
    if label.mode != "RGB":
        label = label.convert("RGB")
        encoded = io.BytesIO()
        label.save(encoded, format="PNG")
        png = encoded.getvalue()
    lap("decode the labels")
    painted = set(unique_ids(label).tolist()) - {0}
    listed = [segment["id"] for segment in item["segments"]]
    if painted != set(listed) or len(set(listed)) < len(listed):
        odd = sorted(painted ^ set(listed)) or sorted(listed)
        where = "PNG" if odd[0] in painted else "JSON"
        raise InputError(
            f"{item['label']}: its segments are not the JSON's: id {odd[0]} is only in the {where}"
            if painted != set(listed)
            else f"{item['label']}: the JSON lists a segment id twice"
        )
    lap("check the labels")
    fields = {
        "image/encoded": photo,
        "image/file_name": os.path.basename(item["photo"]),
        "image/id": image["id"],
        "image/height": size[1],
        "image/width": size[0],
        "panoptic/encoded": png,
        "segment/id": listed,
        "segment/class": [spec.class_of_category[s["category_id"]] for s in item["segments"]],
        "segment/crowd": [s.get("iscrowd", 0) for s in item["segments"]],
    }
    return fields, seconds


def unique_ids(label):
    """The segment ids of an RGB label image."""
    rgb = np.asarray(label).astype(np.int32)
    return np.unique(rgb[..., 0] + 256 * rgb[..., 1] + 65536 * rgb[..., 2])


def sample_data_dir():
    """The sixteen sample photos as TFRecords in the user's cache, converted at first use."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(cache, "axial", "sample")
    for split in ("train2017", "val2017"):
        items, source = coco_items(SAMPLE_DIR, split)
        convert_split(items, encode_item, COCO, split, path, source, progress=False)
    return path
