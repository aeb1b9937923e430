"""Converts data sets to TFRecords, checks them, and converts weights. A stopped conversion resumes with its command.

Photos of 8 bits keep their values. Of n deeper values or floats, the sqrt(n) / 4 darkest become 0 and the sqrt(n) / 4
brightest 255, or less in noise. What of a file is not read, as further pages of a stack or a second channel, is said on
standard error.

%s coco --output_dir=DATA                                  the sixteen sample photos
%s coco --input_dir=COCO --output_dir=DATA --split=train2017 --split=val2017
%s coco_tfds --input_dir=TFDS --output_dir=DATA --split=train2017
%s cityscapes --input_dir=CITYSCAPES --output_dir=DATA --split=train --split=val
%s mapillary --input_dir=VISTAS --version=v1.2 --output_dir=DATA --split=training
%s imagenet --input_dir=IMAGENET --output_dir=DATA --split=train --split=val     or any folder of folders
%s imagenet_tfds --input_dir=TFDS --output_dir=DATA --split=train --split=val
%s nuclei --output_dir=DATA                                the 130 sample photos of nuclei
%s nuclei --input_dir=BBBC038 --output_dir=DATA            stage1_train
%s nuclei --input_dir=BBBC038 --output_dir=DATA --split=train     what the list BBBC038/train.txt names
%s folder --input_dir=MINE --spec=mine.yaml --output_dir=DATA --split=train
%s multi30k --input_dir=TEXTS --output_dir=DATA --split=train --split=val     train.en, train.de, ...
%s wmt14 --input_dir=TEXTS --output_dir=DATA --split=train --split=newstest2014 --languages=en,de
%s wmt14_tfds --input_dir=TFDS --output_dir=DATA --split=train --split=newstest2013 --split=newstest2014
%s coco --input_dir=gs://B/COCO --output_dir=gs://B/DATA --split=train2017 --beam --runner=DataflowRunner
                                                          the same shards, by many machines
%s folder --input_dir=MINE --spec=mine.yaml --output_dir=DATA --split=train --skip_broken     not broken ones
%s check --data_dir=DATA --split=train --split=val --html=CHECK.html      what was converted
%s zip --input_dir=RESULTS --data_dir=DATA --split=test-dev2017 --output_dir=OUT     for COCO's server
%s weights --source=csrhddlam --input=axial26s.pth --output=WEIGHTS     weights of another implementation
%s weights --target=csrhddlam --input=WEIGHTS --output=mine.pth         and back
"""

import contextlib
import functools
import sys

from absl import flags

from axial.cli import app
from axial.cli.checks import SOURCES, TARGETS, check_splits, check_weights
from axial.io.show import broken, counted, say

FLAGS = flags.FLAGS

# About 100 MB, 50 MB for ImageNet. Street scenes are ten times as large as COCO's photos.
PHOTOS_A_SHARD = {"coco": 512, "coco_tfds": 512, "imagenet": 391, "imagenet_tfds": 391, "nuclei": 512}
PAIRS_A_SHARD = 200_000  # of sentences, about 100 MB
SAMPLE_SPLITS = {"coco": ("train2017", "val2017"), "nuclei": ("train", "test")}  # of what ships with axial
MOST_SHARDS = 1024  # of a split: ImageNet has 1024 and 128

