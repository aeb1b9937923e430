"""Published figures of Google's TPUs.

From https://cloud.google.com/tpu/docs/v3 and its pages for v4, v5e, v5p and v6e, read in November 2026. The clock is
not published: it is the peak of a chip divided by its products a cycle (the number and size of matrix units there). The
page of v6e names two units of 256x256, with which its peak would need 3.5 GHz. libtpu's cost model gives a v6e 3.4
times as many products a cycle as a v5e for a product of 8192x8192 matrices. So four units' worth is assumed here.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU chip.

    Attributes:
        peak: floating-point operations a second in bfloat16.
        products: multiply-adds a cycle, of all its matrix units.
        memory: bytes a second to and from its memory.
        reduce: bytes a second that it can send to its neighbours while all chips sum: the published all-reduce
            bandwidth of a pod, divided by its chips, or half of the published bidirectional bandwidth.
        host: chips of a host.
        most: chips of the largest slice.
        torus: number of axes of the network.
    """

    peak: float
    products: int
    memory: float
    reduce: float
    host: int
    most: int
    torus: int

    @property
    def clock(self):
        """Cycles a second."""
        return self.peak / (2 * self.products)


CHIPS = {
    "v3": Chip(123e12, 4 * 128 * 128, 900e9, 340e12 / 1024, host=4, most=1024, torus=2),
    "v4": Chip(275e12, 8 * 128 * 128, 1200e9, 1.1e15 / 4096, host=4, most=4096, torus=3),
    "v5e": Chip(197e12, 4 * 128 * 128, 819e9, 51.2e12 / 256, host=8, most=256, torus=2),
    "v5p": Chip(459e12, 8 * 128 * 128, 2765e9, 1200e9 / 2, host=4, most=6144, torus=3),
    "v6e": Chip(918e12, 4 * 256 * 256, 1638e9, 102.4e12 / 256, host=8, most=256, torus=2),
}
