"""Panoptic segmentation: model, data, losses and predictions, and nothing of the loop around them."""

import tensorflow as tf

from axial.data.pipeline import Augmentation, evaluation_dataset, training_dataset
from axial.data.tfrecord import read_manifest
from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.conv import resize_antialiased
from axial.losses import LossConfig, panoptic_losses
from axial.models.panoptic_deeplab import OFFSET, SEMANTIC, upsample
from axial.models.registry import build_model
from axial.postprocess import CERTAINTY, CLASS, PostprocessConfig, postprocess


class PanopticTask:
    """What a trainer, an evaluator and an exporter need to know of Panoptic-DeepLab.

    Args:
        model: name of a registered model.
        data_dir: folder of a converted data set.
        train_split, eval_split: splits of it.
        canvas: (height, width) of the network's input in evaluation; photos are fitted to it.
        augmentation: `Augmentation` of training photos.
        shuffle: records drawn from at a time.
        norm: `BatchNormConfig`.
        grouping: `PostprocessConfig`.
        drop_path: stochastic depth of the backbone in training, as of its builder.
        memory: what the backward pass of an axial backbone finds kept: see `axial_resnet`.
        loss: `LossConfig`.
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
        augmentation=Augmentation(),
        shuffle=1024,
        norm=BatchNormConfig(),
        grouping=PostprocessConfig(),
        drop_path=0.0,
        memory=None,
        loss=LossConfig(),
        instances=True,
        spec=None,
    ):
        self.model, self.data_dir = model, data_dir
        self.train_split, self.eval_split = train_split, eval_split
        self.canvas, self.augmentation, self.shuffle = tuple(canvas), augmentation, shuffle
        self.norm, self.grouping, self.loss = norm, grouping, loss
        self.backbone = {"drop_path": drop_path, **({"memory": memory} if memory else {})}
        self.spec = spec or read_manifest(data_dir, train_split)["spec"]
        self.crop = tuple(augmentation.crop or canvas)
        self.instances = instances and any(self.spec.things)
        branches = ("semantic", "center", "offset") if self.instances else ("semantic",)
        self.loss_names = (*branches, "total")

    def build_model(self, folded=False):
        """The model with its weights made; `folded` without batch norms."""
        norm = None if folded else self.norm
        model = build_model(self.model, self.spec.num_classes, norm, **self.backbone)
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
            self.augmentation,
            self.shuffle,
            context,
            self.instances,
        )

    def losses(self, model, batch):
        """dict of scalars of a training step, 'total' among them."""
        targets = {name: x for name, x in batch.items() if name != "image"}
        outputs = model(batch["image"], training=True)
        return panoptic_losses(outputs, targets, self.spec, self.loss)

    def eval_dataset(self):
        return evaluation_dataset(self.data_dir, self.eval_split, self.spec, self.canvas)

    def maps(self, model, images, widths=None, scales=(1.0,), flip=False):
        """`canvas_maps` of a batch of canvases float32 [N, H, W, 3]."""
        return canvas_maps(model, images, widths, scales, flip)

    def segment(self, maps, grouping=None):
        """`postprocess` of such maps, by default with the task's own grouping."""
        return postprocess(maps, self.spec, grouping or self.grouping)


def canvas_maps(model, images, widths=None, scales=(1.0,), flip=False):
    """The network's answer on the canvas, averaged over scales and over the photo and its mirror image.

    Probabilities and heat are averaged, and so are the offsets, in pixels of the canvas. Scales run
    one after the other; what is left of each is its sum with those before. A mirrored photo gives the
    mirrored maps to the last bit, for the two images of a scale are averaged before anything else.

    Args:
        model: from images to the dict of maps.
        images: float32 [N, H, W, 3] of `preprocess`.
        widths: int [N] of each photo on the canvas; what is right of it is padding. Needed to flip.
        scales: of the canvas, aligned corners, to the nearest 16 k + 1 pixels.
        flip: whether the mirror image is seen as well.

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
            # Not a sum: graph optimisation would reorder that with the sum over scales.
            scaled = {name: tf.reduce_mean(tf.stack([scaled[name], mirrored[name]]), 0) for name in scaled}
        total = scaled if total is None else {name: total[name] + scaled[name] for name in total}
    mean = {name: x / len(scales) for name, x in total.items()}
    probability = mean.pop(SEMANTIC)
    return {
        CLASS: tf.argmax(probability, -1, tf.int32),
        CERTAINTY: tf.reduce_max(probability, -1),
        **mean,
    }


def _at_scale(model, images, scale):
    """Class probabilities, heat and offsets on the canvas of one scale."""
    canvas = images.shape[1:3]
    maps = upsample(model(resize_antialiased(images, scaled_canvas(canvas, scale))), canvas)
    maps[SEMANTIC] = tf.nn.softmax(maps[SEMANTIC])
    return maps


def scaled_canvas(canvas, scale):
    """(height, width) of a canvas at a scale, to the nearest 16 k + 1 pixels; itself at 1."""
    if scale == 1:
        return tuple(canvas)
    return tuple(16 * max(round((side - 1) * scale / 16), 1) + 1 for side in canvas)


def _mirror(x, widths):
    """[N, H, W, C] with the first `widths` columns of each image in reverse."""
    return tf.reverse_sequence(x, widths, seq_axis=2, batch_axis=0)


def predict(model, images, spec, grouping):
    """`postprocess`'s dict for a batch of canvases, from one look at each."""
    return postprocess(canvas_maps(model, images), spec, grouping)
