"""Every published recipe for images, compiled for a TPU slice: memory, estimated cycles, all-reduced bytes.

A compilation takes minutes. So the rows are kept in a CSV file, and a row that the file has is not computed again.
"""

import contextlib
import dataclasses
import glob
import os
import re
import tempfile

import tensorflow as tf
import tf_keras as keras

import tpu_compile
from axial.analysis.slice_cost import CompiledStep
from axial.chips import CHIPS, replicas_of
from axial.cli import app
from axial.data.convert import Conversion, convert_split, encode_item
from axial.data.converters import text
from axial.data.converters.coco import SAMPLE_DIR
from axial.data.specs import SPECS, DatasetSpec
from axial.errors import InputError
from axial.io import read, show
from axial.io.lock import locked_file
from axial.io.write import write_text
from axial.recipes import configuration
from axial.serving.export import fold
from axial.tasks.segmentation.panoptic import segment_each
from axial.training.loop import Loop
from axial.training.trainer import check_batch, check_loop

# Cores that the recipes' papers trained on. Axial-DeepLab, Sec. 4: 128 TPU cores for ImageNet, 32 for segmentation.
# The spatial-attention study, Sec. 4.1: 8 GPUs.
CORES = {"imagenet": 128, "coco": 32, "cityscapes": 32, "mapillary": 32}
STUDY = ("faster_rcnn", "mask_rcnn", "ccnet")  # names of the study's recipes begin with these
STUDY_CORES = 8
CLASSES = {"imagenet": 1000, "imagenette": 10}  # data sets for classification
SHAPES = {8: "2x4", 32: "4x8", 128: "8x16"}  # of a slice with one core a chip
FORMS = {"recipe": (), "without kernels": ("ModelConfig.backend = 'auto'",)}
REMEDIES = {
    "block recomputation": ("ModelConfig.recompute = 'block'",),
    "2 cores an image": ("ModelConfig.backend = 'auto'", "TrainingConfig.partitions = 2"),
    "4 cores an image": ("ModelConfig.backend = 'auto'", "TrainingConfig.partitions = 4"),
}
# The largest batch of a device, by what computes the layers and what the backward pass recomputes.
LARGEST = {
    "largest batch, kernels": ("ModelConfig.recompute = 'none'",),
    "largest batch, XLA, blocks recomputed": ("ModelConfig.backend = 'auto'", "ModelConfig.recompute = 'block'"),
    "largest batch, kernels, blocks recomputed": ("ModelConfig.recompute = 'block'",),
    "largest batch, XLA": ("ModelConfig.backend = 'auto'", "ModelConfig.recompute = 'none'"),
}
BINDINGS = {**FORMS, **REMEDIES, **LARGEST}
# These leaves are compiled for other chips too, with all remedies, and in all forms of `LARGEST`. The largest batch of
# the others is that of the fastest form on the first of `DEVICES`.
WHOLLY = ("coco/axial_deeplab_s.gin", "coco/axial_deeplab_l.gin")
DEVICES = ("v5e:1x1", "v6e:1x1", "v5p:1x1x1")  # of `LARGEST`


@dataclasses.dataclass(frozen=True)
class Row(CompiledStep):
    """A training step of a recipe on a slice, whose form is of `BINDINGS`, with what follows from it.

    Cores that share an image have no kernels. The batch of a form of `LARGEST` is the most that fit, or 1.
    """

    @property
    def key(self):
        return self.leaf, self.slice, self.form

    @property
    def chip(self):
        """The `Chip` of its slice."""
        return CHIPS[self.slice.partition(":")[0]]

    @property
    def seconds(self):
        """Of a step, by the cycle model."""
        return self.cycles / self.chip.clock

    @property
    def cores_an_image(self):
        """Cores that share each image."""
        return int(self.form[0]) if self.form.endswith("cores an image") else 1

    @property
    def chip_hours(self):
        """Of the whole training, by the cycle model."""
        cores = replicas_of(self.slice)
        chips = cores / replicas_of(f"{self.slice.partition(':')[0]}:1x1")
        return self.images / (self.batch * cores / self.cores_an_image) * self.seconds * chips / 3600


def leaves(experiments, folder="*"):
    """The recipes of a data set's folder, or of all: the files that set MODEL, without what is laid over a recipe."""
    paths = sorted(glob.glob(os.path.join(experiments, folder, "*.gin")))
    found = [os.path.relpath(path, experiments) for path in paths if re.search("^MODEL = ", read.read_text(path), re.M)]
    return [leaf for leaf in found if not leaf.startswith("tiny/")]


