"""For the tests of all converters: converts the items of a converter, and damages the input files."""

import tensorflow as tf
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import Conversion, convert_split


def convert(listed, spec, output, split="val", **options):
    """Converts `listed`, a converter's (items, source). `options` are fields of `Conversion`. See `convert_split`."""
    return convert_split(Conversion(*listed, spec, split, str(output), progress=False, **options))


def records(output, split="val"):
    """Returns the parsed records of a converted split."""
    manifest = tfrecord.read_manifest(str(output), split)
    dataset = tf.data.TFRecordDataset(tfrecord.shard_paths(str(output), manifest))
    return [tfrecord.parse_example(record, manifest["labels"]) for record in dataset]


def delete(path):
    """Returns a damage, a function of a folder: it removes the file at path(folder)."""
    return lambda folder: path(folder).unlink()


def cut(path, count=30):
    """Returns a damage that cuts off the last `count` bytes of a file."""
    return lambda folder: path(folder).write_bytes(path(folder).read_bytes()[:-count])


def replace(path, image, **save):
    """Returns a damage that replaces an image file by `image`, or by image(old image)."""

    def damage(folder):
        target = path(folder)
        (image(Image.open(target)) if callable(image) else image).save(target, **save)

    return damage
