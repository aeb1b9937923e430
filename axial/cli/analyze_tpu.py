"""The verbs of axial-analyze that ask the TPU's compiler: tpu, pod."""

import contextlib
import dataclasses
import functools
import os
import sys

from absl import flags

from axial.chips import CHIPS, replicas_of
from axial.cli import app
from axial.cli.analyze_speed import builder, recipe
from axial.cli.checks import check_recipe
from axial.cli.pages import finish, report
from axial.io.show import counted, print_table, say, working

FLAGS = flags.FLAGS
OF_RECIPE = ("gin_file", "gin_binding", "data_dir")
OF_STEP = (*OF_RECIPE, "mode", "batch", "parts")
OF_TABLE = ("only", "csv", "markdown")


def check_tpu():
    """Raises InputError for flags that do not go together."""
    app.refuse_without("all", OF_TABLE)
    app.refuse_beside("all", (*OF_STEP, "slice"))


def run_tpu(_):
    from axial.errors import InputError, check_installed

    replicas_of(FLAGS.slice)  # names a wrong slice before anything is built
    generation = FLAGS.slice.partition(":")[0]
    chip = CHIPS.get(generation)
    if FLAGS.parts and not chip:
        raise InputError(f"--parts: no speed of the memory of {FLAGS.slice} is known: {', '.join(CHIPS)}")
    if not FLAGS.all:
        check_recipe()
    check_installed("axial-analyze tpu wants", "analysis", "jax", "libtpu")
    what = "every published recipe: hours" if FLAGS.all else f"a step of {' '.join(FLAGS.gin_file)}: minutes"
    report(f"compiling with the TPU's own compiler {what}")
    if FLAGS.all:
        _compile_all()
        return

    from axial.tpu_compiler import compile as tpu_compile

    training, programs = recipe()[1], {}
    partitions, unit = (1, 1) if FLAGS.mode == "serve" else (training.partitions, training.accumulate)
    replicas = replicas_of(FLAGS.slice, partitions)

    def gib(size):
        return f"{size / 2**30:.2f} GiB"

    def compiled(batch):
        if batch not in programs:
            with working(f"{FLAGS.slice}, {counted(batch, 'image')} a device: compiling"):
                hlo = tpu_compile.alone(_lowered, builder(), batch, replicas, FLAGS.slice, FLAGS.mode)
                programs[batch] = tpu_compile.compile_for(hlo, FLAGS.slice, partitions=partitions)
            report(f"{FLAGS.slice}, {counted(batch, 'image')} a device: {gib(programs[batch].used)}")
        return programs[batch]

    limit = tpu_compile.usable(FLAGS.slice)
    batch = FLAGS.batch or unit * tpu_compile.largest_batch(lambda parts: compiled(parts * unit), limit)
    program = compiled(batch or unit)
    if not program.fits:
        say(
            f"{batch or unit} images a device do not fit: {gib(program.used)} of {gib(program.limit)}, "
            f"{gib(program.used - program.limit)} too much; try a smaller --batch, "
            "--gin_binding=\"TrainingConfig.precision = 'mixed_bfloat16'\", "
            "--gin_binding=\"ModelConfig.backend = 'kernel'\", --gin_binding=\"ModelConfig.recompute = 'block'\", "
            "or a generation with more memory"
        )
        sys.exit(1)
    largest = "" if FLAGS.batch else ", the largest batch that fits"
    limit = next((p.limit for p in programs.values() if p.limit), limit)
    shared = f" of {partitions} devices" if partitions > 1 else ""
    say(f"{FLAGS.slice}: {counted(replicas, 'replica')}{shared}, {counted(batch, 'image')} each{largest}; {FLAGS.mode}")
    if FLAGS.mode == "train" and not FLAGS.batch:
        whole = training.batch
        say(f"{whole} images a step fit on {least_slice(FLAGS.slice, whole, batch, partitions) or 'no slice of it'}")
    say(f"memory {gib(program.used)} of {gib(limit) if limit else 'an unknown limit'}")
    say(f"estimated cycles {program.cycles / 1e6:.2f} M; padding {program.padding:.0%} of the results' bytes")
    result = {"slice": FLAGS.slice, "mode": FLAGS.mode, "batch": batch, "used": program.used, "cycles": program.cycles}
    cores = replicas_of(f"{generation}:1x1")  # of a chip, that are devices
    if chip and FLAGS.mode == "train" and (needed := _multiply_adds()):
        result["utilization"] = 3 * needed * batch / partitions / max(program.cycles * chip.products / cores, 1)
        say(
            f"model {needed / 1e9:.1f} G multiply-adds an image; three times that are {result['utilization']:.1%} of "
            "the products of as many cycles"
        )
    if FLAGS.parts:
        speeds = chip.products / cores, chip.memory / chip.clock / cores
        result["parts"] = _print_parts(program, *speeds)
        result["moves"] = _print_moves(program)
    else:
        for title, costs in (("operation", program.by_op), ("part", program.by_part)):
            for name, cost in list(costs.items())[:12]:
                say(
                    f"  {title:10s} {name:32s} {cost.cycles / 1e6:10.2f} M  {cost.cycles / max(program.cycles, 1):5.1%}"
                )
    say(f"custom calls: {', '.join(program.custom_calls) or 'none'}")
    finish(result)


