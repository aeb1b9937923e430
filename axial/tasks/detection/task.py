"""The task of object detection: its model, data, losses and predictions, without the training loop."""

import tensorflow as tf
import tf_keras as keras

from axial.data.specs import DatasetSpec
from axial.data.tfrecord import WITH_OBJECTS
from axial.errors import InputError
from axial.io import schemas
from axial.io.check import checked
from axial.models.registry import ModelConfig, find_variant
from axial.tasks.base import Task, whole_batch
from axial.tasks.detection.evaluation import DETECTION
from axial.tasks.detection.feed import SAMPLED_ANCHORS, DetectionData, evaluation_photos, place_photo, training_batches
from axial.tasks.replicated import Replicated

HUBER = {"anchors": 1 / 9, "boxes": 1.0}  # where a box's loss turns linear, as in both codes
TRUTH = ("boxes", "classes", "masks")  # of a batch
ANCHORS = ("anchor_scores", "anchor_boxes")  # of a batch, for each level
MASK = ("mask", "float32", "[K, 28, 28]", "probabilities on the box, 0 to 1")  # of `served`
EMPTY = 0.01  # added to counts as in tf-models-official, so that a batch without objects has no loss


class BestScores(schemas.Struct):
    """best/scores.json of a detector: AP of boxes."""

    box: schemas.AveragePrecision


