"""Scores panoptic predictions at each photo's own size, one photo at a time."""

import math

import numpy as np

from axial.data.pipeline import segment_map
from axial.data.streams import decode_photo
from axial.drawing import overlay
from axial.metrics.instance_ap import InstanceAP
from axial.metrics.mean_iou import MeanIoU
from axial.metrics.panoptic_quality import PanopticQuality, split_segments


def segment_table(prediction, spec):
    """The predicted segments of one photo.

    Args:
        prediction: dict of maps [h, w] 'panoptic' and 'instance', and 'score' [K].
        spec: `DatasetSpec`.

    Returns:
        int map [h, w] (0 for void, i + 1 for segment i), classes [S], scores [S] (1 for stuff).
    """
    segments, classes, labels = split_segments(np.asarray(prediction["panoptic"]), spec)
    instances, scores = np.asarray(prediction["instance"]), np.asarray(prediction["score"])
    flat = segments.ravel()
    first = np.zeros(len(labels) + 1, np.int64)
    first[flat[::-1]] = np.arange(flat.size)[::-1]  # the first pixel of each segment
    owner = instances.ravel()[first[1:]]
    return segments, classes, np.where(owner > 0, scores[np.maximum(owner, 1) - 1], 1.0)


class PanopticScores:
    """PQ, mIoU and mask AP, summed over photos. Parts of a split add up to the same bits as the whole.

    Args:
        spec: `DatasetSpec`.
        shard: (i, n) if it scores every n-th photo of the split, from the i-th on.
    """

    def __init__(self, spec, shard=(0, 1)):
        self.spec, self.shard = spec, shard
        self.quality, self.iou, self.ap = PanopticQuality(spec), MeanIoU(spec), InstanceAP(spec)
        self.photos = []  # [number in the split, file name, the photo's own PQ or None]

    def update(self, example, prediction):
        """Adds one photo. Returns its segment table.

        Args:
            example: `evaluation_example`.
            prediction: dict of 'semantic' and the maps for `segment_table`, or of 'semantic' and 'table', that table.
        """
        truth = segment_map(example).numpy()
        true_classes = example["segment/class"].numpy()
        true_crowd = example["segment/crowd"].numpy()
        table = prediction.get("table") or segment_table(prediction, self.spec)
        segments, classes, scores = table
        number = self.shard[0] + self.shard[1] * len(self.photos)
        labels = dict(true_classes=true_classes, true_crowd=true_crowd)
        one = self.quality.update(truth, segments, predicted_classes=classes, **labels).result()["all"]
        of_segment = np.concatenate([[self.spec.ignore], true_classes])
        self.iou.update(of_segment[truth], np.asarray(prediction["semantic"]))
        self.ap.update(truth, segments, predicted_classes=classes, scores=scores, image=number, **labels)
        name = example["image/file_name"].numpy().decode()
        self.photos.append([number, name, one["pq"] if one["classes"] else None])
        return table

    def merge(self, other):
        """Adds another part of the split."""
        self.quality.merge(other.quality)
        self.iou.merge(other.iou)
        self.ap.merge(other.ap)
        self.photos = sorted(self.photos + other.photos)

    def state(self):
        """The sums in a form that JSON can hold."""
        parts = {name: getattr(self, name).state() for name in ("quality", "iou", "ap")}
        return {**parts, "photos": self.photos}

    def restore(self, state):
        """Sets the sums to those of a `state`."""
        for name in ("quality", "iou", "ap"):
            getattr(self, name).restore(state[name])
        self.photos = [list(photo) for photo in state["photos"]]

    def result(self):
        """dict of the metrics' own results: 'pq', 'miou' and 'ap'."""
        return {"pq": self.quality.result(), "miou": self.iou.result(), "ap": self.ap.result()}


def submitted(predictions, results, spec):
    """A function like `predictions` that also writes each prediction to a `CityscapesResults`."""

    def run(examples):
        for example, prediction in predictions(examples):
            table = prediction.get("table") or segment_table(prediction, spec)
            name, semantic = example["image/file_name"].numpy().decode(), np.asarray(prediction["semantic"])
            segments, classes, scores = table
            results.add(name, segments, classes=classes, scores=scores, semantic=semantic)
            yield example, {"table": table, "semantic": prediction["semantic"]}

    return run


def draw_example(example, table, spec):
    """Photo, truth and prediction, each uint8 [h, w, 3], of an example and a `segment_table`."""
    photo = decode_photo(example).numpy()
    truth = overlay(photo, segment_map(example).numpy(), example["segment/class"].numpy(), spec)
    segments, classes, _ = table
    return photo, truth, overlay(photo, segments, classes, spec)


# === Short forms ===


def summaries(scores):
    """Flat dict of the scores that are plotted over training, in percent. NaNs are left out."""
    flat = {f"{q}_{g}": scores["pq"][g][q] for g in ("all", "things", "stuff") for q in ("pq", "sq", "rq")}
    flat.update(miou=scores["miou"]["miou"], ap=scores["ap"]["ap"], ap50=scores["ap"]["ap50"])
    return {name: 100 * value for name, value in flat.items() if not math.isnan(value)}


def brief(scores):
    wanted = {"pq_all": "PQ", "pq_things": "things", "pq_stuff": "stuff", "miou": "mIoU", "ap": "AP"}
    flat = summaries(scores)
    return " ".join(f"{label}={flat[name]:.1f}" for name, label in wanted.items() if name in flat)
