"""Conversion of a converter's items, and damage of its input, for the tests of all converters."""

import tensorflow as tf
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import Conversion, convert_split


def convert(listed, spec, output, split="val", *, write=None, **options):
    """Converts a converter's (items, source). `options` are fields of `Conversion`. See `convert_split`."""
    return convert_split(Conversion(*listed, spec, split, str(output), progress=False, **options), write)


def records(output, split="val"):
    """Parsed records of a converted split."""
    manifest = tfrecord.read_manifest(str(output), split)
    dataset = tf.data.TFRecordDataset(tfrecord.shard_paths(str(output), manifest))
    return [tfrecord.parse_example(record, manifest["labels"]) for record in dataset]


def delete(path):
    """Damage: removes a file. `path` is a function of the folder."""
    return lambda folder: path(folder).unlink()


def cut(path, count=30):
    """Damage: cuts off the last bytes of a file."""
    return lambda folder: path(folder).write_bytes(path(folder).read_bytes()[:-count])


def replace(path, image, **save):
    """Damage: replaces an image by another one, or by a function of the image."""

    def damage(folder):
        target = path(folder)
        (image(Image.open(target)) if callable(image) else image).save(target, **save)

    return damage
