"""What the objects of a training looked like: their size and the grey levels of the photos, from the training labels.

A network knows objects at the zoom of its training alone. objects.json of a run or an export says which this was.
"""

import os
from typing import Annotated

import numpy as np
import tensorflow as tf
from msgspec import Meta

from axial.data import tfrecord
from axial.data.labels import numbered
from axial.data.streams import decode_photo, name_damaged_records
from axial.io.read import read_json
from axial.io.schemas import Count, Strict

OBJECTS = "objects.json"
MOST_PHOTOS = 500  # that are looked at; records have a random order
PERCENTILES = 5, 50, 95


Pixels = Annotated[float, Meta(gt=0, le=2**16)]
Level = Annotated[float, Meta(ge=0, le=255)]


class Objects(Strict):
    """objects.json of runs and exports: what the things of the training photos looked like, by their labels.

    Each range has the 5th percentile, the median and the 95th percentile: of the diameters of circles of the objects'
    areas, in pixels of the photos as they are stored, and of the photos' `grey_level`s.
    """

    photos: Count  # that were looked at
    objects: Count
    diameter: tuple[Pixels, Pixels, Pixels]
    level: tuple[Level, Level, Level]


def diameters(areas):
    """Diameters of the circles that have these areas: float [n] in pixels, from int [n]."""
    return 2 * np.sqrt(np.asarray(areas) / np.pi)


def grey_level(photo):
    """The median of a photo's grey levels, 0 to 255, from uint8 [h, w, 3]. A grey level is the mean of the channels."""
    return float(np.median(np.asarray(photo).mean(-1)))


def objects_of(data_dir, split):
    """`Objects` of a converted split; None if it has no segments, or no thing among them.

    Crowds are left out. Of a large split, the first `MOST_PHOTOS` photos are looked at.

    Raises:
        InputError: no such split, or a damaged one.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    if manifest["labels"] != "panoptic":
        return None
    things, found, levels = np.array(manifest["spec"].things), [np.zeros(0)], []

    def parse(serialized):
        record = tfrecord.parse_example(serialized)
        ids = tfrecord.segment_ids(record["panoptic/encoded"])
        return decode_photo(record), ids, *(record[f"segment/{name}"] for name in ("id", "class", "crowd"))

    records = tf.data.TFRecordDataset(tfrecord.shard_paths(data_dir, manifest)).take(MOST_PHOTOS)
    with name_damaged_records(data_dir, split):
        for photo, ids, *segments in records.map(parse, tf.data.AUTOTUNE):
            known, classes, crowd = (x.numpy() for x in segments)
            areas = np.bincount(numbered(ids.numpy(), known).ravel(), minlength=len(known) + 1)[1:]
            found.append(diameters(areas[things[classes] & (crowd == 0) & (areas > 0)]))
            levels.append(grey_level(photo))
    found = np.concatenate(found)
    if not len(found):
        return None
    ranges = [np.percentile(values, PERCENTILES).round(2).tolist() for values in (found, levels)]
    return Objects(len(levels), len(found), *map(tuple, ranges))


def read_objects(folder):
    """`Objects` of the folder of a run, or of an export's assets.extra; None of one by an older version."""
    path = os.path.join(folder, OBJECTS)
    return read_json(path, Objects)[1] if tf.io.gfile.exists(path) else None
