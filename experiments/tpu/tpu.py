"""Compiles steps with the TPU's own compiler, without a TPU: memory, and estimated cycles of ops and model parts.

%s --gin_file=coco/axial_deeplab_s.gin --slice=v5e:4x4
                        memory and estimated cycles of a recipe's step
%s --parts              cycles of each model part, and a lower bound from the part's bytes and multiply-adds
%s --all --csv=F --markdown=F
                        every published image recipe on its slice (hours; existing rows of the file are kept)
"""

import contextlib
import dataclasses
import functools
import glob
import math
import os
import re
import sys
import tempfile

import tensorflow as tf
import tf_keras as keras

import tpu_compile
from axial import recipes
from axial.analysis.slice_cost import CompiledStep
from axial.chips import CHIPS
from axial.cli import app, flags
from axial.cli.analyze import build_recipe
from axial.cli.flags import Flag, Flags
from axial.data.convert import Conversion, convert_split, encode_item
from axial.data.converters import text
from axial.data.converters.coco import SAMPLE_DIR
from axial.data.specs import SPECS, DatasetSpec
from axial.errors import InputError, check_installed, nearest
from axial.io import read, show
from axial.io.lock import locked_file
from axial.io.paths import experiments_dir
from axial.io.show import counted, print_table, say, working
from axial.io.write import write_text
from axial.serving.export import fold
from axial.tasks.segmentation.canvas_maps import canvas_maps
from axial.tasks.segmentation.panoptic import DensePrediction
from axial.training.train_step import TrainStep
from axial.training.trainer import check_batch, check_loop

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "paper"))
from pages import MARKDOWN, csv_rows, write_block

report = functools.partial(say, error=True)

# Number of cores that the papers train on. Axial-DeepLab, Sec. 4: 128 TPU cores for ImageNet, 32 for segmentation.
# The spatial-attention study, Sec. 4.1: 8 GPUs.
CORES = {"imagenet": 128, "coco": 32, "cityscapes": 32, "mapillary": 32}
STUDY = ("faster_rcnn", "mask_rcnn", "ccnet")  # prefixes of the names of the study's recipes
STUDY_CORES = 8
# (number of classes, number of things) of data sets whose class names come with the data.
CLASSES = {"imagenet": (1000, 0), "imagenette": (10, 0)}
SHAPES = {8: "2x4", 32: "4x8", 128: "8x16"}  # dict from number of cores to shape of a slice with one core per chip
FORMS = {"recipe": (), "without kernels": ("ModelConfig.backend = 'auto'",)}
REMEDIES = {
    "block recomputation": ("ModelConfig.recompute = 'block'",),
    "2 cores an image": ("ModelConfig.backend = 'auto'", "TrainingConfig.partitions = 2"),
    "4 cores an image": ("ModelConfig.backend = 'auto'", "TrainingConfig.partitions = 4"),
}
# Forms whose largest batch on a device is searched: which backend computes attention, and what is recomputed.
LARGEST = {
    "largest batch, kernels": ("ModelConfig.recompute = 'none'",),
    "largest batch, XLA, blocks recomputed": ("ModelConfig.backend = 'auto'", "ModelConfig.recompute = 'block'"),
    "largest batch, kernels, blocks recomputed": ("ModelConfig.recompute = 'block'",),
    "largest batch, XLA": ("ModelConfig.backend = 'auto'", "ModelConfig.recompute = 'none'"),
}
BINDINGS = {**FORMS, **REMEDIES, **LARGEST}
# These leaves are compiled for several generations of chips, with all remedies, and in all forms of `LARGEST`. For
# other leaves, the largest batch is searched in the first form of `LARGEST` on the first of `DEVICES`.
WHOLLY = ("coco/axial_deeplab_s.gin", "coco/axial_deeplab_l.gin")
DEVICES = ("v5e:1x1", "v6e:1x1", "v5p:1x1x1")  # slices of one device for the forms of `LARGEST`


