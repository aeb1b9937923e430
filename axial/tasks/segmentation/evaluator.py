"""Metrics and evaluator of segmentation, at each photo's own size."""

import collections
import functools
import math

import numpy as np
import tensorflow as tf
from scipy.ndimage import find_objects

from axial.data.converters.boxes import as_json
from axial.data.labels import LARGEST_ID
from axial.data.streams import decode_photo
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io.show import counted, percent
from axial.metrics.coco_ap import InstanceAP, run_lengths
from axial.metrics.matching import MatchingAccuracy
from axial.metrics.mean_iou import MeanIoU
from axial.metrics.panoptic_quality import PanopticQuality, Segments, compare, split_segments
from axial.tasks.base import Description, Evaluator, scores_line, summary_line
from axial.tasks.metrics import Metrics
from axial.tasks.segmentation.drawing import overlay, segment_colors
from axial.tasks.segmentation.input_pipeline import segment_map
from axial.tasks.segmentation.prediction_writers import CocoPredictionWriter, category_map
from axial.tasks.segmentation.tiles import Tiled


def segment_table(prediction, spec):
    """The predicted `Segments` of one photo. The score of a stuff segment is 1.

    Args:
        prediction: dict of the maps 'panoptic' and 'instance', [h, w], and of 'score' [K].
        spec: `DatasetSpec`.
    """
    segments = split_segments(np.asarray(prediction["panoptic"]), spec)
    instances, scores = np.asarray(prediction["instance"]), np.asarray(prediction["score"])
    flat = segments.ids.ravel()
    first = np.zeros(len(segments.classes) + 1, np.int64)
    first[flat[::-1]] = np.arange(flat.size)[::-1]  # first pixel of each segment
    owner = instances.ravel()[first[1:]]  # 0 for stuff
    return segments._replace(scores=np.append(np.ones(1, scores.dtype), scores)[owner])


def true_segments(example):
    """The true `Segments` of an evaluation example."""
    classes, crowd = (example[f"segment/{name}"].numpy() for name in ("class", "crowd"))
    return Segments(segment_map(example).numpy(), classes, crowd=crowd)


FULL = (
    "with as many objects as the grouping keeps, or more, whose pixels go to other objects or to void; "
    "PostprocessConfig.top_k = None in config.gin keeps as many as the canvas and the spec's label_divisor allow"
)


class PanopticMetrics(Metrics):
    """PQ, mIoU, mask AP and optionally matching accuracy.

    Merged shards give exactly the scores of the whole split.

    Args:
        spec: `DatasetSpec`.
        shard: (i, n) to score every n-th photo of the split, from the i-th on.
        thresholds: IoU thresholds of `MatchingAccuracy`; empty to leave out this score.
    """

    parts = ("quality", "iou", "ap")

    def __init__(self, spec, shard=(0, 1), thresholds=()):
        super().__init__(spec, shard)
        self.parts += ("matching",) if thresholds else ()
        self.quality, self.iou, self.ap = PanopticQuality(spec), MeanIoU(spec), InstanceAP(spec)
        self.matching = MatchingAccuracy(spec, thresholds)
        self.full_photos = 0  # photos whose prediction dropped objects

    def update(self, example, prediction):
        """Adds one photo. Returns (its predicted `Segments`, class indices int [h, w]).

        Args:
            example: an example from `Evaluator.examples`.
            prediction: dict of 'semantic', int [h, w], and of either the arrays that `segment_table` takes or its
                result 'table'.
        """
        truth, semantic = true_segments(example), np.asarray(prediction["semantic"])
        table = prediction.get("table") or segment_table(prediction, self.spec)
        # The next line needs the photo's number, because AP ranks equal scores in the order of the data set.
        image = int(example.get("number", self.next_number()))
        one = self.quality.update(truth, table).result()["all"]
        self.iou.update(np.concatenate([[self.spec.ignore], truth.classes])[truth.ids], semantic)
        self.ap.update(truth, table, image)
        if self.matching.thresholds:
            self.matching.update(truth, table)
        self.full_photos += int(prediction.get("dropped", 0)) > 0
        self.add_photo(photo_name(example), one["pq"] if one["classes"] else None)
        return table, semantic

    def merge(self, other):
        super().merge(other)
        self.full_photos += other.full_photos

    def state(self):
        return {**super().state(), "full_photos": self.full_photos}

    def restore(self, state):
        """Sets the scores and thresholds from a `state`."""
        if "matching" in state:
            self.parts = (*PanopticMetrics.parts, "matching")
        super().restore(state)
        self.full_photos = state.get("full_photos", 0)  # states of older versions have no count

    def result(self):
        """dict of the results 'pq', 'miou' and 'ap', and of 'matching' if there are thresholds."""
        result = {"pq": self.quality.result(), "miou": self.iou.result(), "ap": self.ap.result()}
        result |= {"full_photos": self.full_photos} if self.full_photos else {}
        return {**result, "matching": self.matching.result()} if self.matching.thresholds else result


