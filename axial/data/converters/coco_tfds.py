"""COCO as tensorflow-datasets prepares it, as items for `convert_split`.

    coco/2017_panoptic      photos and panoptic PNGs
    coco/2017               photos, and objects' boxes and crowds; it has no masks, so it is for Faster R-CNN only

Either is enough, and panoptic records get the boxes if both are there. Panoptic records equal those from COCO's own
files, byte for byte, because tensorflow-datasets keeps the encoded images. It keeps boxes as float32 shares of the
photo, from which COCO's two decimals come back, and areas as whole numbers.
"""

import dataclasses
import functools
import os
import re

import tensorflow as tf
import tensorflow_datasets as tfds
from google.protobuf.message import DecodeError

from axial.data.converters.coco import checked_labels
from axial.data.converters.instances import box_fields
from axial.data.specs import COCO, DatasetSpec
from axial.errors import InputError, nearest
from axial.io import gfile, schemas
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
    there = [name for name in (PANOPTIC, BOXES) if _versions(input_dir, name)] or [PANOPTIC]
    builders = [prepared(input_dir, name, split, SPLITS) for name in there]
    items, *others = (_listed(builder, split, spec) for builder in builders)
    for boxed in others:
        if odd := set(items) ^ set(boxed):
            raise InputError(f"{input_dir}: image {min(odd)} is only in one of {PANOPTIC} and {BOXES}")
        for number, item in items.items():
            item["boxes"] = boxed[number]["objects"]
    source = [builder.info.full_name for builder in builders]
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
    if not (versions := _versions(input_dir, name)):
        folder = os.path.join(input_dir, name)
        raise InputError(f"{folder}: not prepared; run tfds build {name} --data_dir={input_dir} first")
    builder = tfds.builder_from_directory(os.path.dirname(versions[-1]))
    if split and splits[split] not in builder.info.splits:
        raise InputError(f"{builder.data_dir}: the split {splits[split]!r} is not prepared")
    return builder


def _versions(input_dir, name):
    """Paths of what describes the versions of a data set that are prepared, the newest last."""
    paths = gfile.glob(os.path.join(input_dir, name), "/*/dataset_info.json")
    return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.split("/")[-2])])


def _listed(builder, split, spec):
    """dict from image ids to items without ids, of one of the two data sets."""
    features, found = builder.info.features, {}
    objects = features["panoptic_objects" if "panoptic_objects" in features else "objects"]
    known, names = dict(zip(spec.class_names, spec.category_ids)), objects.feature["label"].names
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"{builder.data_dir}: class {unknown[0]!r}, which the spec {spec.name!r} does not have")
    read = _Reader(features, [known[name] for name in names], spec)
    for path in map(str, builder.info.splits[SPLITS[split]].filepaths):
        for place, fields in record_fields(path, ("image/id", "image/filename")):
            number = fields["image/id"].int64_list.value[0]
            photo = inside(path, fields["image/filename"].bytes_list.value[0].decode(), f"{path}: image/filename")
            record = path, *place
            if "panoptic_image" in features:
                found[number] = {"read": functools.partial(read.photo_and_labels, photo, record)}
            else:
                found[number] = {"read": functools.partial(read.photo, record)}
                found[number]["objects"] = functools.partial(read.boxes, photo, record)
            found[number] |= {"photo": photo, "id": number}
    return found


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads records of one of the two data sets.

    Attributes:
        features: of tensorflow-datasets' builder.
        categories: the category id of each of its labels.
        spec: `DatasetSpec`.
    """

    features: tfds.features.FeaturesDict
    categories: list
    spec: DatasetSpec

    def _example(self, record):
        """The features of one record, with encoded images."""
        decoders = {name: decoder for name, decoder in _DECODERS.items() if name in self.features}
        return self.features.deserialize_example(read_record(*record), decoders=decoders)

    def photo(self, record):
        """The photo's bytes of one record, and None for its labels."""
        return self._example(record)["image"].numpy(), None

    def photo_and_labels(self, photo, record):
        """The photo's bytes and the `Labels` of one record."""
        example = self._example(record)
        columns = (example["panoptic_objects"][key].numpy().tolist() for key in ("id", "label", "is_crowd"))
        segments = [
            schemas.Segment(id=identity, category_id=self.categories[label], iscrowd=bool(crowd))
            for identity, label, crowd in zip(*columns)
        ]
        png = example["panoptic_image"].numpy()
        return example["image"].numpy(), checked_labels(photo, png, None, segments, spec=self.spec)

    def boxes(self, photo, record, size):
        """The fields 'box/' of one record, whose labels have a size (width, height); see `box_fields`."""
        objects, spec, found = self._example(record)["objects"], self.spec, []
        columns = (objects[key].numpy().tolist() for key in ("id", "label", "is_crowd", "area", "bbox"))
        for identity, label, crowd, area, (top, left, bottom, right) in zip(*columns):
            category = self.categories[label]
            index = spec.class_index(category)
            if not spec.things[index]:
                raise InputError(
                    f"{photo}: object {identity}: {spec.class_names[index]!r} is no thing of {spec.name!r}"
                )
            left, right = (round(share * size[0], 2) for share in (left, right))
            top, bottom = (round(share * size[1], 2) for share in (top, bottom))
            box = (left, top, round(right - left, 2), round(bottom - top, 2))
            found.append((index, schemas.Instance(identity, 0, category, box, float(area), int(crowd))))
        return box_fields(photo, found, size)


# === Records ===


def record_fields(path, names):
    """Yields ((offset, length) of its data, dict of some features) of every record in a TFRecord file.

    A record is its length as uint64, a checksum of 4 bytes, the data, and another checksum of 4 bytes.

    Args:
        path: of the file.
        names: of the features, each of which has a value.

    Raises:
        InputError: a damaged record, or one without the features.
    """
    offset = 0
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            found = tf.train.Example.FromString(record).features.feature
            if not all(found[name].WhichOneof("kind") for name in names):
                raise DecodeError
            yield (offset + 12, len(record)), found
            offset += 16 + len(record)
    except (tf.errors.DataLossError, DecodeError):
        words = f"the record at byte {offset} is damaged, or does not have {' and '.join(names)}"
        raise InputError(f"{path}: {words}; prepare the data set again") from None


def read_record(path, offset, length):
    """The data of one record."""
    with gfile.open_binary(path, "rb") as file:
        file.seek(offset)
        return file.read(length)