def cores(leaf):
    """The cores that a leaf's paper trains on; 8 for our own small recipes."""
    return STUDY_CORES if _is_studys(leaf) else CORES.get(os.path.dirname(leaf), STUDY_CORES)


def _is_studys(leaf):
    return os.path.basename(leaf).startswith(STUDY)


def plan(experiments):
    """[(leaf, slice, form)] of all rows. A recipe that does not fit has rows of remedies too; see `compile_all`."""
    found, largest = [], []
    for leaf in (leaf for folder in CORES for leaf in leaves(experiments, folder)):
        shape = SHAPES[cores(leaf)]
        forms = list(FORMS) if "axial" in leaf else ["recipe"]  # only axial attention has kernels
        whole = leaf in WHOLLY
        chips = ["v5e", "v6e"] if whole else ["v5e"]
        found += [(leaf, f"{chip}:{shape}", form) for chip in chips for form in forms]
        if whole:  # a device of these has a whole chip of two cores
            found += [(leaf, f"{chip}:2x4x4", form) for chip in ("v4", "v5p") for form in forms]
            found += [(leaf, f"v5e:{shape}", remedy) for remedy in REMEDIES]
        if not _is_studys(leaf):
            devices, forms = (DEVICES, list(LARGEST)) if whole else (DEVICES[:1], list(LARGEST)[:1])
            largest += [(leaf, device, form) for device in devices for form in forms]
    order = list(BINDINGS)
    return sorted(found, key=lambda key: order.index(key[2])) + sorted(
        largest, key=lambda key: (DEVICES.index(key[1]), order.index(key[2]))
    )


def read_table(path, row_type):
    """dict from keys to the rows of a CSV file; empty if there is none. Raises InputError."""
    if not tf.io.gfile.exists(path):
        return {}
    return {row.key: row for _, row in read.read_rows(path, row_type)}


def add_row(path, row):
    """Adds a row to a CSV file, to which other commands may have added for hours. Returns all rows, as `read_table`."""
    with locked_file(path):
        rows = {**read_table(path, type(row)), row.key: row}
        write_text(path, show.csv_rows(type(row), [row for _, row in sorted(rows.items())]))
    return rows


def compile_all(experiments, path, compile_row, *, progress, only=""):
    """Compiles what the CSV file at `path` lacks, and adds each row to it at once. Returns all rows.

    Args:
        experiments: folder of the gin files.
        path: of the CSV file.
        compile_row: function of (leaf, slice, form) that returns the `Row`.
        progress: function of a line of text.
        only: leaves whose names do not have this text are left out.
    """
    rows = read_table(path, Row)
    waiting = [key for key in plan(experiments) if only in key[0]]
    while waiting:
        key = leaf, slice_name, form = waiting.pop(0)
        if key not in rows:
            progress(" ".join(key))
            rows = add_row(path, compile_row(*key))
        if not rows[key].fits and form in ("recipe", *REMEDIES):
            later = list(REMEDIES)[list(REMEDIES).index(form) + 1 if form in REMEDIES else 0 :]
            waiting[:0] = [(leaf, slice_name, remedy) for remedy in later[:1]]
    return rows


@contextlib.contextmanager
def recipe_of(leaf, form):
    """Context with a function that builds a published recipe without its data: (task, training, optimizer)."""
    with tempfile.TemporaryDirectory() as folder:
        splits = write_stand_in(leaf.partition("/")[0], folder)

        def build():
            configuration.load([leaf], [*splits, *BINDINGS[form]])
            return configuration.build(data_dir=folder)

        yield build


def write_stand_in(folder, output_dir):
    """Converts a photo, or words, under the classes of a data set, so that a recipe builds without the data set.

    Args:
        folder: of experiments/.
        output_dir: of what is converted.

    Returns:
        gin bindings that name the splits.
    """
    if folder in text.SIZES:
        names = SPECS["coco"].class_names
        pairs = [(i, name, name[::-1]) for i, name in enumerate(names)]
        spec = text.text_spec(folder, ("en", "de"), text.train_vocabulary(pairs, 128))
        items, encode = text.pair_items(pairs, spec), text.encode_pair
    else:
        spec = _spec(folder)
        photo = sorted(glob.glob(os.path.join(SAMPLE_DIR, "train2017", "*.jpg")))[0]
        items = [{"photo": photo, "id": 1, **({"class": 0} if folder in CLASSES else {"labels": None})}]
        encode = encode_item
    for split in ("train", "val"):
        convert_split(Conversion(items, b"", spec, split, output_dir, encode=encode, progress=False))
    return ["TRAIN_SPLIT = 'train'", "EVAL_SPLIT = 'val'"]


