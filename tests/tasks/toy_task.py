"""A task like a user's own. It classifies photos by axial's models, with its own metrics, writer and evaluator."""

import dataclasses

import numpy as np
import tensorflow as tf

from axial.data.streams import decode_photo
from axial.data.tfrecord import photo_name
from axial.io import schemas
from axial.io.write import write_json
from axial.models.outputs import LOGITS
from axial.tasks.base import Description, DistributedPredictor, Evaluator, Inference, Task
from axial.tasks.classification.task import ClassificationData, central_crop, training_crop
from axial.tasks.metrics import Metrics, PredictionWriter


class RightScores(Metrics):
    """Metrics with one score: 'right' is the accuracy."""

    def update(self, example, prediction):
        predicted = int(np.argmax(prediction["probability"]))
        self.add_photo(photo_name(example), float(predicted == int(example["image/class"])))
        return predicted

    def result(self):
        return {"right": float(np.mean([right for *_, right in self.photos] or [np.nan]))}


class ClassNames(PredictionWriter):
    """Writes the predicted class of each photo."""

    kind, schema = "toy", dict

    def add(self, example, decoded):
        self.annotations.append({"image_id": int(example["image/id"]), "class": decoded})

    def decoded(self, index):
        return self.annotations[index]["class"]

    def close(self):
        write_json(self.path, sorted(self.annotations, key=lambda one: one["image_id"]))


class ToyEvaluator(Evaluator):
    """Evaluator with a single score, 'right'."""

    name, labels, quality, pictures = "toy", "class", "right", ("photo",)
    metrics, writer = RightScores, ClassNames

    def draw(self, example, decoded, spec):
        return (decode_photo(example).numpy(),)

    def describe(self, given, prediction, spec):
        name = spec.class_names[int(np.argmax(prediction["probability"]))]
        return Description({"class": name}, name, lambda: given)

    def headline(self, result):
        return result

    def classes(self, result):
        return ["class", "%"], [], []


class ToyFile(schemas.Struct):
    """Schema of best/scores.json."""

    right: float


@dataclasses.dataclass(eq=False)
class ToyTask(Task):
    """Classification task. See `Task` for the arguments."""

    evaluator = ToyEvaluator()
    models, configures = ("classification",), (ClassificationData,)
    best_scores = ToyFile

    data: ClassificationData

    def __post_init__(self):
        super().__post_init__()
        self.canvas = tuple(self.data.image)

    def training_example(self, record, seed):
        return training_crop(record, seed, self.data)

    def finish(self, batch):
        return {**batch, "label": tf.one_hot(batch["label"], self.num_classes)}

    def losses(self, model, batch, whole=None):
        logits = model(batch["image"], training=True)[LOGITS]
        return {"total": tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(batch["label"], logits))}

    def main_score(self, scores):
        return scores["right"]

    def predictions(self, model, inference=Inference()):
        return DistributedPredictor(
            lambda images, _: {"probability": tf.nn.softmax(model(images)[LOGITS])}, inference.strategy
        )

    def example(self, given):
        return {"image": central_crop(given, self.canvas, 1.0), "valid_size": tf.constant(self.canvas)}

    def serve(self, model, image):
        return {"probability": tf.nn.softmax(model(self.example(image)["image"][None])[LOGITS])[0]}