def replicas_of(slice_name, partitions=1):
    """Number of replicas on a slice such as 'v5e:4x4'.

    Args:
        slice_name: generation and number of chips along each axis, such as 'v5e:4x4'.
        partitions: cores per replica; see `TrainingConfig`.

    Raises:
        InputError: the name is not a slice, or its number of devices is not a multiple of `partitions`.
    """
    generation, _, shape = slice_name.partition(":")
    sides = shape.split("x")
    if generation not in tpu_compile.USABLE_GIB:
        raise InputError(
            f"--slice={slice_name}: no TPU is called {generation!r}{nearest(generation, tpu_compile.USABLE_GIB)}: "
            f"{', '.join(tpu_compile.USABLE_GIB)}"
        )
    if not all(side.isdigit() and int(side) for side in sides):
        raise InputError(f"--slice={slice_name}: expected a shape after the name, as in 'v5e:4x4'")
    devices = math.prod(map(int, sides)) * (2 if generation in ("v2", "v3") else 1)
    if devices % partitions:
        raise InputError(f"TrainingConfig.partitions = {partitions}: {slice_name} has {devices} devices")
    return devices // partitions


@dataclasses.dataclass(frozen=True)
class Row(CompiledStep):
    """A compiled train step of a recipe on a slice, in a form of `BINDINGS`, with derived times.

    Cores that share an image use no kernels. In a form of `LARGEST`, the batch is the largest batch that fits. If none
    fits, it is the smallest batch.
    """

    @property
    def key(self):
        return self.leaf, self.slice, self.form

    @property
    def chip(self):
        """The `Chip` of the slice."""
        return CHIPS[self.slice.partition(":")[0]]

    @property
    def seconds(self):
        """Seconds of a step: estimated cycles / clock."""
        return self.cycles / self.chip.clock

    @property
    def cores_an_image(self):
        """Number of cores that share each image."""
        return int(self.form[0]) if self.form.endswith("cores an image") else 1

    @property
    def chip_hours(self):
        """Chip-hours of the whole training, from the estimated seconds of a step."""
        cores = replicas_of(self.slice)
        chips = cores / replicas_of(f"{self.slice.partition(':')[0]}:1x1")
        return self.images / (self.batch * cores / self.cores_an_image) * self.seconds * chips / 3600


def leaves(folder="*"):
    """Returns the leaves in a folder of experiments/, by default all but tiny/. A leaf is a recipe that sets MODEL."""
    paths = sorted(glob.glob(os.path.join(experiments_dir(), folder, "*.gin")))
    recipes = [path for path in paths if re.search("^MODEL = ", read.read_text(path), re.M)]
    return [leaf for leaf in (os.path.relpath(path, experiments_dir()) for path in recipes) if leaf[:5] != "tiny/"]


def cores(leaf):
    """Returns the number of cores that a leaf's paper trains on; 8 for our own small recipes."""
    study = os.path.basename(leaf).startswith(STUDY)
    return STUDY_CORES if study else CORES.get(os.path.dirname(leaf), STUDY_CORES)


def plan():
    """Returns the list of (leaf, slice, form) of the rows. `compile_all` adds remedies for recipes that do not fit."""
    keys = []
    for leaf in (leaf for folder in CORES for leaf in leaves(folder)):
        shape, wholly, study = SHAPES[cores(leaf)], leaf in WHOLLY, cores(leaf) == STUDY_CORES
        # A device of a v4 or v5p is a chip, with two cores.
        slices = [f"v5e:{shape}", f"v6e:{shape}", "v4:2x4x4", "v5p:2x4x4"] if wholly else [f"v5e:{shape}"]
        forms = FORMS if "axial" in leaf else ["recipe"]  # only axial attention has kernels
        keys += [(leaf, slice_name, form) for form in forms for slice_name in slices]
        keys += [(leaf, slices[0], remedy) for remedy in REMEDIES if wholly]
        devices, forms = (DEVICES, list(LARGEST)) if wholly else (DEVICES[:1], list(LARGEST)[:1])
        keys += [(leaf, device, form) for form in forms for device in devices if not study]
    return keys


def read_table(path, row_type):
    """Returns a dict from the key of each row of a CSV file to the row; empty without a file. Raises InputError."""
    if not tf.io.gfile.exists(path):
        return {}
    return {row.key: row for _, row in read.read_rows(path, row_type)}


def add_row(path, row):
    """Adds a row to a CSV file, which other processes may change at the same time. Returns all rows as `read_table`."""
    with locked_file(path):
        rows = {**read_table(path, type(row)), row.key: row}
        write_text(path, csv_rows(type(row), [row for _, row in sorted(rows.items())]))
    return rows


