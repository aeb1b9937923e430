"""Predicts step time and efficiency of a recipe on 8 to 2048 cores from one compiled step, and says what binds.

%s --only=coco/axial_deeplab_s

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
import os
import sys

from absl import flags

import tpu_table
from axial.chips import replicas_of
from axial.cli import app
from axial.cli.pages import finish
from axial.errors import InputError
from axial.io.show import counted, print_table, say
from axial.statements import experiments_dir

FLAGS = flags.FLAGS

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


def _main(_):
    path = FLAGS.csv or os.path.join(experiments_dir(), "tpu.csv")
    rows = [row for row in tpu_table.read_rows(path).values() if FLAGS.only in row.leaf and row.fits]
    rows = [row for row in rows if row.form not in tpu_table.LARGEST]  # these have one device and no sums
    if not rows:
        raise InputError(f"{path}: no compiled recipe with {FLAGS.only!r} in its name; tpu.py --all makes them")
    found = []
    for row in rows:
        say(f"{row.leaf}, {row.form}, {counted(row.batch, 'image')} a core, as compiled for {row.slice}")
        header = ("cores", "batch", "compute s", "sums s", "step s", "efficiency", "images/s a host", "limit")
        cells = []
        for p in predict(row, FLAGS.hop_microseconds * 1e-6, FLAGS.host_images):
            times = [f"{value:.4f}" for value in (p.compute, p.reduce, p.step)]
            cores = f"{p.cores}{' (paper)' if p.paper else ''}"
            cells.append((cores, p.batch, *times, f"{p.efficiency:.1%}", f"{p.host_images:.0f}", p.limit))
            shares = {"step": p.step, "efficiency": p.efficiency, "limit": p.limit}
            found.append({"leaf": row.leaf, "form": row.form, **dataclasses.asdict(p), **shares})
        print_table(header, cells)
    say(" ".join(__doc__.split("The model.")[1].split()))
    say(f"Here t is {FLAGS.hop_microseconds:g} microseconds. No TPU has run any of it.")
    finish(found)


if __name__ == "__main__":  # who imports this has flags of its own
    flags.DEFINE_string("csv", None, "table of compiled recipes; by default that of experiments/.")
    flags.DEFINE_string("only", "", "recipes whose names have this text.")
    flags.DEFINE_float("hop_microseconds", 1.0, "an assumption: from one chip to the next in a sum.", lower_bound=0)
    flags.DEFINE_float(
        "host_images", None, "images a second that a host's input gives (axial-analyze input).", lower_bound=1e-6
    )
    flags.DEFINE_string("json", None, "file for every number, in plain units.")
    app.run(_main, sys.modules[__name__])
