"""Published figures of Google's TPUs.

The sources are https://cloud.google.com/tpu/docs/v3 and the pages for v4, v5e, v5p and v6e, read in November 2026.
Google does not publish clocks. A chip's clock follows from its peak and its multiply-adds per cycle, which follow from
the published number and size of its matrix units. The page for v6e names two units of 256x256, which would need 3.5 GHz
for the published peak. For a product of 8192x8192 matrices, libtpu's cost model gives a v6e 3.4 times as many
multiply-adds per cycle as a v5e. So this file assumes four units of 256x256.
"""

import dataclasses


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
