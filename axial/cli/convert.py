"""Converts data sets to TFRecords, checks them, and converts weights. The same command resumes a stopped conversion.

8-bit photos keep their values. Deeper values and floats are stretched to levels from 0 to 255: of n values, the
sqrt(n) / 4 darkest become 0, and the sqrt(n) / 4 brightest become 255, or less if the photo is only noise. The command
says on standard error which contents of a file it does not read, like further pages of a stack or a second channel.

%s coco --output_dir=DATA                                  the sixteen sample photos
%s coco --input_dir=COCO --output_dir=DATA --split=train2017 --split=val2017
%s coco_tfds --input_dir=TFDS --output_dir=DATA --split=train2017
%s cityscapes --input_dir=CITYSCAPES --output_dir=DATA --split=train --split=val
%s mapillary --input_dir=VISTAS --version=v1.2 --output_dir=DATA --split=training
%s imagenet --input_dir=IMAGENET --output_dir=DATA --split=train --split=val     or any folder of folders
%s nuclei --output_dir=DATA                                the 130 sample photos of cell nuclei
%s nuclei --input_dir=BBBC038 --output_dir=DATA            stage1_train
%s nuclei --input_dir=BBBC038 --output_dir=DATA --split=train     the photos in the list BBBC038/train.txt
%s folder --input_dir=MINE --spec=mine.yaml --output_dir=DATA --split=train
%s folder --input_dir=MINE --class=cell --output_dir=DATA --split=train     photos/ and one label image each
%s instances --input_dir=MINE --rest=background --output_dir=DATA --split=train     of COCO, LabelMe or YOLO
%s multi30k --input_dir=TEXTS --output_dir=DATA --split=train --split=val     train.en, train.de, ...
%s wmt14 --input_dir=TEXTS --output_dir=DATA --split=train --split=newstest2014 --languages=en,de
%s folder --input_dir=MINE --spec=mine.yaml --output_dir=DATA --split=train --skip_broken  skips broken ones
%s check --data_dir=DATA --split=train --split=val --html=CHECK.html      checks converted data
%s zip --input_dir=RESULTS --data_dir=DATA --split=test-dev2017 --output_dir=OUT     a file for COCO's server
%s weights --source=csrhddlam --input=axial26s.pth --output=WEIGHTS     weights of another implementation
%s weights --target=csrhddlam --input=WEIGHTS --output=mine.pth         and back
"""

import dataclasses
import functools
import os
import pkgutil

from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.data.converters import data_sets
from axial.errors import InputError
from axial.io import gfile
from axial.io.lock import locked
from axial.io.show import counted, say
from axial.io.write import try_file, try_new_folder, write_text
from axial.models.names import check_model_name
from axial.recipes import read_recipe

PAIRS_A_SHARD = 200_000  # sentence pairs, about 100 MB
SAMPLE_SPLITS = {"coco": ("train2017", "val2017"), "nuclei": ("train", "test")}  # splits of the sample data
SOURCES, TARGETS = ("csrhddlam", "deeplab2", "keras_applications"), ("csrhddlam",)  # as in `weights.convert`
MOST_SHARDS = 1024  # per split; ImageNet has 1024 and 128

REST = "background"  # class of pixels without an object

SPLIT = flags.SPLIT.but(needed=True)


class Convert(Flags):
    """Flags of every data conversion."""

    spec, labels, skip_broken = None, None, False  # flags of subclasses
    input_dir = Flag(str, "folder to read; by default, for coco and nuclei, the sample photos.", path=flags.IN_FOLDER)
    output_dir = Flag(str, "folder to write to.", path=flags.OUT_FOLDER, needed=True)
    split = flags.SPLIT
    shards = Flag(int, "TFRecord files per split; by default one per about 100 MB.", least=1)
    workers = Flag(int, "threads; by default one per core.", least=1)


class Photos(Convert):
    skip_broken = Flag(bool, "skips photos and labels that cannot be read, and lists them in SPLIT.json.", False)


class Labelled(Photos):
    spec = Flag(str, "class definitions: coco or another of axial/data/classes, nuclei, json, or a .yaml file.")
    labels = Flag(
        str,
        "cityscapes: gtFine (the default) or gtCoarse. Other data: upright (the default), or stored if labels match "
        "the photo's pixels as stored, before its EXIF tag turns them.",
        choices=("upright", "stored"),
    )


class Cityscapes(Labelled):
    labels = Labelled.declared()["labels"].but(default="gtFine", choices=("gtFine", "gtCoarse"))
    partial = Flag(bool, "converts the cities that are there, even if some of the official release are missing.", False)


class Mapillary(Labelled):
    version = Flag(str, "release of Mapillary Vistas.", "v1.2", choices=("v1.2", "v2.0"))


