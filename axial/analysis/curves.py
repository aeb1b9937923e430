"""The curves of training runs side by side, from their TensorBoard files (paper, Fig. 9)."""

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from axial.errors import InputError
from axial.io.show import drawn
from axial.statements import run_file

CURVES = ("total", "semantic", "center", "offset", "eval/miou", "eval/pq_all", "eval/top1", "eval/top5")


def read_curves(model_dir):
    """dict from each of `CURVES` that a run has to its steps and values.

    Raises:
        InputError: the folder is not a run of axial-train, or the run has no summaries yet.
    """
    found = {name: curve for name, curve in read_events(model_dir)[0].items() if name in CURVES}
    if not found:
        raise InputError(f"{model_dir}: no summaries yet")
    return found


def read_events(model_dir):
    """What a run has written for TensorBoard.

    Returns:
        dict from the names of scalars to their steps and values, and dict from the names of pictures to the last one's
        (step, PNG as bytes).

    Raises:
        InputError: the folder is not a run of axial-train.
    """
    run_file(model_dir)
    events = EventAccumulator(model_dir, size_guidance={"tensors": 0})
    events.Reload()
    curves, pictures = {}, {}
    for name in events.Tags()["tensors"]:
        if events.SummaryMetadata(name).plugin_data.plugin_name == "images":
            last = events.Tensors(name)[-1]
            pictures[name] = last.step, tf.make_ndarray(last.tensor_proto)[2]  # after the width and the height
            continue
        # A killed and resumed run may have written a step twice; the later value counts.
        points = {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(name)}
        steps = sorted(points)
        curves[name] = np.array(steps), np.array([points[step] for step in steps])
    return curves, pictures


def draw_curves(runs, path):
    """Writes a picture with one plot for each curve and one line for each run.

    Args:
        runs: dict from names to what `read_curves` returns.
        path: PNG or JPEG.
    """
    names = [name for name in CURVES if any(name in curves for curves in runs.values())]
    figure = Figure([3.4 * len(names), 3.2], layout="constrained", facecolor="white")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names):
        lines = {drawn(run): axes.plot(*curves[name])[0] for run, curves in runs.items() if name in curves}
        if name == names[0]:
            axes.legend(lines.values(), lines)
        axes.set_title(drawn(name if "/" in name else f"{name} loss"))
        axes.set_xlabel("step")
        if "/" not in name:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