def submitted(predictions, results, spec):
    """A function like `predictions` that also adds each prediction to `results`, a `CityscapesPredictionWriter`."""

    def run(examples):
        for example, prediction in predictions(examples):
            table = prediction.get("table") or segment_table(prediction, spec)
            results.add(photo_name(example), table, np.asarray(prediction["semantic"]))
            yield example, {**prediction, "table": table}

    return run


def _segments_json(table, spec, labels):
    """List of dicts for JSON, one for each predicted segment of the `Segments` in `table`.

    'box' is (x, y, width, height) and 'segmentation' is COCO's run-length encoding. A thing's 'label' is its number in
    the label image. `labels`, int [S], has these numbers, 0 for stuff; it is None if the network has no instances.
    """
    count = len(table.classes)
    area = np.bincount(table.ids.ravel(), minlength=count + 1)
    boxes, runs = find_objects(table.ids, count), run_lengths(table.ids, range(count))
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
        for i, (index, score, (y, x)) in enumerate(zip(table.classes, table.scores, boxes))
    ]


GROUPS = ("all", "things", "stuff")
ACCURACY = "accuracy@"  # prefix of a score's name, before the threshold


def accuracies(result):
    """dict from 'accuracy@THRESHOLD' to matching accuracy, from 0 to 1; empty without thresholds."""
    return {f"{ACCURACY}{at}": row["accuracy"] for at, row in result.get("matching", {}).items()}


