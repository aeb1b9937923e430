"""A made-up COCO panoptic folder, its conversion and its records."""

import json
import os
import pathlib

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import convert_split, encode_item
from axial.data.converters.coco import coco_items
from axial.data.specs import COCO


class CocoFolder:
    """Photos with labels under `root`. Tests may damage the files.

    Args:
        root: folder.
        split: name of the split.
    """

    def __init__(self, root, split="val"):
        self.root, self.split = pathlib.Path(root), split
        self.photos = self.root / split
        self.labels = self.root / "annotations" / f"panoptic_{split}"
        self.json = self.root / "annotations" / f"panoptic_{split}.json"
        self.photos.mkdir(parents=True)
        self.labels.mkdir(parents=True)
        self.content = {"images": [], "annotations": [], "categories": []}

    def add(self, image_id, ids, categories, crowd=(), photo=None, **save):
        """Adds a photo with segment ids, int [h, w], and a category for each id but 0."""
        ids = np.asarray(ids)
        height, width = ids.shape
        name = f"{image_id:012d}"
        if photo is None:
            rng = np.random.default_rng(image_id)
            photo = Image.fromarray(rng.integers(0, 256, [height, width, 3], np.uint8))
        photo.save(self.photos / f"{name}.jpg", **{"format": "JPEG", **save})
        rgb = np.stack([ids % 256, ids // 256 % 256, ids // 65536], -1).astype(np.uint8)
        Image.fromarray(rgb).save(self.labels / f"{name}.png")
        self.content["images"].append({"id": image_id, "file_name": f"{name}.jpg", "height": height, "width": width})
        self.content["annotations"].append(
            {
                "image_id": image_id,
                "file_name": f"{name}.png",
                "segments_info": [
                    {"id": int(i), "category_id": c, "iscrowd": int(i in crowd)} for i, c in categories.items()
                ],
            }
        )
        self.write()
        return name

    def write(self):
        self.json.write_text(json.dumps(self.content))


def stripes(height, width, ids):
    """int [height, width]: one vertical stripe of each id."""
    return np.asarray(ids)[np.arange(width) * len(ids) // width][None].repeat(height, 0)


def convert(folder, output, split="val", **options):
    """Converts a split of a folder; `options` are those of `convert_split`. Returns what that does."""
    items, source = coco_items(str(folder), split)
    options = {"output_dir": str(output), "source": source, "progress": False, **options}
    return convert_split(items, encode_item, COCO, split, **options)


def records(output, split="val"):
    """The parsed records of a converted split."""
    manifest = tfrecord.read_manifest(str(output), split)
    files = [os.path.join(output, name) for name, *_ in manifest["shards"]]
    return [tfrecord.parse_example(r) for r in tf.data.TFRecordDataset(files)]
