"""Many evaluations of one model: over resolutions, knobs of the grouping, or checkpoints."""

import dataclasses
import itertools
import math

import msgspec

from axial.data import tfrecord
from axial.errors import InputError, nearest
from axial.evaluation.loop import evaluate
from axial.io.show import progress
from axial.tasks.segmentation.canvas_maps import scaled_canvas
from axial.tasks.segmentation.evaluation import PANOPTIC, PanopticScores
from axial.tasks.segmentation.grouping import PostprocessConfig
from axial.tasks.segmentation.predictions import CheckpointPredictions, Tiled

# === Resolutions: the scale stress test (Axial-DeepLab, Fig. 4 and 10) ===


def refuse_scaled(task, name):
    """Raises InputError where photos are scaled by one factor, for what changes the size that they are fitted to.

    Args:
        task: any task.
        name: of that, for the message.
    """
    if (scale := task.photo_scale) is not None:
        raise InputError(
            f"{name}: photos are scaled by DataConfig.photo_scale = {scale:g} and not fitted to a size; "
            '--gin_binding="DataConfig.photo_scale = F" of run scores at another scale'
        )


def stress_test(task, model, split, ratios, *, strategy=None, scales=(1.0,), flip=False):
    """Yields a row for each ratio: 'ratio', 'canvas' and the `headline` at the photos' own size.

    Photos are scaled to the canvas times the ratio. Area limits are scaled with the canvas' area; the paper does not
    say what it does. The other knobs stay the same in pixels of the network's input.

    Args:
        task, model: `PanopticTask` and its model.
        split: photos to score.
        ratios: factors of the canvas' sides. Each side is rounded to the nearest 16k + 1 pixels.
        strategy, scales, flip: see `CheckpointPredictions`.

    Raises:
        InputError: photos are scaled by one factor, and not fitted.
    """
    refuse_scaled(task, "stress")
    total = tfrecord.read_manifest(task.data_dir, split)["examples"]
    for ratio in ratios:
        canvas = scaled_canvas(task.canvas, ratio)
        share = math.prod(canvas) / math.prod(task.canvas)
        areas = {k: round(getattr(task.grouping, k) * share) for k in ("stuff_area", "thing_area")}
        grouping = dataclasses.replace(task.grouping, **areas)
        predictions = CheckpointPredictions(task, model, strategy, scales=scales, flip=flip, grouping=grouping)
        scores = evaluate(task.eval_dataset(split, canvas), predictions, task.scores(), total)
        yield {"ratio": ratio, "canvas": list(canvas), **PANOPTIC.headline(scores)}


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


def change_grouping(grouping, changes):
    """A `PostprocessConfig` with some knobs changed.

    Args:
        grouping: the config.
        changes: dict from a knob to its value, as it is or as text; 'None' stands for None.

    Raises:
        InputError: an unknown knob (the message names the nearest one); a value of the wrong type.
    """
    known = [field.name for field in dataclasses.fields(PostprocessConfig)]
    values = {}
    for name, value in changes.items():
        if name not in known:
            raise InputError(f"the grouping has no {name!r}{nearest(name, known)}: {', '.join(known)}")
        try:
            values[name] = None if value == "None" else msgspec.json.decode(str(value), type=int | float)
        except msgspec.DecodeError:
            values[name] = value  # which the config takes or refuses
    return dataclasses.replace(grouping, **values)


def combinations(grouping, sweeps):
    """Every combination of the knobs' values.

    Args:
        grouping: `PostprocessConfig` with the values of all other knobs.
        sweeps: texts 'KNOB=VALUE,VALUE'.

    Returns:
        list of (dict of the knobs that change, `PostprocessConfig`).
    """
    axes = {}
    for text in sweeps:
        name, _, values = text.partition("=")
        if not values:
            raise InputError(f"--knob={text}: expected KNOB=VALUE,VALUE")
        if name.strip() in axes:
            raise InputError(f"--knob={text}: {name.strip()} is given twice")
        axes[name.strip()] = [v.strip() for v in values.split(",")]
    found = []
    for values in itertools.product(*axes.values()):
        config = change_grouping(grouping, dict(zip(axes, values)))
        found.append(({name: getattr(config, name) for name in axes}, config))
    return found


def sweep(outputs, examples, groupings, *, store=None, total=None, thresholds=()):
    """Scores of every grouping from one pass of the network.

    Args:
        outputs: `NetworkOutputs`.
        examples: `evaluation_example`s.
        groupings: list of `PostprocessConfig`s.
        store: `OutputStore`, or None.
        total: number of examples, for the progress bar.
        thresholds: see `PanopticScores`.

    Returns:
        list of `PanopticScores.result`, one for each grouping.
    """
    segmenters = [outputs.segmenter(grouping) for grouping in groupings]
    scores = [PanopticScores(outputs.task.spec, thresholds=thresholds) for _ in groupings]

    def predictions(examples):
        for example, maps in outputs(examples, store):
            yield example, [segment(example, maps) for segment in segmenters]

    tiled = Tiled.of(outputs.task)
    bar = dict(total=total, unit="photo", leave=False)
    for example, parts in progress(tiled.parts(predictions, examples), "sweep", **bar):
        for one, grouping, found in zip(scores, groupings, zip(*parts)):
            one.update(example, tiled.joined(example, found, grouping))
    return [one.result() for one in scores]
