"""Measures the objects of training labels: their sizes, and the grey levels of the photos.

A network recognises objects only at the scale of its training photos. The file objects.json of a run or export records
the measurements.
"""

import os
from typing import Annotated

import numpy as np
import tensorflow as tf
from msgspec import Meta

from axial.data import tfrecord
from axial.data.labels import numbered
from axial.data.streams import as_written, decode_photo, name_damaged_records
from axial.io.read import read_existing
from axial.io.schemas import Count, Strict

OBJECTS = "objects.json"
MOST_PHOTOS = 500  # photos to measure; records have a random order
PERCENTILES = 5, 50, 95


Pixels = Annotated[float, Meta(gt=0, le=2**16)]
Level = Annotated[float, Meta(ge=0, le=255)]


class Objects(Strict):
    """Content of objects.json in runs and exports: sizes of the things and brightness of the training photos.

    A tuple has the 5th percentile, the median and the 95th percentile. `diameter` has diameters of circles with the
    objects' areas, in pixels of the stored photos. `level` has the photos' `grey_level`s.
    """

    photos: Count  # number of measured photos
    objects: Count
    diameter: tuple[Pixels, Pixels, Pixels]
    level: tuple[Level, Level, Level]


def diameters(areas):
    """float [n]: diameters in pixels of circles with the given areas, int [n]."""
    return 2 * np.sqrt(np.asarray(areas) / np.pi)


def grey_level(photo):
    """Median grey level, 0 to 255, of uint8 [h, w, 3]. A pixel's grey level is the mean of its channels."""
    return float(np.median(np.asarray(photo).mean(-1)))


def objects_of(data_dir, split):
    """`Objects` of a converted split; None if it has no things.

    Crowds are left out. The first `MOST_PHOTOS` photos of a large split are measured.

    Raises:
        InputError: there is no such split, or it is damaged.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    if manifest["labels"] != "panoptic":
        return None
    things, sizes, levels = np.array(manifest["spec"].things), [np.zeros(0)], []

    def parse(serialized):
        record = tfrecord.parse_example(serialized)
        ids = tfrecord.segment_ids(record["panoptic/encoded"])
        return decode_photo(record), ids, *(record[f"segment/{name}"] for name in ("id", "class", "crowd"))

    records = tf.data.TFRecordDataset(tfrecord.shard_paths(data_dir, manifest)).take(MOST_PHOTOS)
    with name_damaged_records(data_dir, split):
        for photo, ids, *segments in records.map(as_written(parse), tf.data.AUTOTUNE):
            segment_ids, classes, crowd = (x.numpy() for x in segments)
            areas = np.bincount(numbered(ids.numpy(), segment_ids).ravel(), minlength=len(segment_ids) + 1)[1:]
            sizes.append(diameters(areas[things[classes] & (crowd == 0) & (areas > 0)]))
            levels.append(grey_level(photo))
    sizes = np.concatenate(sizes)
    if not len(sizes):
        return None
    ranges = [np.percentile(values, PERCENTILES).round(2).tolist() for values in (sizes, levels)]
    return Objects(len(levels), len(sizes), *map(tuple, ranges))


def read_objects(folder):
    """`Objects` from a run's folder or an export's assets.extra; None if an older version of axial wrote the folder."""
    return read_existing(os.path.join(folder, OBJECTS), Objects)
