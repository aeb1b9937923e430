"""Published figures of Google's TPUs.

The sources are https://cloud.google.com/tpu/docs/v3 and the pages for v4, v5e, v5p and v6e, read in November 2026.
Google does not publish clocks. A chip's clock follows from its peak and its multiply-adds per cycle, which follow from
the published number and size of its matrix units. The page for v6e names two units of 256x256, which would need 3.5 GHz
for the published peak. For a product of 8192x8192 matrices, libtpu's cost model gives a v6e 3.4 times as many
multiply-adds per cycle as a v5e. So this file assumes four units of 256x256.
"""

import dataclasses
import math

from axial.errors import InputError, nearest

GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e")


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU chip.

    Attributes:
        peak: peak floating-point operations per second in bfloat16.
        products: multiply-adds per cycle, summed over the chip's matrix units. A v3 has two cores, which divide the
            units and the memory.
        memory: memory bandwidth in bytes per second.
    """

    peak: float
    products: int
    memory: float

    @property
    def clock(self):
        """Clock frequency in cycles per second."""
        return self.peak / (2 * self.products)


CHIPS = {
    "v3": Chip(123e12, 4 * 128 * 128, 900e9),
    "v4": Chip(275e12, 8 * 128 * 128, 1200e9),
    "v5e": Chip(197e12, 4 * 128 * 128, 819e9),
    "v5p": Chip(459e12, 8 * 128 * 128, 2765e9),
    "v6e": Chip(918e12, 4 * 256 * 256, 1638e9),
}


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
    if generation not in GENERATIONS:
        raise InputError(
            f"--slice={slice_name}: no TPU is called {generation!r}{nearest(generation, GENERATIONS)}: "
            f"{', '.join(GENERATIONS)}"
        )
    if not all(side.isdigit() and int(side) for side in sides):
        raise InputError(f"--slice={slice_name}: expected a shape after the name, as in 'v5e:4x4'")
    devices = math.prod(map(int, sides)) * (2 if generation in ("v2", "v3") else 1)
    if devices % partitions:
        raise InputError(f"TrainingConfig.partitions = {partitions}: {slice_name} has {devices} devices")
    return devices // partitions