def compile_all(path, compile_row, only=""):
    """Compiles the rows that a CSV file lacks, and writes each row when it is compiled. Returns all rows.

    Args:
        path: path of the CSV file.
        compile_row: function of (leaf, slice, form) that returns the `Row`.
        only: string that the names of the compiled leaves contain.
    """
    rows = read_table(path, Row)
    waiting, remedied = [key for key in plan() if only in key[0]], ["recipe", *REMEDIES]
    while waiting:
        key = leaf, slice_name, form = waiting.pop(0)
        if key not in rows:
            report(" ".join(key))
            rows = add_row(path, compile_row(*key))
        if not rows[key].fits and form in remedied[:-1]:
            waiting.insert(0, (leaf, slice_name, remedied[remedied.index(form) + 1]))
    return rows


# === Recipes without data sets ===


@contextlib.contextmanager
def recipe_of(leaf, form):
    """Context of a function that builds a recipe's (task, training, optimizer) without the recipe's data set."""
    with tempfile.TemporaryDirectory() as folder:
        splits = write_stand_in(leaf.partition("/")[0], folder)
        yield functools.partial(build_recipe, [leaf], [*splits, *BINDINGS[form]], folder)


def write_stand_in(folder, output_dir):
    """Converts a photo or sentences with the classes of a data set, to build the data set's recipes without its files.

    Args:
        folder: folder of the data set's recipes in experiments/.
        output_dir: folder for the converted splits.

    Returns:
        list of gin bindings that name the splits.
    """
    if folder in text.SIZES:
        names = SPECS["coco"].class_names
        pairs = [(i, name, name[::-1]) for i, name in enumerate(names)]
        spec = text.text_spec(folder, ("en", "de"), text.train_vocabulary(pairs, 128))
        items, encode = text.pair_items(pairs, spec), text.encode_pair
    else:
        spec = _spec(folder)
        photo = sorted(glob.glob(os.path.join(SAMPLE_DIR, "train2017", "*.jpg")))[0]
        items = [{"photo": photo, "id": 1, **({"class": 0} if "imagenet" in folder else {"labels": None})}]
        encode = encode_item
    for split in ("train", "val"):
        convert_split(Conversion(items, b"", spec, split, output_dir, encode=encode, progress=False))
    return ["TRAIN_SPLIT = 'train'", "EVAL_SPLIT = 'val'"]


def _spec(folder):
    if folder in SPECS or folder == "sample":
        return SPECS.get(folder, SPECS["coco"])
    count, things = CLASSES.get(folder, (65, 37))  # by default Mapillary Vistas'
    names = tuple(f"class {i}" for i in range(count))
    more = {"ignore": 2000} if "imagenet" in folder else {}
    return DatasetSpec(folder, names, tuple(range(count)), tuple(i < things for i in range(count)), **more)


# === Steps ===


def lowered(build, batch, replicas, slice_name, mode):
    """Returns the serialised module of a replica's step; see `training_step`. `mode` is the value of --mode."""
    app.silence_xla()
    make = serving_step if mode == "serve" else training_step
    return tpu_compile.lower(*make(build, batch, replicas, slice_name), slice_name)


