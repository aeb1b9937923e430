"""A synthetic data set in COCO's panoptic layout, and its conversion."""

import json
import pathlib

import numpy as np
from PIL import Image

from axial.data.converters.coco import coco_items
from axial.data.labels import colors_of
from axial.data.specs import COCO
from tests.data import conversion


class CocoFolder:
    """Writes photos with labels to a folder. A test may then damage the files.

    Args:
        root: path of the folder.
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
        """Adds a photo with segment ids, int [h, w], and a category for each id except 0. Returns its name."""
        ids = np.asarray(ids)
        height, width = ids.shape
        name = f"{image_id:012d}"
        if photo is None:
            rng = np.random.default_rng(image_id)
            photo = Image.fromarray(rng.integers(0, 256, [height, width, 3], np.uint8))
        photo.save(self.photos / f"{name}.jpg", **{"format": "JPEG", **save})
        Image.fromarray(colors_of(ids)).save(self.labels / f"{name}.png")
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
    """int [height, width]: one vertical stripe for each id."""
    return np.asarray(ids)[np.arange(width) * len(ids) // width][None].repeat(height, 0)


def convert(folder, output, split="val", **options):
    """Converts a split of a folder; `options` are fields of `Conversion`. Returns the result of `convert_split`."""
    return conversion.convert(coco_items(str(folder), split), COCO, output, split, **options)
