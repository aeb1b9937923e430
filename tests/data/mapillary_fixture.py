"""A synthetic data set in the layout of Mapillary Vistas."""

import json
import pathlib

import numpy as np
from PIL import Image

from axial.data.labels import colors_of


def labels_of(version):
    """Returns invented labels for config_*.json. The numbers of stuff and thing labels are those in the release."""
    counted, things, dropped = {"v1.2": (65, 37, 1), "v2.0": (116, 70, 8)}[version]
    thing_numbers = [i for i in range(counted) if i % 9][:things]
    colors = [[i, 2 * i % 256, 255 - i] for i in range(counted)]
    labels = [{"color": c, "instances": i in thing_numbers, "readable": f"Class {i}"} for i, c in enumerate(colors)]
    void = {"color": [0, 0, 0], "instances": False, "evaluate": False}
    labels += [{**void, "readable": f"Unlabeled {i}"} for i in range(dropped)]
    return [{"evaluate": True, **label, "name": f"object--{i}"} for i, label in enumerate(labels)]


class MapillaryFolder:
    """Writes a split to a folder.

    Args:
        root: path of the folder.
        split, version: names such as 'training' and 'v1.2'.
        nested: whether the labels are in a folder named after their version, as in newer releases.
    """

    def __init__(self, root, split="training", version="v1.2", nested=True):
        self.root, self.version = pathlib.Path(root), version
        self.config = self.root / (f"config_{version}.json" if nested else "config.json")
        self.split = self.root / split
        self.photos = self.split / "images"
        annotated = self.split / version if nested else self.split
        self.panoptic = annotated / "panoptic"
        for folder in (self.photos, self.panoptic):
            folder.mkdir(parents=True)
        self.json = self.panoptic / f"panoptic_{2018 if version == 'v1.2' else 2020}.json"
        self.labels = labels_of(version)
        self.config.write_text(json.dumps({"labels": self.labels, "version": version[1:]}))
        self.content = {"images": [], "annotations": [], "categories": []}

    def add(self, key, instances):
        """Adds a photo with an instance image, int [h, w] of label x 256 + instance number."""
        instances = np.asarray(instances)
        height, width = instances.shape
        photo = np.random.default_rng(len(key)).integers(0, 256, [height, width, 3], np.uint8)
        Image.fromarray(photo).save(self.photos / f"{key}.jpg")
        ids, segments = np.zeros(instances.shape, int), []
        for number in np.unique(instances):
            identity = 100000 + 7 * int(number)
            ids[instances == number] = identity
            segments.append({"id": identity, "category_id": int(number) // 256 + 1, "iscrowd": 0})
        Image.fromarray(colors_of(ids)).save(self.panoptic / f"{key}.png")
        self.content["images"].append({"id": key, "file_name": f"{key}.jpg", "height": height, "width": width})
        self.content["annotations"].append({"image_id": key, "file_name": f"{key}.png", "segments_info": segments})
        self.json.write_text(json.dumps(self.content))
