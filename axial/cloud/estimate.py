"""What a run costs before it starts: steps, hours, chip-hours. Prices differ by region and contract; none is said."""

import dataclasses

from axial.chips import CHIPS
from axial.errors import InputError
from axial.io.show import counted


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


def describe(slice_, steps_left, time):
    """One line.

    Args:
        slice_: a `Slice`.
        steps_left: steps until the end, or None if unknown.
        time: a `StepTime`, or None.
    """
    parts = ", ".join(counted(getattr(slice_, f"{unit}s"), unit) for unit in ("chip", "core", "host"))
    what = f"{slice_.name}: {parts}, {slice_.topology}"
    if steps_left is None:
        return f"{what}; the number of steps is unknown, so no estimate of the cost: give --steps"
    if time is None:
        return (
            f"{what}; {counted(steps_left, 'step')}; no step time is known, so no estimate of the cost: "
            "give --seconds_per_step, or --cycles_per_step of axial-analyze tpu"
        )
    hours = steps_left * time.seconds / 3600
    return (
        f"{what}; {counted(steps_left, 'step')} of {time.seconds:.4g} s are {hours:.1f} hours and "
        f"{hours * slice_.chips:.0f} chip-hours, without waiting, compiling and evaluating ({time.source})"
    )
