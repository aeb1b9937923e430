"""Panoptic quality (Kirillov et al., CVPR 2019), by the rule of COCO's official evaluator.

- A predicted and a true segment of one class match if their IoU is above 0.5. The union leaves out pixels without a
  true label.
- Crowds match nothing.
- An unmatched prediction is not a false positive if more than half of it lies on unlabelled pixels or on a crowd of its
  class. If its class has several crowds, only the last crowd in the list counts.
"""

import math
import typing

import numpy as np


class Segments(typing.NamedTuple):
    """The segments of one image.

    Attributes:
        ids: int [h, w]: i + 1 for segment i; 0 for unlabelled pixels or void predictions.
        classes: class index of each segment.
        scores: confidence of each predicted segment, by which AP ranks them.
        crowd: whether each true segment is a crowd; None for no crowds.
    """

    ids: np.ndarray
    classes: np.ndarray
    scores: np.ndarray | None = None
    crowd: np.ndarray | None = None


class Pairs(typing.NamedTuple):
    """The P overlapping pairs of segments of one image that can match; see `compare`. Number 0 stands for no segment.

    Attributes:
        true, predicted: int [P]: the segment numbers of each pair, i + 1 for segment i.
        iou: float64 [P], above 0.
        true_classes, predicted_classes: int [S + 1]: class index by segment number, for S segments.
        required: bool [S + 1]: whether a true segment is a false negative if unmatched.
        unexcused: bool [S + 1]: whether a predicted segment is a false positive if unmatched.
    """

    true: np.ndarray
    predicted: np.ndarray
    iou: np.ndarray
    true_classes: np.ndarray
    predicted_classes: np.ndarray
    required: np.ndarray
    unexcused: np.ndarray

    def errors(self, true, predicted):
        """Classes of the false negatives and of the false positives, if the segments with these numbers are matched."""
        missed, wrong = self.required.copy(), self.unexcused.copy()
        missed[true], wrong[predicted] = False, False
        return self.true_classes[missed], self.predicted_classes[wrong]


def compare(truth, predicted):
    """The `Pairs` of the true and predicted `Segments` of one image, by the rule of this module's docstring."""
    n, m = len(truth.classes) + 1, len(predicted.classes) + 1
    true_area = np.bincount(np.ravel(truth.ids), minlength=n)
    predicted_area = np.bincount(np.ravel(predicted.ids), minlength=m)
    true_classes = np.concatenate([[-1], np.asarray(truth.classes, np.int64)])
    predicted_classes = np.concatenate([[-2], np.asarray(predicted.classes, np.int64)])
    crowd = np.concatenate([[True], np.zeros(n - 1, bool) if truth.crowd is None else np.asarray(truth.crowd, bool)])
    # Only overlapping pairs are listed: 65,000 segments on each side would make a table of 4e9 pairs.
    pairs = np.ravel(truth.ids).astype(np.int64) * m + np.ravel(predicted.ids)
    pairs, overlap = np.unique(pairs, return_counts=True)
    i, j = pairs // m, pairs % m
    on_void = np.zeros(m, np.int64)
    on_void[j[i == 0]] = overlap[i == 0]

    same = true_classes[i] == predicted_classes[j]
    last_crowd = {true_classes[k]: k for k in np.nonzero(crowd)[0] if k}
    on_crowd = same & np.isin(i, list(last_crowd.values()))
    excused = on_void.astype(np.float64)
    excused[j[on_crowd]] += overlap[on_crowd]
    unexcused = (predicted_area > 0) & (excused <= 0.5 * predicted_area)
    unexcused[0] = False

    real = same & ~crowd[i]
    i, j, overlap = i[real], j[real], overlap[real]
    union = true_area[i] + predicted_area[j] - overlap - on_void[j]
    classes, required = (true_classes, predicted_classes), ~crowd & (true_area > 0)
    return Pairs(i, j, overlap / union, *classes, required=required, unexcused=unexcused)


