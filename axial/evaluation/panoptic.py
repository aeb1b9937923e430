"""Scores panoptic predictions at each photo's own size, one photo at a time."""

import json
import os

import numpy as np
import tensorflow as tf
from PIL import Image
from tqdm import tqdm

from axial.data import tfrecord
from axial.data.pipeline import decode_photo, segment_map
from axial.data.preprocess import restore
from axial.drawing import overlay
from axial.metrics.instance_ap import InstanceAP
from axial.metrics.mean_iou import MeanIoU
from axial.metrics.panoptic_quality import PanopticQuality, split_segments


class CheckpointPredictions:
    """Predictions of a model for a stream of `evaluation_example`s, batched over all replicas.

    Args:
        task: `PanopticTask`.
        model: its model.
        strategy: `tf.distribute` strategy that the model was made under.
    """

    def __init__(self, task, model, strategy=None):
        self.strategy = strategy or tf.distribute.get_strategy()
        self._predict = tf.function(lambda x: task.predict(model, x), autograph=False)
        self._run = tf.function(lambda x: self.strategy.run(self._predict, (x,)), autograph=False)

    def __call__(self, examples):
        """Yields (example, dict of 'panoptic', 'semantic', 'instance' at the photo's size, 'score')."""
        replicas, waiting = self.strategy.num_replicas_in_sync, []
        for example in examples:
            waiting.append(example)
            if len(waiting) == replicas:
                yield from self._flush(waiting)
                waiting = []
        if waiting:
            yield from self._flush(waiting)

    def _flush(self, examples):
        image = lambda context: examples[
            min(context.replica_id_in_sync_group, len(examples) - 1)  # repeats the last one
        ]["image"][None]
        results = self._run(self.strategy.experimental_distribute_values_from_function(image))
        parts = {k: self.strategy.experimental_local_results(v) for k, v in results.items()}
        for i, example in enumerate(examples):
            yield example, full_size(
                {k: v[i][0] for k, v in parts.items()}, example["content"], example["size"]
            )


def full_size(result, content, size):
    """One image's result on the canvas -> the same at the photo's own size."""
    maps = {k: restore(result[k], content, size) for k in ("panoptic", "semantic", "instance")}
    return {**maps, "score": result["score"]}


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
    first[flat[::-1]] = np.arange(flat.size)[::-1]  # a pixel of each segment
    owner = instances.ravel()[first[1:]]
    return segments, classes, np.where(owner > 0, scores[np.maximum(owner, 1) - 1], 1.0)


class PanopticScores:
    """PQ, mIoU and mask AP, summed over photos.

    Args:
        spec: `DatasetSpec`.
    """

    def __init__(self, spec):
        self.spec = spec
        self.quality, self.iou, self.ap = PanopticQuality(spec), MeanIoU(spec), InstanceAP(spec)

    def update(self, example, prediction):
        """Adds one photo: an `evaluation_example` and its prediction. Returns its `segment_table`."""
        truth = segment_map(example).numpy()
        true_classes = example["segment/class"].numpy()
        true_crowd = example["segment/crowd"].numpy()
        table = segment_table(prediction, self.spec)
        segments, classes, scores = table
        self.quality.update(truth, true_classes, true_crowd, segments, classes)
        of_segment = np.concatenate([[self.spec.ignore], true_classes])
        self.iou.update(of_segment[truth], np.asarray(prediction["semantic"]))
        self.ap.update(truth, true_classes, true_crowd, segments, classes, scores)
        return table

    def result(self):
        """dict 'pq', 'miou', 'ap' of the metrics' own results."""
        return {"pq": self.quality.result(), "miou": self.iou.result(), "ap": self.ap.result()}


def evaluate(examples, predictions, spec, total=None, watch=None):
    """Scores a stream; memory does not grow with it, but for the scores and matches that AP needs.

    Args:
        examples: iterable of `evaluation_example`s.
        predictions: function of them that yields (example, prediction).
        spec: `DatasetSpec`.
        total: number of examples, for the progress bar.
        watch: function that sees each example with its `segment_table`.
    """
    scores = PanopticScores(spec)
    for example, prediction in tqdm(predictions(examples), "evaluate", total, unit="photo", leave=False):
        table = scores.update(example, prediction)
        if watch:
            watch(example, table)
    return scores.result()


def draw_example(example, table, spec):
    """Photo, truth and prediction, each uint8 [h, w, 3], of an example and a `segment_table`."""
    photo = decode_photo(example).numpy()
    truth = overlay(photo, segment_map(example).numpy(), example["segment/class"].numpy(), spec)
    segments, classes, _ = table
    return photo, truth, overlay(photo, segments, classes, spec)


class CocoResults:
    """COCO's panoptic result format: a PNG of ids for each photo, and one JSON written last.

    Args:
        folder: where 'panoptic_SPLIT.json' and 'panoptic_SPLIT/' go.
        spec: `DatasetSpec`.
        split: names them.
    """

    def __init__(self, folder, spec, split):
        self.folder, self.spec, self.split = folder, spec, split
        self.annotations = []
        tf.io.gfile.makedirs(os.path.join(folder, f"panoptic_{split}"))

    def add(self, example, table):
        segments, classes, _ = table
        name = os.path.splitext(example["image/file_name"].numpy().decode())[0] + ".png"
        rgb = np.stack([segments % 256, segments // 256 % 256, segments // 65536], -1)
        path = os.path.join(self.folder, f"panoptic_{self.split}", name)
        with tf.io.gfile.GFile(path, "wb") as file:
            Image.fromarray(rgb.astype(np.uint8)).save(file, "PNG")
        area = np.bincount(segments.ravel(), minlength=len(classes) + 1)
        self.annotations.append(
            {
                "image_id": int(example["image/id"]),
                "file_name": name,
                "segments_info": [
                    {
                        "id": i + 1,
                        "category_id": self.spec.category_ids[c],
                        "area": int(area[i + 1]),
                        "iscrowd": 0,
                    }
                    for i, c in enumerate(classes)
                ],
            }
        )

    def close(self):
        categories = zip(self.spec.category_ids, self.spec.class_names, self.spec.things)
        tfrecord.write_json(
            os.path.join(self.folder, f"panoptic_{self.split}.json"),
            {
                "annotations": self.annotations,
                "categories": [
                    {"id": i, "name": name, "isthing": int(thing)} for i, name, thing in categories
                ],
            },
        )
