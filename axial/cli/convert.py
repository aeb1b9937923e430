"""Converts a data set to TFRecords; the same command goes on where it was stopped.

%s coco --output_dir=DATA                                  the sixteen sample photos
%s coco --input_dir=COCO --output_dir=DATA --split=train2017 --split=val2017
%s cityscapes --input_dir=CITYSCAPES --output_dir=DATA --split=train --split=val
"""

import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

DATASETS = ("coco", "cityscapes")

flags.DEFINE_string("input_dir", None, "the data set in its own layout; for coco by default the sample photos.")
flags.DEFINE_string("output_dir", None, "folder for SPLIT-*.tfrecord and SPLIT.json.")
flags.DEFINE_multi_string("split", None, "splits to convert; for coco by default train2017 and val2017.")
flags.DEFINE_string("spec", None, "classes in place of the data set's own: coco, cityscapes, camvid.")
flags.DEFINE_string("labels", "gtFine", "cityscapes: gtFine or gtCoarse.")
flags.DEFINE_integer("shards", None, "files a split; by default one for 512 photos.", lower_bound=1)
flags.DEFINE_integer("workers", None, "threads; by default one for each core.", lower_bound=1)


def _main(arguments):
    from axial.errors import InputError, nearest

    if len(arguments) != 1 or arguments[0] not in DATASETS:
        wrong = f": got {' '.join(arguments)!r}{nearest(arguments[0], DATASETS)}" if arguments else ""
        raise InputError(f"name one data set of {', '.join(DATASETS)}{wrong}")
    name = arguments[0]
    if not FLAGS.output_dir:
        raise InputError("--output_dir is needed")
    if not FLAGS.split and name != "coco":
        raise InputError("--split is needed")
    if not FLAGS.input_dir and name != "coco":
        raise InputError(f"--input_dir is needed: {name} in its own layout")
    from axial.data.convert import convert_split, encode_item

    spec = _spec(name)
    for split in FLAGS.split or ("train2017", "val2017"):
        items, source = _items(name, split, spec)
        manifest, done = convert_split(
            items, encode_item, spec, split, FLAGS.output_dir, source, FLAGS.shards, FLAGS.workers
        )
        print(summary(split, manifest, done), flush=True)


def _spec(name):
    from axial.data.specs import get_spec

    return get_spec(FLAGS.spec or name)


def _items(name, split, spec):
    """Items of a split and the bytes that tell them from others."""
    from axial.data import cityscapes, coco

    if name == "cityscapes":
        return cityscapes.cityscapes_items(FLAGS.input_dir, split, spec, FLAGS.labels)
    return coco.coco_items(FLAGS.input_dir or coco.SAMPLE_DIR, split, spec)


def summary(split, manifest, done):
    """One line: what there is, what this call did, how fast, and which stage took longest."""
    line = f"{split}: {manifest['examples']} photos in {len(manifest['shards'])} shards"
    if not done["photos"]:
        return f"{line}, nothing left to do"
    line += f", {done['photos']} converted now at {done['photos'] / done['seconds']:.0f} photos a second"
    total = sum(done["stages"].values())
    slowest = max(done["stages"], key=done["stages"].get)
    share = 100 * done["stages"][slowest] / total
    return f"{line}; the limiting stage is to {slowest} ({share:.0f} % of the work)"


def main():
    app.run(_main, sys.modules[__name__])
