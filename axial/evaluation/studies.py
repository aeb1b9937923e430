"""Many evaluations of one model: over resolutions, over knobs of the grouping, over its checkpoints."""

import dataclasses
import itertools
import math
import os

import tensorflow as tf
from tqdm import tqdm

from axial.data import tfrecord
from axial.data.pipeline import evaluation_dataset
from axial.errors import InputError, nearest
from axial.evaluation.panoptic import PanopticScores, evaluate
from axial.evaluation.predictions import Replicated, full_size
from axial.postprocess import PostprocessConfig
from axial.tasks.panoptic import scaled_canvas


def headline(scores):
    """dict of the six figures that a table of evaluations shows, 0 to 1."""
    pq = scores["pq"]
    return {
        "pq": pq["all"]["pq"],
        "pq_things": pq["things"]["pq"],
        "pq_stuff": pq["stuff"]["pq"],
        "miou": scores["miou"]["miou"],
        "ap": scores["ap"]["ap"],
        "ap50": scores["ap"]["ap50"],
    }


# === Resolutions: the scale stress test (Axial-DeepLab, Fig. 4 and 10) ===


def stress_test(task, model, data_dir, split, ratios, strategy=None, scales=(1.0,), flip=False):
    """Yields the row of each ratio: 'ratio', 'canvas' and the `headline` at the photos' own size.

    Photos are scaled to the canvas times the ratio. Area limits keep their share of the photo, which
    the paper does not state; the other knobs are in pixels of what the network sees.

    Args:
        task, model: of a run.
        data_dir, split: photos to score.
        ratios: of the canvas' sides, each to the nearest 16 k + 1 pixels.
        strategy, scales, flip: as of `CheckpointPredictions`.
    """
    total = tfrecord.read_manifest(data_dir, split)["examples"]
    for ratio in ratios:
        canvas = scaled_canvas(task.canvas, ratio)
        share = math.prod(canvas) / math.prod(task.canvas)
        areas = {k: round(getattr(task.grouping, k) * share) for k in ("stuff_area", "thing_area")}
        grouping = dataclasses.replace(task.grouping, **areas)
        run = Replicated(_prediction(task, model, grouping, scales, flip), strategy)

        def sized(examples):
            return ((e, full_size(r, e["content"], e["size"])) for e, r in run(examples))

        scores = evaluate(evaluation_dataset(data_dir, split, task.spec, canvas), sized, task.spec, total)
        yield {"ratio": ratio, "canvas": list(canvas), **headline(scores)}


def _prediction(task, model, grouping, scales, flip):
    return lambda images, widths: task.segment(task.maps(model, images, widths, scales, flip), grouping)


# === Knobs of the grouping ===


def change_grouping(grouping, changes):
    """A `PostprocessConfig` with some knobs changed.

    Args:
        grouping: the config.
        changes: dict from a knob to its value, a number or its text.

    Raises:
        InputError: an unknown knob, with the nearest; a value that is none.
    """
    types = {field.name: field.type for field in dataclasses.fields(PostprocessConfig)}
    values = {}
    for name, value in changes.items():
        if name not in types:
            raise InputError(f"the grouping has no {name!r}{nearest(name, types)}: {', '.join(types)}")
        try:
            values[name] = types[name](value)
        except ValueError:
            raise InputError(f"{name}={value}: not a number of type {types[name].__name__}") from None
    return dataclasses.replace(grouping, **values)


def combinations(grouping, sweeps):
    """Every combination of knobs.

    Args:
        grouping: `PostprocessConfig` of the knobs that stay.
        sweeps: texts 'KNOB=VALUE,VALUE'.

    Returns:
        List of (dict of the knobs swept, `PostprocessConfig`).
    """
    axes = {}
    for text in sweeps:
        name, _, values = text.partition("=")
        if not values:
            raise InputError(f"--sweep={text}: expected KNOB=VALUE,VALUE")
        axes[name.strip()] = [v.strip() for v in values.split(",")]
    found = []
    for values in itertools.product(*axes.values()):
        config = change_grouping(grouping, dict(zip(axes, values)))
        found.append(({name: getattr(config, name) for name in axes}, config))
    return found


def sweep(outputs, examples, spec, groupings, total=None):
    """Scores of every grouping from one look at each photo.

    Args:
        outputs: `NetworkOutputs`.
        examples: `evaluation_example`s.
        spec: `DatasetSpec`.
        groupings: list of `PostprocessConfig`s.
        total: number of examples, for the progress bar.

    Returns:
        List of the results of `PanopticScores`.
    """
    segmenters = [outputs.segmenter(grouping) for grouping in groupings]
    scores = [PanopticScores(spec) for _ in groupings]
    for example, maps in tqdm(outputs(examples), "sweep", total, unit="photo", leave=False):
        for one, segment in zip(scores, segmenters):
            one.update(example, segment(example, maps))
    return [one.result() for one in scores]


# === Checkpoints, as a training writes them ===


def checkpoints(model_dir, last_step, timeout):
    """Yields (step, prefix) of each new checkpoint of a run, the latest first, until its last step.

    Args:
        model_dir: folder of the run.
        last_step: function that returns the last step of its training.
        timeout: seconds to wait for another one.
    """
    for prefix in tf.train.checkpoints_iterator(model_dir, min_interval_secs=1, timeout=timeout):
        step = checkpoint_step(prefix)
        yield step, prefix
        if step >= last_step():
            return


def checkpoint_step(prefix):
    """The step in a checkpoint's name, 'ckpt-STEP'."""
    number = os.path.basename(prefix).rpartition("-")[2]
    if not number.isdigit():
        raise InputError(f"{prefix}: a checkpoint of a training is named ckpt-STEP")
    return int(number)
