"""Measures how long it takes to trace and compile each recipe's train step, and counts its instructions (hours).

%s --csv=experiments/compile.csv --markdown=experiments/results/speed.md
                        existing rows of the file are kept; --only=coco/axial_deeplab_s takes minutes

The step is for one device, with a core's batch in the recipe's paper. XLA compiles the step for this CPU, with the
layer forms that accelerators use. The TPU's compiler compiles it for a chip, at level O1 as in experiments/tpu.csv.
"""

import dataclasses
import time

import hlo
import tpu
import tpu_compile
from axial.analysis.step_cost import resident
from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import check_installed
from axial.io import show
from pages import MARKDOWN, write_block


@dataclasses.dataclass(frozen=True)
class Row:
    """Measurements of a recipe's train step.

    Attributes:
        leaf: gin file of the recipe.
        compiler: `tpu_compile.CPU`, or `tpu_compile.DEFAULT_SLICE`.
        batch: batch of the device.
        instructions, computations: number of each in the lowered module before optimisation.
        tracing: CPU seconds in which Python builds the graph with its gradients.
        compiling: CPU seconds of all threads from the graph to the compiled program.
        wall: wall-clock seconds of tracing and compiling, which depend on other load on the machine.
        gib: peak memory in GiB of the process that needs most.
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


def markdown(rows):
    """Returns a Markdown table of the rows in a dict from `tpu.read_table`."""
    head = ("recipe", "compiler", "images or tokens", "instructions", "tracing s", "compiling s", "GiB")
    cells = [
        (show.code(row.leaf), row.compiler, row.batch, f"{row.instructions:,}")
        + tuple(f"{x:.1f}" for x in (row.tracing, row.compiling, row.gib))
        for _, row in sorted(rows.items())
    ]
    return "\n".join(show.markdown_table(head, cells))


def measure(leaf, compiler):
    """Measures a recipe's train step. Returns its `Row`.

    Raises:
        InputError: the compiler needs another version of jax or libtpu, or libtpu does not know the slice.
        MemoryError: the process was killed.
    """
    module, row = tpu_compile.alone(lower_recipe, leaf, compiler)
    if module:
        wall, compiling, gib = tpu_compile.alone(_compile, module, compiler)
        row = dataclasses.replace(row, wall=row.wall + wall, compiling=row.compiling + compiling, gib=max(row.gib, gib))
    return dataclasses.replace(row, **{x: round(vars(row)[x], 1) for x in ("tracing", "compiling", "wall", "gib")})


def lower_recipe(leaf, compiler):
    """Calls `lower` for a recipe's train step."""
    app.silence_xla()
    with tpu.recipe_of(leaf, "recipe") as build:
        batch = max(build()[1].batch // tpu.cores(leaf), 1)
        return lower(leaf, compiler, batch, tpu.training_step(build, batch, 1, compiler))


def lower(leaf, compiler, batch, step):
    """Traces a step, and compiles it if `compiler` is `tpu_compile.CPU`.

    Args:
        leaf, compiler, batch: see `Row`.
        step: tuple of a function of tensors and the tensors' `tf.TensorSpec`s.

    Returns:
        (serialised module for the TPU's compiler, or None if the compiler is a CPU's; `Row` without the times of the
        TPU's compiler).
    """
    started, begun = time.perf_counter(), time.process_time()
    stage, _ = tpu_compile.trace(*step, compiler)
    traced = time.process_time()
    here = compiler == tpu_compile.CPU
    raw = stage("optimized_hlo_serialized" if here else "hlo_serialized")
    compiled, wall = time.process_time(), time.perf_counter() - started
    raw = stage("hlo_serialized") if here else raw
    computations = hlo.parse(raw).computations
    instructions = sum(len(computation.instructions) for computation in computations)
    times = traced - begun, compiled - traced, wall, resident() / 2**30
    row = Row(leaf, compiler, batch, instructions, len(computations), *times)
    return None if here else tpu_compile.for_compiler(raw), row


def _compile(module, compiler):
    """Compiles a module by the TPU's compiler. Returns (wall-clock seconds, CPU seconds, peak memory in GiB)."""
    program = tpu_compile.compiler(module, compiler)
    started, processor = time.perf_counter(), time.process_time()
    program()
    return time.perf_counter() - started, time.process_time() - processor, resident() / 2**30


class Seconds(Flags):
    csv = flags.CSV.but(meaning="table of compile times.", needed=True)
    markdown = MARKDOWN
    only = Flag(str, "text that the names of the recipes contain.", "")


def _main(given):
    if given.markdown:
        write_block(given.markdown, "compile")
    path, compilers = given.csv, (tpu_compile.CPU, tpu_compile.DEFAULT_SLICE)
    leaves = tpu.named(tpu.leaves(), given.only)
    rows = tpu.read_table(path, Row)
    lacking = [key for leaf in leaves for key in ((leaf, compiler) for compiler in compilers) if key not in rows]
    if lacking:
        check_installed("the TPU's compiler wants", "analysis", "jax", "libtpu")
    for key in lacking:
        with show.working(" ".join(key)):
            rows = tpu.add_row(path, measure(*key))
    table = markdown(rows)
    show.say(*table.splitlines())
    if given.markdown:
        write_block(given.markdown, "compile", table)


if __name__ == "__main__":
    app.run({"": (Seconds, _main)})
