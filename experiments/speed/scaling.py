"""Measures time and memory of attention over image size and span. With a local span both are linear in the pixels.

The measured work is one training step of a layer that attends along the width of a strip of 32 rows. The strip is as
wide as the image's map at stride 4: 65 to 513 pixels. Nothing else in a model depends on the span.
"""

import tensorflow as tf

from axial.io.show import drawn
from axial.layers.attention.layer import AxialAttention
from benchmark import measure, training_step

SIZES = (257, 513, 1025, 2049)
SPANS = (None, 129, 65, 17)
ROWS, CHANNELS = 32, 64


def strip_step(size, span):
    """A function without arguments that runs one training step for an image `size` pixels wide."""
    images = tf.random.stateless_normal([1, ROWS, (size - 1) // 4 + 1, CHANNELS], [0, 0])
    layer = AxialAttention(CHANNELS // 2, CHANNELS, "width", span=span, name="attention")
    layer(images)
    return training_step(layer, images)


def benchmark(quick=False):
    """(works, ratios) of each image size and span; see `benchmark.benchmark`. There are no ratios."""
    cases = [(size, span) for size in SIZES for span in (SPANS[::2] if quick else SPANS)]
    return {"strip": measure(cases, lambda case: strip_step(*case), 3 if quick else 9, "scaling:strip_step(*{!r})")}, {}


def draw(works, path):
    """Writes a figure of time and memory over size, with a line for each span. Both axes are logarithmic."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure = Figure((9, 4), layout="constrained")
    for axes, key, label, unit in zip(
        figure.subplots(1, 2), ("median_s", "peak_bytes"), ("seconds a step", "peak memory, MB"), (1, 1e6)
    ):
        for span in dict.fromkeys(span for _, span in works["strip"]):
            own = {size: found[key] / unit for (size, of), found in works["strip"].items() if of == span}
            axes.loglog([*own], [*own.values()], "o-", label=drawn(f"span {span}" if span else "whole axis"))
        axes.set_xticks([*own])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
        axes.set_xlabel(drawn(f"width of the image, pixels; {ROWS} rows at stride 4"))
        axes.set_ylabel(drawn(label))
        axes.legend()
    figure.savefig(path)
