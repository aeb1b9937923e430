"""Converted splits whose records hold only a class, for tests of the record order."""

import numpy as np
import tensorflow as tf

from axial.data.convert import Conversion, convert_split
from axial.data.converters.imagenet import classes_spec

PIXEL = tf.io.encode_png(np.zeros([1, 1, 3], np.uint8)).numpy()


def convert_labels(folder, classes, shards, **options):
    """Converts a split 'train' of items with these classes. Item i has the id i. Returns the split's manifest."""
    names = [f"{number:04d}" for number in range(int(np.max(classes)) + 1)]
    items = [{"photo": "", "read": None, "id": number, "class": int(c)} for number, c in enumerate(classes)]
    listed, options = (items, b"labels"), {"encode": encode_label, "progress": False, **options}
    made = Conversion(*listed, classes_spec("labels", names), "train", str(folder), 1, shards=shards, **options)
    return convert_split(made)[0]


def encode_label(item):
    """Returns the fields of an item's record, and no remarks."""
    photo = {"image/encoded": PIXEL, "image/file_name": "", "image/height": 1, "image/width": 1}
    return {**photo, "image/id": item["id"], "image/class": item["class"]}, []


def label_of(record, key):
    """Returns the id and class of a record."""
    del key
    return {"id": record["image/id"], "class": record["image/class"]}


def uniform_classes(classes, batch, draws=100):
    """Returns the mean number of different classes in batches that are drawn uniformly without replacement."""
    rng = np.random.default_rng(0)
    return np.mean([len(np.unique(rng.choice(classes, batch, replace=False))) for _ in range(draws)])
