"""Scores of classifiers: accuracy, confusions and calibration."""

import collections
import functools
import math
import typing

import msgspec
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from axial.data.streams import decode_photo
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io import schemas
from axial.io.read import convert
from axial.io.show import percent, plain
from axial.io.write import write_json
from axial.tasks.base import Description, Evaluation
from axial.tasks.scores import JsonResults, PairScores

BINS = 15  # of the calibration error, as Guo et al. have
BEST = 5  # classes of a prediction that are kept


class ClassificationScores(PairScores):
    """Top-1 and top-5 accuracy, accuracy of each class, confusions and calibration error, summed over photos.

    The expected calibration error is sum_b n_b / n |accuracy_b - confidence_b| over bins b of the largest probability
    (Guo et al., ICML 2017, Eq. 3).

    Args:
        spec: `DatasetSpec`.
        shard: (i, n) if it scores every n-th photo of the split, from the i-th on.
    """

    def __init__(self, spec, shard=(0, 1)):
        super().__init__(spec, shard)
        self.top5 = 0
        self.right = np.zeros(BINS, np.int64)  # right photos of each bin
        self.confidences = [[] for _ in range(BINS)]  # kept one by one and summed exactly, so in any order

    def update(self, example, prediction):
        """Adds one photo. Returns its best classes, at most five, with their probabilities.

        Args:
            example: an evaluation example with 'image/class' and 'image/file_name'.
            prediction: dict of 'probability' [classes].
        """
        probability = np.asarray(prediction["probability"], np.float64)
        best = np.argsort(-probability, kind="stable")[:BEST]
        truth, confidence = int(example["image/class"]), probability[best[0]]
        right = bool(best[0] == truth)
        self.pairs[truth, int(best[0])] += 1
        self.top5 += int(truth in best)
        index = min(int(confidence * BINS), BINS - 1)
        self.right[index] += right
        self.confidences[index].append(float(confidence))
        self.add_photo(photo_name(example), float(probability[truth]))
        return [(int(i), float(probability[i])) for i in best]

    def merge(self, other):
        """Adds another part of the split."""
        super().merge(other)
        self.top5 += other.top5
        self.right += other.right
        for mine, theirs in zip(self.confidences, other.confidences):
            mine.extend(theirs)

    def state(self):
        """The sums in a form that JSON can hold."""
        return {**super().state(), "top5": self.top5, "bins": [self.right.tolist(), self.confidences]}

    def restore(self, state):
        """Sets the sums to those of a `state`."""
        super().restore(state)
        right, confidences = state["bins"]
        self.top5, self.right = int(state["top5"]), np.reshape(np.asarray(right, np.int64), BINS)
        # older states have a sum in place of each list
        self.confidences = [list(map(float, x if isinstance(x, list) else [x])) for x in confidences]
        if len(self.confidences) != BINS:
            raise ValueError(f"bins: {len(self.confidences)}, expected {BINS}")

    def result(self):
        """dict of 'top1', 'top5', 'calibration_error' and 'per_class' from 0 to 1, and of 'confusions'.

        'per_class' has a name's accuracy, or NaN without photos. 'confusions' are [truth, prediction, photos], the most
        frequent first.
        """
        names, total = self.spec.class_names, len(self.photos)
        of_class = collections.Counter()
        for (truth, _), count in self.pairs.items():
            of_class[truth] += count
        confidence = np.array([math.fsum(values) for values in self.confidences])
        wrong = ((pair, n) for pair, n in self.pairs.most_common() if pair[0] != pair[1])
        share = 1 / total if total else float("nan")
        return {
            "top1": int(self.right.sum()) * share,
            "top5": self.top5 * share,
            "calibration_error": float(np.abs(self.right - confidence).sum()) * share,
            "per_class": {
                name: self.pairs[i, i] / of_class[i] if of_class[i] else float("nan") for i, name in enumerate(names)
            },
            "confusions": [[names[truth], names[guess], n] for (truth, guess), n in wrong],
        }


class Guess(schemas.Strict):
    """A class of a photo's prediction."""

    index: schemas.Count
    class_: str = msgspec.field(name="class")
    probability: typing.Annotated[float, msgspec.Meta(ge=0, le=1)]


class ClassifiedPhoto(schemas.Strict):
    """A photo in a classifier's results."""

    file_name: str
    best: list[Guess]
    image_id: schemas.Count = 0


class ClassResults(JsonResults):
    """Writes the best classes of every photo to one JSON, classification_SPLIT.json."""

    kind = "classification"

    def check(self, where, annotations):
        """Raises InputError unless the annotations of a state are such results."""
        for photo in convert(where, annotations, list[ClassifiedPhoto]):
            for guess in photo.best:
                if guess.index >= self.spec.num_classes:
                    raise InputError(f"{where}: {photo.file_name} has class {guess.index} of {self.spec.num_classes}")

    def add(self, example, best):
        """Adds one photo."""
        name = photo_name(example)
        image_id = int(example["image/id"])
        self.annotations.append({"image_id": image_id, "file_name": name, "best": _named(best, self.spec)})

    def seen(self, index):
        """What `add` was given for photo number `index`."""
        return [(guess["index"], guess["probability"]) for guess in self.annotations[index]["best"]]

    def close(self):
        """Writes the JSON."""
        photos = sorted(self.annotations, key=lambda photo: photo.get("image_id", 0))  # older states have no ids
        write_json(self.path, {"photos": photos, "class_names": list(self.spec.class_names)})


def _named(best, spec):
    """The best classes as JSON has them."""
    return [{"index": i, "class": spec.class_names[i], "probability": share} for i, share in best]


class ClassificationEvaluation(Evaluation):
    """The evaluation of classifiers."""

    name, labels = "classification", "class"
    scores = ClassificationScores
    quality = "probability of its class"
    results = ClassResults
    pictures = ("photo",)
    briefly = ("top1", "top1"), ("top5", "top5")

    def draw(self, example, best, spec):
        """A tuple of one picture, uint8 [h + some, w, 3]: a photo over its class and the best prediction."""
        index, probability = best[0]
        truth = spec.class_names[int(example["image/class"])]
        return (caption(decode_photo(example).numpy(), f"{truth} | {spec.class_names[index]} {probability:.0%}"),)

    def describe(self, image, prediction, spec):
        """The `Description` of a photo, uint8 [h, w, 3]: its best classes."""
        probability = np.asarray(prediction["probability"], np.float64)
        best = np.argsort(-probability, kind="stable")[:BEST]
        found = _named([(int(i), round(float(probability[i]), 6)) for i in best], spec)
        summary = ", ".join(f"{guess['class']} {guess['probability']:.1%}" for guess in found)
        text = f"{found[0]['class']} {found[0]['probability']:.0%}"
        return Description({"best": found}, summary, draw=functools.partial(caption, image, text))

    def headline(self, result):
        """The three scores that a table of evaluations shows."""
        return {name: result[name] for name in ("top1", "top5", "calibration_error")}

    def classes(self, result):
        """See `Evaluation.classes`."""
        rows = [[name, percent(value)] for name, value in result["per_class"].items()]
        return ["class", "top-1"], rows, [["all photos", percent(result["top1"])]]


CLASSIFICATION = ClassificationEvaluation()


def caption(photo, text):
    """A photo, uint8 [h, w, 3], with a line of text on a black strip below it."""
    size = max(10, photo.shape[1] // 16)
    strip = Image.new("RGB", (photo.shape[1], 3 * size // 2))
    ImageDraw.Draw(strip).text((size // 4, size // 8), plain(text), fill="white", font=ImageFont.load_default(size))
    return np.concatenate([photo, np.asarray(strip)])
