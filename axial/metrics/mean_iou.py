"""Mean intersection over union of classes."""

import math

import numpy as np


class MeanIoU:
    """A confusion matrix over images.

    Rows are true classes, and columns are predicted classes. The last column counts pixels without a predicted class.

    Args:
        spec: `DatasetSpec`. Pixels whose true class is spec.ignore do not count.
    """

    def __init__(self, spec):
        self.spec = spec
        self.confusion = np.zeros([spec.num_classes, spec.num_classes + 1], np.int64)

    def update(self, truth, predicted):
        """Adds the true and predicted class indices of an image, int [h, w] each. Predicted spec.ignore means void."""
        classes = self.spec.num_classes
        valid = truth != self.spec.ignore
        predicted = np.where(predicted == self.spec.ignore, classes, predicted)[valid]
        pairs = truth[valid].astype(np.int64) * (classes + 1) + predicted
        self.confusion += np.bincount(pairs, minlength=self.confusion.size).reshape(classes, -1)

    def merge(self, other):
        self.confusion += other.confusion

    def state(self):
        """The counts in a form that JSON can hold."""
        return {"confusion": self.confusion.tolist()}

    def restore(self, state):
        """Restores the counts of a `state`."""
        self.confusion = np.array(state["confusion"], np.int64)

    def result(self):
        """dict of 'miou', 'per_class' and 'confusion'.

        'miou' is the mean IoU over the classes in the ground truth or the prediction; NaN without such a class. IoUs
        are from 0 to 1.
        'confusion' counts pixels: {true class: {predicted class or 'void': count}}.
        """
        square = self.confusion[:, :-1]
        hit = np.diag(square)
        union = square.sum(0) + self.confusion.sum(1) - hit
        present = union > 0
        iou = hit / np.maximum(union, 1)
        names = [*self.spec.class_names, "void"]
        return {
            "miou": float(iou[present].mean()) if present.any() else math.nan,
            "per_class": {names[i]: float(iou[i]) for i in np.nonzero(present)[0]},
            "confusion": {
                names[i]: {names[j]: int(row[j]) for j in np.nonzero(row)[0]}
                for i, row in enumerate(self.confusion)
                if row.any()
            },
        }
