"""Measures the seconds in which each recipe's training step is traced and compiled, and counts its program (hours).

%s --csv=experiments/compile.csv --markdown=experiments/RESULTS.md
                        what the file has is kept; --only=coco/axial_deeplab_s takes minutes

The step is that of one device, with the recipe's batch shared by the cores of its paper. XLA compiles it for this CPU,
in the forms that accelerators have, or the TPU's compiler for a chip, at its level O1 as in experiments/tpu.csv.
"""

import dataclasses
import resource
import sys
import time

import tensorflow as tf
from absl import flags

import steps
import tpu_compile
import tpu_table
from axial.chips import replicas_of
from axial.cli import app
from axial.cli.checks import check_page
from axial.errors import InputError, check_installed
from axial.io import show
from axial.io.lock import locked_file
from axial.io.read import read_rows
from axial.io.write import write_block, write_text
from axial.statements import experiments_dir

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Row:
    """A training step of a recipe.

    Attributes:
        leaf: gin file.
        compiler: `compile.CPU`, or a slice of one chip like 'v5e:1x1'.
        batch: of the device.
        instructions, computations: of the lowered module, before XLA optimises it.
        tracing: seconds of a processor in which Python builds the graph, its gradients included.
        compiling: seconds of a processor from the graph to the program, over all its threads.
        wall: seconds that passed in both. Other work on the machine lengthens them.
        gib: most memory of the processes that did it.
    """

    leaf: str
    compiler: str
    batch: int
    instructions: int
    computations: int
    tracing: float
    compiling: float
    wall: float
    gib: float

    @property
    def key(self):
        return self.leaf, self.compiler

    def rounded(self):
        """With one decimal."""
        cells = vars(self).items()
        return Row(**{name: round(value, 1) if isinstance(value, float) else value for name, value in cells})


def read(path):
    """dict from (leaf, compiler) to the rows of a CSV file; empty if there is none. Raises InputError."""
    if not tf.io.gfile.exists(path):
        return {}
    return {row.key: row for _, row in read_rows(path, Row)}


def write(path, rows):
    """Writes a CSV file of rows, a dict as of `read`."""
    write_text(path, show.csv_rows(Row, [row.rounded() for _, row in sorted(rows.items())]))


def add(path, row):
    """Adds a row to a CSV file, to which other commands may have added. Returns all rows, as `read`."""
    with locked_file(path):
        rows = {**read(path), row.key: row}
        write(path, rows)
    return rows


def complete(path, keys, measured):
    """Adds the rows that a CSV file lacks, each as soon as it is measured. Returns all rows, as `read`.

    Args:
        path: of the file.
        keys: (leaf, compiler) of each row.
        measured: function of them that returns the `Row`.
    """
    rows = read(path)
    for key in keys:
        if key not in rows:  # another command may have added it
            rows = add(path, measured(*key))
    return rows


def markdown(rows):
    """A table of rows, a dict as of `read`, as Markdown."""
    head = ("recipe", "compiler", "images or tokens", "instructions", "tracing s", "compiling s", "GiB")
    cells = [
        (show.code(row.leaf), row.compiler, row.batch, f"{row.instructions:,}")
        + tuple(f"{x:.1f}" for x in (row.tracing, row.compiling, row.gib))
        for _, row in sorted(rows.items())
    ]
    return "\n".join(show.markdown_table(head, cells))


def measure(lowered, leaf, compiler):
    """The `Row` of a recipe's step.

    Args:
        lowered: function of (leaf, compiler) that returns (module or None, fields of the row), in a process of its own.
        leaf, compiler: see `Row`.

    Raises:
        InputError: the installed jax or libtpu is another than the compiler needs, or libtpu does not know the slice.
        MemoryError: the process was killed.
    """
    module, fields = tpu_compile.alone(lowered, leaf, compiler)
    if module:
        wall, compiling, gib = tpu_compile.alone(_compile, module, compiler)
        fields["wall"] += wall
        fields["compiling"] += compiling
        fields["gib"] = max(fields["gib"], gib)
    return Row(leaf, compiler, **fields)


def lower(step, specs, compiler, batch):
    """(module for a TPU's compiler or None, fields of a `Row`) of a step, which is compiled here for a CPU.

    Args:
        step, specs: a function of tensors, and their `tf.TensorSpec`s.
        compiler, batch: see `Row`.
    """
    from tensorflow.compiler.xla.service import hlo_pb2

    started, begun = time.perf_counter(), time.process_time()
    stage, _ = tpu_compile.trace(step, specs, compiler)
    traced = time.process_time()
    here = compiler == tpu_compile.CPU
    raw = stage("optimized_hlo_serialized" if here else "hlo_serialized")
    compiled, wall = time.process_time(), time.perf_counter() - started
    raw = stage("hlo_serialized") if here else raw
    module = hlo_pb2.HloModuleProto.FromString(raw)
    fields = {
        "batch": batch,
        "instructions": sum(len(computation.instructions) for computation in module.computations),
        "computations": len(module.computations),
        "tracing": traced - begun,
        "compiling": compiled - traced,
        "wall": wall,
        "gib": _gib(),
    }
    return None if here else tpu_compile.for_compiler(raw), fields


def _compile(module, compiler):
    """(seconds that pass, seconds of all cores, GiB of memory) that the TPU's compiler takes for a module."""
    program = tpu_compile.compiler(module, compiler)
    started, processor = time.perf_counter(), time.process_time()
    program()
    return time.perf_counter() - started, time.process_time() - processor, _gib()


def _gib():
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _check():
    """Raises InputError for a slice of several devices, or none, and a --markdown without room for the table."""
    check_page("compile")()
    if replicas_of(FLAGS.slice) != 1:
        raise InputError(f"--slice={FLAGS.slice}: expected one device, like v5e:1x1")


def _main(_):
    _check()
    path, compilers = app.flag("csv"), (tpu_compile.CPU, FLAGS.slice)
    leaves = steps.named(tpu_table.leaves(experiments_dir()), FLAGS.only)
    keys = [(leaf, compiler) for leaf in leaves for compiler in compilers]
    if not set(keys) <= read(path).keys():
        check_installed("the TPU's compiler wants", "analysis", "jax", "libtpu")

    def measured(*key):
        with show.working(" ".join(key)):
            return measure(lower_recipe, *key)

    rows = complete(path, keys, measured)
    table = markdown(rows)
    show.say(*table.splitlines())
    if FLAGS.markdown:
        write_block(FLAGS.markdown, "compile", table)


def lower_recipe(leaf, compiler):
    """`lower` of a recipe's step."""
    app.silence_xla()
    with steps.recipe_of(leaf, "recipe") as build:
        batch = max(build()[1].batch // tpu_table.cores(leaf), 1)
        return lower(*steps.training_step(build, batch, 1, compiler), compiler, batch)


if __name__ == "__main__":  # who imports this has flags of its own
    flags.DEFINE_string("csv", None, "table of the seconds of recipes.")
    flags.DEFINE_string("markdown", None, "page that holds the two comments around the table, or a new file.")
    flags.DEFINE_string("only", "", "recipes whose names have this text.")
    flags.DEFINE_string("slice", tpu_compile.DEFAULT_SLICE, "the TPU chip, like v6e:1x1.")
    app.run(_main, sys.modules[__name__])
