"""How an export differs from the checkpoint that it was made of."""

import time

import numpy as np
import tensorflow as tf

NUMBERS = ("probability", "box", "mask")  # predictions whose difference is a number; the others are labels


def map_differences(task, model, other, images):
    """dict from the names of the network's maps to the largest difference of two models, by the largest value.

    Args:
        task: the task.
        model, other: functions of canvases, such as a model and a `FileModel`.
        images: list of photos, uint8 [h, w, 3].
    """
    largest = {}
    for image in images:
        canvas = task.example(tf.constant(image))["image"][None]
        wanted, found = model(canvas), other(canvas)
        for name, value in wanted.items():
            value = np.asarray(tf.cast(value, tf.float32))
            difference = np.abs(np.asarray(found[name]) - value).max() / max(np.abs(value).max(), 1e-12)
            largest[name] = max(largest.get(name, 0.0), float(difference))
    return largest


def prediction_differences(wanted, found, images):
    """How two predictors differ over photos.

    Args:
        wanted, found: functions of a photo or a text that return a dict of arrays, such as `Predictor`s.
        images: list of photos, uint8 [h, w, 3], or of texts.

    Returns:
        dict from the names that both return to the share of equal pixels or texts, or to the largest difference.
    """
    values = {}
    for image in images:
        ours, theirs = wanted(image), found(image)
        for name in sorted(ours.keys() & theirs.keys()):
            a, b = np.asarray(ours[name]), np.asarray(theirs[name])
            if a.dtype.kind in "iuU":  # labels or text
                values.setdefault(name, []).append(np.mean(a == b))
            elif name != "score":  # one for each instance; instances may differ
                values.setdefault(name, []).append(-np.abs(a - b).max())
    return {name: float(abs(min(found))) for name, found in values.items()}


def latency(predict, image, runs=5):
    """Seconds that a photo takes, the median of some calls after the first."""
    predict(image)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        predict(image)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
