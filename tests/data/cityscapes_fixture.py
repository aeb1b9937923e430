"""A synthetic data set in Cityscapes' folder layout."""

import pathlib

import numpy as np
from PIL import Image


class CityscapesFolder:
    """Writes photos with labels to a folder. A test may then damage the files.

    Args:
        root: path of the folder.
        split, labels: names of the split and of the label folder.
    """

    def __init__(self, root, split="val", labels="gtFine"):
        self.root, self.labels = pathlib.Path(root), labels
        self.photos, self.truth = self.root / "leftImg8bit" / split, self.root / labels / split

    def add(self, city, frame, instances, labelled=True):
        """Adds a photo with instance ids, int [h, w], as in *_instanceIds.png. Returns its city_sequence_frame."""
        name = f"{city}_000000_{frame:06d}"
        instances = np.asarray(instances)
        for folder in (self.photos, self.truth) if labelled else (self.photos,):
            (folder / city).mkdir(parents=True, exist_ok=True)
        photo = np.random.default_rng(frame).integers(0, 256, [*instances.shape, 3], np.uint8)
        Image.fromarray(photo).save(self.photos / city / f"{name}_leftImg8bit.png")
        if labelled:
            ids = np.where(instances >= 1000, instances // 1000, instances)
            Image.fromarray(instances.astype(np.uint16)).save(self.path(name, "instanceIds"))
            Image.fromarray(ids.astype(np.uint8)).save(self.path(name, "labelIds"))
        return name

    def path(self, name, kind):
        return self.truth / name.split("_")[0] / f"{name}_{self.labels}_{kind}.png"


# Every instance id of the label table except the licence plate's. Each thing class has two instances and a group.
STREET = [*range(34), *(1000 * i + k for i in (24, 25, 26, 27, 28, 29, 30, 31, 32, 33) for k in (0, 1, 7))]


def street(height=40, width=128, seed=0):
    """int [height, width]: blocks of random ids. Each id of `STREET` appears at least once."""
    rng = np.random.default_rng(seed)
    blocks = np.concatenate([STREET, rng.choice(STREET, 16 * 5 - len(STREET))])
    return np.kron(rng.permutation(blocks).reshape(5, 16), np.ones((height // 5, width // 16), int))