def training_step(build, batch, replicas, slice_name):
    """Returns (function, specs of its tensors) of a replica's train step.

    Args:
        build: function without arguments that returns (task, training, optimizer).
        batch: batch of each replica.
        replicas: number of replicas on the slice.
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
        loop = TrainStep(task, model, optimizer.build(model.trainable_variables), training, strategy=strategy)
    spec = task.train_dataset(batch, training.seed).element_spec
    return lambda batch: strategy.run(loop.replica_step, (batch,)), [spec]


def segment_each(task, model, images):
    """Segments a large batch of canvases. The network runs on the whole batch, and the post-processing on each image.

    Maps on the canvas are float32 and have all classes: 133 classes of 1025x1025 pixels take 0.56 GB for each image.
    Raises InputError if the task is not segmentation.
    """
    if not isinstance(task, DensePrediction):
        raise InputError(f"--mode=serve: {task.model.name} is not a model for segmentation, which this mode compiles")

    def segment_image(inputs):
        image, outputs = tf.nest.map_structure(lambda x: x[None], inputs)
        return {name: x[0] for name, x in task.segment(canvas_maps(lambda _: outputs, image)).items()}

    batch = images, task.network(model)(images)
    first = segment_image(tf.nest.map_structure(lambda x: x[0], batch))  # only its shapes are used
    return tf.map_fn(segment_image, batch, fn_output_signature=tf.nest.map_structure(tf.TensorSpec.from_tensor, first))


def serving_step(build, batch, *_):
    """Returns (function, specs of its tensors) of an exported model, which maps canvases to panoptic maps."""
    task = build()[0]
    folded = fold(task, task.build_model())
    return lambda images: segment_each(task, folded, images), [tf.TensorSpec([batch, *task.canvas, 3])]


def compile_step(build, slice_name, batch=None, mode="train"):
    """Compiles a step of a recipe. Returns (images per replica, `Compiled`, number of replicas, `TrainingConfig`).

    Args:
        build: function without arguments that returns (task, training, optimizer). It can be pickled.
        slice_name: like 'v5e:4x4'.
        batch: images per replica; None for the largest batch that fits, or the smallest batch if none fits.
        mode: value of --mode.
    """
    training = build()[1]
    partitions, unit = (1, 1) if mode == "serve" else (training.partitions, training.accumulate)
    replicas = replicas_of(slice_name, partitions)

    @functools.cache
    def compiled(batch):
        title = f"{slice_name}, {counted(batch, 'image')} a device"
        with working(f"{title}: compiling"):
            module = tpu_compile.alone(lowered, build, batch, replicas, slice_name, mode)
            program = tpu_compile.compile_for(module, slice_name, partitions=partitions)
        report(f"{title}: {_gib(program.used)}")
        return program

    batch = batch or unit * max(tpu_compile.largest_batch(lambda units: compiled(units * unit).fits), 1)
    return batch, compiled(batch), replicas, training


# === The table ===


def named(leaves, only):
    """Returns the leaves whose names contain the value of --only. Raises InputError if there is none."""
    matches = [leaf for leaf in leaves if only in leaf]
    if not matches:
        raise InputError(f"--only={only}: no recipe has this in its name")
    return matches


def markdown(rows):
    """Returns two Markdown tables: the recipes on their slices, and the largest batches on one device."""
    devices = [row for row in rows.values() if row.form in LARGEST]
    slices = [row for row in rows.values() if row.form not in LARGEST]
    lines = _table("MB all-reduced", slices, lambda row: f"{row.all_reduced / 1e6:.1f}")
    if devices:
        lines += ["", *_table("M cycles an image", devices, lambda row: f"{row.cycles / row.batch / 1e6:.0f}")]
    return "\n".join(lines)


def _table(last, rows, last_cell):
    head = ("recipe", "slice", "form", "images", "GiB", "of", "M cycles", "s a step", "chip-hours", last)
    lines = []
    for row in rows:
        costs = ["does not fit", "", "", ""]
        if row.fits:
            costs = [f"{row.cycles / 1e6:.0f}", f"{row.seconds:.3f}", f"{row.chip_hours:.0f}", last_cell(row)]
        memory = f"{row.used / 2**30:.1f}", f"{row.limit / 2**30:.1f}"
        lines.append([show.code(row.leaf), row.slice, row.form, row.batch, *memory, *costs])
    return show.markdown_table(head, lines)


# === The command ===


class Compile(Flags):
    gin_file = flags.GIN_FILE.but(default=("sample/overfit.gin",), alone=("all",))
    gin_binding = flags.GIN_BINDING.but(alone=("all",))
    data_dir = flags.DATA_DIR.but(alone=("all",))
    slice = Flag(str, "the TPU slice, like v5e:4x4.", tpu_compile.DEFAULT_SLICE, alone=("all",))
    batch = flags.BATCH.but(meaning="images of a device; by default as many as fit.", alone=("all",))
    mode = Flag(str, "step to compile.", "train", choices=("train", "serve"), alone=("all",))
    parts = Flag(bool, "cycles, bytes and products of each part, with a lower bound.", False, alone=("all",))
    all = Flag(bool, "every published recipe; adds missing rows to the file of --csv.", False)
    only = Flag(str, "text that the names of the recipes contain.", "", needs="all")
    csv = flags.CSV.but(meaning="table of compiled recipes.", needs="all")
    markdown = MARKDOWN.but(needs="all")


def _main(given):
    replicas_of(given.slice)  # raises InputError for a wrong slice, before anything is built
    if given.parts and given.slice.partition(":")[0] not in CHIPS:
        raise InputError(f"--parts: no speed of the memory of {given.slice} is known: {', '.join(CHIPS)}")
    if not given.all:
        recipes.read(given.gin_file, given.gin_binding)
    check_installed("the TPU's compiler wants", "analysis", "jax", "libtpu")
    what = "every published recipe: hours" if given.all else f"a step of {' '.join(given.gin_file)}: minutes"
    report(f"compiling with the TPU's own compiler {what}")
    _compile_all(given) if given.all else _compile_step(given)


def _compile_step(given):
    """Compiles the step of the flags' recipe, and prints its memory and the cycles of its ops and parts."""
    build = functools.partial(build_recipe, given.gin_file, given.gin_binding, given.data_dir)
    batch, program, replicas, training = compile_step(build, given.slice, given.batch, given.mode)
    if not program.fits:
        say(
            f"{batch} images a device do not fit: {_gib(program.used)} of {_gib(program.limit)}, "
            f"{_gib(program.used - program.limit)} too much; try a smaller --batch, "
            "--gin_binding=\"TrainingConfig.precision = 'mixed_bfloat16'\", "
            "--gin_binding=\"ModelConfig.backend = 'kernel'\", --gin_binding=\"ModelConfig.recompute = 'block'\", "
            "or a generation with more memory"
        )
        sys.exit(1)
    largest = "" if given.batch else ", the largest batch that fits"
    shared = f" of {training.partitions} devices" if training.partitions > 1 and given.mode == "train" else ""
    say(f"{given.slice}: {counted(replicas, 'replica')}{shared}, {counted(batch, 'image')} each{largest}; {given.mode}")
    say(f"memory {_gib(program.used)} of {_gib(program.limit) if program.limit else 'an unknown limit'}")
    say(f"estimated cycles {program.cycles / 1e6:.2f} M; padding {program.padding:.0%} of the results' bytes")
    if given.parts:
        generation = given.slice.partition(":")[0]
        chip, cores = CHIPS[generation], replicas_of(f"{generation}:1x1")  # `cores` is the number of devices of a chip
        _print_parts(program, chip.products / cores, chip.memory / chip.clock / cores)
    else:
        for title, costs in (("operation", program.by_op), ("part", program.by_part)):
            for name, cost in list(costs.items())[:12]:
                fraction = cost.cycles / max(program.cycles, 1)
                say(f"  {title:10s} {name:32s} {cost.cycles / 1e6:10.2f} M  {fraction:5.1%}")
    say(f"custom calls: {', '.join(program.custom_calls) or 'none'}")


