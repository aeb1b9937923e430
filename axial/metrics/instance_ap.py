"""Mask AP of the thing classes, by pycocotools on run-length masks at full size."""

import collections
import contextlib
import io

import numpy as np
from pycocotools import mask as masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval


class InstanceAP:
    """COCO's AP, evaluated image by image: of each only its scores and matches are kept.

    Args:
        spec: `DatasetSpec`.
    """

    def __init__(self, spec):
        self.spec = spec
        self.matches = collections.defaultdict(list)  # (class, area range) -> results of images
        self.images = 0

    def update(self, truth, true_classes, true_crowd, predicted, predicted_classes, scores):
        """Adds one image; segment maps as of `PanopticQuality.update`, a score a prediction."""
        self.images += 1
        things = np.array(self.spec.things)
        wanted = [i for i, c in enumerate(true_classes) if things[c]]
        true = [self._annotation(truth, i, true_classes[i], int(true_crowd[i])) for i in wanted]
        wanted = [i for i, c in enumerate(predicted_classes) if things[c]]
        found = [self._annotation(predicted, i, predicted_classes[i], 0) for i in wanted]
        for annotation, i in zip(found, wanted):
            annotation["score"] = float(scores[i])
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
                self.matches[classes[place // ranges], place % ranges].append(one)

    def _annotation(self, segments, index, category, crowd):
        mask = np.asfortranarray(segments == index + 1, np.uint8)
        return {
            "segmentation": masks.encode(mask),
            "category_id": int(category),
            "iscrowd": crowd,
            "area": int(mask.sum()),
        }

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
            self.matches[key].extend(results)

    def result(self):
        """dict 'ap' (IoU 0.5 to 0.95), 'ap50', 'ap75' and 'ap_small', 'ap_medium', 'ap_large'.

        From 0 to 1; NaN where no true instance falls into the mean.
        """
        names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(iouType="segm")
            classes = sorted({c for c, _ in self.matches})
            if not classes:
                return dict.fromkeys(names, float("nan"))
            params = evaluation.params
            params.catIds = classes
            params.imgIds = list(range(max(len(r) for r in self.matches.values())))
            evaluation.evalImgs = [
                (self.matches[c, a] + [None] * len(params.imgIds))[i]
                for c in classes
                for a in range(len(params.areaRng))
                for i in params.imgIds
            ]
            evaluation._paramsEval = params
            evaluation.accumulate()
            evaluation.summarize()
        stats = [float("nan") if value < 0 else float(value) for value in evaluation.stats[:6]]
        return dict(zip(names, stats))
