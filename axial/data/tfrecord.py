"""TFRecord schemas of all data sets, and splits on disk.

A record is a tf.train.Example:

    image/encoded        JPEG or PNG, as in the data set
    image/orientation    EXIF orientation, 1 to 8, that turns the photo upright; 1 if absent. Labels, height and width
                         refer to the upright photo
    image/file_name      name of the photo; COCO's includes the subfolders of the split
    image/id             id of the photo in the data set
    image/height, image/width

A segmentation data set adds labels, schema 'panoptic':

    panoptic/encoded     RGB PNG: segment id = R + 256 G + 65536 B, 0 for unlabelled pixels
    segment/id           segment ids, in the order of the data set's JSON; without a JSON, ascending
    segment/class        class index of each segment in the DatasetSpec
    segment/crowd        1 for a crowd

A data set with boxes adds them too, and 'box/known' is 1. Records of axial 0.2 have none of these fields:

    box/class            class index of each object in the DatasetSpec
    box/crowd            1 for a crowd
    box/numbers          float64 [n, 5], little-endian: x, y, width, height in pixels, and area of the mask
    box/mask             PNG of each object's mask, 255 inside; a PNG of one pixel means no mask. The list is empty if
                         no object has a mask

Schema 'objects' has boxes only. A classification data set has the schema 'class':

    image/class          class index of the photo in the DatasetSpec

A record of sentence pairs, schema 'text', has no photo:

    text/id                    line number, from 0
    source/text, target/text   UTF-8
    source/ids, target/ids     piece ids of the TextSpec; the last id is its `end`

A split consists of shards named `SPLIT-00000-of-00004.tfrecord` and so on, and of its manifest `SPLIT.json`, which is
written last. The manifest's 'permutation' is the seed of the record order. Without it, as in older versions, records
have the order of the data set's items. The manifest's optional 'left_out' lists the items without a record.
"""

import concurrent.futures
import functools
import hashlib
import os
import typing

import msgspec
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from axial.data.files import find_manifest
from axial.data.specs import DatasetSpec, StoredSpec
from axial.errors import InputError
from axial.io import gfile
from axial.io.paths import inside
from axial.io.read import LARGEST_TEXT, check_regular, read_json
from axial.io.schemas import Count, Struct, Text
from axial.io.write import write_whole


class Plan(Struct):
    """Content of .SPLIT.plan, the manifest of an unfinished conversion.

    `stamps` has, for each shard, a hash of the sizes and modification times of its input files.
    """

    format: typing.Literal[1]
    spec: StoredSpec
    split: Text
    examples: typing.Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    source: Text
    stamps: list[Text] = []
    labels: typing.Literal["panoptic", "objects", "class", "text"] = "panoptic"  # key of `SCHEMAS`
    # Seed of the record order (see `item_numbers`); None if the records have the order of the items.
    permutation: typing.Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    shards: list[tuple[Text, Count, Count]] = []
    hashes: list[Text] = []
    left_out: list[tuple[Count, str]] = []


class Manifest(Plan, kw_only=True):
    """Content of SPLIT.json, the manifest of a converted split.

    `shards` lists [file name, number of records, bytes], `hashes` the SHA-256 of each shard. `left_out` lists the items
    that --skip_broken left out, as (index in the data set's list, error message).
    """

    shards: typing.Annotated[list[tuple[Text, Count, Count]], msgspec.Meta(min_length=1)]


