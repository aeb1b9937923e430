"""The task of object detection: its model, data, losses and predictions, without the training loop."""

import dataclasses

import tensorflow as tf

from axial.errors import InputError
from axial.io import schemas
from axial.models.registry import find_variant
from axial.tasks.base import DistributedPredictor, Inference, Task, whole_batch
from axial.tasks.detection.evaluator import DETECTION
from axial.tasks.detection.input_pipeline import DetectionData, check_masks, place_photo, training_example

BETA = {"anchors": 1 / 9, "boxes": 1.0}  # where a box's loss turns linear, as in both codes
TRUTH = ("boxes", "classes", "masks")  # of a batch
MASK = ("mask", "float32", "[K, 28, 28]", "probabilities on the box, 0 to 1")  # of `served`


class BestScores(schemas.Struct):
    """best/scores.json of a detector: AP of boxes."""

    box: schemas.AveragePrecision


@dataclasses.dataclass(eq=False)
class DetectionTask(Task):
    """What a trainer, an evaluator and an exporter need to know of Faster R-CNN and Mask R-CNN.

    Args:
        model: `ModelConfig`.
        data: `DetectionData`.
        data_dir: folder of the converted data set. If it lacks both splits of `data`, the only ones whose names begin
            with train and with val take their places.
        spec: `DatasetSpec`; by default the one that the training split was converted under. Things are detected.

    Raises:
        InputError: no such data, or data without things; a model that is no detector.
    """

    evaluator = DETECTION
    models = ("detection",)
    configures = (DetectionData,)
    best_scores = BestScores
    counted = True
    trained_by, loss_rule = ("loss_rule",), "mmdetection"  # of runs before this rule see `axial.training.continuing`
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
        """See `Task.train_dataset`. Raises InputError for a network with masks where no object has one."""
        if self.masks:
            check_masks(self.data_dir, self.data.train_split)
        return super().train_dataset(batch, seed, first_step, context, service=service)

    def training_example(self, record, seed):
        return training_example(record, seed, self.spec, self.data, masks=self.masks)

    def main_score(self, scores):
        """The number by which checkpoints are compared: AP of boxes."""
        return scores["box"]["ap"]

    def counts(self, model, batch):
        """dict of what some of `losses` divide by, in a part of a batch. The model draws boxes as in `losses`."""
        return {name: count for name, (_, count) in self._sums(model, batch).items()}

    def losses(self, model, batch, whole=None):
        """dict of the losses of a training step and their sum 'total', as scalars.

        With S the smooth L1 loss of a box's four codes together and E a cross entropy, they are those of mmdetection,
        the study's code (AnchorHead.loss, BBoxHead.loss and FCNMaskHead.loss, each with a weight of 1):

            anchor_score = sum of E over sampled anchors / sampled anchors
            anchor_box = sum of S over sampled anchors of objects / sampled anchors
            class = sum of E over sampled boxes / sampled boxes
            box = sum of S over sampled boxes of objects / sampled boxes
            mask = mean of E over the pixels of the masks of sampled boxes of objects

        The counts are of the whole batch, over all replicas and parts. mmdetection counts the photos of one GPU and
        takes the mean over GPUs, which is the same where every photo has its 256 anchors and 512 boxes.

        Args:
            model, batch: of a part of a batch.
            whole: see `whole_batch`; by default the part is all that this replica has.
        """
        sums = self._sums(model, batch)
        counts, micro_batches = whole or whole_batch({name: count for name, (_, count) in sums.items()})
        losses = {name: micro_batches * total / tf.maximum(counts[name], 1.0) for name, (total, _) in sums.items()}
        return {**losses, "total": tf.add_n(list(losses.values()))}

    def _sums(self, model, batch):
        """dict from a loss to (its sum, the count that it is divided by) in a part of a batch."""
        truth = {name: batch[name] for name in TRUTH if name in batch}
        outputs = model(batch["image"], valid_size=batch["valid_size"], truth=truth, training=True)
        entropy, levels = tf.nn.sigmoid_cross_entropy_with_logits, sorted(outputs["anchor_scores"])

        def flat(maps, *last):
            return tf.concat([tf.reshape(maps(level), [-1, *last]) for level in levels], 0)

        labels = flat(lambda level: batch[f"anchor_scores/{level}"])  # [anchors of all photos and levels]
        score_logits = flat(lambda level: outputs["anchor_scores"][level])
        score = entropy(tf.cast(labels > 0, tf.float32), score_logits)
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
        """A function of examples that yields each with its prediction; see `on_photo`."""
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
        """A photo's detections on its own pixels.

        Args:
            detections: a `FasterRCNN`'s detections without the batch axis.
            valid_size: int [2], the photo's size on the canvas.
            size: int [2], the photo's own size.

        Returns:
            dict of 'box' float32 [K, 4] of (x, y, width, height), 'class' int32 [K], class indices of the spec, 'score'
            float32 [K], 'count' int32 [], and with masks 'mask' float32 [K, 28, 28] of probabilities on the boxes. Rows
            from `count` on mean nothing.
        """
        size, valid_size = tf.cast(size, tf.float32), tf.cast(valid_size, tf.float32)
        corners = detections["box"] * tf.tile(size / valid_size, [2])
        top, left, bottom, right = tf.unstack(tf.clip_by_value(corners, 0.0, tf.tile(size, [2])), axis=-1)
        classes = tf.gather(self.spec.thing_classes, tf.maximum(tf.cast(detections["class"], tf.int32) - 1, 0))
        box = tf.stack([left, top, right - left, bottom - top], -1)
        return {**detections, "box": box, "class": classes}

    def example(self, image):
        """A photo, uint8 [h, w, 3], as `predictions` takes it."""
        canvas, valid_size = place_photo(image, self.data.sides, self.canvas)
        return {"image": canvas, "valid_size": valid_size, "size": tf.shape(image)[:2]}

    def serve(self, model, image):
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        photo = self.example(image)
        detections = model(photo["image"][None], valid_size=photo["valid_size"][None])
        return self.on_photo({name: x[0] for name, x in detections.items()}, photo["valid_size"], photo["size"])


def _smooth_l1(error, beta):
    """Girshick's smooth L1 loss (ICCV 2015, Eq. 3) of codes [..., 4], summed over them; linear from `beta` on."""
    size = tf.abs(error)
    return tf.reduce_sum(tf.where(size < beta, 0.5 * size**2 / beta, size - 0.5 * beta), -1)


def _sum_where(mask, loss, sampled):
    """(sum of a loss where a mask is true, how often `sampled` is)."""
    return tf.reduce_sum(tf.where(mask, loss, 0.0)), tf.reduce_sum(tf.cast(sampled, tf.float32))
