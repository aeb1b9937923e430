"""What a run costs before it starts: steps, hours, chip-hours, and the list price."""

import dataclasses

from axial.chips import CHIPS
from axial.errors import InputError
from axial.io.show import counted

# US dollars of a chip-hour on demand, by generation and region. Other regions, spot, flex start, reservations and
# contracts have other prices. No price of a v2 was found.
PRICES = {
    "v3": {"us-east1": 2.0},
    "v4": {"us-central2": 3.22},
    "v5e": {
        **dict.fromkeys(("us-central1", "us-east1", "us-east4", "us-east5", "us-west1", "us-west4"), 1.2),
        "us-south1": 1.416,
        "europe-west1": 1.3213,
        "europe-west4": 1.56,
        "asia-east1": 1.3895,
        "asia-northeast1": 1.541,
        "asia-southeast1": 1.56,
    },
    "v5p": {
        **dict.fromkeys(("us-central1", "us-east1", "us-east5"), 4.2),
        "us-south1": 4.779,
        "europe-west1": 4.4595,
        "europe-west4": 4.2525,
    },
    "v6e": {
        **dict.fromkeys(("us-central1", "us-east1", "us-east4", "us-east5", "us-south1", "us-west1"), 2.7),
        "europe-west4": 2.97,
        "asia-southeast1": 2.97,
        "asia-northeast1": 3.24,
        "asia-south1": 3.24,
    },
}
# catalogs/v8/gcp/vms.csv of github.com/skypilot-org/skypilot-catalog at 006059e, made from Google's Cloud Billing
# Catalog; v3: sky/catalog/data_fetchers/fetch_gcp.py of SkyPilot 0.14.1. Google's own page: PRICES_PAGE.
PRICES_SOURCE, PRICES_READ = "skypilot-catalog 006059e", "2026-11-27"
PRICES_PAGE = "https://cloud.google.com/tpu/pricing"


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a training step, and where they are known from."""

    seconds: float
    source: str


def step_time(slice_, *, given=None, status=None, cycles=None):
    """The `StepTime` of a run, or None if nothing is known: what is measured goes before what is computed.

    Args:
        slice_: a `Slice`.
        given: seconds a step that the user gives, or None.
        status: the run's `RunStatus`, or None.
        cycles: of one step on one device by the compiler's cost model (axial-analyze tpu), or None.

    Raises:
        InputError: cycles for a generation whose clock no source says.
    """
    if given:
        return StepTime(given, "--seconds_per_step")
    if status is not None and status.seconds_per_step:
        return StepTime(status.seconds_per_step, f"measured by this run, {status.updated or 'at an unknown time'}")
    if cycles:
        if slice_.generation not in CHIPS:
            raise InputError(
                f"--cycles_per_step: no source says the clock of {slice_.generation}; give --seconds_per_step"
            )
        clock = CHIPS[slice_.generation].clock
        return StepTime(cycles / clock, f"{cycles:.4g} cycles of the compiler's cost model at {clock / 1e9:.2f} GHz")
    return None


def describe(slice_, region, *, steps_left, time, limit):
    """Lines on what a run costs.

    Args:
        slice_: a `Slice`.
        region: of Google Cloud, or '' if it is not known.
        steps_left: steps until the end.
        time: a `StepTime`, or None.
        limit: hours until the deadline.
    """
    parts = ", ".join(counted(getattr(slice_, f"{unit}s"), unit) for unit in ("chip", "core", "host"))
    what = f"{slice_.name}: {parts}, {slice_.topology}; {counted(steps_left, 'step')}"
    hours = steps_left * time.seconds / 3600 if time else 0.0
    if time:
        what += f" of {time.seconds:.4g} s are {hours:.1f} hours and {hours * slice_.chips:.0f} chip-hours, "
        yield what + f"without waiting, compiling and evaluating ({time.source})"
    else:
        yield what + "; no step time is known, so no estimate of the cost: give --seconds_per_step"
    table = PRICES.get(slice_.generation)
    if table:
        place = region if region in table else next(iter(table))
        rate = table[place] * slice_.chips
        yield (
            f"list price: {f'about {hours * rate:.0f} USD, ' if time else ''}at most {limit * rate:.0f} USD until the "
            f"deadline in {limit:g} hours: {table[place]:g} USD a chip-hour on demand in {place}"
            f"{'' if place == region else '; your region may differ'} ({PRICES_SOURCE}, read {PRICES_READ})"
        )
    else:
        yield f"list price: none is known of a {slice_.generation}: {PRICES_PAGE}"
    if hours > limit:
        done = round(steps_left * limit / hours)
        yield (
            f"warning: {hours:.1f} hours do not fit --time_limit={limit:g}: the run ends after "
            f"{counted(done, 'step')}, {counted(steps_left - done, 'step')} before its last one"
        )
