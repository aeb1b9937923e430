"""Measures time and memory of attention over image size and span. With a local span both are linear in the pixels.

The measured work is one training step of a layer that attends along the width of a strip of 32 rows. The strip is as
wide as the image's map at stride 4: 65 to 513 pixels. Nothing else in a model depends on the span.
"""

import statistics

import tensorflow as tf

from axial.io.show import drawn, say
from axial.layers.axial_attention import AxialAttention
from benchmark import peak_memory, time_in_turn, training_step

SIZES = (257, 513, 1025, 2049)
SPANS = (None, 129, 65, 17)
ROWS, CHANNELS = 32, 64


def strip_step(size, span):
    """A function without arguments that runs one training step for an image `size` pixels wide."""
    images = tf.random.stateless_normal([1, ROWS, (size - 1) // 4 + 1, CHANNELS], [0, 0])
    layer = AxialAttention(CHANNELS // 2, CHANNELS, "width", span=span, name="attention")
    layer(images)
    return training_step(layer, images)


def benchmark(quick=False, report=lambda line: None):
    """List of dicts of 'size', 'length', 'span', 'pixels' (of the strip), 'seconds' and 'peak_bytes'.

    Steps are timed in turn, round by round, so that other load on the machine slows all of them alike.
    """
    cases = [(size, span) for size in SIZES for span in (SPANS[::2] if quick else SPANS)]
    steps = {f"{size} pixels, span {span}": strip_step(size, span) for size, span in cases}
    seconds = time_in_turn(steps, 3 if quick else 9, report)
    rows = []
    for (size, span), (name, times) in zip(cases, seconds.items()):
        report(f"{name}: peak memory")
        length = (size - 1) // 4 + 1
        rows.append(
            {
                "size": size,
                "length": length,
                "span": span,
                "pixels": ROWS * length,
                "seconds": statistics.median(times),
                "peak_bytes": peak_memory(f"scaling:strip_step({size}, {span})"),
            }
        )
    return rows


def draw(rows, path):
    """Writes a figure of time and memory over size, with a line for each span. Both axes are logarithmic."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure = Figure((9, 4), layout="constrained")
    for axes, key, label, unit in zip(
        figure.subplots(1, 2), ("seconds", "peak_bytes"), ("seconds a step", "peak memory, MB"), (1, 1e6)
    ):
        for span in dict.fromkeys(row["span"] for row in rows):
            own = [row for row in rows if row["span"] == span]
            name = "whole axis" if span is None else f"span {span}"
            axes.loglog([r["size"] for r in own], [r[key] / unit for r in own], "o-", label=drawn(name))
        axes.set_xticks(list(dict.fromkeys(row["size"] for row in rows)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
        axes.set_xlabel(drawn(f"width of the image, pixels; {ROWS} rows at stride 4"))
        axes.set_ylabel(drawn(label))
        axes.legend()
    figure.savefig(path)


def show(rows):
    """Prints a line for each size and span."""
    for row in rows:
        say(
            f"{row['size']:5d} px  span {row['span'] or 'whole':>5}  {row['seconds']:8.3f} s  "
            f"{row['peak_bytes'] / 1e6:8.0f} MB  {1e9 * row['seconds'] / row['pixels']:7.1f} ns/pixel"
        )
