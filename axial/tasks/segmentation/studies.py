"""Many evaluations of one model: over resolutions, knobs of the grouping, or checkpoints."""

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
    """Yields a row for each ratio: 'ratio', 'canvas' and the `headline` at the photos' own size.

    Photos are scaled to the canvas times the ratio. Area limits are scaled with the canvas' area; the paper does not
    say what it does. The other knobs stay the same in pixels of the network's input.

    Args:
        task, model: a task of segmentation and its model.
        split: photos to score.
        ratios: factors of the canvas' sides. Each side is rounded to the nearest 16k + 1 pixels.
        inference: `Inference`.

    Raises:
        InputError: photos are scaled by one factor, and not fitted.
    """
    total = tfrecord.read_manifest(task.data_dir, split)["examples"]
    for ratio in ratios:
        canvas = scaled_canvas(task.canvas, ratio)
        area_ratio, grouping = math.prod(canvas) / math.prod(task.canvas), task.grouping
        stuff_area, thing_area = (round(area * area_ratio) for area in (grouping.stuff_area, grouping.thing_area))
        grouping = dataclasses.replace(grouping, stuff_area=stuff_area, thing_area=thing_area)
        scaled = dataclasses.replace(task, data=task.data.resized(canvas), grouping=grouping)
        predictions, scores = scaled.predictions(model, inference), PanopticMetrics(task.spec)
        result = evaluate(scaled.eval_dataset(split), predictions, scores, total)
        yield {"ratio": ratio, "canvas": list(canvas), **PANOPTIC.headline(result)}


CHANGES = {"relative_change": "pq", "relative_change_things": "pq_things", "relative_change_stuff": "pq_stuff"}


def add_changes(curves):
    """Adds the relative changes of PQ, PQ-things and PQ-stuff, `CHANGES`, to the rows of one run or two.

    Of two runs they are the changes from the first run to each at the same ratio, as in Fig. 4. Of one run they are the
    changes from its own row of ratio 1. They are None without such a row, and where the score there is 0 or undefined.

    Args:
        curves: a list of `stress_test`'s rows for each run.
    """
    first = curves[0]
    whole = next((row for row in first if row["ratio"] == 1), {})
    bases = [whole] * len(first) if len(curves) == 1 else first
    for rows in curves:
        for row, base in zip(rows, bases):
            row.update({name: _change(row[score], base.get(score)) for name, score in CHANGES.items()})


def _change(value, base):
    return value / base - 1 if base and math.isfinite(base) and math.isfinite(value) else None


# === Knobs of the grouping ===


def combinations(grouping, sweeps):
    """Every combination of the knobs' values.

    Args:
        grouping: `PostprocessConfig` with the values of all other knobs.
        sweeps: texts 'KNOB=VALUE,VALUE'.

    Returns:
        list of (dict of the knobs that change, `PostprocessConfig`).

    Raises:
        InputError: an unknown knob (the message names the nearest one), one that is given twice, or a wrong value.
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
    """A number or None that a text says, or the text, which the config takes or refuses."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def sweep(tasks, model, examples, inference=Inference(), *, total=None, thresholds=()):
    """Scores of every grouping from one pass of the network.

    Args:
        tasks: the task with each grouping.
        model: of the tasks.
        examples: of `eval_dataset`.
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
