"""Step time of a recipe on slices of many sizes, predicted from one compiled step.

The model. Each core keeps its images, so that the batch grows with the slice. A step computes (the compiler's cycles
over the clock), then sums its gradients and the statistics of its batch norms over all cores. Nothing of the sums is
hidden behind the computing. A sum of B bytes over n chips takes

    2 B (n - 1) / n / R + 2 h t,

where R is the published all-reduce bandwidth of a chip (`chips.CHIPS`), h the hops across half of each axis of the
torus, and t the time of a hop, which is an assumption. Cores of a chip sum first, at no cost. Meanwhile each host
prepares its images; a step takes as long as the slower of the two.
"""

import dataclasses
import math

from axial.chips import replicas_of
from axial.tpu_compiler import table as tpu_table

CORES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step on a slice. Times are in seconds.

    Attributes:
        cores: devices of the slice.
        chips: chips of the slice.
        batch: images of a step.
        compute, reduce, feed: of computing, of the sums, and of the input; feed is None if a host's speed is unknown.
        host_images: images a second that each host must prepare.
        paper: whether the paper trained on so many cores.
    """

    cores: int
    chips: int
    batch: int
    compute: float
    reduce: float
    feed: float | None
    host_images: float
    paper: bool

    @property
    def step(self):
        return max(self.compute + self.reduce, self.feed or 0.0)

    @property
    def efficiency(self):
        """Share of the step in which the cores compute."""
        return self.compute / self.step

    @property
    def limit(self):
        """'input' if the cores wait for it, otherwise what takes them longer: 'compute' or 'sums'."""
        if (self.feed or 0.0) > self.compute + self.reduce:
            return "input"
        return "compute" if self.compute >= self.reduce else "sums"


def predict(row, hop, host_images=None):
    """[`Prediction`] for `CORES`, as far as slices of the row's generation reach.

    Args:
        row: `tpu_table.Row` that fits, of a slice: a step on one device has no sums over the replicas.
        hop: seconds from a chip to the next.
        host_images: images a second that a host's input gives, if known.
    """
    chip, found = row.chip, []
    cores_of_chip = replicas_of(f"{row.slice.partition(':')[0]}:1x1")
    for cores in CORES:
        chips = max(cores // cores_of_chip, 1)
        if chips > chip.most:
            break
        hops = chip.torus * (chips ** (1 / chip.torus)) / 2
        sums = 2 * row.all_reduced * (chips - 1) / chips / chip.reduce + row.all_reduces * 2 * hops * hop
        step = row.seconds + sums
        images = row.batch * cores // row.cores_an_image
        hosts = math.ceil(chips / chip.host)
        found.append(
            Prediction(
                cores,
                chips,
                images,
                compute=row.seconds,
                reduce=sums,
                feed=images / hosts / host_images if host_images else None,
                host_images=images / hosts / step,
                paper=cores == tpu_table.cores(row.leaf),
            )
        )
    return found
