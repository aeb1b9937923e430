"""The task of image classification: its model, data, loss and predictions, without the training loop."""

import dataclasses

import tensorflow as tf

from axial.data.classification import ClassificationData, central_crop, evaluation_photos, training_batches
from axial.data.specs import DatasetSpec
from axial.data.streams import spec_of
from axial.data.tfrecord import find_splits
from axial.errors import InputError
from axial.evaluation.classification import BEST, CLASSIFICATION, classifier_predictions
from axial.io import schemas
from axial.io.check import BelowOne, checked
from axial.models.registry import ModelConfig, check_model
from axial.outputs import LOGITS


@checked
class ClassificationTask:
    """What a trainer, an evaluator and an exporter need to know of a classifier.

    Args:
        model: `ModelConfig`.
        data: `ClassificationData`.
        data_dir: folder of the converted data set. If it lacks both splits of `data`, the only ones whose names begin
            with train and with val take their places.
        label_smoothing: share of the target that all classes get alike (Szegedy et al., CVPR 2016).
        spec: `DatasetSpec`; by default the one that the training split was converted under.

    Raises:
        InputError: no such data; a model that is not a classifier.
    """

    loss_names = ("total",)
    kind = CLASSIFICATION
    multi_scale = (1.0,)
    best_scores = schemas.Accuracy  # what `main_score` needs of a file of scores
    trained_by = ("label_smoothing",)  # arguments that the losses depend on, beside model and data

    def __init__(
        self,
        model: ModelConfig,
        data: ClassificationData,
        data_dir: str,
        label_smoothing: BelowOne = 0.1,
        spec: DatasetSpec | None = None,
    ):
        check_model(model, CLASSIFICATION.name)
        train_split, eval_split = find_splits(data_dir, {"train": data.train_split, "val": data.eval_split})
        self.data = dataclasses.replace(data, train_split=train_split, eval_split=eval_split)
        self.model, self.data_dir, self.label_smoothing = model, data_dir, label_smoothing
        self.spec = spec or spec_of(data_dir, self.data.train_split, "class")
        self.num_classes, self.canvas = self.spec.num_classes, tuple(data.image)

    def build_model(self, folded=False):
        """The model with its weights. With `folded` it has no batch norms."""
        return self.model.build(self.num_classes, self.canvas, folded=folded)

    def main_score(self, scores):
        """The number by which checkpoints are compared: top-1 accuracy."""
        return scores["top1"]

    def train_dataset(self, batch, seed, first_step=0, context=None, service=None):
        """The stream of training batches; see `training_batches`."""
        place = dict(batch=batch, seed=seed, first_step=first_step, context=context, service=service)
        return training_batches(self.data_dir, self.data, self.spec, **place)

    def losses(self, model, batch):
        """dict of the loss of a training step, 'total'."""
        logits = model(batch["image"], training=True)[LOGITS]
        labels = batch["label"] * (1 - self.label_smoothing) + self.label_smoothing / self.spec.num_classes
        return {"total": tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))}

    def eval_dataset(self, split=None, canvas=None, shard=(0, 1), skip=0):
        """The photos of a split (see `evaluation_photos`); by default the evaluation split at the task's size."""
        split = split or self.data.eval_split
        return self.photos(self.data_dir, split, canvas=canvas, shard=shard, skip=skip)

    def photos(self, data_dir, split, canvas=None, **part):
        """The photos of any converted split; see `evaluation_photos`."""
        canvas = canvas or self.canvas
        return evaluation_photos(data_dir, split, self.spec, canvas, central=self.data.central, **part)

    def predictions(self, model, strategy=None, scales=(1.0,), flip=False):
        """A function of examples that yields each with the model's prediction; see `classifier_predictions`."""
        if tuple(scales) != (1.0,):
            raise InputError("--scales: a classifier sees a photo at one scale; --image_size chooses it")
        return classifier_predictions(model, strategy, flip=flip)

    def scores(self):
        """Empty sums of the scores of a split."""
        return CLASSIFICATION.scores(self.spec)

    def picture(self, example, best):
        """A photo with its class and the best prediction below it, uint8 [h, w, 3]."""
        return CLASSIFICATION.draw(example, best, self.spec)[0]

    def example(self, image):
        """A photo, uint8 [h, w, 3], as `predictions` takes it."""
        return {"image": central_crop(image, self.canvas, self.data.central), "content": tf.constant(self.canvas)}

    def serve(self, model, image):
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        probability = tf.nn.softmax(model(self.example(image)["image"][None])[LOGITS])[0]
        score, best = tf.math.top_k(probability, min(BEST, self.spec.num_classes))
        return {"probability": probability, "score": score, "class": tf.gather(self.spec.class_names, best)}

    def settings(self):
        """What predictions depend on beside the weights and the size, for JSON."""
        return {"central": self.data.central}
