"""Panoptic quality (Kirillov et al., CVPR 2019) by the rule of COCO's official evaluator.

The rule, with its treatment of void and crowds: a predicted and a true segment of one class match
when their IoU is above 0.5, where pixels without a true label leave the union; crowds match nothing;
an unmatched prediction is no false positive if more than half of it lies on void or on a crowd of
its class (the last listed one, should there be several).
"""

import numpy as np


class PanopticQuality:
    """Sums over images, so that parts of a data set can be counted apart and added.

    Args:
        spec: `DatasetSpec`.
    """

    def __init__(self, spec):
        self.spec = spec
        self.iou = np.zeros(spec.num_classes)
        self.tp, self.fp, self.fn = (np.zeros(spec.num_classes, np.int64) for _ in range(3))

    def update(self, truth, true_classes, true_crowd, predicted, predicted_classes):
        """Adds one image.

        Args:
            truth: int [h, w]; 0 without a label, i + 1 for segment i.
            true_classes, true_crowd: class index and crowd flag of each true segment.
            predicted: int [h, w]; 0 for void, i + 1 for segment i.
            predicted_classes: class index of each predicted segment.

        Returns:
            The image's own `PanopticQuality`.
        """
        one = PanopticQuality(self.spec)
        n, m = len(true_classes) + 1, len(predicted_classes) + 1
        pairs = np.asarray(truth, np.int64) * m + np.asarray(predicted, np.int64)
        overlap = np.bincount(pairs.ravel(), minlength=n * m).reshape(n, m)
        true_area, predicted_area = overlap.sum(1), overlap.sum(0)
        true_classes = np.concatenate([[-1], np.asarray(true_classes, np.int64)])
        predicted_classes = np.concatenate([[-2], np.asarray(predicted_classes, np.int64)])
        crowd = np.concatenate([[True], np.asarray(true_crowd, bool)])

        candidates = (true_classes[:, None] == predicted_classes[None, :]) & ~crowd[:, None]
        union = true_area[:, None] + predicted_area[None, :] - overlap - overlap[0][None, :]
        iou = np.where(candidates, overlap / np.maximum(union, 1), 0)
        i, j = np.nonzero(iou > 0.5)
        np.add.at(one.iou, true_classes[i], iou[i, j])
        np.add.at(one.tp, true_classes[i], 1)

        missed = ~crowd & (true_area > 0)
        missed[i] = False
        np.add.at(one.fn, true_classes[missed], 1)

        excused = overlap[0].astype(np.float64)
        last_crowd = {true_classes[k]: k for k in np.nonzero(crowd)[0] if k}
        for category, k in last_crowd.items():
            same = predicted_classes == category
            excused[same] += overlap[k, same]
        wrong = predicted_area > 0
        wrong[0] = False
        wrong[j] = False
        wrong &= excused <= 0.5 * predicted_area
        np.add.at(one.fp, predicted_classes[wrong], 1)
        self.merge(one)
        return one

    def merge(self, other):
        """Adds what another instance has counted."""
        for name in ("iou", "tp", "fp", "fn"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def result(self):
        """dict 'all', 'things', 'stuff' of {'pq', 'sq', 'rq', 'classes'} and 'per_class', in 0 to 1.

        Means are over the classes that occur, in the truth or in the prediction.
        """
        seen = self.tp + self.fp + self.fn > 0
        sq = self.iou / np.maximum(self.tp, 1)
        rq = self.tp / np.maximum(self.tp + 0.5 * self.fp + 0.5 * self.fn, 0.5)
        pq = sq * rq
        things = np.array(self.spec.things)
        groups = {"all": seen, "things": seen & things, "stuff": seen & ~things}
        mean = lambda values, group: float(values[group].mean()) if group.any() else 0.0
        result = {
            name: {
                "pq": mean(pq, group),
                "sq": mean(sq, group),
                "rq": mean(rq, group),
                "classes": int(group.sum()),
            }
            for name, group in groups.items()
        }
        result["per_class"] = {
            self.spec.class_names[i]: {
                "pq": float(pq[i]),
                "sq": float(sq[i]),
                "rq": float(rq[i]),
                "tp": int(self.tp[i]),
                "fp": int(self.fp[i]),
                "fn": int(self.fn[i]),
            }
            for i in np.nonzero(seen)[0]
        }
        return result


def split_segments(panoptic, spec):
    """Segment map and class of each segment from a map of class x label_divisor + instance.

    Args:
        panoptic: int [h, w]; class spec.ignore is void.

    Returns:
        int [h, w] (0 for void, i + 1 for segment i), classes [S], labels [S] as in the map.
    """
    labels = np.flatnonzero(np.bincount(np.ravel(panoptic)))
    keep = labels // spec.label_divisor != spec.ignore
    number = np.zeros(labels[-1] + 1, np.int32)
    number[labels] = np.where(keep, np.cumsum(keep), 0)
    return number[panoptic], labels[keep] // spec.label_divisor, labels[keep]