def least_slice(slice_name, batch, largest, partitions=1):
    """The smallest slice of a generation that trains with a batch, as text, or None.

    Args:
        slice_name: any slice of the generation, like 'v5e:4x4'.
        batch: images of a step, over all replicas.
        largest: most images of a replica.
        partitions: see `replicas_of`.
    """
    from axial.slices import GENERATIONS

    generation = slice_name.partition(":")[0]
    for topology in GENERATIONS[generation].topologies.split():
        devices = replicas_of(f"{generation}:{topology}")
        replicas = devices // partitions
        if replicas and devices % partitions == 0 and batch % replicas == 0 and batch // replicas <= largest:
            return f"{generation}:{topology}, {batch // replicas} a replica, or larger"
    return None


def _multiply_adds():
    """Multiply-adds of the recipe's model for an image of its crop.

    None for a model of no single map, and for one that differs from its name's.
    """
    from axial.analysis.stages import stages

    task = recipe()[0]
    if task.crop is None or task.model.arguments or not task.instances:
        return None
    height, width = task.crop
    with working(f"counting {task.model.name}"):
        rows = stages(task.model.name, task.num_classes, batch=1, height=height, width=width)
    return sum(row.macs for row in rows)


def _print_moves(program):
    """Prints what copies, slices and pads cost. Returns the largest of them."""
    all_of_it = sum(cost.cycles for cost in program.moves.values())
    rows = [
        {"part": part, "name": name, "cycles": cost.cycles, "share": cost.cycles / max(program.cycles, 1)}
        for (part, name), cost in program.moves.items()
    ]
    say(
        f"copies, slices, pads and other moves: {all_of_it / 1e6:.2f} M cycles, "
        f"{all_of_it / max(program.cycles, 1):.1%}; the largest:"
    )
    for row in rows[:5]:
        say(f"  {row['cycles'] / 1e6:.2f} M  {row['share']:.1%}  {row['part']}: {row['name']}")
    return rows[:20]


