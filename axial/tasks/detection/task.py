"""The task of object detection: model, data, losses and predictions."""

import dataclasses

import tensorflow as tf

from axial.errors import InputError
from axial.io import schemas
from axial.models.registry import find_variant
from axial.tasks.base import DistributedPredictor, Inference, Task, whole_batch
from axial.tasks.detection.evaluator import DETECTION
from axial.tasks.detection.input_pipeline import DetectionData, check_masks, place_photo, training_example

BETA = {"anchors": 1 / 9, "boxes": 1.0}  # thresholds of the smooth L1 losses; see `_smooth_l1`
TRUTH = ("boxes", "classes", "masks")  # keys of a batch that the network takes as ground truth
MASK = ("mask", "float32", "[K, 28, 28]", "probabilities on the box, 0 to 1")  # added to `served`


class BestScores(schemas.Struct):
    """best/scores.json of a detector: AP of boxes."""

    box: schemas.AveragePrecision


@dataclasses.dataclass(eq=False)
class DetectionTask(Task):
    """The task of object detection, with Faster R-CNN or Mask R-CNN.

    Args:
        model: `ModelConfig`.
        data: `DetectionData`.
        data_dir: folder of the converted data set. If the folder has neither split of `data`, the task uses the only
            splits there whose names begin with 'train' and 'val'.
        spec: `DatasetSpec`; by default the spec of the converted training split. Only things are detected.

    Raises:
        InputError: the data does not exist or has no things, or the model is not a detector.
    """

    evaluator = DETECTION
    models = ("detection",)
    configures = (DetectionData,)
    best_scores = BestScores
    counted = True
    trained_by, loss_rule = ("loss_rule",), "mmdetection"  # `axial.training.continuing` has the rule of older runs
    served = (
        ("box", "float32", "[K, 4]", "x, y, width and height in pixels of the photo"),
        ("class", "int32", "[K]", "class index"),
        ("score", "float32", "[K]", "confidence of each object, 0 to 1, the best first"),
        ("count", "int32", "[]", "how many of the K rows are objects"),
    )

    data: DetectionData

    def __post_init__(self):
        super().__post_init__()
        if not self.spec.thing_classes:
            raise InputError(f"{self.data_dir}: the spec {self.spec.name!r} has no things to detect")
        self.num_classes, self.canvas = len(self.spec.thing_classes), tuple(self.data.canvas)
        self.settings = {"sides": list(self.data.sides)}
        self.masks = {**find_variant(self.model.name).arguments, **self.model.arguments}.get("masks", False)
        if self.masks:
            self.served += (MASK,)
        self.loss_names = "anchor_score", "anchor_box", "class", "box", *(["mask"] if self.masks else []), "total"

    def train_dataset(self, batch, seed, first_step=0, context=None, service=None):
        """See `Task.train_dataset`. Raises InputError if the network has masks and the data has none."""
        if self.masks:
            check_masks(self.data_dir, self.data.train_split)
        return super().train_dataset(batch, seed, first_step, context, service=service)

    def training_example(self, record, seed):
        return training_example(record, seed, self.spec, self.data, masks=self.masks)

    def main_score(self, scores):
        """The score by which a training ranks its checkpoints: box AP."""
        return scores["box"]["ap"]

    def counts(self, model, batch):
        """dict of a micro-batch's divisors in `losses`. The model samples the same boxes as in `losses`."""
        return {name: count for name, (_, count) in self._sums(model, batch).items()}

    def losses(self, model, batch, whole=None):
        """dict of the losses of a train step and their sum 'total', as scalars.

        The losses follow mmdetection, the code of the spatial-attention study: AnchorHead.loss, BBoxHead.loss and
        FCNMaskHead.loss, each with weight 1. S is the smooth L1 loss summed over the four numbers of a box code, and E
        is the cross entropy:

            anchor_score = sum of E over sampled anchors / sampled anchors
            anchor_box = sum of S over positive sampled anchors / sampled anchors
            class = sum of E over sampled boxes / sampled boxes
            box = sum of S over positive sampled boxes / sampled boxes
            mask = mean of E over the mask pixels of positive sampled boxes

        The counts are taken over the global batch. mmdetection divides by the counts of one GPU and averages over GPUs,
        which gives the same losses if each photo has 256 sampled anchors and 512 sampled boxes.

        Args:
            model: a model of `build_model`.
            batch: a micro-batch.
            whole: see `whole_batch`; None if the replica has a single micro-batch.
        """
        sums = self._sums(model, batch)
        counts, micro_batches = whole or whole_batch({name: count for name, (_, count) in sums.items()})
        losses = {name: micro_batches * total / tf.maximum(counts[name], 1.0) for name, (total, _) in sums.items()}
        return {**losses, "total": tf.add_n(list(losses.values()))}

    def _sums(self, model, batch):
        """dict from the name of a loss to (sum of the loss, count that divides this sum) for a micro-batch."""
        truth = {name: batch[name] for name in TRUTH if name in batch}
        outputs = model(batch["image"], valid_size=batch["valid_size"], truth=truth, training=True)
        entropy, levels = tf.nn.sigmoid_cross_entropy_with_logits, sorted(outputs["anchor_scores"])

        def flat(maps, *last):
            return tf.concat([tf.reshape(maps(level), [-1, *last]) for level in levels], 0)

        labels = flat(lambda level: batch[f"anchor_scores/{level}"])  # [anchors of all photos and levels]
        score = entropy(tf.cast(labels > 0, tf.float32), flat(lambda level: outputs["anchor_scores"][level]))
        error = flat(lambda level: outputs["anchor_codes"][level] - batch[f"anchor_boxes/{level}"], 4)
        sums = {"anchor_score": _sum_where(labels >= 0, score, labels >= 0)}
        sums["anchor_box"] = _sum_where(labels > 0, _smooth_l1(error, BETA["anchors"]), labels >= 0)
        classes, logits = outputs["classes"], outputs["logits"]  # [N, boxes], [N, boxes, 1 + classes]
        kinds = tf.one_hot(classes, logits.shape[2])
        codes = tf.einsum("bnij,bni->bnj", tf.reshape(outputs["codes"], [*kinds.shape, 4]), kinds)
        error = _smooth_l1(codes - outputs["code_targets"], BETA["boxes"])
        sums["class"] = _sum_where(classes >= 0, tf.nn.softmax_cross_entropy_with_logits(kinds, logits), classes >= 0)
        sums["box"] = _sum_where(classes > 0, error, classes >= 0)
        if self.masks:
            pixels = tf.reduce_mean(entropy(outputs["mask_targets"], outputs["mask_logits"]), [2, 3])  # [N, boxes]
            sums["mask"] = _sum_where(outputs["mask_classes"] > 0, pixels, outputs["mask_classes"] > 0)
        return sums

    def predictions(self, model, inference=Inference()):
        """A function that takes examples and yields (example, prediction); see `on_photo`."""
        if tuple(inference.scales) != (1.0,) or inference.flip:
            raise InputError("--scales, --flip: a detector sees a photo once; --image_size chooses its canvas")
        replicated = DistributedPredictor(
            lambda images, valid_sizes: model(images, valid_size=valid_sizes), inference.strategy
        )
        return lambda examples: (
            (example, self.on_photo(detections, example["valid_size"], example["size"]))
            for example, detections in replicated(examples)
        )

    def on_photo(self, detections, valid_size, size):
        """Maps detections from the canvas to the pixels of the photo.

        Args:
            detections: a `FasterRCNN`'s detections without the batch axis.
            valid_size: int [2], the photo's size on the canvas.
            size: int [2], the photo's own size.

        Returns:
            dict of 'box' float32 [K, 4] of (x, y, width, height), 'class' int32 [K], class indices of the spec, 'score'
            float32 [K], 'count' int32 [], and with masks 'mask' float32 [K, 28, 28] of probabilities on the boxes. Rows
            from `count` on are padding.
        """
        size, valid_size = tf.cast(size, tf.float32), tf.cast(valid_size, tf.float32)
        corners = detections["box"] * tf.tile(size / valid_size, [2])
        top, left, bottom, right = tf.unstack(tf.clip_by_value(corners, 0.0, tf.tile(size, [2])), axis=-1)
        classes = tf.gather(self.spec.thing_classes, tf.maximum(tf.cast(detections["class"], tf.int32) - 1, 0))
        return {**detections, "box": tf.stack([left, top, right - left, bottom - top], -1), "class": classes}

    def example(self, image):
        """An example for `predictions`, from a photo, uint8 [h, w, 3]."""
        canvas, valid_size = place_photo(image, self.data.sides, self.canvas)
        return {"image": canvas, "valid_size": valid_size, "size": tf.shape(image)[:2]}

    def serve(self, model, image):
        """The prediction for one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        photo = self.example(image)
        detections = model(photo["image"][None], valid_size=photo["valid_size"][None])
        return self.on_photo({name: x[0] for name, x in detections.items()}, photo["valid_size"], photo["size"])


def _smooth_l1(error, beta):
    """Smooth L1 loss (Girshick, ICCV 2015, Eq. 3) of errors [..., 4], summed over the last axis.

    The loss is quadratic for errors below `beta`, and linear for larger errors.
    """
    size = tf.abs(error)
    return tf.reduce_sum(tf.where(size < beta, 0.5 * size**2 / beta, size - 0.5 * beta), -1)


def _sum_where(mask, loss, sampled):
    """(sum of the loss where `mask` is true, number of true values in `sampled`)."""
    return tf.reduce_sum(tf.where(mask, loss, 0.0)), tf.reduce_sum(tf.cast(sampled, tf.float32))
