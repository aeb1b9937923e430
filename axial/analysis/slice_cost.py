"""Estimates the cost of a run before it starts: steps, hours, chip-hours, and list price."""

import dataclasses
import os

from axial.chips import CHIPS
from axial.io.paths import experiments_dir
from axial.io.read import read_rows
from axial.io.schemas import Struct
from axial.io.show import counted

# CSV of on-demand prices in US dollars a chip-hour, by generation and region, with day and source. SkyPilot makes its
# catalogue from Google's Cloud Billing Catalog. Spot, flex start, reservations and contracts have other prices.
PRICES = "tpu_prices.csv"
PRICES_PAGE = "https://cloud.google.com/tpu/pricing"


class Price(Struct):
    """A row of the CSV `PRICES`."""

    generation: str
    region: str
    usd: str
    read: str
    source: str


def prices():
    """dict from each generation to a dict from regions to `Price`s."""
    table = {}
    for _, row in read_rows(os.path.join(experiments_dir(), PRICES), Price):
        table.setdefault(row.generation, {})[row.region] = row
    return table


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A recipe's training step on a slice, compiled by the TPU's compiler: a row of experiments/tpu.csv.

    Attributes:
        leaf: gin file of the recipe.
        slice: name of the slice, such as 'v5e:4x8'.
        form: variant of the step, such as 'recipe' or 'largest batch, kernels'.
        batch: images per replica.
        fits: whether the step fits the memory of a device.
        used, limit: needed and available bytes of a device.
        cycles: estimated clock cycles of a step.
        all_reduced: bytes that a step sums over the replicas.
        all_reduces: number of these sums, one after the other.
        images: number of images of the whole training.
        problems: ops without a TPU kernel.
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
    """dict from form to `CompiledStep`, for the steps of a recipe that fit; {} if `gin_files` is no compiled recipe."""
    rows = read_rows(os.path.join(experiments_dir(), "tpu.csv"), CompiledStep) if len(gin_files) == 1 else ()
    ours = [*gin_files, generation]
    return {row.form: row for _, row in rows if row.fits and [row.leaf, row.slice.partition(":")[0]] == ours}


def step_time(slice_, *, given=None, status=None, cycles=None):
    """(seconds of a training step on a `Slice`, source of this number), or None if there is no source.

    A measured time takes precedence over a computed one.

    Args:
        given: seconds a step that the user gives, or None.
        status: the run's `RunStatus`, or None.
        cycles: cycles of a step on one device, by the compiler's cost model (experiments/tpu.csv), or None.
    """
    if given:
        return given, "--seconds_per_step"
    if status is not None and status.seconds_per_step:
        return status.seconds_per_step, f"measured by this run, {status.updated or 'at an unknown time'}"
    if cycles and slice_.generation in CHIPS:  # no source gives the clock of a v2
        clock = CHIPS[slice_.generation].clock
        return cycles / clock, f"{cycles:.4g} cycles of the compiler's cost model at {clock / 1e9:.2f} GHz"
    return None


def describe(slice_, region, *, steps_left, time, limit):
    """Yields lines that describe the cost of a run on a `Slice`.

    Args:
        region: region of Google Cloud, or '' if it is unknown.
        steps_left: number of remaining steps.
        time: result of `step_time`.
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
        price = table.get(region) or next(iter(table.values()))
        rate = float(price.usd) * slice_.chips
        yield (
            f"list price: {f'about {hours * rate:.0f} USD, ' if time else ''}at most {limit * rate:.0f} USD until the "
            f"deadline in {limit:g} hours: {price.usd} USD a chip-hour on demand in {price.region}"
            f"{'' if price.region == region else '; your region may differ'} ({price.source}, read {price.read})"
        )
    else:
        yield f"list price: none is known of a {slice_.generation}: {PRICES_PAGE}"
    if hours > limit:
        done = round(steps_left * limit / hours)
        end = f"{counted(done, 'step')}, {counted(steps_left - done, 'step')} before its last one"
        yield f"warning: {hours:.1f} hours do not fit --time_limit={limit:g}: the run ends after {end}"
