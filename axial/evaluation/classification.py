"""Scores of classifiers: accuracy, confusions and calibration."""

import collections

import numpy as np
import tensorflow as tf

from axial.data.streams import decode_photo
from axial.drawing import caption
from axial.evaluation.predictions import Replicated
from axial.outputs import LOGITS

BINS = 15  # of the calibration error, as Guo et al. have


class ClassificationScores:
    """Top-1 and top-5 accuracy, accuracy of each class, confusions and calibration error, summed over photos.

    The expected calibration error is sum_b n_b / n |accuracy_b - confidence_b| over bins b of the largest probability
    (Guo et al., ICML 2017, Eq. 3).

    Args:
        spec: `DatasetSpec`.
    """

    def __init__(self, spec):
        self.spec = spec
        self.pairs = collections.Counter()  # (truth, prediction)
        self.top5 = 0
        self.bins = np.zeros([2, BINS])  # right photos, and the sum of confidences
        self.photos = []  # [number in the split, file name, whether it is right]

    def update(self, example, prediction):
        """Adds one photo. Returns its best classes, at most five, with their probabilities.

        Args:
            example: an evaluation example with 'image/class' and 'image/file_name'.
            prediction: dict of 'probability' [classes].
        """
        probability = np.asarray(prediction["probability"], np.float64)
        best = np.argsort(-probability, kind="stable")[:5]
        truth, confidence = int(example["image/class"]), probability[best[0]]
        right = bool(best[0] == truth)
        self.pairs[truth, int(best[0])] += 1
        self.top5 += int(truth in best)
        index = min(int(confidence * BINS), BINS - 1)
        self.bins[:, index] += right, confidence
        self.photos.append([len(self.photos), example["image/file_name"].numpy().decode(), right])
        return [(int(i), float(probability[i])) for i in best]

    def result(self):
        """dict of 'top1', 'top5', 'calibration_error' and 'per_class' from 0 to 1, and of 'confusions'.

        'per_class' has a name's accuracy, or NaN without photos. 'confusions' are [truth, prediction, photos], the most
        frequent first.
        """
        names, total = self.spec.class_names, len(self.photos)
        of_class = collections.Counter()
        for (truth, _), count in self.pairs.items():
            of_class[truth] += count
        right, confidence = self.bins
        wrong = ((pair, n) for pair, n in self.pairs.most_common() if pair[0] != pair[1])
        share = 1 / total if total else float("nan")
        return {
            "top1": float(sum(right)) * share,
            "top5": self.top5 * share,
            "calibration_error": float(np.abs(right - confidence).sum()) * share,
            "per_class": {
                name: self.pairs[i, i] / of_class[i] if of_class[i] else float("nan") for i, name in enumerate(names)
            },
            "confusions": [[names[truth], names[guess], n] for (truth, guess), n in wrong],
        }


def classifier_predictions(model, strategy=None, batch=32):
    """A function of evaluation examples that yields each with its prediction, a dict of 'probability' [classes].

    Args:
        model: a classifier.
        strategy: `tf.distribute` strategy that it was made under.
        batch: photos on each replica.
    """

    def predict(images, widths):
        del widths
        return {"probability": tf.nn.softmax(model(images)[LOGITS])}

    return Replicated(predict, strategy, batch)


def draw_example(example, best, spec):
    """A photo, uint8 [h + some, w, 3], with its class and the best prediction written below it."""
    index, probability = best[0]
    truth = spec.class_names[int(example["image/class"])]
    return caption(decode_photo(example).numpy(), f"{truth} | {spec.class_names[index]} {probability:.0%}")


def summaries(scores):
    """Flat dict of the scores that are plotted over training, in percent."""
    return {name: 100 * scores[name] for name in ("top1", "top5", "calibration_error")}


def brief(scores):
    return " ".join(f"{name}={100 * scores[name]:.1f}" for name in ("top1", "top5"))