flags.DEFINE_string("input_dir", None, "the data set in its own layout; for coco and nuclei by default the samples.")
flags.DEFINE_string("output_dir", None, "folder for SPLIT-*.tfrecord and SPLIT.json.")
flags.DEFINE_string("data_dir", None, "folder of a converted data set.")
flags.DEFINE_string("html", None, "page to write, with 20 random photos of each split and their labels.")
flags.DEFINE_multi_string("split", None, "split to convert; coco and nuclei default to the samples or stage1_train.")
flags.DEFINE_string("spec", None, "classes: coco, cityscapes, camvid, nuclei, json, or a .yaml or .py file.")
flags.DEFINE_string(
    "labels",
    None,
    "of cityscapes: gtFine, the default, gtCoarse, or panoptic for cityscapesscripts' images. Of others: upright, the "
    "default, or stored, where labels are of the photos' pixels as they are stored, not turned by the EXIF tag.",
)
flags.DEFINE_bool("partial", False, "converts what there is, though cities of the official release are missing.")
flags.DEFINE_enum("version", "v1.2", ["v1.2", "v2.0"], "release of Mapillary Vistas.")
flags.DEFINE_integer("shards", None, "files of each split; by default one for about 100 MB.", lower_bound=1)
flags.DEFINE_list("languages", ["en", "de"], "suffixes of a split's two text files, with a sentence a line.")
flags.DEFINE_integer("vocabulary_size", None, "pieces of the vocabulary; 4000, for wmt14 37000.", lower_bound=4)
flags.DEFINE_string("vocabulary", None, "a SentencePiece model with pad_id 0; by default one of the training split.")
flags.DEFINE_string("source", None, "whose weights: csrhddlam, deeplab2 or keras_applications.")
flags.DEFINE_string("target", None, "for whom to write converted weights: csrhddlam.")
flags.DEFINE_string("input", None, "the file of weights; with --target the folder of converted ones.")
flags.DEFINE_string("output", None, "a new folder; with --target a new .pth file.")
flags.DEFINE_string("model", None, "registered model of the weights; by default the one that their sizes tell.")
flags.DEFINE_bool("skip_broken", False, "leaves out photos and labels that cannot be read; SPLIT.json lists them.")
flags.DEFINE_integer(
    "workers", None, "threads; by default one for each core, with --beam one for each shard.", lower_bound=1
)

flags.DEFINE_bool("beam", False, "converts by an Apache Beam pipeline; it needs the package apache-beam.")
flags.DEFINE_string("runner", "DirectRunner", "Beam's runner, like DataflowRunner.")
flags.DEFINE_multi_string("beam_option", [], "an option of Beam's or of the runner, like 'project=mine'.")

# === Data sets: each function returns one that lists the items of a split, with bytes that identify their source ===


def _coco(split, spec):
    from axial.data.converters import coco

    return functools.partial(coco.coco_items, FLAGS.input_dir or coco.SAMPLE_DIR, split, spec)


def _coco_tfds(split, spec):
    from axial.data.converters.coco_tfds import tfds_items

    return functools.partial(tfds_items, app.flag("input_dir"), split, spec)


def _cityscapes(split, spec):
    from axial.data.converters.cityscapes import cityscapes_items

    arguments = app.flag("input_dir"), split, spec, FLAGS.labels or "gtFine"
    return functools.partial(cityscapes_items, *arguments, partial=FLAGS.partial)


def _mapillary(split, spec):
    from axial.data.converters.mapillary import mapillary_items

    return functools.partial(mapillary_items, app.flag("input_dir"), split, spec, FLAGS.version)


def _imagenet(split, spec):
    from axial.data.converters.imagenet import imagenet_items

    return functools.partial(imagenet_items, app.flag("input_dir"), split)


def _imagenet_tfds(split, spec):
    from axial.data.converters.imagenet import tfds_items

    return functools.partial(tfds_items, app.flag("input_dir"), split)


def _nuclei(split, spec):
    from axial.data.converters import nuclei
    from axial.data.converters.folder import folder_items

    if FLAGS.input_dir:
        return functools.partial(nuclei.nuclei_items, FLAGS.input_dir, split, spec)
    return functools.partial(folder_items, nuclei.SAMPLE_DIR, split, spec)


def _folder(split, spec):
    from axial.data.converters.folder import folder_items

    return functools.partial(folder_items, app.flag("input_dir"), split, spec)


