"""COCO as tensorflow-datasets prepares it, as items for `convert_split`.

    coco/2017_panoptic      photos and panoptic PNGs
    coco/2017               photos, and objects' boxes and crowds; it has no masks, so it is for Faster R-CNN only

Either is enough, and panoptic records get the boxes if both are there. Panoptic records equal those from COCO's own
files, byte for byte, because tensorflow-datasets keeps the encoded images. It keeps boxes as float32 shares of the
photo, from which COCO's two decimals come back, and areas as whole numbers.
"""

import functools
import os
import re

import tensorflow as tf
import tensorflow_datasets as tfds
from google.protobuf.message import DecodeError

from axial.data.converters.coco import checked_labels
from axial.data.converters.instances import box_fields
from axial.data.specs import COCO
from axial.errors import InputError, nearest
from axial.io import gfile, schemas
from axial.io.check import is_remote
from axial.io.paths import inside

SPLITS = {"train2017": "train", "val2017": "validation"}
PANOPTIC, BOXES = "coco/2017_panoptic", "coco/2017"
_DECODERS = {"image": tfds.decode.SkipDecoding(), "panoptic_image": tfds.decode.SkipDecoding()}


def tfds_items(input_dir, split, spec=COCO):
    """Items of a split in the order of their image ids, and bytes that identify this input.

    Args:
        input_dir: tensorflow-datasets' data_dir, in which coco/2017_panoptic, coco/2017 or both are prepared.
        split: one of `SPLITS`.
        spec: `DatasetSpec` whose class names are those of the data set.

    Raises:
        InputError: an unknown split; no data set that is prepared; classes that the spec does not have, or objects of a
            class that is no thing of it; a photo that only one of the two data sets has.
    """
    builders, missing = {}, []
    for name in (PANOPTIC, BOXES):
        try:
            builders[name] = prepared(input_dir, name, split, SPLITS)
        except InputError as error:
            missing.append(error)
    if not builders:
        raise missing[0]
    found = {name: _listed(builder, split, spec) for name, builder in builders.items()}
    items, *others = found.values()
    for boxed in others:
        if set(items) != set(boxed):
            odd = min(set(items) ^ set(boxed))
            raise InputError(f"{input_dir}: image {odd} is only in one of {PANOPTIC} and {BOXES}")
        for number, item in items.items():
            item["boxes"] = boxed[number]["objects"]
    source = [builder.info.full_name for builder in builders.values()]
    return [items[number] for number in sorted(items)], f"{' '.join(source)} {split} {len(items)}".encode()


def prepared(input_dir, name, split=None, splits=()):
    """tensorflow-datasets' builder of a data set, of the newest version that is prepared.

    Args:
        input_dir: tensorflow-datasets' data_dir.
        name: of the data set and, after a slash, of its configuration.
        split: the split that is needed; None for any.
        splits: dict from the splits that axial knows to tensorflow-datasets' names.

    Raises:
        InputError: an unknown split; the data set is not prepared there, or does not have the split.
    """
    if split and split not in splits:
        raise InputError(f"--split={split}: one of {', '.join(splits)}{nearest(split, splits)}")
    folder = os.path.join(input_dir, name)
    versions = gfile.glob(folder, "/*/dataset_info.json")
    if not versions:
        raise InputError(f"{folder}: not prepared; run tfds build {name} --data_dir={input_dir} first")
    builder = tfds.builder_from_directory(os.path.dirname(max(versions, key=_version)))
    if split and splits[split] not in builder.info.splits:
        raise InputError(f"{builder.data_dir}: the split {splits[split]!r} is not prepared")
    return builder


def _version(path):
    return [int(number) for number in re.findall(r"\d+", os.path.basename(os.path.dirname(path)))]


def _listed(builder, split, spec):
    """dict from image ids to items without ids, of one of the two data sets."""
    features, found = builder.info.features, {}
    of_split = dict(features=features, categories=_categories(builder, spec), spec=spec)
    for path in map(str, builder.info.splits[SPLITS[split]].filepaths):
        for place, fields in record_fields(path, ("image/id", "image/filename")):
            number = fields["image/id"].int64_list.value[0]
            photo = inside(path, fields["image/filename"].bytes_list.value[0].decode(), f"{path}: image/filename")
            found[number] = {"photo": photo, "id": number}
            if "panoptic_image" in features:
                found[number]["read"] = functools.partial(_read_both, photo, place, **of_split)
            else:
                found[number]["read"] = functools.partial(_read_photo, photo, place, features)
                found[number]["objects"] = functools.partial(_boxes, photo, place, **of_split)
    return found


