"""Scores panoptic predictions at each photo's own size, one photo at a time."""

import collections
import functools
import math

import numpy as np
import tensorflow as tf
from scipy.ndimage import find_objects

from axial.data.converters.instances import as_json
from axial.data.labels import LARGEST_ID
from axial.data.preprocess import ScaledCanvas
from axial.data.streams import decode_photo
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io.show import counted, percent
from axial.metrics.instance_ap import InstanceAP, run_lengths
from axial.metrics.matching import MatchingAccuracy
from axial.metrics.mean_iou import MeanIoU
from axial.metrics.panoptic_quality import PanopticQuality, split_segments
from axial.tasks.base import Description, Evaluation
from axial.tasks.scores import Scores
from axial.tasks.segmentation.coco_results import CocoResults, ResultPredictions, category_map
from axial.tasks.segmentation.drawing import overlay
from axial.tasks.segmentation.feed import evaluation_dataset, segment_map
from axial.tasks.segmentation.grouping import PostprocessConfig
from axial.tasks.segmentation.predictions import Tiled


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
    owner = instances.ravel()[first[1:]]  # 0 for stuff
    return segments, classes, np.append(np.ones(1, scores.dtype), scores)[owner]


MOST_NAMED = 6  # classes in one line


def _of_classes(names):
    """One line on the classes of segments.

    >>> _of_classes(["nucleus"] * 16 + ["background"]), _of_classes([])
    ('17 segments: 16 nucleus, 1 background', '0 segments')
    >>> _of_classes("aabcdefgh")
    '9 segments: 2 a, 1 b, 1 c, 1 d, 1 e, 1 f, 2 of 2 other classes'
    """
    counts = collections.Counter(names).most_common()
    parts = [f"{number} {name}" for name, number in counts[:MOST_NAMED]]
    if left := sum(number for _, number in counts[MOST_NAMED:]):
        parts.append(f"{left} of {counted(len(counts) - MOST_NAMED, 'other class')}")
    return f"{counted(len(names), 'segment')}{': ' * bool(parts)}{', '.join(parts)}"


FULL = (
    "with as many objects as the grouping finds, or more, whose pixels go to others or to none; "
    "PostprocessConfig.top_k = None in config.gin finds all that the canvas and the spec's label_divisor have room for"
)


class PanopticScores(Scores):
    """PQ, mIoU and mask AP, summed over photos, and with thresholds matching accuracy.

    Parts of a split add up to the same bits as the whole.

    Args:
        spec: `DatasetSpec`.
        shard: (i, n) if it scores every n-th photo of the split, from the i-th on.
        thresholds: of `MatchingAccuracy`, which is scored too if there are any.
    """

    parts = ("quality", "iou", "ap")

    def __init__(self, spec, shard=(0, 1), thresholds=()):
        super().__init__(spec, shard)
        self.parts += ("matching",) if thresholds else ()
        self.quality, self.iou, self.ap = PanopticQuality(spec), MeanIoU(spec), InstanceAP(spec)
        self.matching = MatchingAccuracy(spec, thresholds)
        self.full_photos = 0  # photos with objects that are left out

    def update(self, example, prediction):
        """Adds one photo. Returns its segment table, and its int [h, w] of classes; see `CocoResults.add`.

        Args:
            example: `evaluation_example`.
            prediction: dict of 'semantic' and the maps for `segment_table`, or of 'semantic' and 'table', that table.
        """
        truth = segment_map(example).numpy()
        true_classes = example["segment/class"].numpy()
        true_crowd = example["segment/crowd"].numpy()
        table = prediction.get("table") or segment_table(prediction, self.spec)
        segments, classes, scores = table
        number = self.next_number()
        self.full_photos += int(prediction.get("dropped", 0)) > 0
        labels = dict(true_classes=true_classes, true_crowd=true_crowd)
        one = self.quality.update(truth, segments, predicted_classes=classes, **labels).result()["all"]
        of_segment = np.concatenate([[self.spec.ignore], true_classes])
        semantic = np.asarray(prediction["semantic"])
        self.iou.update(of_segment[truth], semantic)
        image = int(example.get("number", number))  # predictions of equal score rank in the data set's order
        self.ap.update(truth, segments, predicted_classes=classes, scores=scores, image=image, **labels)
        if self.matching.thresholds:
            self.matching.update(truth, segments, predicted_classes=classes, **labels)
        name = photo_name(example)
        self.photos.append([number, name, one["pq"] if one["classes"] else None])
        return *table, semantic

    def merge(self, other):
        super().merge(other)
        self.full_photos += other.full_photos

    def state(self):
        return {**super().state(), "full_photos": self.full_photos}

    def restore(self, state):
        """Sets the sums to those of a `state`, whose thresholds they have then."""
        if "matching" in state:
            self.parts = (*PanopticScores.parts, "matching")
        super().restore(state)
        self.full_photos = state.get("full_photos", 0)  # older states lack it

    @property
    def confusion(self):
        """Pixels, int [C, C + 1]: rows are true classes, columns predicted ones, then void."""
        return self.iou.confusion

    def result(self):
        """dict of the metrics' own results: 'pq', 'miou' and 'ap', and 'matching' with thresholds."""
        result = {"pq": self.quality.result(), "miou": self.iou.result(), "ap": self.ap.result()}
        result |= {"full_photos": self.full_photos} if self.full_photos else {}
        return {**result, "matching": self.matching.result()} if self.matching.thresholds else result