def _spec(name):
    """The `DatasetSpec` of --spec, or the data set's own."""
    from axial.data.spec_file import find_spec, json_spec
    from axial.errors import InputError

    if name in ("imagenet", "imagenet_tfds"):
        from axial.data.converters import imagenet

        return (imagenet.imagenet_spec if name == "imagenet" else imagenet.tfds_spec)(FLAGS.input_dir)
    if FLAGS.spec == "json":
        if name not in ("coco", "folder"):
            raise InputError("--spec=json: for coco and folder, whose classes a panoptic JSON has")
        from axial.data.converters.coco import SAMPLE_DIR

        return json_spec(FLAGS.input_dir or SAMPLE_DIR, FLAGS.split or SAMPLE_SPLITS["coco"])
    if FLAGS.spec:
        return find_spec(FLAGS.spec)
    if name == "mapillary":
        from axial.data.converters.mapillary import mapillary_spec

        return mapillary_spec(FLAGS.input_dir, FLAGS.version)[1]
    if name == "folder":
        return find_spec(app.flag("spec"))
    return find_spec(name.removesuffix("_tfds"))


def _default_splits(name):
    """The splits of a data set's sample; of the nuclei's release the one with masks. None for other data sets."""
    return ("stage1_train",) if name == "nuclei" and FLAGS.input_dir else SAMPLE_SPLITS.get(name)


