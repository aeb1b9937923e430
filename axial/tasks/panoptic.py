"""Panoptic segmentation: model, data, losses and predictions, and nothing of the loop around them."""

import tensorflow as tf

from axial.data.pipeline import evaluation_dataset, training_dataset
from axial.data.tfrecord import read_manifest
from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.losses import OFFSET_WEIGHT, panoptic_losses
from axial.models.panoptic_deeplab import SEMANTIC, upsample
from axial.models.registry import build_model
from axial.postprocess import PostprocessConfig, postprocess


class PanopticTask:
    """What a trainer, an evaluator and an exporter need to know of Panoptic-DeepLab.

    Args:
        model: name of a registered model.
        data_dir: folder of a converted data set.
        train_split, eval_split: splits of it.
        canvas: (height, width) of the network's input in evaluation; photos are fitted to it.
        crop: (height, width) of training crops; by default the canvas.
        scales: range of the random scale, over the photo fitted to the canvas.
        flip: whether training flips photos.
        shuffle: records drawn from at a time.
        norm: `BatchNormConfig`.
        grouping: `PostprocessConfig`.
        drop_path: stochastic depth of the backbone in training, as of its builder.
        loss_stride: the losses see every loss_stride-th row and column of the crop; 1 as published.
        offset_weight: as of `panoptic_losses`; 0.01 as published, for crops of 641 pixels and more.
        instances: whether there is an instance branch; data without things never has one.
        spec: `DatasetSpec`; by default the one that the training split was converted under.
    """

    def __init__(
        self,
        model,
        data_dir,
        train_split,
        eval_split,
        canvas=(641, 641),
        scales=(0.5, 2.0),
        flip=True,
        shuffle=1024,
        norm=BatchNormConfig(),
        grouping=PostprocessConfig(),
        drop_path=0.0,
        loss_stride=1,
        offset_weight=OFFSET_WEIGHT,
        crop=None,
        instances=True,
        spec=None,
    ):
        self.model, self.data_dir = model, data_dir
        self.train_split, self.eval_split = train_split, eval_split
        self.canvas, self.scales, self.flip = tuple(canvas), tuple(scales), flip
        self.shuffle, self.norm, self.grouping, self.loss_stride = shuffle, norm, grouping, loss_stride
        self.drop_path, self.offset_weight = drop_path, offset_weight
        self.spec = spec or read_manifest(data_dir, train_split)["spec"]
        self.crop = tuple(crop or canvas)
        self.instances = instances and any(self.spec.things)
        branches = ("semantic", "center", "offset") if self.instances else ("semantic",)
        self.loss_names = (*branches, "total")

    def build_model(self, folded=False):
        """The model with its weights made; `folded` without batch norms."""
        norm = None if folded else self.norm
        model = build_model(self.model, self.spec.num_classes, norm, drop_path=self.drop_path)
        if not self.instances:
            if not hasattr(model, "drop_instances"):
                raise InputError(f"model {self.model!r} cannot do without its instance branch")
            model.drop_instances()
        model(tf.zeros([1, *self.crop, 3]))
        return model

    def main_score(self, scores):
        """The number by which checkpoints are compared: PQ, or mIoU without an instance branch."""
        return scores["pq"]["all"]["pq"] if self.instances else scores["miou"]["miou"]

    def train_dataset(self, batch, seed, first_step=0, context=None):
        return training_dataset(
            self.data_dir,
            self.train_split,
            self.spec,
            self.canvas,
            batch,
            seed,
            first_step,
            self.scales,
            self.flip,
            self.shuffle,
            context,
            self.crop,
            self.instances,
        )

    def losses(self, model, batch):
        """dict of scalars of a training step, 'total' among them."""
        targets = {name: x for name, x in batch.items() if name != "image"}
        outputs = model(batch["image"], training=True)
        return panoptic_losses(outputs, targets, self.spec, self.loss_stride, self.offset_weight)

    def eval_dataset(self):
        return evaluation_dataset(self.data_dir, self.eval_split, self.spec, self.canvas)

    def predict(self, model, images):
        """`postprocess` of a batch of canvases float32 [N, *canvas, 3], with 'score' [N, K]."""
        return predict(model, images, self.spec, self.grouping)


def predict(model, images, spec, grouping):
    """Panoptic maps of a batch of canvases, on the canvas.

    Args:
        model: from images to the dict of maps.
        images: float32 [N, H, W, 3] of `preprocess`.
        spec: `DatasetSpec`.
        grouping: `PostprocessConfig`.

    Returns:
        `postprocess`'s dict, and 'score' float32 [N, K] of each instance: its centre's heat times
        the mean probability of its pixels' classes (Panoptic-DeepLab, Sec. 3.4).
    """
    maps = upsample(model(images), images.shape[1:3])
    result = postprocess(maps, spec, grouping)
    logits = maps[SEMANTIC]
    certainty = tf.exp(tf.reduce_max(logits, -1) - tf.reduce_logsumexp(logits, -1))
    count = result["center_score"].shape[1] + 1
    rows = tf.range(tf.shape(images)[0])[:, None, None] * count
    segments = tf.reshape(result["instance"] + rows, [-1])
    total = tf.shape(images)[0] * count
    mean = tf.math.divide_no_nan(
        tf.math.unsorted_segment_sum(tf.reshape(certainty, [-1]), segments, total),
        tf.math.unsorted_segment_sum(tf.ones_like(segments, tf.float32), segments, total),
    )
    result["score"] = result["center_score"] * tf.reshape(mean, [-1, count])[:, 1:]
    return result