@checked
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

    evaluation = DETECTION
    models, labels, configures = ("detection",), WITH_OBJECTS, (DetectionData,)
    best_scores = BestScores
    counted = True
    served = (
        ("box", "float32", "[K, 4]", "x, y, width and height in pixels of the photo"),
        ("class", "int32", "[K]", "class index"),
        ("score", "float32", "[K]", "confidence of each object, 0 to 1, the best first"),
        ("count", "int32", "[]", "how many of the K rows are objects"),
    )

    def __init__(self, model: ModelConfig, data: DetectionData, data_dir: str, spec: DatasetSpec | None = None):
        super().__init__(model, data, data_dir, spec)
        if not self.spec.thing_classes:
            raise InputError(f"{data_dir}: the spec {self.spec.name!r} has no things to detect")
        self.num_classes, self.canvas = len(self.spec.thing_classes), tuple(data.canvas)
        self.masks = {**find_variant(model.name).arguments, **model.arguments}.get("masks", False)
        if self.masks:
            self.served += (MASK,)
        parts = ("anchor_score", "anchor_box", "class", "box", *(["mask"] if self.masks else []))
        self.loss_names = (*parts, "total")

    @property
    def crop(self):
        return self.data.crop

    def main_score(self, scores):
        """The number by which checkpoints are compared: AP of boxes."""
        return scores["box"]["ap"]

    def train_dataset(self, batch, seed, first_step=0, context=None, service=None):
        """The stream of training batches; see `training_batches`."""
        place = dict(batch=batch, seed=seed, first_step=first_step, context=context, service=service)
        return training_batches(self.data_dir, self.data, self.spec, masks=self.masks, **place)

    def counts(self, model, batch):
        """dict of what some of `losses` divide by, in a part of a batch. The model draws boxes as in `losses`."""
        return {name: count for name, (_, count) in self._sums(self._outputs(model, batch), batch).items()}

    def losses(self, model, batch, whole=None):
        """dict of the losses of a training step and their sum 'total', as scalars.

        They are tf-models-official's: of the anchors' scores and boxes, of the boxes' classes and codes, and of masks.
        Those of boxes and masks are sums over the objects' boxes, divided by the numbers in these boxes, of each level
        or in all. Both are of the whole batch. mmdetection, the study's code, divides by counts of the photos of one
        GPU.

        Args:
            model, batch: of a part of a batch.
            whole: see `whole_batch`; by default the part is all that this replica has.
        """
        from official.vision.losses import maskrcnn_losses

        outputs = self._outputs(model, batch)
        sums = self._sums(outputs, batch)
        counts, parts = whole or whole_batch({name: count for name, (_, count) in sums.items()})
        means = {name: parts * total / (counts[name] + EMPTY) for name, (total, _) in sums.items()}
        scores = outputs["anchor_scores"]
        labels = _of_levels(batch, "anchor_scores", scores)
        losses = {
            "anchor_score": maskrcnn_losses.RpnScoreLoss(SAMPLED_ANCHORS)(scores, labels),
            "anchor_box": tf.add_n([means.pop(f"anchor_box/{level}") for level in sorted(scores)]),
            "class": maskrcnn_losses.FastrcnnClassLoss()(outputs["logits"], outputs["classes"]),
            **means,
        }
        return {**losses, "total": tf.add_n(list(losses.values()))}

    def _outputs(self, model, batch):
        truth = {name: batch[name] for name in TRUTH if name in batch}
        return model(batch["image"], content=batch["content"], truth=truth, training=True)

    def _sums(self, outputs, batch):
        """dict of (sum of a loss, count of the numbers that it sums) in a part of a batch.

        The names are 'anchor_box/L' for each level, 'box' and with masks 'mask'.
        """
        huber = {name: keras.losses.Huber(delta, keras.losses.Reduction.SUM) for name, delta in HUBER.items()}
        sums, codes = {}, outputs["anchor_codes"]
        for level, targets in _of_levels(batch, "anchor_boxes", codes).items():
            shape = [*codes[level].shape[:3], codes[level].shape[3] // 4, 4]
            found, wanted = tf.reshape(codes[level], shape), tf.reshape(targets, shape)
            has_object = tf.reduce_any(tf.abs(wanted) > 1e-6, -1)
            sums[f"anchor_box/{level}"] = _sum_where(has_object, huber["anchors"], wanted, found)
        classes = outputs["classes"]
        kinds = tf.one_hot(classes, outputs["logits"].shape[2])
        found = tf.einsum("bnij,bni->bnj", tf.reshape(outputs["codes"], [*kinds.shape, 4]), kinds)
        sums["box"] = _sum_where(classes > 0, huber["boxes"], outputs["code_targets"], found)
        if self.masks:
            entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction=keras.losses.Reduction.SUM)
            found, wanted = outputs["mask_logits"], outputs["mask_targets"]
            sums["mask"] = _sum_where(outputs["mask_classes"] > 0, entropy, wanted, found)
        return sums

    def photos(self, data_dir, split, canvas=None, **part):
        """The photos of any converted split; see `evaluation_photos`."""
        return evaluation_photos(data_dir, split, self.spec, canvas or self.canvas, sides=self.data.sides, **part)

    def predictions(self, model, strategy=None, scales=(1.0,), flip=False):
        """A function of examples that yields each with its prediction; see `on_photo`."""
        if tuple(scales) != (1.0,) or flip:
            raise InputError("--scales, --flip: a detector sees a photo once; --image_size chooses its canvas")

        def detect(images, contents):
            return model(images, content=contents)

        replicated = Replicated(detect, strategy)

        def run(examples):
            for example, found in replicated(examples):
                yield example, self.on_photo(found, example["content"], example["size"])

        return run

    def on_photo(self, found, content, size):
        """A photo's detections on its own pixels.

        Args:
            found: a `FasterRCNN`'s detections without the batch axis.
            content: int [2], the photo's size on the canvas.
            size: int [2], the photo's own size.

        Returns:
            dict of 'box' float32 [K, 4] of (x, y, width, height), 'class' int32 [K], class indices of the spec, 'score'
            float32 [K], 'count' int32 [], and with masks 'mask' float32 [K, 28, 28] of probabilities on the boxes. Rows
            from `count` on mean nothing.
        """
        size, content = tf.cast(size, tf.float32), tf.cast(content, tf.float32)
        corners = found["box"] * tf.tile(size / content, [2])
        top, left, bottom, right = tf.unstack(tf.clip_by_value(corners, 0.0, tf.tile(size, [2])), axis=-1)
        classes = tf.gather(tf.constant(self.spec.thing_classes), tf.maximum(tf.cast(found["class"], tf.int32) - 1, 0))
        box = tf.stack([left, top, right - left, bottom - top], -1)
        return {**found, "box": box, "class": classes}

    def example(self, image):
        """A photo, uint8 [h, w, 3], as `predictions` takes it."""
        canvas, content = place_photo(image, self.data.sides, self.canvas)
        return {"image": canvas, "content": content, "size": tf.shape(image)[:2]}

    def serve(self, model, image):
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        photo = self.example(image)
        found = model(photo["image"][None], content=photo["content"][None])
        return self.on_photo({name: x[0] for name, x in found.items()}, photo["content"], photo["size"])

    def settings(self):
        """What predictions depend on beside the weights and the canvas, for JSON."""
        return {"sides": list(self.data.sides)}


def _of_levels(batch, name, levels):
    """dict of a batch's targets of a name for each level."""
    return {level: tf.cast(batch[f"{name}/{level}"], tf.float32) for level in levels}


def _sum_where(mask, loss, wanted, found):
    """(sum of a loss over the numbers of what is masked, how many these are).

    Args:
        mask: bool, of the first axes of `wanted` and `found`.
        loss: of tf_keras, with `Reduction.SUM`.
    """
    mask = tf.reshape(tf.cast(mask, tf.float32), [*mask.shape, *[1] * (wanted.shape.rank - mask.shape.rank)])
    mask = tf.broadcast_to(mask, tf.shape(wanted))
    return loss(wanted[..., None], found[..., None], sample_weight=mask), tf.reduce_sum(mask)
