"""A made-up COCO panoptic folder."""

import json
import pathlib

import numpy as np
from PIL import Image


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
