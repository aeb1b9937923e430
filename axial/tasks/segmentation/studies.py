"""Studies that evaluate one model many times: at several resolutions, or with several options of the grouping."""

import ast
import dataclasses
import itertools
import math

from axial.data import tfrecord
from axial.errors import InputError, nearest
from axial.io.show import progress
from axial.tasks.base import Inference, by_size
from axial.tasks.metrics import evaluate
from axial.tasks.segmentation.canvas_maps import scaled_canvas
from axial.tasks.segmentation.evaluator import PANOPTIC, PanopticMetrics
from axial.tasks.segmentation.tiles import Tiled

# === Resolutions: the scale stress test (Axial-DeepLab, Fig. 4 and 10) ===


def stress_test(task, model, split, ratios, inference=Inference()):
    """Yields a row for each ratio: 'ratio', 'canvas' and the `headline`, scored at the photos' own size.

    Photos are fitted to the canvas times the ratio. The grouping's areas are scaled with the area of the canvas,
    although the paper does not mention this. The grouping's other options, in pixels of the canvas, do not change.

    Args:
        task, model: a segmentation task and its model.
        split: name of the split to score.
        ratios: factors for the sides of the canvas, which are rounded to the nearest 16k + 1 pixels.
        inference: `Inference`.

    Raises:
        InputError: the task scales all photos by one factor, so photos are not fitted to a canvas.
    """
    total = tfrecord.read_manifest(task.data_dir, split)["examples"]
    for ratio in ratios:
        canvas = scaled_canvas(task.canvas, ratio)
        scaled = dataclasses.replace(task.resized(canvas), data=task.data.resized(canvas))
        predictions, scores = scaled.predictions(model, inference), PanopticMetrics(task.spec)
        result = evaluate(scaled.eval_dataset(split), predictions, scores, total)
        yield {"ratio": ratio, "canvas": list(canvas), **PANOPTIC.headline(result)}


CHANGES = {"relative_change": "pq", "relative_change_things": "pq_things", "relative_change_stuff": "pq_stuff"}


def add_changes(curves):
    """Adds the relative changes of PQ, PQ-things and PQ-stuff, named as in `CHANGES`, to the rows of one or two runs.

    With two runs, the changes are relative to the first run at the same ratio, as in Fig. 4. With one run, they are
    relative to this run's row at ratio 1. A change is None if the base row is missing, or its score is 0 or undefined.

    Args:
        curves: list of the `stress_test` rows of each run.
    """
    first = curves[0]
    whole = next((row for row in first if row["ratio"] == 1), {})
    bases = [whole] * len(first) if len(curves) == 1 else first
    for rows in curves:
        for row, base in zip(rows, bases):
            row.update({name: _change(row[score], base.get(score)) for name, score in CHANGES.items()})


def _change(value, base):
    return value / base - 1 if base and math.isfinite(base) and math.isfinite(value) else None


# === Options of the grouping ===


def combinations(grouping, sweeps):
    """All combinations of values for options ("knobs") of the grouping.

    Args:
        grouping: `PostprocessConfig` with the values of all other options.
        sweeps: list of 'KNOB=VALUE,VALUE'.

    Returns:
        list of (dict of the changed options, `PostprocessConfig`).

    Raises:
        InputError: an option is unknown (the message names the nearest), is given twice, or has a wrong value.
    """
    knobs, axes = [field.name for field in dataclasses.fields(grouping)], {}
    for text in sweeps:
        name, _, values = map(str.strip, text.partition("="))
        if not values:
            raise InputError(f"--knob={text}: expected KNOB=VALUE,VALUE")
        if name not in knobs:
            raise InputError(f"--knob={text}: the grouping has no {name!r}{nearest(name, knobs)}: {', '.join(knobs)}")
        if name in axes:
            raise InputError(f"--knob={text}: {name} is given twice")
        axes[name] = [_value(value.strip()) for value in values.split(",")]
    changes = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    return [(one, dataclasses.replace(grouping, **one)) for one in changes]


def _value(text):
    """The value of a literal, such as a number or None. Any other text is returned unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def sweep(tasks, model, examples, inference=Inference(), *, total=None, thresholds=()):
    """Scores several groupings with a single pass of the network.

    Args:
        tasks: copies of one task, each with another grouping.
        model: the model of all tasks.
        examples: examples from `eval_dataset`.
        inference: `Inference`.
        total: number of examples, for the progress bar.
        thresholds: see `PanopticMetrics`.

    Returns:
        list of `PanopticMetrics.result`, one for each task.
    """

    def network(images, valid_sizes):
        return tasks[0].maps(model, images, valid_sizes[:, 1], inference)

    def predictions(examples):
        for example, maps in outputs(examples):
            maps = {name: x[None] for name, x in maps.items()}
            results = [{name: x[0] for name, x in segment(maps).items()} for segment in segments]
            yield example, [task.on_photo(x, example["valid_size"], example["size"]) for task, x in zip(tasks, results)]

    outputs, segments = tasks[0].replicated(network, inference), [by_size(task.segment) for task in tasks]
    tiled = [Tiled.from_task(task) for task in tasks]
    scores = [PanopticMetrics(task.spec, thresholds=thresholds) for task in tasks]
    tile_results = tiled[0].tile_results(predictions, examples)
    for example, tile_predictions in progress(tile_results, "sweep", total=total, unit="photo", leave=False):
        for one, tiles, prediction in zip(scores, tiled, zip(*tile_predictions)):
            one.update(example, tiles.joined(example, prediction))
    return [one.result() for one in scores]