def _print_parts(program, products, memory):
    """Prints what each part costs beside what it must, the most wasteful first. Returns the rows.

    Args:
        program: `Compiled`.
        products, memory: multiply-adds and bytes of a device in a cycle.
    """
    rows = []
    for part, cost in program.by_part.items():
        least, limit = cost.bound(products, memory)
        share = cost.cycles / max(program.cycles, 1)
        rows.append({"part": part, **dataclasses.asdict(cost), "share": share, "bound": round(least), "limit": limit})
    rows.sort(key=lambda row: row["bound"] - row["cycles"])
    header = ("part", "M cycles", "share", "MB", "G multiply-adds", "bound, M cycles", "of", "ratio")
    cells = [
        (
            row["part"],
            f"{row['cycles'] / 1e6:.2f}",
            f"{row['share']:.1%}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['products'] / 1e9:.2f}",
            f"{row['bound'] / 1e6:.2f}",
            row["limit"],
            f"{row['cycles'] / max(row['bound'], 1):.1f}",
        )
        for row in rows
    ]
    print_table(header, cells)
    return rows


@contextlib.contextmanager
def recipe_of(leaf, form):
    """Context with a function that builds a published recipe without its data: (task, training, optimizer)."""
    import tempfile

    from axial import configuration
    from axial.tpu_compiler import table as tpu_table

    with tempfile.TemporaryDirectory() as folder:
        splits = tpu_table.write_stand_in(leaf.partition("/")[0], folder)

        def build():
            configuration.load([leaf], [*splits, *tpu_table.BINDINGS[form]])
            return configuration.build(data_dir=folder)

        yield build


