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

    def update(self, truth, predicted, image):
        """Adds the true and the predicted `Segments` of an image, whose number in the data set is `image`."""
        crowd = np.zeros(len(truth.classes)) if truth.crowd is None else truth.crowd
        true = self._annotations(truth, [{"iscrowd": int(c)} for c in crowd])
        found = self._annotations(predicted, [{"iscrowd": 0, "score": float(s)} for s in predicted.scores])
        self.add(true, found, size=truth.ids.shape, image=image)

    def _annotations(self, segments, extra):
        """COCO's annotations of the things among the segments, with further fields from `extra`."""
        classes, things = segments.classes, [i for i, c in enumerate(segments.classes) if self.spec.things[c]]
        return [
            {"segmentation": mask, "category_id": int(classes[i]), "area": int(masks.area(mask)), **extra[i]}
            for i, mask in zip(things, run_lengths(segments.ids, things))
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
    edges_of_run = np.stack([starts, np.append(starts[1:], flat.size)], 1)
    owner = flat[starts]
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.stack([wanted, wanted]).T + [1, 2])
    encodings = []
    for first, last in bounds:
        runs = order[first:last]
        edges = np.concatenate([[0], edges_of_run[runs].ravel(), [flat.size]])
        counts = edges[1:] - edges[:-1]
        encodings.append({"size": list(segments.shape), "counts": counts if counts[-1] else counts[:-1]})
    return masks.frPyObjects(encodings, *segments.shape) if encodings else []