def _categories(builder, spec):
    """The category id of each of tensorflow-datasets' labels. Raises InputError for a class that the spec lacks."""
    features = builder.info.features
    objects = features["panoptic_objects" if "panoptic_objects" in features else "objects"]
    known, names = dict(zip(spec.class_names, spec.category_ids)), objects.feature["label"].names
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"{builder.data_dir}: class {unknown[0]!r}, which the spec {spec.name!r} does not have")
    return [known[name] for name in names]


def _example(photo, place, features):
    """The features of one record, with encoded images."""
    decoders = {name: decoder for name, decoder in _DECODERS.items() if name in features}
    return features.deserialize_example(read_record(os.path.dirname(photo), *place), decoders=decoders)


def _read_photo(photo, place, features):
    """The photo's bytes of one record, and None for its labels."""
    return _example(photo, place, features)["image"].numpy(), None


def _read_both(photo, place, *, features, categories, spec):
    """The photo's bytes and the `Labels` of one record. `categories` has the category id of each of tfds' labels."""
    example = _example(photo, place, features)
    objects = {key: example["panoptic_objects"][key].numpy().tolist() for key in ("id", "label", "is_crowd")}
    segments = [
        schemas.Segment(id=identity, category_id=categories[label], iscrowd=bool(crowd))
        for identity, label, crowd in zip(*objects.values())
    ]
    found = checked_labels(photo, example["panoptic_image"].numpy(), None, segments, spec=spec)
    return example["image"].numpy(), found


def _boxes(photo, place, size, *, features, categories, spec):
    """The fields 'box/' of one record, whose labels have a size (width, height); see `box_fields`."""
    example, (width, height) = _example(photo, place, features), size
    columns = (example["objects"][key].numpy().tolist() for key in ("id", "label", "is_crowd", "area", "bbox"))
    found = []
    for identity, label, crowd, area, (top, left, bottom, right) in zip(*columns):
        index = spec.class_index(categories[label])
        if not spec.things[index]:
            raise InputError(f"{photo}: object {identity}: {spec.class_names[index]!r} is no thing of {spec.name!r}")
        left, right = (round(share * width, 2) for share in (left, right))
        top, bottom = (round(share * height, 2) for share in (top, bottom))
        box = (left, top, round(right - left, 2), round(bottom - top, 2))
        one = schemas.Instance(
            id=identity, image_id=0, category_id=categories[label], bbox=box, area=float(area), iscrowd=int(crowd)
        )
        found.append((index, one))
    return box_fields(photo, (height, width), found)


# === Records ===


def _open(path):
    """A file to read records of."""
    return tf.io.gfile.GFile(path, "rb") if is_remote(path) else open(path, "rb")


def record_fields(path, names):
    """Yields ((offset, length) of its data, dict of some features) of every record in a TFRecord file.

    A record is its length as uint64, a checksum of 4 bytes, the data, and another checksum of 4 bytes.

    Args:
        path: of the file.
        names: of the features, each of which has a value.

    Raises:
        InputError: a file that ends within a record; a record without the features.
    """
    size, offset = tf.io.gfile.stat(path).length, 0
    with _open(path) as file:
        while offset < size:
            file.seek(offset)
            length = int.from_bytes(file.read(8), "little")
            if offset + 16 + length > size:
                raise InputError(
                    f"{path}: {size} bytes end within the record at byte {offset}; prepare the data set again"
                )
            place = offset + 12, length
            try:
                file.seek(offset + 12)
                found = tf.train.Example.FromString(file.read(length)).features.feature
                if not all(found[name].WhichOneof("kind") for name in names):
                    raise DecodeError
            except DecodeError:
                words = f"the record at byte {offset} does not have {' and '.join(names)}"
                raise InputError(f"{path}: {words}; prepare the data set again") from None
            yield place, found
            offset += 16 + length


def read_record(path, offset, length):
    """The data of one record."""
    with _open(path) as file:
        file.seek(offset)
        return file.read(length)