def _spec(folder):
    if folder in SPECS:
        return SPECS[folder]
    if folder == "sample":
        return SPECS["coco"]
    # Their classes are in files of the data set. Only their number matters here: Mapillary Vistas has 28 classes of
    # stuff and 37 of things.
    count, things = (CLASSES[folder], 0) if folder in CLASSES else {"nuclei": (2, 1)}.get(folder, (65, 37))
    names = tuple(f"class {i}" for i in range(count))
    more = {"ignore": 2000} if folder in CLASSES else {}
    return DatasetSpec(folder, names, tuple(range(count)), tuple(i < things for i in range(count)), **more)


# === Steps ===


def lowered_row(leaf, slice_name, form, batch=None):
    """(module, training, batch) of a training step of a recipe on a slice.

    Args:
        leaf, slice_name, form: see `Row`.
        batch: of each replica; None for the recipe's own.
    """
    with recipe_of(leaf, form) as build:
        training = build()[1]
        replicas = replicas_of(slice_name, training.partitions)
        batch = batch or max(training.batch // replicas, 1)
        return lowered(build, batch, replicas, slice_name), training, batch


def lowered(build, batch, replicas, slice_name, mode="train"):
    """Serialised module of a step of one replica; see `training_step`. `mode` is the flag of tpu.py."""
    app.silence_xla()
    make = serving_step if mode == "serve" else training_step
    return tpu_compile.lower(*make(build, batch, replicas, slice_name), slice_name)


def training_step(build, batch, replicas, slice_name):
    """(function, specs) of a training step of one replica.

    Args:
        build: function that takes nothing and returns (task, training, optimizer).
        batch: of each replica.
        replicas: of the slice.
        slice_name: like 'v5e:4x4', or `tpu_compile.CPU`.

    Raises:
        InputError: `TrainingConfig.accumulate` does not divide the batch.
    """
    strategy = tpu_compile.SliceStrategy(replicas)
    with strategy.scope(), tpu_compile.forms(slice_name):
        task, training, optimizer = build()
        row = task.row
        check_batch(dataclasses.replace(training, batch=batch * replicas), replicas, row)
        keras.mixed_precision.set_global_policy(training.precision)
        model = task.build_model()
        check_loop(task, model, training, strategy)
        loop = Loop(task, model, optimizer.build(model.trainable_variables), training, strategy=strategy)
    spec = task.train_dataset(batch, training.seed).element_spec
    return lambda batch: strategy.run(loop.replica_step, (batch,)), [spec]


def serving_step(build, batch, *_):
    """(function, specs) of an exported model, from canvases to panoptic maps."""
    task = build()[0]
    folded = fold(task, task.build_model())
    return lambda images: segment_each(task, folded, images), [tf.TensorSpec([batch, *task.canvas, 3])]


# === The table ===


def named(leaves, only):
    """The recipes whose names have the text of --only. Raises InputError if there is none."""
    found = [leaf for leaf in leaves if only in leaf]
    if not found:
        raise InputError(f"--only={only}: no recipe has this in its name")
    return found


def markdown(rows):
    """Two tables as Markdown: the recipes on their slices, and the largest batch of a device."""
    devices = [row for row in rows.values() if row.form in LARGEST]
    slices = [row for row in rows.values() if row.form not in LARGEST]
    lines = _table("MB all-reduced", slices, lambda row: f"{row.all_reduced / 1e6:.1f}")
    if devices:
        lines += ["", *_table("M cycles an image", devices, lambda row: f"{row.cycles / row.batch / 1e6:.0f}")]
    return "\n".join(lines)


def _table(last, rows, of_last):
    head = ("recipe", "slice", "form", "images", "GiB", "of", "M cycles", "s a step", "chip-hours", last)
    lines = []
    for row in rows:
        costs = ["does not fit", "", "", ""]
        if row.fits:
            costs = [f"{row.cycles / 1e6:.0f}", f"{row.seconds:.3f}", f"{row.chip_hours:.0f}", of_last(row)]
        memory = f"{row.used / 2**30:.1f}", f"{row.limit / 2**30:.1f}"
        lines.append([show.code(row.leaf), row.slice, row.form, row.batch, *memory, *costs])
    return show.markdown_table(head, lines)