def _gib(size):
    return f"{size / 2**30:.2f} GiB"


def _print_parts(program, products, memory):
    """Prints the cycles of each part and their lower bound. The part with the largest difference is first.

    Args:
        program: the `Compiled`.
        products, memory: multiply-adds and bytes of memory traffic per cycle of a device.
    """
    rows = []
    for name, cost in program.by_part.items():
        limits = {"products": cost.products / products, "memory": cost.bytes / memory}
        limit = max(limits, key=limits.get)
        rows.append((name, cost, limits[limit], limit))
    header = ("part", "M cycles", "share", "MB", "G multiply-adds", "bound, M cycles", "of", "ratio")
    cells = []
    for name, cost, bound, limit in sorted(rows, key=lambda row: row[2] - row[1].cycles):
        cycles = f"{cost.cycles / 1e6:.2f}", f"{cost.cycles / max(program.cycles, 1):.1%}"
        moved = f"{cost.bytes / 1e6:.1f}", f"{cost.products / 1e9:.2f}"
        cells.append((name, *cycles, *moved, f"{bound / 1e6:.2f}", limit, f"{cost.cycles / max(bound, 1):.1f}"))
    print_table(header, cells)


def compile_row(leaf, slice_name, form):
    """Compiles a train step of a recipe on a slice. Returns its `Row`."""
    with recipe_of(leaf, form) as build:
        training = build()[1]
        recipe_batch = max(training.batch // replicas_of(slice_name, training.partitions), 1)
        batch, program, *_ = compile_step(build, slice_name, None if form in LARGEST else recipe_batch)
    facts = {name: vars(program)[name] for name in ("fits", "used", "cycles", "all_reduced", "all_reduces")}
    images, problems = training.steps * training.batch, " ".join(program.custom_calls)
    return Row(leaf, slice_name, form, batch, images=images, problems=problems, limit=program.limit or 0, **facts)


def _compile_all(given):
    """Compiles every published recipe, or the recipes of --only."""
    if given.markdown:
        write_block(given.markdown, "tpu")
    path = given.need("csv")
    named([leaf for leaf, *_ in plan()], given.only)
    table = markdown(compile_all(path, compile_row, given.only))
    say(*table.splitlines())
    if given.markdown:
        write_block(given.markdown, "tpu", table)


if __name__ == "__main__":
    app.run({"": (Compile, _main)})
