"""Functions that change a field of a record, and one that writes the changed record with valid checksums."""

import io
import json
import pathlib

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.data import tfrecord


def png(pixels):
    encoded = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(encoded, "PNG")
    return encoded.getvalue()


def values_of(example, key):
    feature = example.features.feature[key]
    return getattr(feature, feature.WhichOneof("kind")).value


def remove(example, key):
    del example.features.feature[key]


def empty(example, key):
    del values_of(example, key)[:]


def shorten(example, key):
    values_of(example, key).pop()


def double(example, key):
    values_of(example, key).extend(list(values_of(example, key)))


def retype(example, key):
    remove(example, key)
    example.features.feature[key].float_list.value.append(1.5)


def spoil(example, key):
    """Replaces the first value. A number becomes -7, which no record has. Bytes become no valid text and no image."""
    values = values_of(example, key)
    values[0] = values[0][: len(values[0]) // 2] + b"\xff" if isinstance(values[0], bytes) else -7


def exchange(example, key):
    """Reverses the order of numbers, replaces an image by one of another size, or lengthens other bytes."""
    values = values_of(example, key)
    if isinstance(values[0], bytes):
        values[0] = png(np.zeros([4, 4, 3])) if key.endswith(("encoded", "mask")) else values[0] + b"\0" * 8
    else:
        values[:] = values[::-1]


CHANGES = (remove, empty, shorten, double, retype, spoil, exchange)


def changed(record, key, change):
    example = tf.train.Example.FromString(record)
    change(example, key)
    return example.SerializeToString()


def change_record(shard, number, field, change):
    """Changes a field of record `number` in a shard, and updates checksums and the size in the manifest."""
    shard = pathlib.Path(shard)
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(shard))]
    records[number] = changed(records[number], field, change)
    tfrecord.write_shard(str(shard), records)
    (path,) = (path for path in shard.parent.glob("*.json") if shard.name.startswith(f"{path.stem}-"))
    manifest = json.loads(path.read_text())
    manifest["shards"] = [[n, c, shard.stat().st_size if n == shard.name else s] for n, c, s in manifest["shards"]]
    path.write_text(json.dumps({**manifest, "hashes": []}))
