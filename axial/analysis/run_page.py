"""Shows the results of training runs: the curves of several runs in a picture, or one run as an HTML page.

The page has losses, scores, pictures, speed, configuration and machine. It embeds its pictures, so it needs neither the
internet nor the run's folder.
"""

import io
import os

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from axial.errors import InputError
from axial.io import schemas
from axial.io.page import embedded, figure, grid, in_words, page, table
from axial.io.read import read_existing, read_text
from axial.io.show import drawn, html
from axial.io.write import write_text
from axial.weights.checkpoint import run_checkpoints
from axial.weights.interchange import WeightsCard
from axial.weights.source import RUN_CARD, run_file

CURVES = ("total", "semantic", "center", "offset", "eval/miou", "eval/pq_all", "eval/top1", "eval/top5")
SPEED = "images_per_second learning_rate input_bound seconds_per_step seconds_per_step_p90 seconds_per_step_p99".split()


# === Curves ===


def read_curves(model_dir):
    """dict from the name of each curve in `CURVES` to its (steps, values), for one run.

    Raises:
        InputError: the folder is not a run of axial-train, or the run has no summaries yet.
    """
    return {name: curve for name, curve in read_events(model_dir)[0].items() if name in CURVES}


def read_events(model_dir):
    """Reads a run's TensorBoard summaries.

    Returns:
        A dict from names of scalars to arrays (steps, values), and a dict from names of pictures to the last picture's
        (step, PNG as bytes).

    Raises:
        InputError: the folder is not a run of axial-train, or the run has no losses in summaries yet.
    """
    run_file(model_dir)
    events = EventAccumulator(model_dir, size_guidance={"tensors": 0})
    events.Reload()
    curves, pictures = {}, {}
    for name in events.Tags()["tensors"]:
        if events.SummaryMetadata(name).plugin_data.plugin_name == "images":
            last = events.Tensors(name)[-1]
            pictures[name] = last.step, tf.make_ndarray(last.tensor_proto)[2]  # entries 0 and 1 are width and height
            continue
        # A killed and resumed run may have written a step twice; the later value counts.
        points = {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(name)}
        steps = sorted(points)
        curves[name] = np.array(steps), np.array([points[step] for step in steps])
    if not any(map(_is_loss, curves)):
        raise InputError(f"{model_dir}: no summaries yet")
    return curves, pictures


def draw_curves(runs, path):
    """Writes a picture with one plot for each curve and one line for each run.

    Args:
        runs: dict from names to the results of `read_curves`.
        path: PNG or JPEG to write.
    """
    names = [name for name in CURVES if any(name in curves for curves in runs.values())]
    plots = _plots(runs, names)
    plots.axes[0].legend(plots.axes[0].lines, [drawn(run) for run, curves in runs.items() if names[0] in curves])
    plots.savefig(path, dpi=110)


def _plots(runs, names):
    """A figure with a plot for each named curve and a line for each run. Losses have a logarithmic axis."""
    plots = Figure([3.4 * len(names), 3], layout="constrained", facecolor="white")
    for axes, name in zip(np.atleast_1d(plots.subplots(1, len(names))), names):
        lines = [curves[name] for curves in runs.values() if name in curves]
        for x, y in lines:
            axes.plot(x, y, marker="." if len(x) < 20 else "")
        axes.set_title(drawn(in_words(name)))
        axes.set_xlabel("step")
        if _is_loss(name) and all(np.all(y > 0) for _, y in lines):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    return plots


def _is_loss(name):
    return "/" not in name and name not in SPEED


# === The page ===


def write_page(model_dir, path):
    """Writes the page of a run.

    Args:
        model_dir: folder of a run of axial-train.
        path: HTML file to write.

    Raises:
        InputError: the folder is not a run, or has no summaries yet.
    """
    curves, pictures = read_events(model_dir)
    shown = []
    for name, (step, data) in sorted(pictures.items()):
        shown.append(figure(embedded(data, in_words(name)), f"{in_words(name)} at step {step}"))
    sections = {
        "": table((), _status(model_dir).items(), words=True),
        "Pictures": grid(shown),
        "Losses": _plotted(curves, filter(_is_loss, curves)),
        "Scores": _plotted(curves, [name for name in curves if name.startswith("eval/")]),
        "Speed": _plotted(curves, SPEED),
        "Configuration": f"<pre>{html(read_text(os.path.join(model_dir, 'config.gin')))}</pre>",
    }
    card, checkpoints = read_existing(os.path.join(model_dir, RUN_CARD), WeightsCard), run_checkpoints(model_dir)
    about = [*([card.model] if card else []), *map(os.path.basename, checkpoints[-1:])]
    write_text(path, page(os.path.basename(model_dir.rstrip("/")), sections, about))


def _status(model_dir):
    """dict from labels to values of a run's status.json; empty if the run has no such file."""
    status = read_existing(os.path.join(model_dir, schemas.STATUS), schemas.RunStatus)
    if status is None:
        return {}
    steps = f"{status.step} of {status.steps}"
    return {"state": status.state, "step": steps, "updated": status.updated, "host": status.host, **status.machine}


def _plotted(curves, names):
    """HTML with a plot for each named curve, and its last value below."""
    plots = []
    for name in sorted(name for name in names if name in curves):
        image, (steps, values) = io.BytesIO(), curves[name]
        _plots({"": curves}, [name]).savefig(image, format="svg")
        plot = embedded(image.getvalue(), in_words(name), "svg+xml")
        plots.append(figure(plot, f"{in_words(name)}: {values[-1]:.4g} at step {steps[-1]}"))
    return grid(plots)