_TEXT, _NUMBER = tf.io.FixedLenFeature([], tf.string), tf.io.FixedLenFeature([], tf.int64)
_NUMBERS = tf.io.RaggedFeature(tf.int64)
_PHOTO = {
    **dict.fromkeys(("image/encoded", "image/file_name"), _TEXT),
    **dict.fromkeys(("image/id", "image/height", "image/width"), _NUMBER),
    "image/orientation": tf.io.FixedLenFeature([], tf.int64, 1),
}
_BOXES = {
    "box/known": tf.io.FixedLenFeature([], tf.int64, 0),
    **dict.fromkeys(("box/class", "box/crowd"), _NUMBERS),
    "box/numbers": tf.io.FixedLenFeature([], tf.string, ""),
    "box/mask": tf.io.RaggedFeature(tf.string),
}
_SEGMENTS = {"panoptic/encoded": _TEXT, **dict.fromkeys(("segment/id", "segment/class", "segment/crowd"), _NUMBERS)}
_PAIR = dict.fromkeys(("source/text", "target/text"), _TEXT) | dict.fromkeys(("source/ids", "target/ids"), _NUMBERS)
SCHEMAS = {
    "panoptic": {**_PHOTO, **_SEGMENTS, **_BOXES},
    "objects": {**_PHOTO, **_BOXES},
    "class": {**_PHOTO, "image/class": _NUMBER},
    "text": {"text/id": _NUMBER, **_PAIR},
}
WITH_OBJECTS = ("panoptic", "objects")

BOX_BYTES = 5 * 8  # bytes of an object in 'box/numbers'
REQUESTS = 32  # concurrent requests for shard lengths; a bucket takes 0.05 s for each
_checked = set()  # (path, bytes) of bucket manifests whose shards this process has checked


def encode_example(fields):
    """Bytes of a record from a dict with a schema's keys. Equal dicts give equal bytes."""
    feature = {}
    for key, value in fields.items():
        values = [value] if np.isscalar(value) else list(value)
        if values and isinstance(values[0], (bytes, str)):
            values = [v.encode() if isinstance(v, str) else v for v in values]
            feature[key] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        else:
            feature[key] = tf.train.Feature(int64_list=tf.train.Int64List(value=map(int, values)))
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(deterministic=True)


def parse_example(serialized, labels="panoptic"):
    """dict of tensors with the keys of the schema `labels`, from one serialised record."""
    return tf.io.parse_single_example(serialized, SCHEMAS[labels])


def photo_name(record):
    """Name of a parsed record's photo. Raises InputError if it is not Unicode."""
    name = record["image/file_name"].numpy()
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise InputError(f"a record's image/file_name {name[:100]!r}: not UTF-8") from None


def segment_ids(encoded):
    """int32 [h, w] of segment ids, from a panoptic PNG."""
    rgb = tf.cast(tf.io.decode_png(encoded, channels=3), tf.int32)
    return rgb[..., 0] + 256 * rgb[..., 1] + 65536 * rgb[..., 2]


# === Splits on disk ===


def shard_name(split, shard, shards):
    return f"{split}-{shard:05d}-of-{shards:05d}.tfrecord"


def write_shard(path, records):
    """Writes serialised records to a TFRecord file, which appears only when it is complete."""

    def write(temporary):
        with tf.io.TFRecordWriter(temporary) as writer:
            for record in records:
                writer.write(record)

    write_whole(path, write)


def shard_path(data_dir, name):
    """Path of a manifest's shard. Raises InputError if its name leads out of the folder."""
    return inside(data_dir, name, f"{data_dir}: a manifest's shard")


def shard_paths(data_dir, manifest):
    """Paths of a manifest's shards, in order."""
    return [shard_path(data_dir, name) for name, *_ in manifest["shards"]]


def item_numbers(records, permutation, left_out=()):
    """int64 [records]: index of each record's item in the data set's list.

    Data sets list their items by class, city or date. Training reads neighbouring records together, so neighbouring
    records must not be alike.

    Args:
        records: number of records.
        permutation: seed of the record order from the manifest; None for the order of the items.
        left_out: (number, reason) of each item without a record, from the manifest.
    """
    items = records + len(left_out)
    order = np.arange(items)
    if permutation is not None:
        order = np.random.RandomState(permutation).permutation(items)  # NumPy guarantees this generator's output
    return order[~np.isin(order, [number for number, _ in left_out])]


