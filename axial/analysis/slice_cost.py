"""What a run costs before it starts: steps, hours, chip-hours, and the list price."""

import dataclasses
import os

from axial.chips import CHIPS
from axial.io.paths import experiments_dir
from axial.io.read import read_rows
from axial.io.schemas import Struct
from axial.io.show import counted

# US dollars of a chip-hour on demand, by generation and region, with day and source. SkyPilot's catalogue is made from
# Google's Cloud Billing Catalog. Spot, flex start, reservations and contracts have other prices.
PRICES = "tpu_prices.csv"
PRICES_PAGE = "https://cloud.google.com/tpu/pricing"


class Price(Struct):
    """A row of the table."""

    generation: str
    region: str
    usd: str
    read: str
    source: str


def prices():
    """dict from generations to dicts from regions to `Price`s."""
    found = {}
    for _, row in read_rows(os.path.join(experiments_dir(), PRICES), Price):
        found.setdefault(row.generation, {})[row.region] = row
    return found


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A training step of a recipe on a slice, by the TPU's compiler: a row of experiments/tpu.csv.

    Attributes:
        leaf: gin file.
        slice: like 'v5e:4x8'.
        form: what it is compiled with, like 'recipe' or 'largest batch, kernels'.
        batch: images of a replica.
        fits: whether it fits the memory of a device.
        used, limit: bytes needed and available.
        cycles: estimated, of a step.
        all_reduced: bytes that a step sums over the replicas.
        all_reduces: number of such sums, one after the other.
        images: that the whole training sees.
        problems: operations without a TPU kernel.
    """

    leaf: str
    slice: str
    form: str
    batch: int
    fits: bool
    used: int
    limit: int
    cycles: int
    all_reduced: int
    all_reduces: int
    images: int
    problems: str


def compiled_steps(gin_files, generation):
    """dict from forms to the rows of `experiments/tpu.csv` that fit, of a recipe as it is; {} for other gin files."""
    rows = read_rows(os.path.join(experiments_dir(), "tpu.csv"), CompiledStep) if len(gin_files) == 1 else ()
    ours = [*gin_files, generation]
    return {row.form: row for _, row in rows if row.fits and [row.leaf, row.slice.partition(":")[0]] == ours}


def step_time(slice_, *, given=None, status=None, cycles=None):
    """(seconds of a training step on a `Slice`, where they are known from), or None if nothing is known.

    What is measured goes before what is computed.

    Args:
        given: seconds a step that the user gives, or None.
        status: the run's `RunStatus`, or None.
        cycles: of one step on one device by the compiler's cost model (experiments/tpu.csv), or None.
    """
    if given:
        return given, "--seconds_per_step"
    if status is not None and status.seconds_per_step:
        return status.seconds_per_step, f"measured by this run, {status.updated or 'at an unknown time'}"
    if cycles and slice_.generation in CHIPS:  # no source says the clock of a v2
        clock = CHIPS[slice_.generation].clock
        return cycles / clock, f"{cycles:.4g} cycles of the compiler's cost model at {clock / 1e9:.2f} GHz"
    return None


def describe(slice_, region, *, steps_left, time, limit):
    """Lines on what a run costs on a `Slice`.

    Args:
        region: of Google Cloud, or '' if it is not known.
        steps_left: steps until the end.
        time: of `step_time`.
        limit: hours until the deadline.
    """
    parts = f"{counted(slice_.chips, 'chip')}, {counted(slice_.cores, 'core')}, {counted(slice_.hosts, 'host')}"
    what = f"{slice_.name}: {parts}, {slice_.topology}; {counted(steps_left, 'step')}"
    seconds, source = time or (0.0, "")
    hours = steps_left * seconds / 3600
    if time:
        what += f" of {seconds:.4g} s are {hours:.1f} hours and {hours * slice_.chips:.0f} chip-hours, "
        yield what + f"without waiting, compiling and evaluating ({source})"
    else:
        yield what + "; no step time is known, so no estimate of the cost: give --seconds_per_step"
    if table := prices().get(slice_.generation):
        found = table.get(region) or next(iter(table.values()))
        rate = float(found.usd) * slice_.chips
        yield (
            f"list price: {f'about {hours * rate:.0f} USD, ' if time else ''}at most {limit * rate:.0f} USD until the "
            f"deadline in {limit:g} hours: {found.usd} USD a chip-hour on demand in {found.region}"
            f"{'' if found.region == region else '; your region may differ'} ({found.source}, read {found.read})"
        )
    else:
        yield f"list price: none is known of a {slice_.generation}: {PRICES_PAGE}"
    if hours > limit:
        done = round(steps_left * limit / hours)
        yield (
            f"warning: {hours:.1f} hours do not fit --time_limit={limit:g}: the run ends after "
            f"{counted(done, 'step')}, {counted(steps_left - done, 'step')} before its last one"
        )
