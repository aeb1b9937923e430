"""The curves of training runs side by side, from their TensorBoard files (paper, Fig. 9)."""

import os

import numpy as np
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorflow import make_ndarray

from axial.errors import InputError

CURVES = ("total", "semantic", "center", "offset", "eval/miou", "eval/pq_all", "eval/top1", "eval/top5")


def read_curves(model_dir):
    """dict from each of `CURVES` that a run has to its steps and values.

    Raises:
        InputError: the folder is not a run of axial-train, or the run has no summaries yet.
    """
    if not os.path.exists(os.path.join(model_dir, "config.gin")):
        raise InputError(f"{model_dir}: not a run of axial-train, it has no config.gin")
    events = EventAccumulator(model_dir, size_guidance={"tensors": 0})
    events.Reload()
    found = {}
    for name in set(CURVES) & set(events.Tags()["tensors"]):
        # A killed and resumed run may have written a step twice; the later value counts.
        points = {event.step: float(make_ndarray(event.tensor_proto)) for event in events.Tensors(name)}
        steps = sorted(points)
        found[name] = np.array(steps), np.array([points[step] for step in steps])
    if not found:
        raise InputError(f"{model_dir}: no summaries yet")
    return found


def draw_curves(runs, path):
    """Writes a picture with one plot for each curve and one line for each run.

    Args:
        runs: dict from names to what `read_curves` returns.
        path: PNG or JPEG.
    """
    names = [name for name in CURVES if any(name in curves for curves in runs.values())]
    figure = Figure([3.4 * len(names), 3.2], layout="constrained", facecolor="white")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names):
        for run, curves in runs.items():
            if name in curves:
                axes.plot(*curves[name], label=run)
        axes.set_title(name if "/" in name else f"{name} loss")
        axes.set_xlabel("step")
        if "/" not in name:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=110)
