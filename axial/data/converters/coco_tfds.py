"""Lists items of COCO as tensorflow-datasets prepares it (coco/2017_panoptic), for `convert_split`.

Records equal the records from COCO's own panoptic files, byte for byte, because tensorflow-datasets keeps the encoded
images. The prepared data set has no object masks.
"""

import functools
import os
import re

import tensorflow as tf
import tensorflow_datasets as tfds
from google.protobuf.message import DecodeError

from axial.data.converters.coco import checked_labels
from axial.data.specs import COCO
from axial.errors import InputError, nearest
from axial.io import gfile, schemas
from axial.io.paths import inside

NAME = "coco/2017_panoptic"
SPLITS = {"train2017": "train", "val2017": "validation"}
_DECODERS = {"image": tfds.decode.SkipDecoding(), "panoptic_image": tfds.decode.SkipDecoding()}


def coco_tfds_items(input_dir, split, spec=COCO):
    """Items of a split in order of their image ids, and bytes that identify this input.

    Args:
        input_dir: data_dir of tensorflow-datasets, in which coco/2017_panoptic is prepared.
        split: one of `SPLITS`.
        spec: `DatasetSpec` with the data set's class names.

    Raises:
        InputError: the split is unknown or not prepared; the spec lacks a class.
    """
    if split not in SPLITS:
        raise InputError(f"--split={split}: one of {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    versions = gfile.glob(os.path.join(input_dir, NAME), "/*/dataset_info.json")
    if not versions:
        folder = os.path.join(input_dir, NAME)
        raise InputError(f"{folder}: not prepared; run tfds build {NAME} --data_dir={input_dir} first")
    newest = max(versions, key=lambda path: [int(number) for number in re.findall(r"\d+", path.split("/")[-2])])
    builder = tfds.builder_from_directory(os.path.dirname(newest))
    if SPLITS[split] not in builder.info.splits:
        raise InputError(f"{builder.data_dir}: the split {SPLITS[split]!r} is not prepared")
    category_of = dict(zip(spec.class_names, spec.category_ids))
    names = builder.info.features["panoptic_objects"].feature["label"].names
    if unknown := [name for name in names if name not in category_of]:
        raise InputError(f"{builder.data_dir}: class {unknown[0]!r}, which the spec {spec.name!r} does not have")
    categories, items = [category_of[name] for name in names], []
    read = functools.partial(_read_record, builder.info.features, categories, spec)
    for path in map(str, builder.info.splits[SPLITS[split]].filepaths):
        for extent, fields in record_fields(path, ("image/id", "image/filename")):
            photo = inside(path, fields["image/filename"].bytes_list.value[0].decode(), f"{path}: image/filename")
            number = fields["image/id"].int64_list.value[0]
            items.append({"photo": photo, "id": number, "read": functools.partial(read, photo, path, *extent)})
    items.sort(key=lambda item: item["id"])
    return items, f"{builder.info.full_name} {split} {len(items)}".encode()


def _read_record(features, categories, spec, photo, path, offset, length):
    """(bytes of the photo, its `Labels`) of a record.

    Args:
        features: features of the builder of tensorflow-datasets.
        categories: category id of each of the builder's labels.
        spec: `DatasetSpec`.
        photo: name of the photo in messages.
        path: path of the TFRecord file.
        offset, length: extent of the record's data in the file, in bytes.
    """
    with gfile.open_binary(path, "rb") as file:
        file.seek(offset)
        example = features.deserialize_example(file.read(length), decoders=_DECODERS)
    columns = (example["panoptic_objects"][key].numpy().tolist() for key in ("id", "label", "is_crowd"))
    segments = [schemas.Segment(number, categories[label], bool(crowd)) for number, label, crowd in zip(*columns)]
    png = example["panoptic_image"].numpy()
    return example["image"].numpy(), checked_labels(photo, None, segments, spec=spec, png=png)


def record_fields(path, names):
    """Yields ((offset, length) of the data, dict of features) of every record in a TFRecord file.

    A record consists of its length as uint64, a 4-byte checksum, the data, and another 4-byte checksum.

    Args:
        path: path of the file.
        names: names of features that must have a value.

    Raises:
        InputError: a record is damaged or lacks one of the features.
    """
    offset = 0
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            if not all(features[name].WhichOneof("kind") for name in names):
                raise DecodeError
            yield (offset + 12, len(record)), features
            offset += 16 + len(record)
    except (tf.errors.DataLossError, DecodeError):
        words = f"the record at byte {offset} is damaged, or does not have {' and '.join(names)}"
        raise InputError(f"{path}: {words}; prepare the data set again") from None
