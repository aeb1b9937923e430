"""Converts a data set to TFRecords, or checks one; the same command goes on where it was stopped.

%s coco --output_dir=DATA                                  the sixteen sample photos
%s coco --input_dir=COCO --output_dir=DATA --split=train2017 --split=val2017
%s coco_tfds --input_dir=TFDS --output_dir=DATA --split=train2017
%s cityscapes --input_dir=CITYSCAPES --output_dir=DATA --split=train --split=val
%s mapillary --input_dir=VISTAS --version=v1.2 --output_dir=DATA --split=training
%s folder --input_dir=MINE --spec=mine.yaml --output_dir=DATA --split=train
%s check --data_dir=DATA --split=train --split=val --html=CHECK.html      what was converted
%s zip --input_dir=RESULTS --data_dir=DATA --split=test-dev2017 --output_dir=OUT     for COCO's server
"""

import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

DATASETS = ("coco", "coco_tfds", "cityscapes", "mapillary", "folder")
PHOTOS_A_SHARD = {"coco": 512, "coco_tfds": 512}  # about 100 MB; street scenes are ten times as large

flags.DEFINE_string("input_dir", None, "the data set in its own layout; for coco by default the sample photos.")
flags.DEFINE_string("output_dir", None, "folder for SPLIT-*.tfrecord and SPLIT.json.")
flags.DEFINE_string("data_dir", None, "check and zip: what was converted.")
flags.DEFINE_string("html", None, "check: page to write, with 20 random photos of each split and their labels.")
flags.DEFINE_multi_string("split", None, "splits to convert; for coco by default train2017 and val2017.")
flags.DEFINE_string("spec", None, "classes: coco, cityscapes, camvid, or a .yaml or .py file of your own.")
flags.DEFINE_string("labels", "gtFine", "cityscapes: gtFine, gtCoarse, or panoptic for cityscapesscripts' images.")
flags.DEFINE_string("version", "v1.2", "mapillary: v1.2 or v2.0.")
flags.DEFINE_integer("shards", None, "files a split; by default about 100 MB each.", lower_bound=1)
flags.DEFINE_integer("workers", None, "threads; by default one for each core.", lower_bound=1)


def _main(arguments):
    from axial.errors import InputError, nearest

    if len(arguments) != 1 or arguments[0] not in (*DATASETS, *OTHERS):
        wrong = f": got {' '.join(arguments)!r}{nearest(arguments[0], (*DATASETS, *OTHERS))}" if arguments else ""
        raise InputError(f"name one data set of {', '.join(DATASETS)}, or {' or '.join(OTHERS)}{wrong}")
    name = arguments[0]
    if name in OTHERS:
        return OTHERS[name]()
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
        shards = FLAGS.shards or -(-len(items) // PHOTOS_A_SHARD.get(name, 50))
        manifest, done = convert_split(items, encode_item, spec, split, FLAGS.output_dir, source, shards, FLAGS.workers)
        print(summary(split, manifest, done), flush=True)


def _spec(name):
    from axial.data.mapillary import mapillary_spec
    from axial.data.spec_file import find_spec
    from axial.errors import InputError

    if FLAGS.spec:
        return find_spec(FLAGS.spec)
    if name == "mapillary":
        return mapillary_spec(FLAGS.input_dir, FLAGS.version)[1]
    if name == "folder":
        raise InputError("--spec is needed: a .yaml or .py file that names the classes")
    return find_spec(name.removesuffix("_tfds"))


def _items(name, split, spec):
    """Items of a split and the bytes that tell them from others."""
    from axial.data import cityscapes, coco, folder, mapillary

    if name == "cityscapes":
        return cityscapes.cityscapes_items(FLAGS.input_dir, split, spec, FLAGS.labels)
    if name == "mapillary":
        return mapillary.mapillary_items(FLAGS.input_dir, split, spec, FLAGS.version)
    if name == "folder":
        return folder.folder_items(FLAGS.input_dir, split, spec)
    if name == "coco_tfds":
        from axial.data.coco_tfds import tfds_items

        return tfds_items(FLAGS.input_dir, split, spec)
    return coco.coco_items(FLAGS.input_dir or coco.SAMPLE_DIR, split, spec)


def _check():
    from rich.console import Console

    from axial.analysis import data_check
    from axial.data.tfrecord import write_text
    from axial.errors import InputError

    if not FLAGS.data_dir or not FLAGS.split:
        raise InputError("check needs --data_dir, a folder that this command wrote, and --split")
    reports = [data_check.check_split(FLAGS.data_dir, split) for split in FLAGS.split]
    data_check.across_splits(reports)
    console = Console()
    for report in reports:
        console.print(*data_check.tables(report))
    if FLAGS.html:
        write_text(FLAGS.html, data_check.page(reports))
        console.print(f"wrote {FLAGS.html}", soft_wrap=True)
    errors = sum(report.errors() for report in reports)
    if errors:
        raise InputError(f"{FLAGS.data_dir}: {errors} errors, which the tables above name")
    print(f"{FLAGS.data_dir}: no errors in {sum(report.photos for report in reports)} photos")


def _zip():
    from axial.data.submission import zip_coco_results
    from axial.errors import InputError

    if not (FLAGS.input_dir and FLAGS.data_dir and FLAGS.output_dir and FLAGS.split):
        raise InputError("zip needs --input_dir, results of axial-evaluate, --data_dir, --split and --output_dir")
    for split in FLAGS.split:
        print(zip_coco_results(FLAGS.input_dir, split, FLAGS.data_dir, FLAGS.output_dir))


OTHERS = {"check": _check, "zip": _zip}


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
