"""Mask AP of the thing classes. pycocotools computes it from run-length masks at full size."""

import numpy as np
from pycocotools import mask as masks

from axial.metrics.coco_ap import FIGURES, CocoAP


class InstanceAP(CocoAP):
    """COCO's AP of the things of a panoptic segmentation; see `CocoAP`.

    Args:
        spec: `DatasetSpec`.
    """

    def __init__(self, spec):
        super().__init__("segm", spec.num_classes)
        self.spec = spec

    def update(self, truth, predicted, *, true_classes, true_crowd, predicted_classes, scores, image):
        """Adds one image.

        Args:
            truth, predicted, true_classes, true_crowd, predicted_classes: see `PanopticQuality.update`.
            scores: score of each predicted segment.
            image: number of the image in the data set.
        """
        crowd = [{"iscrowd": int(c)} for c in true_crowd]
        scored = [{"iscrowd": 0, "score": float(s)} for s in scores]
        true = self._annotations(truth, true_classes, crowd)
        self.add(true, self._annotations(predicted, predicted_classes, scored), size=truth.shape, image=image)

    def _annotations(self, segments, classes, extra):
        """COCO's annotations of the things among the segments, with further fields from `extra`."""
        things = [i for i, c in enumerate(classes) if self.spec.things[c]]
        encoded = run_lengths(segments, things)
        return [
            {"segmentation": mask, "category_id": int(classes[i]), "area": int(masks.area(mask)), **extra[i]}
            for i, mask in zip(things, encoded)
        ]

    def result(self):
        """The six figures of AP; see `CocoAP.figures`."""
        figures = self.figures()
        return {name: figures[name] for name in FIGURES[:6]}


def run_lengths(segments, wanted):
    """COCO's run-length encodings of some segments of a map, in one pass over it.

    Args:
        segments: int [h, w], i + 1 for segment i.
        wanted: numbers i of the segments to encode.
    """
    flat = np.ravel(segments, "F")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1])
    ends = np.concatenate([starts[1:], [flat.size]])
    owner = flat[starts]
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.stack([wanted, wanted]).T + [1, 2])
    encodings = []
    for first, last in bounds:
        runs = order[first:last]
        counts = np.diff(np.stack([starts[runs], ends[runs]], 1).ravel(), prepend=0, append=flat.size)
        encodings.append({"size": list(segments.shape), "counts": counts if counts[-1] else counts[:-1]})
    return masks.frPyObjects(encodings, *segments.shape) if encodings else []
