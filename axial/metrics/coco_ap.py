"""COCO's twelve scores of boxes or masks, computed by pycocotools, and mask AP of panoptic segmentations."""

import collections
import contextlib
import io
import itertools

import numpy as np
from pycocotools import mask as masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

FIGURES = "ap ap50 ap75 ap_small ap_medium ap_large ar1 ar10 ar100 ar_small ar_medium ar_large".split()
KEPT = ("dtScores", "dtMatches", "dtIgnore", "gtIgnore")  # fields that COCOeval.accumulate reads


class CocoAP:
    """COCO's average precision and recall, evaluated image by image. The object keeps only scores and matches.

    Scores and matches are stored by image number, because predictions with equal scores are ranked in order of image
    numbers. So merged shards of a data set give the same result as a single evaluation, bit for bit.

    Args:
        kind: 'bbox' or 'segm'.
        num_classes: number of classes.
    """

    def __init__(self, kind, num_classes):
        self.kind, self.num_classes = kind, num_classes
        self.matches = collections.defaultdict(dict)  # (class, area range) -> image number -> dict of `KEPT`
        self.images = 0

    def add(self, true, predicted, *, size, image):
        """Adds one image.

        Args:
            true: list of COCO's annotations: 'category_id' (a class index), 'iscrowd', 'area', and 'bbox' or
                'segmentation'.
            predicted: list of COCO's annotations with an additional 'score'.
            size: (height, width) of the image.
            image: number of the image in the data set.
        """
        self.images += 1
        classes = sorted({a["category_id"] for a in [*true, *predicted]})
        if not classes:
            return
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(self._index(true, size), self._index(predicted, size), self.kind)
            evaluation.params.catIds = classes
            evaluation.evaluate()
        ranges = len(evaluation.params.areaRng)
        for index, one in enumerate(evaluation.evalImgs):
            if one is not None:
                kept = {key: np.asarray(one[key]) for key in KEPT}
                kept["dtMatches"] = kept["dtMatches"] > 0
                self.matches[classes[index // ranges], index % ranges][image] = kept

    def _index(self, annotations, size):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": 0, "height": size[0], "width": size[1]}],
            "categories": [{"id": i} for i in range(self.num_classes)],
            "annotations": [{**a, "id": i + 1, "image_id": 0} for i, a in enumerate(annotations)],
        }
        coco.createIndex()
        return coco

    def merge(self, other):
        """Adds the scores and matches of another shard of the data set."""
        self.images += other.images
        for key, results in other.matches.items():
            self.matches[key].update(results)

    def state(self):
        """The matches in a form that JSON can hold."""
        results = [(*pair, image, one) for pair, images in self.matches.items() for image, one in images.items()]
        rows = [[*where, *(one[key].tolist() for key in KEPT)] for *where, one in results]
        return {"images": self.images, "matches": rows}

    def restore(self, state):
        """Restores the matches of a `state`."""
        self.images = state["images"]
        self.matches.clear()
        thresholds = len(COCOeval(iouType=self.kind).params.iouThrs)
        for category, area, image, *values in state["matches"]:
            one = dict(zip(KEPT, map(np.array, values)))
            for key in ("dtMatches", "dtIgnore"):
                one[key] = one[key].reshape(thresholds, -1).astype(bool)
            self.matches[category, area][image] = one

    def figures(self, classes=None):
        """dict from the names in `FIGURES` to scores from 0 to 1.

        The first six scores are average precision: over IoU 0.5 to 0.95, at 0.5, at 0.75, and for small, medium and
        large objects. The last six are average recall: with 1, 10 and 100 predictions per image, and for the three
        sizes of objects. Without objects, scores are NaN.

        Args:
            classes: class indices to average over; by default all.
        """
        classes = sorted({c for c, _ in self.matches} & set(range(self.num_classes) if classes is None else classes))
        if not classes:
            return dict.fromkeys(FIGURES, float("nan"))
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(iouType=self.kind)
            params = evaluation.params
            params.catIds = classes
            params.imgIds = sorted({image for results in self.matches.values() for image in results})
            keys = itertools.product(classes, range(len(params.areaRng)))
            evaluation.evalImgs = [self.matches.get(key, {}).get(i) for key in keys for i in params.imgIds]
            evaluation._paramsEval = params
            evaluation.accumulate()
            evaluation.summarize()
        return {k: float("nan") if v < 0 else float(v) for k, v in zip(FIGURES, evaluation.stats)}

    def per_class(self):
        """dict from class index to AP, averaged over IoU 0.5 to 0.95, for classes with objects or predictions."""
        return {c: self.figures([c])["ap"] for c in sorted({c for c, _ in self.matches})}


class InstanceAP(CocoAP):
    """COCO's AP of the things of a panoptic segmentation; see `CocoAP`.

    Args:
        spec: `DatasetSpec`.
    """

    def __init__(self, spec):
        super().__init__("segm", spec.num_classes)
        self.spec = spec

    def update(self, truth, predicted, image):
        """Adds the true and predicted `Segments` of the image with the number `image` in the data set."""
        crowd = np.zeros(len(truth.classes)) if truth.crowd is None else truth.crowd
        true = self._annotations(truth, [{"iscrowd": int(c)} for c in crowd])
        detections = self._annotations(predicted, [{"iscrowd": 0, "score": float(s)} for s in predicted.scores])
        self.add(true, detections, size=truth.ids.shape, image=image)

    def _annotations(self, segments, extra):
        """COCO's annotations of the things among the segments, with additional fields from `extra`."""
        classes, things = segments.classes, [i for i, c in enumerate(segments.classes) if self.spec.things[c]]
        return [
            {"segmentation": mask, "category_id": int(classes[i]), "area": int(masks.area(mask)), **extra[i]}
            for i, mask in zip(things, run_lengths(segments.ids, things))
        ]

    def result(self):
        """The six scores of average precision; see `CocoAP.figures`."""
        return dict(zip(FIGURES[:6], self.figures().values()))


def run_lengths(segments, numbers):
    """COCO's run-length encodings of some segments of a map, in one pass over the map.

    Args:
        segments: int [h, w], i + 1 for segment i.
        numbers: indices i of the segments to encode.
    """
    flat = np.ravel(segments, "F")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1])
    edges_of_run = np.stack([starts, np.append(starts[1:], flat.size)], 1)
    owner = flat[starts]
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.stack([numbers, numbers]).T + [1, 2])
    encodings = []
    for first, last in bounds:
        runs = order[first:last]
        edges = np.concatenate([[0], edges_of_run[runs].ravel(), [flat.size]])
        counts = edges[1:] - edges[:-1]
        encodings.append({"size": list(segments.shape), "counts": counts if counts[-1] else counts[:-1]})
    return masks.frPyObjects(encodings, *segments.shape) if encodings else []