def find_splits(data_dir, splits):
    """Names of a recipe's splits. If a folder has none of them, its own splits may replace them.

    Args:
        data_dir: folder of a converted data set.
        splits: dict from the beginning of a split's name, 'train' or 'val', to the recipe's split.

    Returns:
        list in the order of `splits`. A split is replaced if exactly one split of the folder has its beginning.
    """
    paths = gfile.glob(os.path.join(data_dir, ""), "*.json") if data_dir else []
    names = [os.path.basename(path)[:-5] for path in paths]
    if set(names) & set(splits.values()):
        return list(splits.values())
    alike = {kind: [name for name in names if name.startswith(kind)] for kind in splits}
    return [alike[kind][0] if len(alike[kind]) == 1 else split for kind, split in splits.items()]


def is_labelled(data_dir, split):
    """Whether any record of a split has a label. Reads no record after the first labelled or damaged one."""
    manifest = read_manifest(data_dir, split)
    if manifest["labels"] not in WITH_OBJECTS:
        return True
    try:
        records = tf.data.TFRecordDataset(shard_paths(data_dir, manifest))
        features = (tf.train.Example.FromString(record.numpy()).features.feature for record in records)
        return any(feature[name].int64_list.value for feature in features for name in ("segment/id", "box/class"))
    except (tf.errors.OpError, DecodeError):  # training or evaluation reports the damaged record
        return True


def fingerprint(data_dir, split):
    """A text that identifies the records of a split: its classes, its number of records and a hash of its shards.

    A copy in another folder has the same fingerprint. The shards themselves are not read.

    Raises:
        InputError: no such split.
    """
    manifest = read_json(inside(data_dir, f"{split}.json", "--split"), Manifest, LARGEST_TEXT)[1]
    spec, content = manifest.spec, manifest.hashes or [manifest.source, manifest.shards]  # axial 0.1 wrote no hashes
    classes = [spec.class_names, spec.category_ids, spec.things, spec.label_divisor, spec.ignore, spec.vocabulary]
    digest = hashlib.sha256(msgspec.json.encode([classes, manifest.labels, content])).hexdigest()
    return f"{spec.name} {split}, {manifest.examples} records, {digest[:16]}"


def read_manifest(data_dir, split):
    """dict of the fields of a converted split's `Manifest`, with its `DatasetSpec` or `TextSpec` as 'spec'.

    A process checks the shards of a manifest in a bucket only once.

    Raises:
        InputError: there is no such folder or split (the message names the nearest split); the split is empty; a shard
            is missing or has another length than when it was written.
    """
    path = find_manifest(data_dir, split)
    content, manifest = read_json(path, Manifest, LARGEST_TEXT)
    if manifest.split != split:
        raise InputError(f"{path}: split: the manifest is of {manifest.split!r}")
    if sum(records for _, records, _ in manifest.shards) != manifest.examples:
        raise InputError(f"{path}: examples: {manifest.examples}, the shards have another number of records")
    if (path, content) not in _checked:
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(functools.partial(_check_shard, path, data_dir), manifest.shards))
        if gfile.is_remote(path):
            _checked.add((path, content))
    return {**msgspec.structs.asdict(manifest), "spec": DatasetSpec.from_schema(path, manifest.spec)}


def _check_shard(path, data_dir, row):
    """Raises InputError unless a manifest's shard exists with its original length."""
    name, records, size = row
    shard = shard_path(data_dir, name)
    check_regular(shard)
    if 16 * records > size:  # a record takes 16 bytes more than its data
        raise InputError(f"{path}: shards: {records} records do not fit the {size} bytes of {name}")
    length = tf.io.gfile.stat(shard).length if tf.io.gfile.exists(shard) else 0
    if length != size:
        raise InputError(f"{shard}: {length} bytes where {size} were written, it is lost or changed; convert again")
