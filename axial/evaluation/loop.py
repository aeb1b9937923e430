"""The evaluation loop of every task."""

import numpy as np
import tensorflow as tf

from axial.io.show import progress


def evaluate(examples, predictions, scores, total=None, watch=None):
    """Scores a stream of photos. Returns the scores' result. Memory grows only by what the scores keep.

    Args:
        examples: iterable of a task's evaluation examples.
        predictions: function of the examples that yields (example, prediction).
        scores: a task's `scores()`.
        total: number of examples, for the progress bar.
        watch: function that is called with each example and what `scores.update` returns for it.
    """
    for example, prediction in progress(predictions(examples), "evaluate", total=total, unit="photo", leave=False):
        seen = scores.update(example, prediction)
        if watch:
            watch(example, seen)
    return scores.result()


def write_scalar(name, value, step):
    """Writes a summary. TensorFlow keeps every Python number that becomes a tensor for good, but no array."""
    tf.summary.scalar(name, np.asarray(value, np.float32), step)