def _convert(name, list_items):
    """Converts the splits of a data set."""
    output_dir = app.flag("output_dir")
    splits = FLAGS.split or _default_splits(name) or app.flag("split")
    if name not in SAMPLE_SPLITS:
        app.flag("input_dir")
    if name != "cityscapes":
        app.choice("labels", FLAGS.labels or "upright", ("upright", "stored"))
    spec = _spec(name)  # before TensorFlow is imported

    from axial.data.convert import convert_split, encode_item, of_stored_pixels
    from axial.data.tfrecord import is_labelled
    from axial.io.lock import locked

    with locked(output_dir, "output_dir"):
        for split in splits:
            listing = list_items(split, spec)
            if FLAGS.labels == "stored":
                listing = functools.partial(of_stored_pixels, listing)
            items, source = listing()
            shards = FLAGS.shards or min(-(-len(items) // PHOTOS_A_SHARD.get(name, 50)), MOST_SHARDS)
            manifest, done = convert_split(
                items,
                encode_item,
                spec,
                split,
                output_dir=output_dir,
                source=source,
                shards=shards,
                workers=FLAGS.workers,
                write=_writer(listing, encode_item),
                skip_broken=FLAGS.skip_broken,
            )
            say(summary(split, manifest, done))
            if all(item.get("labels", item) is None for item in items) or not is_labelled(output_dir, split):
                say(f"{split}: no photo has a label; the split is for predictions, not for training", error=True)


def _convert_text(name):
    """Converts the splits of a data set of sentence pairs, the training split first."""
    input_dir, output_dir, splits = app.flag("input_dir"), app.flag("output_dir"), app.flag("split")
    from axial.errors import InputError

    if len(FLAGS.languages) != 2:
        raise InputError(f"--languages={','.join(FLAGS.languages)}: expected two, as in en,de")
    from axial.data.convert import convert_split
    from axial.data.converters import text
    from axial.io.lock import locked

    reader, data_set = text, name.removesuffix("_tfds")
    if name != data_set:
        from axial.data.converters import wmt14_tfds as reader
    read = functools.cache(lambda split: reader.read_pairs(input_dir, split, FLAGS.languages))
    training = next((split for split in splits if split.startswith("train")), None)
    with locked(output_dir, "output_dir"):
        pairs = functools.partial(read, training) if training else None
        given, size = FLAGS.vocabulary, FLAGS.vocabulary_size
        model = text.find_vocabulary(output_dir, given, pairs, size, default=text.SIZES[data_set])
        spec = text.text_spec(data_set, FLAGS.languages, model)
        for split in splits:
            pairs, empty, digest = read(split)
            source = reader.read_pairs, input_dir, split, FLAGS.languages
            if empty:
                say(f"{split}: {counted(empty, 'pair')} with an empty line left out")
            manifest, done = convert_split(
                text.pair_items(pairs, spec),
                text.encode_pair,
                spec,
                split,
                output_dir=output_dir,
                source=digest,
                shards=FLAGS.shards or min(-(-len(pairs) // PAIRS_A_SHARD), MOST_SHARDS),
                workers=FLAGS.workers,
                unit="pair",
                write=_writer(functools.partial(text.listed_pairs, *source, spec), text.encode_pair),
            )
            say(summary(split, manifest, done, "pair"))


def _writer(listing, encode):
    """What writes the shards: a Beam pipeline with --beam, else None for this process."""
    if not FLAGS.beam:
        return None
    from axial.data import beam

    return beam.shard_writer(listing, encode, beam.make_options(FLAGS.runner, FLAGS.beam_option), workers=FLAGS.workers)


def _check_beam():
    """Raises InputError for flags of Beam without --beam, or where Beam is not installed."""
    from axial.errors import InputError, check_installed

    if not FLAGS.beam:
        if FLAGS["runner"].present or FLAGS.beam_option:
            raise InputError("--runner, --beam_option: for --beam, which is not given")
        return
    check_installed("--beam needs", "beam", "apache_beam")


def summary(split, manifest, done, unit="photo"):
    """One line: the photos of the split, those that this call converted, the speed, and the slowest stage."""
    line = f"{split}: {counted(manifest['examples'], unit)} in {counted(len(manifest['shards']), 'shard')}"
    if left_out := manifest.get("left_out"):
        line += f", {len(left_out)} left out as broken"
    if manifest["permutation"] is None:
        line += ", in the order of an older version (a new --output_dir permutes them)"
    if not done["photos"]:
        return f"{line}, nothing left to do"
    line += f", {done['photos']} converted now at {done['photos'] / done['seconds']:.0f} {unit}s a second"
    total = sum(done["stages"].values())
    slowest = max(done["stages"], key=done["stages"].get)
    share = 100 * done["stages"][slowest] / total
    return f"{line}; the limiting stage is to {slowest} ({share:.0f} % of the work)"


# === check, zip ===


def _check(_):
    data_dir, splits = app.flag("data_dir"), app.flag("split")
    check_splits(data_dir, splits)

    from axial.analysis import data_check
    from axial.errors import InputError
    from axial.io.write import write_text

    checks = [data_check.check_split(data_dir, split) for split in splits]
    data_check.across_splits(checks)
    for check in checks:
        data_check.print_report(check)
    if FLAGS.html:
        write_text(FLAGS.html, data_check.page(checks))
        say(f"wrote {FLAGS.html}")
    errors = sum(check.errors() for check in checks)
    if errors:
        raise InputError(f"{data_dir}: {counted(errors, 'error')}, which the tables above name")
    say(f"{data_dir}: no errors in {counted(sum(check.photos for check in checks), checks[0].unit)}")
    if all(check.labels == "panoptic" for check in checks):
        _say_how_to_train(data_dir, checks)


def _say_how_to_train(data_dir, checks):
    """Prints the command that trains on a checked data set, and what it takes on this machine."""
    import os

    from axial.analysis import own_data, step_cost
    from axial.data.tfrecord import is_labelled
    from axial.errors import InputError
    from axial.io import gfile
    from axial.recipes import experiments_dir, read_recipe

    names = []
    for path in gfile.glob(os.path.join(data_dir, ""), "*.json"):
        with contextlib.suppress(InputError):  # another file than a manifest
            name = os.path.basename(path)[:-5]
            names += [name] * is_labelled(data_dir, name)
    advice = own_data.advise(checks, names)
    recipe = read_recipe(experiments_dir(), own_data.RECIPE)
    step = step_cost.read_steps(os.path.join(experiments_dir(), "steps.csv"))[recipe.model]
    products, memory = step.of(advice.crop, own_data.BATCH)
    device, _ = step_cost.device_memory()
    rate = step_cost.rate()
    line, too_many = own_data.crowding(checks, advice.bindings["CANVAS"], recipe)
    say(line, error=too_many)
    say(f"To train on them ({advice.why}):", *broken(advice.command(data_dir)))
    seconds, memory = advice.steps * products / rate, memory + step_cost.resident()
    say(
        f"This takes about {step_cost.duration(seconds)} on this machine's {device}, and up to {memory / 1e9:.1f} GB "
        f"of memory. Each of {advice.steps} steps has {products / 1e9:.0f} billion multiply-adds, as counted; a "
        f"residual block did {rate / 1e9:.0f} billion a second just now."
    )


def _zip(_):
    folders, splits = [app.flag(name) for name in ("input_dir", "data_dir", "output_dir")], app.flag("split")
    check_splits(folders[1], splits)

    from axial.tasks.segmentation.submission import zip_coco_results

    for split in splits:
        say(zip_coco_results(folders[0], split, *folders[1:]))


# === weights ===


def _weights(_):
    from axial import recipes
    from axial.errors import InputError
    from axial.io.write import try_file, try_new_folder

    source, target = FLAGS.source, FLAGS.target
    app.refuse_beside("target", ("model",))
    path, output = app.flag("input"), app.flag("output")
    if (source is None) == (target is None):
        raise InputError("--source or --target is needed, one of them")
    if target:
        app.choice("target", target, TARGETS)
        try_file("output", output, (".pth", ".pt"))
        check_weights(path)
        from axial.weights import convert

        say(f"{output}: {counted(convert.TARGETS[target](path, output), 'tensor')} for {target}")
        return
    app.choice("source", source, SOURCES)
    if FLAGS.model:
        recipes.check_model_name(FLAGS.model)
    try_new_folder("output", output)
    check_weights(path)
    from axial.weights import convert

    conversion, model = convert.convert(source, path, output, FLAGS.model)
    say(*convert.summary(conversion, model))
    say(f"wrote {output}: {convert.CARD}, {convert.GIN}, and a checkpoint for init_checkpoint")


_CONVERT = ("input_dir", "output_dir", "split", "shards", "workers", "beam", "runner", "beam_option")


def _verb(name, list_items, *own_flags):
    flags_of = (*_CONVERT, "skip_broken", *own_flags)
    return app.Verb(lambda _: _convert(name, list_items), flags_of, writes=("output_dir",), check=_check_beam)


def _text_verb(name):
    own = ("languages", "vocabulary", "vocabulary_size")
    return app.Verb(lambda _: _convert_text(name), (*_CONVERT, *own), writes=("output_dir",), check=_check_beam)


VERBS = {
    "coco": _verb("coco", _coco, "spec", "labels"),
    "coco_tfds": _verb("coco_tfds", _coco_tfds, "spec", "labels"),
    "cityscapes": _verb("cityscapes", _cityscapes, "spec", "labels", "partial"),
    "mapillary": _verb("mapillary", _mapillary, "spec", "version", "labels"),
    "nuclei": _verb("nuclei", _nuclei),
    "imagenet": _verb("imagenet", _imagenet),
    "imagenet_tfds": _verb("imagenet_tfds", _imagenet_tfds),
    "folder": _verb("folder", _folder, "spec", "labels"),
    "multi30k": _text_verb("multi30k"),
    "wmt14": _text_verb("wmt14"),
    "wmt14_tfds": _text_verb("wmt14_tfds"),
    "check": app.Verb(_check, ("data_dir", "split", "html")),
    "weights": app.Verb(_weights, ("source", "target", "input", "output", "model")),
    "zip": app.Verb(_zip, ("input_dir", "data_dir", "output_dir", "split"), writes=("output_dir",)),
}


def main():
    app.run_verbs(VERBS, sys.modules[__name__])
