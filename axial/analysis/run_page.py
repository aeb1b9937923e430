"""One HTML page of a training run: losses, scores, pictures, speed, configuration and machine.

The page holds its pictures itself, so that it needs neither a network nor the run's folder.
"""

import base64
import html
import io
import os
import string

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from axial.analysis.curves import read_events
from axial.errors import InputError
from axial.io import schemas
from axial.io.read import read_json, read_text
from axial.io.write import write_text

_PAGE = string.Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; }
th, td { padding: .15em .8em; text-align: left; border-bottom: 1px solid #ddd; }
pre { background: #f6f6f6; overflow-x: auto; padding: 1em; }
img { max-width: 100%; }
</style>
</head>
<body>
<h1>$title</h1>
$status
<h2>Losses</h2>
$losses
<h2>Scores</h2>
$scores
<h2>Speed</h2>
$speed
<h2>Pictures</h2>
$pictures
<h2>Configuration</h2>
<pre>$config</pre>
</body>
</html>
"""
)
SPEED = ("images_per_second", "seconds_per_step", "input_bound", "learning_rate")


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
    page = _PAGE.substitute(
        title=html.escape(os.path.basename(model_dir.rstrip("/"))),
        status=_table(_status(model_dir)),
        losses=_plots(losses, scale="log"),
        scores=_plots(scores) + _table({name: f"{y[-1]:.4g} at step {x[-1]}" for name, (x, y) in scores.items()}),
        speed=_plots(speed),
        pictures="\n".join(_picture(name, step, data) for name, (step, data) in sorted(pictures.items())),
        config=html.escape(read_text(os.path.join(model_dir, "config.gin"))),
    )
    write_text(path, page)


def _status(model_dir):
    """dict from words to what status.json says; empty for a run that has none."""
    path = os.path.join(model_dir, "status.json")
    if not tf.io.gfile.exists(path):
        return {}
    status = read_json(path, schemas.RunStatus)[1]
    shown = {"state": status.state, "step": f"{status.step} of {status.steps}"}
    if status.seconds_per_step:
        times = status.seconds_per_step, status.seconds_per_step_p90, status.seconds_per_step_p99
        shown["seconds a step"] = "{:.3g} (90 %: {:.3g}, 99 %: {:.3g})".format(*times)
        shown["images a second"] = f"{status.images_per_second:.3g}"
    if status.input_bound is not None:
        shown["time waiting for input"] = f"{100 * status.input_bound:.1f} %"
    return {**shown, "updated": status.updated, "host": status.host, **status.machine}


def _table(values):
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>" if rows else "<p>none yet</p>"


def _plots(curves, scale="linear"):
    """A picture with a plot for each curve, as HTML."""
    if not curves:
        return ""
    columns = 4
    rows = -(-len(curves) // columns)
    figure = Figure([3.4 * columns, 2.8 * rows], layout="constrained", facecolor="white")
    for axes, (name, (x, y)) in zip(figure.subplots(rows, columns, squeeze=False).flat, sorted(curves.items())):
        axes.plot(x, y, marker="." if len(x) < 20 else "")
        axes.set_title(name)
        axes.set_xlabel("step")
        if scale == "log" and np.all(y > 0):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    for axes in figure.axes[len(curves) :]:
        axes.remove()
    image = io.BytesIO()
    figure.savefig(image, dpi=90, format="png")
    return _image(image.getvalue(), ", ".join(sorted(curves)))


def _picture(name, step, data):
    return f"<figure>{_image(data, name)}<figcaption>{html.escape(name)} at step {step}</figcaption></figure>"


def _image(data, alt):
    return f'<img src="data:image/png;base64,{base64.b64encode(data).decode()}" alt="{html.escape(alt)}">'
