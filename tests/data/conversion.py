"""What the tests of all converters do with the items that a converter lists."""

import tensorflow as tf
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import Conversion, convert_split


def convert(listed, spec, output, split="val", *, write=None, **options):
    """Converts a converter's (items, source); `options` are of `Conversion`. Returns what `convert_split` does."""
    return convert_split(Conversion(*listed, spec, split, str(output), progress=False, **options), write)


def records(output, split="val"):
    """The parsed records of a converted split."""
    manifest = tfrecord.read_manifest(str(output), split)
    dataset = tf.data.TFRecordDataset(tfrecord.shard_paths(str(output), manifest))
    return [tfrecord.parse_example(record, manifest["labels"]) for record in dataset]


def delete(path):
    """Damage of a folder: a file is not there. `path` is a function of the folder."""
    return lambda folder: path(folder).unlink()


def cut(path, count=30):
    """Damage of a folder: a file lacks its last bytes."""
    return lambda folder: path(folder).write_bytes(path(folder).read_bytes()[:-count])


def replace(path, image, **save):
    """Damage of a folder: an image in the place of another, or what a function makes of that one."""

    def damage(folder):
        target = path(folder)
        (image(Image.open(target)) if callable(image) else image).save(target, **save)

    return damage
