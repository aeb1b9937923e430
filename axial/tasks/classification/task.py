"""The task of image classification: its model, data, loss and predictions, without the training loop."""

import dataclasses

import tensorflow as tf

from axial.errors import InputError
from axial.io import schemas
from axial.io.check import BelowOne, checked
from axial.layers.device import is_compiled
from axial.models.outputs import LOGITS
from axial.tasks.base import Inference, Task
from axial.tasks.classification.evaluation import BEST, CLASSIFICATION
from axial.tasks.classification.feed import ClassificationData, central_crop, soft_labels, training_crop
from axial.tasks.replicated import Replicated

BATCH = 32  # photos on each replica, of predictions


class BestScores(schemas.Struct):
    """best/scores.json of a classifier."""

    top1: float
    top5: float | None = None
    calibration_error: float | None = None


@checked
@dataclasses.dataclass(eq=False)
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
    models = ("classification",)
    configures = (ClassificationData,)
    best_scores = BestScores
    trained_by = ("label_smoothing",)
    served = (
        ("probability", "float32", "[C]", "of every class, 0 to 1"),
        ("class", "string", "[5]", "names of the most probable classes"),
        ("score", "float32", "[5]", "their probabilities, 0 to 1"),
    )

    data: ClassificationData
    label_smoothing: BelowOne = 0.1

    def __post_init__(self):
        super().__post_init__()
        self.canvas, self.settings = tuple(self.data.image), {"central": self.data.central}

    def training_example(self, record, seed):
        return training_crop(record, seed, self.data)

    def finish(self, batch):
        return soft_labels(batch, self.data, self.num_classes)

    def main_score(self, scores):
        """The number by which checkpoints are compared: top-1 accuracy."""
        return scores["top1"]

    def losses(self, model, batch, whole=None):
        """dict of the loss of a training step, 'total'."""
        del whole  # the loss is a mean over the images
        logits = model(batch["image"], training=True)[LOGITS]
        labels = batch["label"] * (1 - self.label_smoothing) + self.label_smoothing / self.spec.num_classes
        return {"total": tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))}

    def predictions(self, model, inference=Inference()):
        """A function of examples that yields each with the model's prediction, a dict of 'probability' [classes]."""
        if tuple(inference.scales) != (1.0,):
            raise InputError("--scales: a classifier sees a photo at one scale; --image_size chooses it")

        def predict(images, contents=None):
            del contents
            views = [images, images[:, :, ::-1]] if inference.flip else [images]
            return {"probability": tf.add_n([tf.nn.softmax(model(view)[LOGITS]) for view in views]) / len(views)}

        return Replicated(predict, inference.strategy, BATCH, compiled=is_compiled(inference.jit_compile))

    def example(self, image):
        """A photo, uint8 [h, w, 3], as `predictions` takes it."""
        return {"image": central_crop(image, self.canvas, self.data.central), "content": tf.constant(self.canvas)}

    def serve(self, model, image):
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        probability = tf.nn.softmax(model(self.example(image)["image"][None])[LOGITS])[0]
        score, best = tf.math.top_k(probability, min(BEST, self.spec.num_classes))
        return {"probability": probability, "score": score, "class": tf.gather(self.spec.class_names, best)}
