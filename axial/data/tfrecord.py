"""The one TFRecord schema of all segmentation data sets, and files that appear only when they are complete.

A record is a tf.train.Example:

    image/encoded        JPEG or PNG, as the data set has it
    image/file_name      name of the photo
    image/id             the data set's number of the photo
    image/height, image/width
    panoptic/encoded     PNG, RGB: segment id = R + 256 G + 65536 B, 0 without a label
    segment/id           ids of the segments, in rising order
    segment/class        class index of each segment in the DatasetSpec
    segment/crowd        1 where a segment is a crowd

A split is the shards `SPLIT-00000-of-00004.tfrecord` and so on, and its manifest `SPLIT.json`, which is written last.
"""

import json
import os

import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError, nearest

_FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/file_name": tf.io.FixedLenFeature([], tf.string),
    "image/id": tf.io.FixedLenFeature([], tf.int64),
    "image/height": tf.io.FixedLenFeature([], tf.int64),
    "image/width": tf.io.FixedLenFeature([], tf.int64),
    "panoptic/encoded": tf.io.FixedLenFeature([], tf.string),
    "segment/id": tf.io.RaggedFeature(tf.int64),
    "segment/class": tf.io.RaggedFeature(tf.int64),
    "segment/crowd": tf.io.RaggedFeature(tf.int64),
}


def encode_example(fields):
    """The bytes of a record from a dict with the schema's keys. Equal dicts give equal bytes."""
    feature = {}
    for key in _FEATURES:
        value = fields[key]
        values = list(value) if key.startswith("segment/") else [value]
        if values and isinstance(values[0], (bytes, str)):
            values = [v.encode() if isinstance(v, str) else v for v in values]
            feature[key] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        else:
            feature[key] = tf.train.Feature(int64_list=tf.train.Int64List(value=map(int, values)))
    example = tf.train.Example(features=tf.train.Features(feature=feature))
    return example.SerializeToString(deterministic=True)


def parse_example(serialized):
    """dict of tensors with the schema's keys from one serialised record."""
    return tf.io.parse_single_example(serialized, _FEATURES)


def segment_ids(encoded):
    """int32 [h, w] of segment ids from a panoptic PNG."""
    rgb = tf.cast(tf.io.decode_png(encoded, channels=3), tf.int32)
    return rgb[..., 0] + 256 * rgb[..., 1] + 65536 * rgb[..., 2]


# === Splits on disk ===


def shard_name(split, shard, shards):
    return f"{split}-{shard:05d}-of-{shards:05d}.tfrecord"


def write_whole(path, write):
    """Calls write(temporary path), then renames the file to `path`: it is there complete or not at all."""
    if os.path.dirname(path):
        tf.io.gfile.makedirs(os.path.dirname(path))
    temporary = os.path.join(os.path.dirname(path), f".partial.{os.path.basename(path)}")
    write(temporary)
    tf.io.gfile.rename(temporary, path, overwrite=True)


def write_shard(path, records):
    """Writes serialised records to a TFRecord file that appears only when it is complete."""

    def write(temporary):
        with tf.io.TFRecordWriter(temporary) as writer:
            for record in records:
                writer.write(record)

    write_whole(path, write)


def write_text(path, text):
    def write(temporary):
        with tf.io.gfile.GFile(temporary, "w") as file:
            file.write(text)

    write_whole(path, write)


def write_json(path, value):
    write_text(path, json.dumps(value, indent=1) + "\n")


def shard_paths(data_dir, manifest):
    """Paths of the shards of a manifest, in order."""
    return [os.path.join(data_dir, name) for name, *_ in manifest["shards"]]


def read_manifest(data_dir, split):
    """The manifest of a converted split: 'spec', 'examples', 'shards' of [file, records, bytes].

    Raises:
        InputError: no such folder or split (the message names the nearest split); an empty split; a shard that is
            missing or has another length than when it was written.
    """
    if not tf.io.gfile.isdir(data_dir):
        raise InputError(f"{data_dir}: no such folder; --data_dir takes what axial-convert wrote")
    path = os.path.join(data_dir, f"{split}.json")
    if not tf.io.gfile.exists(path):
        found = sorted(os.path.basename(p)[:-5] for p in tf.io.gfile.glob(os.path.join(data_dir, "*.json")))
        has = f"has {', '.join(found)}{nearest(split, found)}" if found else "has no converted split"
        raise InputError(f"{data_dir}: no split {split!r}, the folder {has}")
    try:
        with tf.io.gfile.GFile(path) as file:
            manifest = json.load(file)
        manifest["spec"] = DatasetSpec.from_json(manifest["spec"])
        shards = [(name, int(records), int(size)) for name, records, size in manifest["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a manifest of axial-convert ({error})") from None
    if not manifest["examples"]:
        raise InputError(f"{path}: the split is empty")
    for name, _, size in shards:
        shard = os.path.join(data_dir, name)
        if not tf.io.gfile.exists(shard):
            raise InputError(f"{shard}: the shard is missing; convert the split again")
        length = tf.io.gfile.stat(shard).length
        if length != size:
            raise InputError(
                f"{shard}: {length} bytes where {size} were written, the shard was cut short or "
                "changed; delete it and convert again"
            )
    return manifest
