"""Mask AP of the thing classes. pycocotools computes it from run-length masks at full size."""

import collections
import contextlib
import io

import numpy as np
from pycocotools import mask as masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval


class InstanceAP:
    """COCO's AP, evaluated image by image. Only scores and matches are kept.

    They are kept by image number, because predictions of equal score are ranked in that order. So parts of a data set
    that are evaluated separately add up to the same bits.

    Args:
        spec: `DatasetSpec`.
    """

    KEPT = ("dtScores", "dtMatches", "dtIgnore", "gtIgnore")  # what COCOeval.accumulate reads

    def __init__(self, spec):
        self.spec = spec
        self.matches = collections.defaultdict(dict)  # (class, area range) -> image -> result
        self.images = 0

    def update(self, truth, predicted, *, true_classes, true_crowd, predicted_classes, scores, image):
        """Adds one image.

        Args:
            truth, predicted, true_classes, true_crowd, predicted_classes: see `PanopticQuality.update`.
            scores: score of each predicted segment.
            image: number of the image in the data set.
        """
        self.images += 1
        crowd = [{"iscrowd": int(c)} for c in true_crowd]
        true = self._annotations(truth, true_classes, crowd)
        scored = [{"iscrowd": 0, "score": float(s)} for s in scores]
        found = self._annotations(predicted, predicted_classes, scored)
        classes = sorted({a["category_id"] for a in true + found})
        if not classes:
            return
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(self._index(true, truth), self._index(found, truth), "segm")
            evaluation.params.catIds = classes
            evaluation.evaluate()
        ranges = len(evaluation.params.areaRng)
        for place, one in enumerate(evaluation.evalImgs):
            if one is not None:
                kept = {key: np.asarray(one[key]) for key in self.KEPT}
                kept["dtMatches"] = kept["dtMatches"] > 0
                self.matches[classes[place // ranges], place % ranges][image] = kept

    def _annotations(self, segments, classes, extra):
        """COCO's annotations of the things among the segments, with further fields from `extra`."""
        things = [i for i, c in enumerate(classes) if self.spec.things[c]]
        encoded = run_lengths(segments, things)
        return [
            {"segmentation": mask, "category_id": int(classes[i]), "area": int(masks.area(mask)), **extra[i]}
            for i, mask in zip(things, encoded)
        ]

    def _index(self, annotations, segments):
        coco = COCO()
        height, width = segments.shape
        coco.dataset = {
            "images": [{"id": 0, "height": height, "width": width}],
            "categories": [{"id": i} for i in range(self.spec.num_classes)],
            "annotations": [{"id": i + 1, "image_id": 0, **a} for i, a in enumerate(annotations)],
        }
        coco.createIndex()
        return coco

    def merge(self, other):
        self.images += other.images
        for key, results in other.matches.items():
            self.matches[key].update(results)

    def state(self):
        """The matches in a form that JSON can hold."""
        rows = [
            [category, area, image, *(one[key].tolist() for key in self.KEPT)]
            for (category, area), results in self.matches.items()
            for image, one in results.items()
        ]
        return {"images": self.images, "matches": rows}

    def restore(self, state):
        """Sets the matches to those of a `state`."""
        self.images = state["images"]
        self.matches.clear()
        thresholds = len(COCOeval(iouType="segm").params.iouThrs)
        for category, area, image, *values in state["matches"]:
            one = dict(zip(self.KEPT, map(np.array, values)))
            for key in ("dtMatches", "dtIgnore"):
                one[key] = one[key].reshape(thresholds, -1).astype(bool)
            self.matches[category, area][image] = one

    def result(self):
        """dict 'ap' (IoU 0.5 to 0.95), 'ap50', 'ap75', 'ap_small', 'ap_medium', 'ap_large', from 0 to 1.

        A score is NaN if there is no true instance for it.
        """
        names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(iouType="segm")
            classes = sorted({c for c, _ in self.matches})
            if not classes:
                return dict.fromkeys(names, float("nan"))
            params = evaluation.params
            params.catIds = classes
            params.imgIds = sorted({image for results in self.matches.values() for image in results})
            evaluation.evalImgs = [
                self.matches[c, a].get(i) for c in classes for a in range(len(params.areaRng)) for i in params.imgIds
            ]
            evaluation._paramsEval = params
            evaluation.accumulate()
            evaluation.summarize()
        stats = [float("nan") if value < 0 else float(value) for value in evaluation.stats[:6]]
        return dict(zip(names, stats))


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
        edges = [0, *np.stack([starts[runs], ends[runs]], 1).ravel()]
        counts = np.diff(edges if edges[-1] == flat.size else [*edges, flat.size])
        encodings.append({"size": list(segments.shape), "counts": counts.tolist()})
    return masks.frPyObjects(encodings, *segments.shape) if encodings else []