def lowered_row(leaf, slice_name, form, batch=None):
    """(module, training, batch) of a training step of a recipe on a slice.

    Args:
        leaf, slice_name, form: see `tpu_table.Row`.
        batch: of each replica; None for the recipe's own.
    """
    from axial.tpu_compiler import compile as tpu_compile

    with recipe_of(leaf, form) as build:
        training = build()[1]
        replicas = replicas_of(slice_name, training.partitions)
        batch = batch or max(training.batch // replicas, 1)
        return tpu_compile.lower(*training_step(build, batch, replicas, slice_name), slice_name), training, batch


def compile_row(leaf, slice_name, form, known=None):
    """The `tpu_table.Row` of a training step of a recipe on a slice.

    Args:
        leaf, slice_name, form: see `tpu_table.Row`.
        known: see `tpu_compile.largest_batch`.
    """
    from axial.tpu_compiler import compile as tpu_compile
    from axial.tpu_compiler import table as tpu_table

    @functools.cache
    def compiled(batch):
        hlo, training, batch = tpu_compile.alone(lowered_row, leaf, slice_name, form, batch)
        return tpu_compile.compile_for(hlo, slice_name, partitions=training.partitions), training, batch

    batch = None
    if form in tpu_table.LARGEST:
        limit = tpu_compile.usable(slice_name)
        batch = max(tpu_compile.largest_batch(lambda batch: compiled(batch)[0], limit, known), 1)
    program, training, batch = compiled(batch)
    return tpu_table.Row(
        leaf,
        slice_name,
        form,
        batch,
        fits=program.fits,
        used=program.used,
        limit=program.limit or tpu_compile.usable(slice_name) or 0,
        cycles=program.cycles,
        all_reduced=program.all_reduced,
        all_reduces=program.all_reduces,
        images=training.steps * training.batch,
        problems=" ".join(program.custom_calls),
    )


def _compile_all():
    """Compiles every published recipe; see `tpu_table`."""
    from axial.io.write import around_block, write_block
    from axial.recipes import experiments_dir
    from axial.tpu_compiler import table as tpu_table

    if FLAGS.markdown:
        around_block(FLAGS.markdown, "tpu")
    path = app.flag("csv")
    named([leaf for leaf, *_ in tpu_table.plan(experiments_dir())], FLAGS.only)
    rows = tpu_table.compile_all(experiments_dir(), path, compile_row, progress=report, only=FLAGS.only)
    say(*tpu_table.markdown(rows).splitlines())
    finish([dataclasses.asdict(row) for _, row in sorted(rows.items())])
    if FLAGS.markdown:
        write_block(FLAGS.markdown, "tpu", tpu_table.markdown(rows))


def named(leaves, only):
    """The recipes whose names have the text of --only. Raises InputError if there is none."""
    from axial.errors import InputError

    found = [leaf for leaf in leaves if only in leaf]
    if not found:
        raise InputError(f"--only={only}: no recipe has this in its name")
    return found


def training_step(build, batch, replicas, slice_name):
    """(function, specs) of a training step of one replica.

    Args:
        build: function that takes nothing and returns (task, training, optimizer).
        batch: of each replica.
        replicas: of the slice.
        slice_name: like 'v5e:4x4', or `compile.CPU`.

    Raises:
        InputError: `TrainingConfig.accumulate` does not divide the batch.
    """
    from axial.tpu_compiler.compile import SliceStrategy, forms
    from axial.training.loop import Loop
    from axial.training.strategy import set_precision
    from axial.training.trainer import check_batch

    strategy = SliceStrategy(replicas)
    with strategy.scope(), forms(slice_name):
        task, training, optimizer = build()
        row = task.row
        check_batch(dataclasses.replace(training, batch=batch * replicas), replicas, row)
        set_precision(training.precision)
        model = task.build_model()
        optimizer.build(model.trainable_variables)
        loop = Loop(task, model, optimizer, config=training, strategy=strategy)
    spec = task.train_dataset(batch, training.seed).element_spec
    return lambda batch: strategy.run(loop.replica_step, (batch,)), [spec]


def _lowered(build, batch, replicas, slice_name, mode):
    """Serialised module of a step of one replica; see `training_step`. `mode` is the flag."""
    from axial.tpu_compiler import compile as tpu_compile

    app.silence_xla()
    if mode == "serve":
        step, specs = _serving_step(build()[0], batch)
    else:
        step, specs = training_step(build, batch, replicas, slice_name)
    return tpu_compile.lower(step, specs, slice_name)


def _serving_step(task, batch):
    """(function, specs) of an exported model, from canvases to panoptic maps."""
    import tensorflow as tf

    from axial.serving.fold import fold

    folded = fold(task, task.build_model())
    return lambda images: task.segments(folded, images), [tf.TensorSpec([batch, *task.canvas, 3])]


def run_pod(_):
    from axial.errors import InputError
    from axial.io.write import write_json
    from axial.recipes import experiments_dir
    from axial.tpu_compiler import pod
    from axial.tpu_compiler import table as tpu_table

    path = FLAGS.csv or os.path.join(experiments_dir(), "tpu.csv")
    rows = [row for row in tpu_table.read_rows(path).values() if FLAGS.only in row.leaf and row.fits]
    rows = [row for row in rows if row.form not in tpu_table.LARGEST]  # these have one device and no sums
    if not rows:
        raise InputError(
            f"{path}: no compiled recipe with {FLAGS.only!r} in its name; axial-analyze tpu --all makes them"
        )
    found = []
    for row in rows:
        say(f"{row.leaf}, {row.form}, {counted(row.batch, 'image')} a core, as compiled for {row.slice}")
        header = ("cores", "batch", "compute s", "sums s", "step s", "efficiency", "images/s a host", "limit")
        cells = []
        for p in pod.predict(row, FLAGS.hop_microseconds * 1e-6, FLAGS.host_images):
            times = [f"{value:.4f}" for value in (p.compute, p.reduce, p.step)]
            cores = f"{p.cores}{' (paper)' if p.paper else ''}"
            cells.append((cores, p.batch, *times, f"{p.efficiency:.1%}", f"{p.host_images:.0f}", p.limit))
            shares = {"step": p.step, "efficiency": p.efficiency, "limit": p.limit}
            found.append({"leaf": row.leaf, "form": row.form, **dataclasses.asdict(p), **shares})
        print_table(header, cells)
    say(" ".join(pod.__doc__.split("The model.")[1].split()))
    say(f"Here t is {FLAGS.hop_microseconds:g} microseconds. No TPU has run any of it.")
    if FLAGS.json:
        write_json(FLAGS.json, found)
