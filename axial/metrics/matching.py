"""Matching accuracy of things: TP / (TP + FP + FN) at IoU thresholds.

StarDist (Schmidt et al., MICCAI 2018, Section 3.2) and the 2018 Data Science Bowl call this metric average precision;
StarDist's code calls it `accuracy`. Unlike COCO's AP, the metric does not use scores of the predictions.

- A predicted and a true thing of one class can match if their IoU is at least the threshold, as in StarDist's code. A
  largest one-to-one matching counts. For thresholds above 0.5, this matching is unique.
- Unlabelled pixels and crowds count as in `PanopticQuality`. If several matchings are largest, one with the
  fewest false positives counts.
- Counts are summed over images, and then over classes.
"""

import math

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from axial.metrics.panoptic_quality import compare

COUNTS = ("tp", "fp", "fn")


class MatchingAccuracy:
    """Counts true positives, false positives and false negatives over images.

    Shards of a data set can be counted separately and added.

    Args:
        spec: `DatasetSpec`.
        thresholds: least IoUs of a match, each above 0 and at most 1.
    """

    def __init__(self, spec, thresholds):
        self.spec, self.thresholds = spec, tuple(thresholds)
        self.counts = np.zeros([len(COUNTS), len(self.thresholds), spec.num_classes], np.int64)

    def update(self, truth, predicted):
        """Adds the true and predicted `Segments` of one image."""
        pairs = compare(truth, predicted)
        for k, threshold in enumerate(self.thresholds):
            near = pairs.iou >= threshold
            i, j = pairs.true[near], pairs.predicted[near]
            matched, _ = largest_matching(i, j)
            # There is a largest matching of all predictions that also matches all of `right`. So one matching has the
            # counts of `matched` and of `right`.
            real = pairs.unexcused[j]
            _, right = largest_matching(i[real], j[real])
            missed, wrong = pairs.errors(matched, right)
            for row, classes in enumerate((pairs.true_classes[matched], wrong, missed)):
                self.counts[row, k] += np.bincount(classes, minlength=self.spec.num_classes) * self.spec.things

    def merge(self, other):
        """Adds another shard of the data set, which has the same thresholds."""
        self.counts += other.counts

    def state(self):
        """The counts in a form that JSON can hold."""
        return {"thresholds": list(self.thresholds), **dict(zip(COUNTS, self.counts.tolist()))}

    def restore(self, state):
        """Restores thresholds and counts of a `state`. Raises KeyError, TypeError or ValueError for any other dict."""
        self.thresholds = tuple(map(float, state["thresholds"]))
        counts = np.array([state[name] for name in COUNTS], np.int64)
        self.counts = counts.reshape(len(COUNTS), len(self.thresholds), self.spec.num_classes)
        if (counts < 0).any():
            raise ValueError("matching: counts below 0")

    def result(self):
        """dict from each threshold, as text, to {'accuracy', 'tp', 'fp', 'fn', 'per_class'}.

        'per_class' has the first four entries for each class with a count above 0. An accuracy is from 0 to 1; NaN
        without objects and predictions.
        """
        names = self.spec.class_names
        result = {}
        for k, threshold in enumerate(self.thresholds):
            counts = self.counts[:, k]
            present = np.nonzero(counts.sum(0))[0]
            per_class = {names[c]: _accuracy(counts[:, c]) for c in present}
            result[str(threshold)] = {**_accuracy(counts.sum(1)), "per_class": per_class}
        return result


def largest_matching(rows, columns):
    """A largest subset of the pairs without a repeated row or column, as (rows, columns), int [M] each."""
    if not len(rows):
        return rows, columns
    places = rows.astype(np.int32), columns.astype(np.int32)  # SciPy 1.13's matching accepts no other dtype
    graph = csr_array((np.ones(len(rows), bool), places))
    column = maximum_bipartite_matching(graph, perm_type="column")  # column of each row, or -1
    matched = np.nonzero(column >= 0)[0]
    return matched, column[matched]


def _accuracy(counts):
    """dict of 'accuracy' and the counts of true positives, false positives and false negatives."""
    total = int(counts.sum())
    accuracy = int(counts[0]) / total if total else math.nan
    return {"accuracy": accuracy, **dict(zip(COUNTS, map(int, counts)))}
