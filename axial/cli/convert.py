"""Converts a data set to TFRecords; the same command goes on where it was stopped.

%s coco --output_dir=DATA                                  the sixteen sample photos
%s coco --input_dir=COCO --output_dir=DATA --split=train2017 --split=val2017
"""

import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

DATASETS = ("coco",)

flags.DEFINE_string("input_dir", None, "the data set in its own layout; the sample photos by default.")
flags.DEFINE_string("output_dir", None, "folder for SPLIT-*.tfrecord and SPLIT.json.")
flags.DEFINE_multi_string("split", ["train2017", "val2017"], "splits to convert.")
flags.DEFINE_integer("shards", None, "files a split; by default one for 512 photos.", lower_bound=1)
flags.DEFINE_integer("workers", None, "threads; by default one for each core.", lower_bound=1)


def _main(arguments):
    from axial.errors import InputError, nearest

    if len(arguments) != 1 or arguments[0] not in DATASETS:
        wrong = f": got {' '.join(arguments)!r}{nearest(arguments[0], DATASETS)}" if arguments else ""
        raise InputError(f"name one data set of {', '.join(DATASETS)}{wrong}")
    if not FLAGS.output_dir:
        raise InputError("--output_dir is needed")
    from axial.data import coco
    from axial.data.convert import convert_split

    for split in FLAGS.split:
        items, source = coco.coco_items(FLAGS.input_dir or coco.SAMPLE_DIR, split)
        manifest, done = convert_split(
            items, coco.encode_item, coco.COCO, split, FLAGS.output_dir, source, FLAGS.shards, FLAGS.workers
        )
        print(summary(split, manifest, done), flush=True)


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