class SegmentationEvaluator(Evaluator):
    """Evaluator of panoptic and semantic segmentation."""

    name = labels = "panoptic"
    metrics = PanopticMetrics
    quality = "PQ"
    writer = CocoPredictionWriter
    pictures = ("photo", "truth", "prediction")
    main = ("pq", "PQ"), ("pq_things", "PQ_things"), ("pq_stuff", "PQ_stuff"), ("miou", "mIoU"), ("ap", "AP")
    briefly = ("pq", "PQ"), ("pq_things", "things"), ("pq_stuff", "stuff"), *main[3:]
    studies = ("submission_dir", "stress", "sweep", "thresholds")

    def draw(self, example, decoded, spec):
        """Pictures of the photo, the ground truth and the prediction, each uint8 [h, w, 3].

        A match has the colour of its true segment; all other segments have colours of their own.
        """
        both, photo = (true_segments(example), decoded[0]), decode_photo(example).numpy()
        colors = np.split(segment_colors(np.concatenate([s.classes for s in both]), spec), [len(both[0].classes)])
        pairs = compare(*both)
        match = pairs.iou > 0.5
        colors[1][pairs.predicted[match] - 1] = colors[0][pairs.true[match] - 1]
        return photo, *(overlay(photo, s.ids, s.classes, spec, colors=shades) for s, shades in zip(both, colors))

    def describe(self, image, prediction, spec):
        """The `Description` of the prediction for a photo, uint8 [h, w, 3].

        Raises:
            InputError: the photo has more segments than a panoptic PNG has ids.
        """
        table = segment_table(prediction, spec)
        segments, classes, *_ = table
        if len(classes) > LARGEST_ID:
            raise InputError(f"{len(classes)} segments in one photo; a panoptic PNG has numbers for {LARGEST_ID}")
        things, labels = np.asarray(spec.things, bool)[classes], None
        if any(spec.things) and (not things.any() or np.any(prediction["instance"])):  # else there are no instances
            labels = np.where(things, np.cumsum(things), 0)
        listed, dropped = _segments_json(table, spec, labels), int(prediction.get("dropped", 0))
        counts = collections.Counter(segment["class"] for segment in listed).most_common()
        return Description(
            content={"dropped_objects": dropped, "segments": listed},
            warning=f"a photo {FULL}" if dropped else "",
            summary=summary_line(len(classes), "segment", [f"{n} {name}" for name, n in counts]),
            draw=functools.partial(overlay, image, segments, classes, spec),
            segments=listed,
            panoptic=segments,
            categories=category_map(np.asarray(prediction["semantic"]), spec),
            label_image=None if labels is None else functools.partial(np.take, np.concatenate([[0], labels]), segments),
        )

    def predictions(self, signatures, spec, about):
        """See `Evaluator.predictions`. Photos at their own scale may be cut into tiles; see `Tiled`.

        Older exports do not return 'dropped'. The value is then 1 if every instance slot is used, else 0.
        """
        run = super().predictions(signatures, spec, about)

        def predict_canvases(examples):
            for example, prediction in run(examples):
                yield example, {"dropped": tf.cast(tf.reduce_all(prediction["score"] > 0), tf.int32), **prediction}

        tiled = Tiled.from_export(about, self.example, spec)
        return functools.partial(tiled, predict_canvases) if tiled else predict_canvases

    def headline(self, result):
        """The six main scores, and the matching accuracies."""
        pq, ap = result["pq"], result["ap"]
        group_pq = {"pq": pq["all"]["pq"], "pq_things": pq["things"]["pq"], "pq_stuff": pq["stuff"]["pq"]}
        return {**group_pq, "miou": result["miou"]["miou"], "ap": ap["ap"], "ap50": ap["ap50"], **accuracies(result)}

    def columns(self, result):
        """PQ, SQ and RQ of each group, mIoU, all APs, and the matching accuracies."""
        flat = {f"{q}_{g}": result["pq"][g][q] for g in GROUPS for q in ("pq", "sq", "rq")}
        return {**flat, "miou": result["miou"]["miou"], **result["ap"], **accuracies(result)}

    def classes(self, result):
        """See `Evaluator.classes`."""
        iou, pq, matching = result["miou"], result["pq"], result.get("matching", {})
        rows = []
        for name, row in pq["per_class"].items():
            scores = (*(row[k] for k in ("pq", "sq", "rq")), iou["per_class"].get(name, math.nan))
            accuracy = (at["per_class"].get(name, {}).get("accuracy") for at in matching.values())
            counts = (str(row[k]) for k in ("tp", "fp", "fn"))
            rows.append([name, *map(percent, scores), *counts, *map(percent, accuracy)])
        last = []
        for name in GROUPS:
            scores = [percent(pq[name][k]) for k in ("pq", "sq", "rq")]
            miou = percent(iou["miou"]) if name == "all" else ""
            accuracy = [percent(at["accuracy"]) if name == "things" else "" for at in matching.values()]
            last.append([f"{name} ({counted(pq[name]['classes'], 'class')})", *scores, miou, "", "", "", *accuracy])
        return ["class", "PQ", "SQ", "RQ", "IoU", "TP", "FP", "FN", *accuracies(result)], rows, last

    def lines(self, result):
        """See `Evaluator.lines`."""
        taken, last = super().lines(result)
        lines = [taken, f"mask AP {scores_line(result['ap'])}"]
        if matched := scores_line(accuracies(result)):
            lines.append(f"things matched by IoU, TP/(TP+FP+FN): {matched}")
        if "full_photos" in result:
            lines.append(f"{counted(result['full_photos'], 'photo')} {FULL}")
        return [*lines, last]

    def mistakes(self, result):
        """See `Evaluator.mistakes`. The confusions with the most pixels come first."""
        confusion = result["miou"]["confusion"]
        pixels = [(n, true, guess) for true, row in confusion.items() for guess, n in row.items() if guess != true]
        pixels.sort(key=lambda mistake: -mistake[0])
        rows = [[true, guess, f"{percent(n / sum(confusion[true].values()))} %"] for n, true, guess in pixels[:20]]
        return ["pixels of", "taken for", "of the class"], rows


PANOPTIC = SegmentationEvaluator()
