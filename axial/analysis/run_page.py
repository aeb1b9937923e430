"""One HTML page of a training run: losses, scores, pictures, speed, configuration and machine.

The page holds its pictures itself, so that it needs neither a network nor the run's folder.
"""

import io
import os

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from axial.analysis.curves import read_events
from axial.errors import InputError
from axial.io import schemas
from axial.io.page import embedded, figure, page, table
from axial.io.read import read_json, read_text
from axial.io.show import drawn, html
from axial.io.write import write_text

SPEED = (
    *("images_per_second", "learning_rate", "input_bound"),
    *("seconds_per_step", "seconds_per_step_p90", "seconds_per_step_p99"),
)


def write_page(model_dir, path):
    """Writes the page of a run.

    Args:
        model_dir: folder of a run of axial-train.
        path: of the HTML file.

    Raises:
        InputError: the folder is not a run, or has no summaries yet.
    """
    curves, pictures = read_events(model_dir)
    losses = {name: curve for name, curve in curves.items() if "/" not in name and name not in SPEED}
    scores = {name: curve for name, curve in curves.items() if name.startswith("eval/")}
    speed = {name: curve for name, curve in curves.items() if name in SPEED}
    if not losses:
        raise InputError(f"{model_dir}: no summaries yet")
    last = [(name, f"{y[-1]:.4g} at step {x[-1]}") for name, (x, y) in scores.items()]
    sections = {
        "": _table(_status(model_dir).items()),
        "Losses": _plots(losses, scale="log"),
        "Scores": _plots(scores) + _table(last),
        "Speed": _plots(speed),
        "Pictures": "\n".join(_picture(name, step, data) for name, (step, data) in sorted(pictures.items())),
        "Configuration": f"<pre>{html(read_text(os.path.join(model_dir, 'config.gin')))}</pre>",
    }
    write_text(path, page(os.path.basename(model_dir.rstrip("/")), sections))


def _status(model_dir):
    """dict from words to what status.json says; empty for a run that has none."""
    path = os.path.join(model_dir, schemas.STATUS)
    if not tf.io.gfile.exists(path):
        return {}
    status = read_json(path, schemas.RunStatus)[1]
    shown = {"state": status.state, "step": f"{status.step} of {status.steps}"}
    if status.seconds_per_step:
        times = status.seconds_per_step, status.seconds_per_step_p90, status.seconds_per_step_p99
        shown["seconds a step"] = "{} (90 %: {}, 99 %: {})".format(*map(_short, times))
        shown["images a second"] = _short(status.images_per_second)
    if status.input_bound is not None:
        shown["time waiting for input"] = f"{100 * status.input_bound:.1f} %"
    return {**shown, "updated": status.updated, "host": status.host, **status.machine}


def _short(value):
    return "?" if value is None else f"{value:.3g}"


def _table(rows):
    return table((), rows, words=True) if rows else "<p>none yet</p>"


def _plots(curves, scale="linear"):
    """A picture with a plot for each curve, as HTML."""
    if not curves:
        return ""
    columns = 4
    rows = -(-len(curves) // columns)
    plots = Figure([3.4 * columns, 2.8 * rows], layout="constrained", facecolor="white")
    for axes, (name, (x, y)) in zip(plots.subplots(rows, columns, squeeze=False).flat, sorted(curves.items())):
        axes.plot(x, y, marker="." if len(x) < 20 else "")
        axes.set_title(drawn(name))
        axes.set_xlabel("step")
        if scale == "log" and np.all(y > 0):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    for axes in plots.axes[len(curves) :]:
        axes.remove()
    image = io.BytesIO()
    plots.savefig(image, dpi=90, format="png")
    return embedded(image.getvalue(), ", ".join(sorted(curves)))


def _picture(name, step, data):
    return figure(embedded(data, name), f"{name} at step {step}")
