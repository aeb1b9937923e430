"""Classification metrics, compared with their definitions."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.converters.imagenet import classes_spec
from axial.tasks.classification.task import BINS, ClassificationMetrics

SPEC = classes_spec("made up", [f"class {i}" for i in range(8)])


def scored(truth, probability):
    """The result of `ClassificationMetrics` for true classes [N] and probabilities [N, classes]."""
    scores = ClassificationMetrics(SPEC)
    for number in range(len(truth)):
        example = {"image/class": tf.constant(truth[number]), "image/file_name": tf.constant(f"{number}.jpg")}
        scores.update(example, {"probability": probability[number]})
    return scores.result()


@pytest.fixture
def guesses():
    """(true classes [300], probabilities [300, 8]). About half of the predictions are right. No photo has class 7."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=[300, 8])
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    truth = np.where(rng.random(300) < 0.5, probability.argmax(1), rng.integers(0, 7, 300))
    return np.minimum(truth, 6), probability


def test_definitions(guesses):
    truth, probability = guesses
    scores = scored(truth, probability)
    best = np.argsort(-probability, 1)
    right = best[:, 0] == truth
    assert scores["top1"] == pytest.approx(right.mean())
    assert scores["top5"] == pytest.approx((best[:, :5] == truth[:, None]).any(1).mean())
    for i, name in enumerate(SPEC.class_names[:-1]):
        assert scores["per_class"][name] == pytest.approx(right[truth == i].mean())
    assert np.isnan(scores["per_class"]["class 7"])
    confidence, error = probability.max(1), 0
    for low in np.arange(BINS) / BINS:
        inside = (confidence >= low) & (confidence < low + 1 / BINS)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert scores["calibration_error"] == pytest.approx(error)
    counts = {(a, b): n for a, b, n in scores["confusions"]}
    assert sum(counts.values()) == (~right).sum()
    for (a, b), count in counts.items():
        pair = (truth == SPEC.class_names.index(a)) & (best[:, 0] == SPEC.class_names.index(b))
        assert count == pair.sum()