def submitted(predictions, results, spec):
    """A function like `predictions` that also writes each prediction to a `CityscapesResults`."""

    def run(examples):
        for example, prediction in predictions(examples):
            table = prediction.get("table") or segment_table(prediction, spec)
            name, semantic = photo_name(example), np.asarray(prediction["semantic"])
            segments, classes, scores = table
            results.add(name, segments, classes=classes, scores=scores, semantic=semantic)
            dropped = prediction.get("dropped", 0)
            yield example, {"table": table, "semantic": prediction["semantic"], "dropped": dropped}

    return run


def _segments(table, spec, labels):
    """List of the segments of a `segment_table` as a JSON has them.

    The boxes are (x, y, width, height), 'segmentation' is COCO's run lengths. A thing's 'label' is its number in the
    label image, from `labels`, int [S]; 0 of stuff. None if the network tells no things apart.
    """
    segments, classes, scores = table
    area = np.bincount(segments.ravel(), minlength=len(classes) + 1)
    boxes, runs = find_objects(segments, len(classes)), run_lengths(segments, range(len(classes)))
    return [
        {
            "id": i + 1,
            "class": spec.class_names[index],
            "category_id": int(spec.category_ids[index]),
            "thing": bool(spec.things[index]),
            **({"label": int(labels[i])} if labels is not None and labels[i] else {}),
            "score": round(float(score), 4),
            "area": int(area[i + 1]),
            "box": [x.start, y.start, x.stop - x.start, y.stop - y.start],
            "segmentation": as_json(runs[i]),
        }
        for i, (index, score, (y, x)) in enumerate(zip(classes, scores, boxes))
    ]


GROUPS = ("all", "things", "stuff")
ACCURACY = "accuracy@"  # before a threshold, in names of scores
MAIN = {"pq": "PQ", "pq_things": "PQ_things", "pq_stuff": "PQ_stuff", "miou": "mIoU", "ap": "AP"}  # of the headline


def accuracies(result):
    """dict from 'accuracy@THRESHOLD' to the matching accuracy, from 0 to 1; empty without thresholds."""
    return {f"{ACCURACY}{at}": row["accuracy"] for at, row in result.get("matching", {}).items()}


def mistakes(confusion, count=20):
    """The mistakes with the most pixels in a `MeanIoU`'s 'confusion'.

    Returns:
        list of (true class, predicted class, share of the true class).
    """
    pixels = [
        (true, found, number, sum(row.values()))
        for true, row in confusion.items()
        for found, number in row.items()
        if found != true
    ]
    pixels.sort(key=lambda entry: -entry[2])
    return [(true, found, number / total) for true, found, number, total in pixels[:count]]


