"""The task of panoptic segmentation: its model, data, losses and predictions, without the training loop."""

import dataclasses

import tensorflow as tf

from axial.data.pipeline import DataConfig, evaluation_dataset, training_dataset
from axial.data.tfrecord import find_splits, read_manifest
from axial.errors import InputError
from axial.io.check import Scales, checked
from axial.layers.conv import resize_antialiased
from axial.losses import LossConfig, panoptic_losses
from axial.models.registry import ModelConfig, find_variant
from axial.outputs import CLASS, OFFSET, PROBABILITY, SEMANTIC, upsample
from axial.postprocess import PostprocessConfig, check_room, postprocess


@checked
class PanopticTask:
    """What a trainer, an evaluator and an exporter need to know of Panoptic-DeepLab.

    Args:
        model: `ModelConfig`.
        data: `DataConfig`.
        data_dir: folder of the converted data set. If it lacks both splits of `data`, the only ones whose names begin
            with train and with val take their places.
        loss: `LossConfig`.
        grouping: `PostprocessConfig`.
        multi_scale: scales of the canvas that multi-scale inference averages over, each with its mirror image.
        instances: whether there is an instance branch. Data without things never has one.
        spec: `DatasetSpec`; by default the one that the training split was converted under.

    Raises:
        InputError: no such data; a grouping that finds more instances than the labels have room for.
    """

    def __init__(
        self,
        model: ModelConfig,
        data: DataConfig,
        data_dir: str,
        loss: LossConfig = LossConfig(),
        grouping: PostprocessConfig = PostprocessConfig(),
        multi_scale: Scales = (0.5, 0.75, 1, 1.25, 1.5),
        instances: bool = True,
        spec=None,
    ):
        if find_variant(model.name).is_classifier:
            raise InputError(f"ModelConfig.name = {model.name!r}: a classifier; a segmentation model is expected")
        train_split, eval_split = find_splits(data_dir, {"train": data.train_split, "val": data.eval_split})
        self.data = dataclasses.replace(data, train_split=train_split, eval_split=eval_split)
        self.model, self.data_dir = model, data_dir
        self.loss, self.grouping, self.multi_scale = loss, grouping, multi_scale
        self.spec = spec or read_manifest(data_dir, self.data.train_split)["spec"]
        check_room(self.spec, grouping)
        self.canvas = tuple(data.canvas)
        self.instances = instances and any(self.spec.things)
        branches = ("semantic", "center", "offset") if self.instances else ("semantic",)
        self.loss_names = (*branches, "total")

    def build_model(self, folded=False):
        """The model with its weights. With `folded` it has no batch norms."""
        changes = {} if self.instances else {"instances": False}
        return self.model.build(self.spec.num_classes, self.data.crop, folded=folded, **changes)

    def main_score(self, scores):
        """The number by which checkpoints are compared: PQ, or mIoU without an instance branch."""
        return scores["pq"]["all"]["pq"] if self.instances else scores["miou"]["miou"]

    def train_dataset(self, batch, seed, first_step=0, context=None):
        """The stream of training batches; see `training_dataset`."""
        return training_dataset(
            self.data_dir,
            self.data,
            self.spec,
            batch=batch,
            seed=seed,
            first_step=first_step,
            context=context,
            instances=self.instances,
        )

    def losses(self, model, batch):
        """dict of the losses of a training step and their sum 'total', as scalars."""
        targets = {name: x for name, x in batch.items() if name != "image"}
        outputs = model(batch["image"], training=True)
        return panoptic_losses(outputs, targets, self.spec, self.loss)

    def eval_dataset(self, split=None, canvas=None, shard=(0, 1), skip=0):
        """The photos of a split (see `evaluation_dataset`); by default the evaluation split on the task's canvas."""
        split, canvas = split or self.data.eval_split, canvas or self.canvas
        return evaluation_dataset(self.data_dir, split, self.spec, canvas, shard=shard, skip=skip)

    def maps(self, model, images, widths=None, scales=(1.0,), flip=False):
        """`canvas_maps` of a batch of canvases, float32 [N, H, W, 3]."""
        return canvas_maps(model, images, widths, scales, flip=flip)

    def segment(self, maps, grouping=None):
        """`postprocess` of the maps from `maps`, by default with the task's own grouping."""
        return postprocess(maps, self.spec, grouping or self.grouping)


def canvas_maps(model, images, widths=None, scales=(1.0,), *, flip=False):
    """The network's maps on the canvas, averaged over scales and over the photo and its mirror image.

    Class probabilities, heat and offsets (in pixels of the canvas) are averaged. Scales run one after the other and
    are added up, so memory does not grow with their number. A mirrored photo gives the mirrored maps to the last bit,
    because the two images of a scale are averaged before anything else.

    Args:
        model: function from images to the dict of maps.
        images: float32 [N, H, W, 3], of `preprocess`.
        widths: int [N], the width of each photo on the canvas; the rest is padding. Needed with `flip`.
        scales: scales of the canvas; see `scaled_canvas`.
        flip: whether the mirror image is averaged in too.

    Returns:
        dict of maps as `postprocess` takes them.
    """
    total = None
    for scale in scales:
        with tf.control_dependencies(tf.nest.flatten(total or {})):
            scaled = _at_scale(model, images, scale)
        if flip:
            with tf.control_dependencies(tf.nest.flatten(scaled)):
                mirrored = _at_scale(model, _mirror(images, widths), scale)
            mirrored = {name: _mirror(x, widths) for name, x in mirrored.items()}
            if OFFSET in mirrored:
                mirrored[OFFSET] *= tf.constant([1.0, -1.0])
            # A mean, because graph optimisation would reorder a sum with the sum over scales.
            scaled = {name: tf.reduce_mean(tf.stack([scaled[name], mirrored[name]]), 0) for name in scaled}
        total = scaled if total is None else {name: total[name] + scaled[name] for name in total}
    mean = {name: x / len(scales) for name, x in total.items()}
    probability = mean.pop(SEMANTIC)
    return {CLASS: tf.argmax(probability, -1, tf.int32), PROBABILITY: probability, **mean}


def _at_scale(model, images, scale):
    """Class probabilities, heat and offsets on the canvas of one scale."""
    canvas = images.shape[1:3]
    maps = upsample(model(resize_antialiased(images, scaled_canvas(canvas, scale))), canvas)
    maps[SEMANTIC] = tf.nn.softmax(maps[SEMANTIC])
    return maps


def scaled_canvas(canvas, scale):
    """(height, width) of a canvas at a scale, rounded to the nearest 16k + 1 pixels. At scale 1 it stays as it is."""
    if scale == 1:
        return tuple(canvas)
    return tuple(16 * max(round((side - 1) * scale / 16), 1) + 1 for side in canvas)


def _mirror(x, widths):
    """x [N, H, W, C] with the first `widths` columns of each image in reverse."""
    return tf.reverse_sequence(x, widths, seq_axis=2, batch_axis=0)


def predict(model, images, spec, grouping):
    """`postprocess` of a batch of canvases at one scale."""
    return postprocess(canvas_maps(model, images), spec, grouping)
