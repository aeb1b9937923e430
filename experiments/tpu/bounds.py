"""Compares each layer's cycles in a training step with three lower bounds, and says how busy the kernels keep units.

%s --slices=v5e:1x1     parts of Axial-DeepLab-S's step with one image, worst first, and its Pallas kernels (minutes)
%s --csv=F --markdown=F
                        the same for three chips; every layer in a CSV file; the tables on a page

Everything is read from the TPU's own compiler. It knows neither waits for memory inside a kernel nor the overlap of
kernels with other work.
"""

import collections
import dataclasses
import math
import os
import re
import sys

import hlo
import schedules
import tpu
from axial.chips import CHIPS
from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError, check_installed
from axial.io.show import markdown_table, print_table
from axial.io.write import write_text

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "paper"))
from pages import MARKDOWN, csv_rows, write_block

SIDES = {"v5e": 128, "v5p": 128, "v6e": 256}  # side of a matrix unit
FORM = "largest batch, kernels"  # nothing is recomputed
UNITS = ("matrix", "weights", "shuffle", "vector", "load", "store")


@dataclasses.dataclass(frozen=True)
class Row:
    """The cycles of a layer's forward or backward pass, and lower bounds on them.

    Attributes:
        leaf, slice, layer, phase: the recipe, the slice, the layer, 'forward' or 'backward'.
        cycles: the compiler's estimate; for kernels, the instruction bundles.
        products: cycles for the multiply-adds, with padding to the matrix units' tiles.
        least: cycles for the arrays that the layer shares with others (`hlo.shared_bytes`).
        moved: cycles for the bytes that this program moves.
        kernels: the part of `cycles` in kernels.
        units: for all kernels, the cycles of each kernel's busiest unit (`schedules.busy`).
    """

    leaf: str
    slice: str
    layer: str
    phase: str
    cycles: int
    products: int
    least: int
    moved: int
    kernels: int
    units: int

    @property
    def bound(self):
        return max(self.products, self.least)


def layer_and_phase(name):
    """The part of an op for `hlo.costs`: its layer and whether the op belongs to the backward pass."""
    layer = hlo.layer_of_op(name)
    return f"{layer}, backward" if "gradient_tape" in name and layer != hlo.REST else layer


def rows_of(leaf, slice_name, compiled):
    """Returns the list of a compiled step's `Row`s."""
    generation = slice_name.partition(":")[0]
    chip, devices = CHIPS[generation], tpu.replicas_of(f"{generation}:1x1")
    products, memory = chip.products / devices, chip.memory / chip.clock / devices
    program, kernels = hlo.parse(compiled.program), compiled.kernels

    def costs_of(cycles):
        costs = hlo.costs(program, cycles, name_part=layer_and_phase, side=SIDES[generation])[1]
        return collections.defaultdict(hlo.Cost, costs)

    busy = {name: schedules.busy(counts, generation) for name, counts in kernels.items()}
    costs = costs_of({name: counts["bundles"] for name, counts in kernels.items()})
    others = costs_of(dict.fromkeys(kernels, 0))
    matrix = costs_of({name: math.ceil(cycles["matrix"]) for name, cycles in busy.items()})
    units = costs_of({name: math.ceil(max(cycles.values())) for name, cycles in busy.items()})
    shared = hlo.shared_bytes(program, layer_and_phase)
    rows = []
    for name, cost in costs.items():
        other, (layer, _, phase) = others[name].cycles, name.partition(", ")
        bounds = cost.products / products + matrix[name].cycles - other, shared.get(name, 0) / memory
        bounds = *bounds, cost.bytes / memory
        inside = cost.cycles - other, units[name].cycles - other
        rows.append(Row(leaf, slice_name, layer, phase or "forward", cost.cycles, *map(round, bounds), *inside))
    return rows