class PanopticQuality:
    """Counts matches, false positives and false negatives over images.

    Shards of a data set can be counted separately and added. The object keeps every IoU and sums the IoUs exactly. So
    merged shards give the same result in any order, bit for bit.

    Args:
        spec: `DatasetSpec`.
    """

    def __init__(self, spec):
        self.spec = spec
        self.matches = [[] for _ in spec.class_names]  # IoUs of the matches of each class
        self.fp, self.fn = (np.zeros(spec.num_classes, np.int64) for _ in range(2))

    @property
    def iou(self):
        """float64 [C]: sum of the IoUs of each class."""
        return np.array([math.fsum(values) for values in self.matches])

    @property
    def tp(self):
        """int64 [C]: number of matches of each class."""
        return np.array([len(values) for values in self.matches])

    def update(self, truth, predicted):
        """Adds the true and predicted `Segments` of one image. Returns the `PanopticQuality` of this image alone."""
        one, pairs = PanopticQuality(self.spec), compare(truth, predicted)
        match = pairs.iou > 0.5
        for category, value in zip(pairs.true_classes[pairs.true[match]], pairs.iou[match]):
            one.matches[category].append(float(value))
        missed, wrong = pairs.errors(pairs.true[match], pairs.predicted[match])
        np.add.at(one.fn, missed, 1)
        np.add.at(one.fp, wrong, 1)
        self.merge(one)
        return one

    def merge(self, other):
        """Adds the counts of another `PanopticQuality`."""
        for mine, theirs in zip(self.matches, other.matches):
            mine.extend(theirs)
        self.fp, self.fn = self.fp + other.fp, self.fn + other.fn

    def state(self):
        """The counts in a form that JSON can hold."""
        return {"matches": self.matches, "fp": self.fp.tolist(), "fn": self.fn.tolist()}

    def restore(self, state):
        """Restores the counts of a `state`."""
        self.matches = [list(values) for values in state["matches"]]
        self.fp, self.fn = np.array(state["fp"]), np.array(state["fn"])

    def result(self):
        """dict with 'all', 'things' and 'stuff', each a dict of 'pq', 'sq', 'rq' and 'classes', and with 'per_class'.

        Qualities are from 0 to 1. Means are over the classes in the ground truth or the prediction; 'classes' is their
        number. Without such a class, a mean is NaN.
        """
        iou, tp = self.iou, self.tp
        present = tp + self.fp + self.fn > 0
        sq = iou / np.maximum(tp, 1)
        rq = tp / np.maximum(tp + 0.5 * self.fp + 0.5 * self.fn, 0.5)
        pq = sq * rq
        things = np.array(self.spec.things)
        groups = {"all": present, "things": present & things, "stuff": present & ~things}

        quality = {"pq": pq, "sq": sq, "rq": rq}
        every = quality | {"tp": tp, "fp": self.fp, "fn": self.fn}
        result = {
            name: {key: float(x[group].mean()) if group.any() else math.nan for key, x in quality.items()}
            | {"classes": int(group.sum())}
            for name, group in groups.items()
        }
        names = self.spec.class_names
        result["per_class"] = {names[i]: {key: x[i].item() for key, x in every.items()} for i in np.nonzero(present)[0]}
        return result


def split_segments(panoptic, spec):
    """The `Segments` of a panoptic map, int [h, w]: class x label_divisor + instance. Class spec.ignore is void."""
    most = spec.num_classes * spec.label_divisor
    panoptic = np.minimum(panoptic, most)  # the number of void may be so large that counting up to it takes long
    labels = np.flatnonzero(np.bincount(np.ravel(panoptic)))
    keep = labels < most
    number = np.zeros(labels[-1] + 1, np.int32)
    number[labels] = np.where(keep, np.cumsum(keep), 0)
    return Segments(number[panoptic], labels[keep] // spec.label_divisor)