class Folder(Labelled):
    class_name = Flag(str, "name of the only class of objects; or --class.", alone=("spec",), old=("class",))

    def check(self):
        super().check()
        if not self.spec and (name := (self.class_name or "").strip()) in ("", REST):
            given = f"--class={REST} is the name of the other pixels" if name else "--spec is needed: class definitions"
            raise InputError(f"{given}; or --class=NAME, if all objects have one class")


class Instances(Labelled):
    spec = Labelled.declared()["spec"].but(meaning="class definitions; by default the classes of the annotations.")
    rest = Flag(str, "name of the class of pixels without an object, or none if they are unlabelled.", needed=True)


class Texts(Convert):
    languages = Flag(list, "suffixes of a split's two text files, which have a sentence per line.", ("en", "de"))
    vocabulary = Flag(str, "a SentencePiece model; by default one trained on the training split.", path=flags.IN_FILE)
    vocabulary_size = Flag(int, "pieces of the vocabulary; by default 4000, for wmt14 37000.", least=4)

    def check(self):
        super().check()
        if len(self.languages) != 2:
            raise InputError(f"--languages={','.join(self.languages)}: expected two, as in en,de")


# === Data sets ===

# The flags of each data set, and its photos per shard. A shard has about 100 MB (ImageNet: 50 MB). Street scenes are
# ten times as large as COCO's photos. A data set without a line here has `Labelled` and 50 photos per shard.
OWN = {
    "cityscapes": (Cityscapes, 50),
    "coco": (Labelled, 512),
    "coco_tfds": (Labelled, 512),
    "folder": (Folder, 50),
    "imagenet": (Photos, 391),
    "instances": (Instances, 50),
    "mapillary": (Mapillary, 50),
    "nuclei": (Photos, 512),
}
DATA_SETS = {name: OWN.get(name, (Labelled, 50)) for name in data_sets()}


def _converter(name, what):
    """The function of a data set's converter that lists its 'items' or makes its 'spec'."""
    return pkgutil.resolve_name(f"axial.data.converters.{name}.{name}_{what}")


def _items(given, split, spec):
    """The items of a split, and bytes that identify their source."""
    name, input_dir = given.verb, given.input_dir or _sample_dir(given.verb)
    list_items = _converter("folder" if name == "nuclei" and not given.input_dir else name, "items")
    specs = [] if name == "imagenet" else [spec]
    options = {"cityscapes": ("labels", "partial"), "instances": ("rest", "labels"), "mapillary": ("version",)}
    return list_items(input_dir, split, *specs, **{flag: vars(given)[flag] for flag in options.get(name, ())})


def _sample_dir(name):
    """The folder of the sample photos of a data set."""
    return pkgutil.resolve_name(f"axial.data.converters.{name}:SAMPLE_DIR")


def _spec(given, splits):
    """The `DatasetSpec` of --spec, by default the data set's own."""
    name = given.verb
    from axial.data.specs import find_spec, json_spec, plain_spec

    if given.spec == "json":
        if name not in ("coco", "folder"):
            raise InputError("--spec=json: for coco and folder only, whose panoptic JSON has the classes")
        return json_spec(given.input_dir or _sample_dir("coco"), splits)
    if given.spec:
        return find_spec(given.spec)
    if name == "folder":
        return plain_spec(given.input_dir, {1: given.class_name}, REST)
    options = {"imagenet": (), "instances": ("split", "rest"), "mapillary": ("version",)}
    if name in options:
        return _converter(name, "spec")(given.input_dir, *(vars(given)[flag] for flag in options[name]))
    return find_spec(name.removesuffix("_tfds"))


def _convert(given):
    """Converts the splits of a data set."""
    name = given.verb
    sample = ("stage1_train",) if name == "nuclei" and given.input_dir else SAMPLE_SPLITS.get(name)
    splits = given.split or sample or given.need("split")
    if name not in SAMPLE_SPLITS:
        given.need("input_dir")
    spec = _spec(given, splits)  # before TensorFlow is imported

    from axial.data.convert import Conversion, as_stored
    from axial.data.tfrecord import is_labelled

    with locked(given.output_dir, "output_dir"):
        for split in splits:
            listed = _items(given, split, spec)
            if given.labels == "stored":
                listed = as_stored(*listed)
            made = Conversion(*listed, spec, split, given.output_dir, skip_broken=given.skip_broken)
            _write(given, made, DATA_SETS[name][1])
            if all(item.get("labels", item) is None for item in made.items) or not is_labelled(given.output_dir, split):
                say(f"{split}: no photo has a label; the split is for predictions, not for training", error=True)


