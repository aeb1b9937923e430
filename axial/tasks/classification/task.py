"""The task of image classification: its model, data, loss and predictions, without the training loop."""

import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.io import schemas
from axial.io.check import BelowOne, check_arguments
from axial.models.outputs import LOGITS
from axial.models.registry import ModelConfig
from axial.tasks.base import Task
from axial.tasks.classification.evaluation import BEST, CLASSIFICATION, classifier_predictions
from axial.tasks.classification.feed import ClassificationData, central_crop, training_batches


class BestScores(schemas.Struct):
    """best/scores.json of a classifier."""

    top1: float
    top5: float | None = None
    calibration_error: float | None = None


class ClassificationTask(Task):
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

    evaluation = CLASSIFICATION
    models, labels = ("classification",), "class"
    configures = (ClassificationData,)
    best_scores = BestScores
    batches = staticmethod(training_batches)
    trained_by = ("label_smoothing",)
    served = (
        ("probability", "float32", "[C]", "of every class, 0 to 1"),
        ("class", "string", "[5]", "names of the most probable classes"),
        ("score", "float32", "[5]", "their probabilities, 0 to 1"),
    )

    def __init__(
        self,
        model: ModelConfig,
        data: ClassificationData,
        data_dir: str,
        label_smoothing: BelowOne = 0.1,
        spec: DatasetSpec | None = None,
    ):
        super().__init__(model, data, data_dir, spec)
        self.label_smoothing, self.canvas = label_smoothing, tuple(data.image)
        check_arguments(self)
        self.looks = {"central": self.data.central}

    def main_score(self, scores):
        """The number by which checkpoints are compared: top-1 accuracy."""
        return scores["top1"]

    def losses(self, model, batch, whole=None):
        """dict of the loss of a training step, 'total'."""
        del whole  # the loss is a mean over the images
        logits = model(batch["image"], training=True)[LOGITS]
        labels = batch["label"] * (1 - self.label_smoothing) + self.label_smoothing / self.spec.num_classes
        return {"total": tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))}

    def predictions(self, model, strategy=None, scales=(1.0,), flip=False):
        """A function of examples that yields each with the model's prediction; see `classifier_predictions`."""
        if tuple(scales) != (1.0,):
            raise InputError("--scales: a classifier sees a photo at one scale; --image_size chooses it")
        return classifier_predictions(model, strategy, flip=flip, compiled=self.is_compiled())

    def example(self, image):
        """A photo, uint8 [h, w, 3], as `predictions` takes it."""
        return {"image": central_crop(image, self.canvas, self.data.central), "content": tf.constant(self.canvas)}

    def serve(self, model, image):
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        probability = tf.nn.softmax(model(self.example(image)["image"][None])[LOGITS])[0]
        score, best = tf.math.top_k(probability, min(BEST, self.spec.num_classes))
        return {"probability": probability, "score": score, "class": tf.gather(self.spec.class_names, best)}
