"""Measures how an export differs from its checkpoint."""

import timeit

import numpy as np
import tensorflow as tf

from axial.errors import InputError
from axial.metrics.panoptic_quality import PanopticQuality, split_segments

QUALITY = "segment_quality"  # PQ of one predictor's segments, with the other's as ground truth
NUMBERS = ("probability", "score", "box", "mask")  # predictions that are numbers; the others are labels


def map_differences(task, model, other, images):
    """dict from the name of each output map to two models' largest difference, relative to the largest value in a map.

    Args:
        task: the task.
        model, other: functions of canvases, such as a model and a `FileModel`.
        images: list of photos, uint8 [h, w, 3].

    Raises:
        InputError: a number is NaN or infinite.
    """
    largest = {}
    for image in images:
        canvas = task.example(tf.constant(image))["image"][None]
        expected, actual = model(canvas), other(canvas)
        for name, value in expected.items():
            value, ours = np.asarray(tf.cast(value, tf.float32)), np.asarray(actual[name])
            _check_finite(name, value, ours)
            difference = np.abs(ours - value).max() / max(np.abs(value).max(), 1e-12)
            largest[name] = max(largest.get(name, 0.0), float(difference))
    return largest


def prediction_differences(reference, predictor, images):
    """Differences of two predictors over photos or texts.

    Panoptic maps are compared segment by segment (`equal_segments`), and instance maps are not compared, because one
    missing centre renumbers all later instances.

    Args:
        reference, predictor: `Predictor`s, or other functions that map a photo or a text to a dict of arrays and have a
            `spec`.
        images: list of photos, uint8 [h, w, 3], or of texts.

    Returns:
        dict from each output that both return to a number. For labels and texts, the number is the fraction of equal
        pixels or texts in the worst photo or text. For other outputs, the number is the largest difference. Scores are
        compared on photos with equal instance maps. The entry `QUALITY` is the PQ of panoptic maps.

    Raises:
        InputError: a number is NaN or infinite.
    """
    values, quality = {}, None
    for image in images:
        expected, actual = reference(image), predictor(image)
        names = expected.keys() & actual.keys()
        # scores belong to instances, which may differ
        if "instance" not in names or not np.array_equal(expected["instance"], actual["instance"]):
            names -= {"score"}
        if "panoptic" in names:
            names -= {"panoptic", "instance"}
            quality = quality or PanopticQuality(reference.spec)
            values.setdefault("panoptic", []).append(equal_segments(expected["panoptic"], actual["panoptic"], quality))
        for name in sorted(names):
            a, b = np.asarray(expected[name]), np.asarray(actual[name])
            _check_finite(name, a, b)
            if a.dtype.kind in "iuU":  # labels or text
                values.setdefault(name, []).append(np.mean(a == b))
            else:
                values.setdefault(name, []).append(-np.abs(a - b).max())
    least = {name: float(abs(min(agreements))) for name, agreements in values.items()}
    return {**least, QUALITY: quality.result()["all"]["pq"]} if quality else least


def _check_finite(name, expected, actual):
    """Raises InputError if a number of the checkpoint or the export is NaN or infinite and so cannot be compared."""
    for whose, x in (("the checkpoint", expected), ("the export", actual)):
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            percentage = 100 * np.mean(~np.isfinite(x))
            raise InputError(f"{name} of {whose}: {percentage:.3g} % of its numbers are NaN or infinite on a photo")


def equal_segments(reference, panoptic, quality):
    """Fraction of pixels that two panoptic maps both assign to the same segment, or both to none.

    Two segments are the same if their classes are equal and their IoU is above 0.5. Each segment has at most one match.

    Args:
        reference, panoptic: panoptic maps, int [h, w], with the values class x label_divisor + instance number.
        quality: `PanopticQuality`, which is updated with `panoptic` as prediction and `reference` as ground truth.
    """
    sides = [split_segments(np.asarray(x), quality.spec) for x in (reference, panoptic)]
    quality.update(*sides)
    a, b = (side.ids for side in sides)
    a_classes, b_classes = (np.concatenate([[quality.spec.ignore], side.classes]) for side in sides)
    pairs, overlap = np.unique(a.astype(np.int64) * len(b_classes) + b, return_counts=True)
    i, j = np.divmod(pairs, len(b_classes))
    union = np.bincount(a.ravel())[i] + np.bincount(b.ravel())[j] - overlap
    same = (a_classes[i] == b_classes[j]) & ((2 * overlap > union) | (i + j == 0))
    return float(overlap[same].sum() / a.size)


def latency(predict, image, runs=5):
    """Median seconds per photo over `runs` calls, after a first call that is not counted."""
    predict(image)
    return float(np.median(timeit.repeat(lambda: predict(image), number=1, repeat=runs)))