def parts_table(rows):
    """Returns the cells of a table of the parts. The part with the most cycles above its bound is first."""
    parts = collections.defaultdict(list)
    for row in rows:
        parts[re.sub(r" block\d+", "", row.layer)].append(row)
    totals = {part: _total(each) for part, each in parts.items()}
    order = sorted(totals.items(), key=lambda item: item[1]["bound"] - item[1]["cycles"])
    return [_cells(part, total) for part, total in [*order, ("all", _total(rows))]]


def _total(rows):
    names = "cycles", "products", "least", "moved", "bound", "kernels", "units"
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def _cells(part, total):
    cells = [f"{total[name] / 1e6:.2f}" for name in ("products", "least", "moved", "bound", "cycles")]
    ratio = f"{total['cycles'] / max(total['bound'], 1):.1f}"
    inside = f"{total['kernels'] / 1e6:.2f}", f"{total['units'] / 1e6:.2f}" if total["kernels"] else ""
    return [part, *cells, ratio, *inside]


PARTS = ("part", "padded products", "least bytes", "moved bytes", "bound", "estimate", "ratio", "in kernels", "unit")
KERNELS = ("kernel", "calls", "M cycles", *UNITS, "busiest", "of it", "spills")


def kernels_table(compiled, generation):
    """Returns the cells of a table of the kernels: the fractions of the cycles in which units are busy.

    The last columns are the busiest kind, its fraction, and the fraction of spills among loads and stores.
    """
    names = collections.defaultdict(list)
    for name, counts in compiled.kernels.items():
        names[re.sub(r"\.\d+$", "", name)].append(counts)
    totals = {name: sum(each, collections.Counter()) for name, each in names.items()}
    cells = []
    for name, counts in sorted(totals.items(), key=lambda item: -item[1]["bundles"]):
        busy, bundles = schedules.busy(counts, generation), counts["bundles"]
        busy["weights"] += busy.pop("turned weights")
        kind = max(busy, key=busy.get)
        spills = counts["spills"] / max(counts["load"] + counts["store"], 1)
        shares = [f"{busy[unit] / bundles:.0%}" for unit in UNITS]
        last = kind, f"{busy[kind] / bundles:.0%}", f"{spills:.0%}"
        cells.append([name, len(names[name]), f"{bundles / 1e6:.2f}", *shares, *last])
    return cells


class Bounds(Flags):
    leaf = Flag(str, "the recipe.", "coco/axial_deeplab_s.gin")
    slices = Flag(str, "slices of one device, separated by commas.", ",".join(tpu.DEVICES))
    form = Flag(str, "form of the step.", FORM, choices=tuple(tpu.BINDINGS))
    csv = flags.CSV.but(meaning="table of all layers.")
    markdown = MARKDOWN


def _main(given):
    slices = given.slices.split(",")
    for slice_name in slices:
        if slice_name.partition(":")[0] not in SIDES or tpu.replicas_of(slice_name) != 1:
            raise InputError(f"--slices={slice_name}: expected slices of one device, like {','.join(tpu.DEVICES)}")
    if given.markdown:
        write_block(given.markdown, "bounds")
    check_installed("the TPU's compiler wants", "analysis", "jax", "libtpu")
    rows, lines = [], []
    for slice_name in slices:
        with tpu.recipe_of(given.leaf, given.form) as build:
            compiled = tpu.compile_step(build, slice_name, batch=1)[1]
        if not compiled.fits:
            raise InputError(f"--form: one image does not fit {slice_name}")
        new = rows_of(given.leaf, slice_name, compiled)
        rows += new
        for header, cells in (
            (PARTS, parts_table(new)),
            (KERNELS, kernels_table(compiled, slice_name.partition(":")[0])),
        ):
            print_table(header, cells, title=slice_name)
            lines += ["", f"{given.leaf}, {slice_name}:", "", *markdown_table(header, cells)]
    if given.csv:
        write_text(given.csv, csv_rows(Row, rows))
    if given.markdown:
        write_block(given.markdown, "bounds", "\n".join(lines[1:]))


if __name__ == "__main__":
    app.run({"": (Bounds, _main)})
