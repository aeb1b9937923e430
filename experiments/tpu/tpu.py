"""Compiles steps with the TPU's own compiler, without a TPU: memory, estimated cycles, and what they go to.

%s --gin_file=coco/axial_deeplab_s.gin --slice=v5e:4x4
                        memory and estimated cycles of a recipe's step
%s --parts              and of each of its parts, beside the least that its bytes and products take
%s --all --csv=F --markdown=F
                        every published recipe for images on its slice (hours; what the file has is kept)
"""

import functools
import sys

import tpu_compile
import tpu_table
from axial import statements
from axial.chips import CHIPS, replicas_of
from axial.cli import app, flags
from axial.cli.analyze import build_recipe
from axial.cli.flags import Flag, Flags
from axial.errors import InputError, check_installed
from axial.io.show import counted, print_table, say, working
from axial.io.write import around_block, write_block
from axial.statements import experiments_dir

report = functools.partial(say, error=True)


class Compile(Flags):
    gin_file = flags.GIN_FILE.but(default=("sample/overfit.gin",), alone=("all",))
    gin_binding = flags.GIN_BINDING.but(alone=("all",))
    data_dir = flags.DATA_DIR.but(alone=("all",))
    slice = Flag(str, "the TPU slice, like v5e:4x4.", tpu_compile.DEFAULT_SLICE, alone=("all",))
    batch = flags.BATCH.but(meaning="images of a device; by default all that fit.", alone=("all",))
    mode = Flag(str, "the step that is compiled.", "train", choices=("train", "serve"), alone=("all",))
    parts = Flag(
        bool, "cycles, bytes and products of each part, beside the least that they take.", False, alone=("all",)
    )
    all = Flag(bool, "every published recipe; adds to the file of --csv what that lacks.", False)
    only = Flag(str, "recipes whose names have this text.", "", needs="all")
    csv = flags.CSV.but(meaning="table of compiled recipes.", needs="all")
    markdown = flags.MARKDOWN.but(needs="all")


def _main(given):
    replicas_of(given.slice)  # names a wrong slice before anything is built
    if given.parts and given.slice.partition(":")[0] not in CHIPS:
        raise InputError(f"--parts: no speed of the memory of {given.slice} is known: {', '.join(CHIPS)}")
    if not given.all:
        statements.read(given.gin_file, given.gin_binding)
    check_installed("the TPU's compiler wants", "analysis", "jax", "libtpu")
    what = "every published recipe: hours" if given.all else f"a step of {' '.join(given.gin_file)}: minutes"
    report(f"compiling with the TPU's own compiler {what}")
    _compile_all(given) if given.all else _compile_step(given)


def _compile_step(given):
    """Compiles the step of the recipe of the flags, and prints what it needs and what it goes to."""
    build = functools.partial(build_recipe, given.gin_file, given.gin_binding, given.data_dir)
    training, programs = build()[1], {}
    partitions, unit = (1, 1) if given.mode == "serve" else (training.partitions, training.accumulate)
    generation, replicas = given.slice.partition(":")[0], replicas_of(given.slice, partitions)

    def compiled(batch):
        if batch not in programs:
            with working(f"{given.slice}, {counted(batch, 'image')} a device: compiling"):
                hlo = tpu_compile.alone(tpu_table.lowered, build, batch, replicas, given.slice, given.mode)
                programs[batch] = tpu_compile.compile_for(hlo, given.slice, partitions=partitions)
            report(f"{given.slice}, {counted(batch, 'image')} a device: {_gib(programs[batch].used)}")
        return programs[batch]

    batch = given.batch or unit * tpu_compile.largest_batch(lambda parts: compiled(parts * unit).fits)
    program = compiled(batch or unit)
    if not program.fits:
        say(
            f"{batch or unit} images a device do not fit: {_gib(program.used)} of {_gib(program.limit)}, "
            f"{_gib(program.used - program.limit)} too much; try a smaller --batch, "
            "--gin_binding=\"TrainingConfig.precision = 'mixed_bfloat16'\", "
            "--gin_binding=\"ModelConfig.backend = 'kernel'\", --gin_binding=\"ModelConfig.recompute = 'block'\", "
            "or a generation with more memory"
        )
        sys.exit(1)
    largest = "" if given.batch else ", the largest batch that fits"
    limit = next((p.limit for p in programs.values() if p.limit), tpu_compile.usable(given.slice))
    shared = f" of {partitions} devices" if partitions > 1 else ""
    say(f"{given.slice}: {counted(replicas, 'replica')}{shared}, {counted(batch, 'image')} each{largest}; {given.mode}")
    say(f"memory {_gib(program.used)} of {_gib(limit) if limit else 'an unknown limit'}")
    say(f"estimated cycles {program.cycles / 1e6:.2f} M; padding {program.padding:.0%} of the results' bytes")
    if given.parts:
        chip, cores = CHIPS[generation], replicas_of(f"{generation}:1x1")  # of a chip, that are devices
        _print_parts(program, chip.products / cores, chip.memory / chip.clock / cores)
    else:
        for title, costs in (("operation", program.by_op), ("part", program.by_part)):
            for name, cost in list(costs.items())[:12]:
                share = cost.cycles / max(program.cycles, 1)
                say(f"  {title:10s} {name:32s} {cost.cycles / 1e6:10.2f} M  {share:5.1%}")
    say(f"custom calls: {', '.join(program.custom_calls) or 'none'}")


def _gib(size):
    return f"{size / 2**30:.2f} GiB"


def _print_parts(program, products, memory):
    """Prints what each part costs beside what it must, the most wasteful first.

    Args:
        program: `Compiled`.
        products, memory: multiply-adds and bytes of a device in a cycle.
    """
    rows = [(part, cost, *cost.bound(products, memory)) for part, cost in program.by_part.items()]
    header = ("part", "M cycles", "share", "MB", "G multiply-adds", "bound, M cycles", "of", "ratio")
    cells = []
    for part, cost, bound, limit in sorted(rows, key=lambda row: row[2] - row[1].cycles):
        share = f"{cost.cycles / 1e6:.2f}", f"{cost.cycles / max(program.cycles, 1):.1%}"
        moved = f"{cost.bytes / 1e6:.1f}", f"{cost.products / 1e9:.2f}"
        cells.append((part, *share, *moved, f"{bound / 1e6:.2f}", limit, f"{cost.cycles / max(bound, 1):.1f}"))
    print_table(header, cells)


def compile_row(leaf, slice_name, form):
    """The `tpu_table.Row` of a training step of a recipe on a slice; see there."""

    @functools.cache
    def compiled(batch):
        hlo, training, batch = tpu_compile.alone(tpu_table.lowered_row, leaf, slice_name, form, batch)
        return tpu_compile.compile_for(hlo, slice_name, partitions=training.partitions), training, batch

    batch = None
    if form in tpu_table.LARGEST:
        batch = max(tpu_compile.largest_batch(lambda batch: compiled(batch)[0].fits), 1)
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


def _compile_all(given):
    """Compiles every published recipe; see `tpu_table`."""
    if given.markdown:
        around_block(given.markdown, "tpu")
    path = given.need("csv")
    tpu_table.named([leaf for leaf, *_ in tpu_table.plan(experiments_dir())], given.only)
    rows = tpu_table.compile_all(experiments_dir(), path, compile_row, progress=report, only=given.only)
    say(*tpu_table.markdown(rows).splitlines())
    if given.markdown:
        write_block(given.markdown, "tpu", tpu_table.markdown(rows))


if __name__ == "__main__":
    app.run({"": (Compile, _main)})