class SegmentationEvaluation(Evaluation):
    """The evaluation of segmentations, with instances or without."""

    name = "panoptic"
    scores = PanopticScores
    quality = "PQ"
    results = CocoResults
    reader = ResultPredictions
    examples = staticmethod(evaluation_dataset)
    pictures = ("photo", "truth", "prediction")
    studies = ("submission_dir", "outputs_dir", "stress", "sweep", "thresholds")

    def draw(self, example, table, spec):
        """Photo, truth and prediction, each uint8 [h, w, 3], of an example and what `PanopticScores.update` returns."""
        photo = decode_photo(example).numpy()
        truth = overlay(photo, segment_map(example).numpy(), example["segment/class"].numpy(), spec)
        segments, classes, *_ = table
        return photo, truth, overlay(photo, segments, classes, spec)

    def describe(self, image, prediction, spec):
        """The `Description` of a photo, uint8 [h, w, 3].

        Raises:
            InputError: more segments than a panoptic PNG has numbers.
        """
        table = segment_table(prediction, spec)
        if len(table[1]) > LARGEST_ID:
            raise InputError(f"{len(table[1])} segments in one photo; a panoptic PNG has numbers for {LARGEST_ID}")
        things, labels = np.asarray(spec.things, bool)[table[1]], None
        if any(spec.things) and (not things.any() or np.any(prediction["instance"])):  # else a thing is a whole class
            labels = np.where(things, np.cumsum(things), 0)
        segments, dropped = _segments(table, spec, labels), int(prediction.get("dropped", 0))
        return Description(
            content={"dropped_objects": dropped, "segments": segments},
            warning=f"a photo {FULL}" if dropped else "",
            summary=_of_classes([segment["class"] for segment in segments]),
            draw=functools.partial(overlay, image, table[0], table[1], spec),
            segments=segments,
            panoptic=table[0],
            categories=category_map(np.asarray(prediction["semantic"]), spec),
            label_image=None if labels is None else functools.partial(np.take, np.concatenate([[0], labels]), table[0]),
        )

    def call(self, signatures, given):
        """See `Evaluation.call`. Older exports do not tell 'dropped': all that is known is whether they are full."""
        found = super().call(signatures, given)
        return {"dropped": tf.cast(tf.reduce_all(found["score"] > 0), tf.int32), **found}

    def predictions(self, signatures, spec, about):
        """See `Evaluation.predictions`. Photos that keep their own scale are cut into tiles; see `Tiled`."""
        of_canvases = super().predictions(signatures, spec, about)
        if "photo_scale" not in about:
            return of_canvases
        canvas, scale, overlap = (about[name].tolist() for name in ("canvas", "photo_scale", "tile_overlap"))
        areas = {name: int(about[name]) for name in ("stuff_area", "thing_area")}
        tiled = Tiled(
            ScaledCanvas.within(tuple(canvas), scale, overlap).alone,
            example=self.example,
            spec=spec,
            grouping=PostprocessConfig(**areas, pieces=about["pieces"].decode() or None if "pieces" in about else None),
            instances=bool(about["instances"]),
        )
        return functools.partial(tiled, of_canvases)

    def headline(self, result):
        """The six scores that a table of evaluations shows, and the matching accuracies."""
        pq, ap = result["pq"], result["ap"]
        of_group = {"pq": pq["all"]["pq"], "pq_things": pq["things"]["pq"], "pq_stuff": pq["stuff"]["pq"]}
        return {**of_group, "miou": result["miou"]["miou"], "ap": ap["ap"], "ap50": ap["ap50"], **accuracies(result)}

    def columns(self, result):
        """PQ, SQ and RQ of each group, mIoU, every AP, and the matching accuracies."""
        flat = {f"{q}_{g}": result["pq"][g][q] for g in GROUPS for q in ("pq", "sq", "rq")}
        return {**flat, "miou": result["miou"]["miou"], **result["ap"], **accuracies(result)}

    def summaries(self, result):
        """See `Evaluation.summaries`. Of the APs there are AP and AP50 alone."""
        found = super().summaries(result)
        return {name: x for name, x in found.items() if not name.startswith("ap") or name in ("ap", "ap50")}

    def brief(self, result):
        main = self.headline(result)
        shown = {label.removeprefix("PQ_"): main[name] for name, label in MAIN.items() if main[name] == main[name]}
        return " ".join(f"{label}={percent(value)}" for label, value in shown.items())

    def classes(self, result):
        """See `Evaluation.classes`."""
        iou, pq, matching = result["miou"], result["pq"], result.get("matching", {})
        rows = []
        for name, row in pq["per_class"].items():
            shares = (*(row[k] for k in ("pq", "sq", "rq")), iou["per_class"].get(name, math.nan))
            found = (at["per_class"].get(name, {}).get("accuracy") for at in matching.values())
            counts = (str(row[k]) for k in ("tp", "fp", "fn"))
            rows.append([name, *map(percent, shares), *counts, *map(percent, found)])
        last = []
        for name in GROUPS:
            shares = [percent(pq[name][k]) for k in ("pq", "sq", "rq")]
            miou = percent(iou["miou"]) if name == "all" else ""
            found = [percent(at["accuracy"]) if name == "things" else "" for at in matching.values()]
            last.append([f"{name} ({counted(pq[name]['classes'], 'class')})", *shares, miou, "", "", "", *found])
        return ["class", "PQ", "SQ", "RQ", "IoU", "TP", "FP", "FN", *accuracies(result)], rows, last

    def lines(self, result):
        """See `Evaluation.lines`."""
        taken = [f"{a} for {b} {percent(share)} %" for a, b, share in mistakes(result["miou"]["confusion"], 5)]
        main, matched = self.headline(result), [f"{k}={percent(v)}" for k, v in accuracies(result).items()]
        return [
            f"most often taken: {', '.join(taken) or 'nothing for anything else'}",
            "mask AP " + "  ".join(f"{name}={percent(value)}" for name, value in result["ap"].items()),
            *([f"things matched by IoU, TP/(TP+FP+FN): {'  '.join(matched)}"] if matched else ()),
            *([f"{counted(result['full_photos'], 'photo')} {FULL}"] if "full_photos" in result else ()),
            " ".join(f"{label}={percent(main[name])}" for name, label in MAIN.items()),
        ]

    def mistakes(self, result):
        """See `Evaluation.mistakes`."""
        rows = [[true, found, percent(share)] for true, found, share in mistakes(result["miou"]["confusion"])]
        return ["pixels of", "taken for", "% of the class"], rows


PANOPTIC = SegmentationEvaluation()