def _write(given, conversion, per):
    """Writes a `data.convert.Conversion` as a split with `per` items per shard, and prints its summary."""
    from axial.data.convert import convert_split

    shards = given.shards or min(-(-len(conversion.items) // per), MOST_SHARDS)
    manifest, done = convert_split(dataclasses.replace(conversion, shards=shards, workers=given.workers))
    say(summary(conversion.split, manifest, done, conversion.unit))


def _convert_text(given):
    """Converts the splits of a data set of sentence pairs, the training split first."""
    input_dir, splits = given.need("input_dir"), given.need("split")

    from axial.data.convert import Conversion
    from axial.data.converters import text

    read = functools.cache(lambda split: text.read_pairs(input_dir, split, given.languages))
    training = next((split for split in splits if split.startswith("train")), None)
    with locked(given.output_dir, "output_dir"):
        pairs = functools.partial(read, training) if training else None
        size = given.vocabulary_size
        model = text.find_vocabulary(given.output_dir, given.vocabulary, pairs, size, default=text.SIZES[given.verb])
        spec = text.text_spec(given.verb, given.languages, model)
        for split in splits:
            pairs, empty, digest = read(split)
            if empty:
                say(f"{split}: {counted(empty, 'pair')} with an empty line left out")
            listed, how = (text.pair_items(pairs, spec), digest), {"encode": text.encode_pair, "unit": "pair"}
            made = Conversion(*listed, spec, split, given.output_dir, **how)
            _write(given, made, PAIRS_A_SHARD)


def summary(split, manifest, done, unit="photo"):
    """A line with the examples of the split, the number that this call converted, and its speed."""
    line = f"{split}: {counted(manifest['examples'], unit)} in {counted(len(manifest['shards']), 'shard')}"
    if left_out := manifest.get("left_out"):
        line += f", {len(left_out)} left out as broken"
    if not done["photos"]:
        return f"{line}, nothing left to do"
    return f"{line}, {done['photos']} converted now at {done['photos'] / done['seconds']:.0f} {unit}s per second"


# === check, zip ===


class Check(Flags):
    data_dir = flags.DATA_DIR.but(needed=True)
    split = SPLIT
    html = flags.HTML


def _check(given):
    from axial.analysis import data_check

    data_dir = given.data_dir
    checks = [data_check.check_split(data_dir, split) for split in given.split]
    data_check.across_splits(checks)
    for check in checks:
        data_check.print_report(check)
    if given.html:
        write_text(given.html, data_check.page(checks))
        say(f"wrote {given.html}")
    errors = sum(check.errors() for check in checks)
    if errors:
        raise InputError(f"{data_dir}: {counted(errors, 'error')}, which the tables above name")
    say(f"{data_dir}: no errors in {counted(sum(check.photos for check in checks), checks[0].unit)}")
    if all(check.labels == "panoptic" for check in checks):
        from axial.analysis.own_data import RECIPE, print_advice

        print_advice(data_dir, checks, read_recipe(RECIPE))


class Zip(Flags):
    input_dir = Convert.declared()["input_dir"].but(needed=True)
    data_dir = flags.DATA_DIR.but(needed=True)
    output_dir = Convert.declared()["output_dir"]
    split = SPLIT


def _zip(given):
    from axial.tasks.segmentation.prediction_writers import zip_coco_results

    for split in given.split:
        say(zip_coco_results(given.input_dir, split, given.data_dir, given.output_dir))


# === weights ===


class Weights(Flags):
    source = Flag(str, "the implementation that the weights come from.", choices=SOURCES)
    target = Flag(str, "the implementation to write converted weights for.", choices=TARGETS)
    input = Flag(str, "file of weights; with --target, folder of converted weights.", needed=True)
    output = Flag(str, "new folder; with --target, new .pth file.", needed=True)
    model = Flag(str, "registered model of the weights; by default, inferred from their shapes.", alone=("target",))

    def check(self):
        if (self.source is None) == (self.target is None):
            raise InputError("one of --source and --target is needed")
        if self.target:
            try_file("output", self.output, (".pth", ".pt"))
        else:
            if self.model:
                check_model_name(self.model)
            try_new_folder("output", self.output)
        if not gfile.is_remote(self.input) and not any(map(os.path.exists, (self.input, f"{self.input}.index"))):
            raise InputError(f"{self.input}: no such file or folder")


def _weights(given):
    from axial.weights import convert

    path, output = given.input, given.output
    if given.target:
        count = convert.TARGETS[given.target](path, output)
        say(f"{output}: {counted(count, 'tensor')} for {given.target}")
        return
    conversion, model = convert.convert(given.source, path, output, given.model)
    say(*convert.summary(conversion, model))
    say(f"wrote {output}: {convert.WEIGHTS} for init_checkpoint, and {convert.GIN} of its network")


VERBS = {
    **{name: (kind, _convert) for name, (kind, _) in DATA_SETS.items()},
    **dict.fromkeys(("multi30k", "wmt14"), (Texts, _convert_text)),
    "check": (Check, _check),
    "weights": (Weights, _weights),
    "zip": (Zip, _zip),
}


def main():
    app.run(VERBS)
