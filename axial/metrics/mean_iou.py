"""Mean intersection over union of classes."""

import numpy as np


class MeanIoU:
    """A confusion matrix over images: rows are true classes, columns predicted ones.

    Args:
        spec: `DatasetSpec`; true pixels of class spec.ignore do not count.
    """

    def __init__(self, spec):
        self.spec = spec
        self.confusion = np.zeros([spec.num_classes, spec.num_classes], np.int64)

    def update(self, truth, predicted):
        """Adds one image of class indices, int [h, w] each."""
        classes = self.spec.num_classes
        valid = truth != self.spec.ignore
        pairs = truth[valid].astype(np.int64) * classes + predicted[valid]
        self.confusion += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)

    def merge(self, other):
        self.confusion += other.confusion

    def result(self):
        """dict 'miou', over the classes in the truth or the prediction, and 'per_class', 0 to 1."""
        hit = np.diag(self.confusion)
        union = self.confusion.sum(0) + self.confusion.sum(1) - hit
        seen = union > 0
        iou = hit / np.maximum(union, 1)
        names = self.spec.class_names
        return {
            "miou": float(iou[seen].mean()) if seen.any() else 0.0,
            "per_class": {names[i]: float(iou[i]) for i in np.nonzero(seen)[0]},
        }
