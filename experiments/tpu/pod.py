"""Predicts the step time and efficiency of a recipe on 8 to 2048 cores from a compiled step, and names the limit.

%s --only=coco/axial_deeplab_s

The model. The batch of a core is constant, so the global batch grows with the slice. A step computes (the compiler's
cycles / the clock), then all-reduces its gradients and the statistics of its batch norms over all cores. Computation
and all-reduces do not overlap. An all-reduce of B bytes over n chips takes

    2 B (n - 1) / n / R + 2 h t,

where R is the published all-reduce bandwidth of a chip (`NETWORKS`), h the number of hops across half of each axis of
the torus, and t the assumed time of a hop. The sum over the cores of a chip takes no time. Within the time of a step,
each host must prepare its images for one step.
"""

import math
import os

import tpu
from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError
from axial.io.paths import experiments_dir
from axial.io.show import counted, print_table, say

HOP = 1e-6  # assumed seconds from one chip to the next in an all-reduce
CORES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# dict from each generation to (bytes / s that a chip sends in an all-reduce, chips of a host, chips of the largest
# slice, axes of the network). The bytes / s are a pod's published all-reduce bandwidth / its chips, or half of a chip's
# published bidirectional bandwidth. The sources are the pages that `axial.chips` names.
NETWORKS = {
    "v3": (340e12 / 1024, 4, 1024, 2),
    "v4": (1.1e15 / 4096, 4, 4096, 3),
    "v5e": (51.2e12 / 256, 8, 256, 2),
    "v5p": (1200e9 / 2, 4, 6144, 3),
    "v6e": (102.4e12 / 256, 8, 256, 2),
}


def predict(row):
    """Predicts a step for each of `CORES` up to the generation's largest slice. Returns a list of dicts.

    'step', 'compute' and 'reduce' are the seconds of the step, of its computation and of its all-reduces. 'host_images'
    is the images / s that each host must prepare. 'efficiency' is the fraction of the step in which the cores compute.
    'paper' says whether the paper trained on this number of cores.

    Args:
        row: `tpu.Row` of a step that fits, compiled for several devices. A step on one device has no all-reduces.
    """
    generation, predictions = row.slice.partition(":")[0], []
    bandwidth, chips_per_host, most, axes = NETWORKS[generation]
    for cores in CORES:
        chips = max(cores // tpu.replicas_of(f"{generation}:1x1"), 1)
        if chips > most:
            break
        hops = axes * chips ** (1 / axes) / 2
        sums = 2 * row.all_reduced * (chips - 1) / chips / bandwidth + row.all_reduces * 2 * hops * HOP
        step, batch = row.seconds + sums, row.batch * cores // row.cores_an_image
        images = batch / math.ceil(chips / chips_per_host)
        line = {"cores": cores, "chips": chips, "batch": batch, "compute": row.seconds, "reduce": sums, "step": step}
        line |= {"efficiency": row.seconds / step, "limit": "compute" if row.seconds >= sums else "sums"}
        predictions.append(line | {"host_images": images / step, "paper": cores == tpu.cores(row.leaf)})
    return predictions


class Pod(Flags):
    csv = flags.CSV.but(meaning="table of compiled recipes; by default experiments/tpu.csv.", path=flags.IN_FILE)
    only = Flag(str, "text that the names of the recipes contain.", "")


def _main(given):
    path = given.csv or os.path.join(experiments_dir(), "tpu.csv")
    table = tpu.read_table(path, tpu.Row).values()
    # The forms of `tpu.LARGEST` are compiled for one device, which has no all-reduces.
    rows = [row for row in table if given.only in row.leaf and row.fits and row.form not in tpu.LARGEST]
    if not rows:
        raise InputError(f"{path}: no compiled recipe with {given.only!r} in its name; tpu.py --all makes them")
    for row in rows:
        say(f"{row.leaf}, {row.form}, {counted(row.batch, 'image')} a core, as compiled for {row.slice}")
        cells = [
            (f"{p['cores']}{' (paper)' * p['paper']}", p["batch"])
            + tuple(f"{p[name]:.4f}" for name in ("compute", "reduce", "step"))
            + (f"{p['efficiency']:.1%}", f"{p['host_images']:.0f}", p["limit"])
            for p in predict(row)
        ]
        header = ("cores", "batch", "compute s", "sums s", "step s", "efficiency", "images/s a host", "limit")
        print_table(header, cells)
    say(" ".join(__doc__.split("The model.")[1].split()))
    say(f"Here t is {1e6 * HOP:g} microseconds. No TPU has run any of it.")


if __name__ == "__main__":
    app.run({"": (Pod, _main)})
