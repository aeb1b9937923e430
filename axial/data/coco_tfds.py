"""COCO panoptic as tensorflow-datasets prepares it (coco/2017_panoptic), as items for `convert_split`.

The records equal those from COCO's own files, byte for byte, because tensorflow-datasets keeps the encoded images.
"""

import functools
import os

import tensorflow as tf
import tensorflow_datasets as tfds

from axial.data.coco import checked_labels
from axial.data.specs import COCO
from axial.errors import InputError, nearest
from axial.io import schemas
from axial.io.paths import inside

SPLITS = {"train2017": "train", "val2017": "validation"}
_NAME = {
    "image/id": tf.io.FixedLenFeature([], tf.int64),
    "image/filename": tf.io.FixedLenFeature([], tf.string),
}
_DECODERS = {"image": tfds.decode.SkipDecoding(), "panoptic_image": tfds.decode.SkipDecoding()}


def tfds_items(input_dir, split, spec=COCO):
    """Items of a split in the order of their image ids, and bytes that identify this input.

    Args:
        input_dir: tensorflow-datasets' data_dir, in which coco/2017_panoptic is prepared.
        split: one of `SPLITS`.
        spec: `DatasetSpec` whose class names are those of the data set.

    Raises:
        InputError: an unknown split; a data set that is not prepared; classes that the spec does not have.
    """
    if split not in SPLITS:
        raise InputError(f"--split={split}: one of {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    builder = tfds.builder("coco/2017_panoptic", data_dir=input_dir)
    if SPLITS[split] not in builder.info.splits:
        raise InputError(f"{builder.data_dir}: not prepared; run tfds build coco/2017_panoptic --data_dir=... first")
    features = builder.info.features
    names = features["panoptic_objects"].feature["label"].names
    categories = dict(zip(spec.class_names, spec.category_ids))
    unknown = [name for name in names if name not in categories]
    if unknown:
        raise InputError(f"{builder.data_dir}: class {unknown[0]!r}, which the spec {spec.name!r} does not have")
    of_label = [categories[name] for name in names]
    items = []
    for path in map(str, builder.info.splits[SPLITS[split]].filepaths):
        for offset, length in record_places(path):
            found = tf.io.parse_single_example(read_record(path, offset, length), _NAME)
            photo = inside(path, found["image/filename"].numpy().decode(), f"{path}: image/filename")
            read = functools.partial(_read_both, photo, (offset, length), features, categories=of_label, spec=spec)
            items.append({"photo": photo, "id": int(found["image/id"]), "read": read})
    items.sort(key=lambda item: item["id"])
    return items, f"{builder.info.full_name} {split} {len(items)}".encode()


def _read_both(photo, place, features, *, categories, spec):
    """The photo's bytes and the `Labels` of one record. `categories` has the category id of each of tfds' labels."""
    data = read_record(os.path.dirname(photo), *place)
    example = features.deserialize_example(data, decoders=_DECODERS)
    objects = {key: example["panoptic_objects"][key].numpy().tolist() for key in ("id", "label", "is_crowd")}
    segments = [
        schemas.Segment(id=identity, category_id=categories[label], iscrowd=bool(crowd))
        for identity, label, crowd in sorted(zip(*objects.values()))
    ]
    found = checked_labels(photo, example["panoptic_image"].numpy(), None, segments, spec=spec)
    return example["image"].numpy(), found


def record_places(path):
    """(offset, length) of every record's data in a TFRecord file.

    A record is its length as uint64, a checksum of 4 bytes, the data, and another checksum of 4 bytes.

    Raises:
        InputError: a file that ends within a record.
    """
    size, offset = tf.io.gfile.stat(path).length, 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while offset < size:
            file.seek(offset)
            length = int.from_bytes(file.read(8), "little")
            if offset + 16 + length > size:
                raise InputError(
                    f"{path}: {size} bytes end within the record at byte {offset}; prepare the data set again"
                )
            yield offset + 12, length
            offset += 16 + length


def read_record(path, offset, length):
    """The data of one record."""
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(offset)
        return file.read(length)
