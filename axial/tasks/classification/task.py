"""Image classification: input pipeline, metrics, prediction writer, evaluator and task."""

import collections
import dataclasses
import functools
import math
import typing

import msgspec
import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont

from axial.data.preprocess import IN_FILE, resize_by_products
from axial.data.streams import decode_photo
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io import schemas
from axial.io.check import BelowOne, Checked, Name, Natural, NonNegative, Scale, Share, Size, check_range
from axial.io.show import percent, plain
from axial.io.write import write_json
from axial.models.outputs import LOGITS
from axial.tasks.base import Description, DistributedPredictor, Evaluator, Inference, Task
from axial.tasks.metrics import Metrics, PredictionWriter

POLICIES = ("none", "autoaugment", "randaugment")


@dataclasses.dataclass(frozen=True)
class ClassificationData(Checked):
    """Splits, crops and augmentation of a classifier's input pipeline.

    Crops and flips depend only on the seed, so a resumed run repeats them. The policy, mixup and cutmix are
    tf-models-official's. They draw from TensorFlow's global random generators, so a resumed run does not repeat them.

    Attributes:
        train_split, eval_split: names of the training and the evaluation split.
        image: (height, width) of the network's input.
        area: range of the random crop's area, as a fraction of the photo (Szegedy et al., CVPR 2015).
        aspect: range of the random crop's aspect ratio, width / height, before the crop is resized to `image`.
        flip: whether training flips crops horizontally with a probability of 1/2.
        central: side of evaluation's centre crop, as a fraction of the largest crop with the aspect ratio of `image`.
        shuffle: size of the shuffle buffer, in records; 0 keeps the order of the files.
        policy: augmentation policy: 'none', 'autoaugment' or 'randaugment'.
        mixup, cutmix: alpha of the Beta distribution; 0 to disable. If both are set, each batch uses one at random.
    """

    train_split: Name
    eval_split: Name
    image: Size = (224, 224)
    area: tuple[Share, Share] = (0.08, 1.0)
    aspect: tuple[Scale, Scale] = (3 / 4, 4 / 3)
    flip: bool = True
    central: Share = 0.875
    shuffle: Natural = 16384
    policy: typing.Literal[POLICIES] = "none"
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range("ClassificationData.area", self.area)
        check_range("ClassificationData.aspect", self.aspect)

    def resized(self, image):
        """A copy with another size of the network's input."""
        return dataclasses.replace(self, image=image)


def training_crop(record, seed, data):
    """dict of 'image', a random crop, float32 [*data.image, 3] from -1 to 1, and its class 'label', int32 []."""
    from official.vision.ops import augment

    photo = decode_photo(record)
    seeds = tf.random.experimental.stateless_split(seed, 2)
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(photo),
        tf.zeros([1, 0, 4]),
        seeds[0],
        min_object_covered=0,
        aspect_ratio_range=data.aspect,
        area_range=data.area,
        use_image_if_no_bounding_boxes=True,
    )
    image = _resized(tf.slice(photo, begin, size), data.image)
    if data.flip:
        image = tf.image.stateless_random_flip_left_right(image, seeds[1])
    if data.policy != "none":
        policy = augment.AutoAugment() if data.policy == "autoaugment" else augment.RandAugment()
        image = tf.cast(policy.distort(tf.cast(tf.round(image), tf.uint8)), tf.float32)
    image = image / 127.5 - 1
    return {"image": tf.ensure_shape(image, [*data.image, 3]), "label": tf.cast(record["image/class"], tf.int32)}


def central_crop(photo, image, central):
    """Evaluation's centre crop of a photo: uint8 [h, w, 3] -> float32 [*image, 3] from -1 to 1.

    Args:
        photo: uint8 [h, w, 3].
        image: (height, width) of the network's input.
        central: side of the centre crop, as a fraction of the largest crop with the aspect ratio of `image`.
    """
    size = tf.cast(tf.shape(photo)[:2], tf.float32)
    input_size = tf.cast(tf.stack(image), tf.float32)
    crop = tf.cast(tf.maximum(tf.round(input_size * tf.reduce_min(size / input_size) * central), 1), tf.int32)
    first = (tf.shape(photo)[:2] - crop) // 2
    photo = tf.slice(photo, tf.concat([first, [0]], 0), tf.concat([crop, [3]], 0))
    return tf.ensure_shape(_resized(photo, image) / 127.5 - 1, [*image, 3])


def _resized(photo, size):
    """The photo, resized by bicubic interpolation and clipped to the values 0 to 255."""
    if IN_FILE.get():
        resized = resize_by_products(photo, size, _cubic)
    else:
        resized = tf.image.resize(photo, size, "bicubic", antialias=True)
    return tf.clip_by_value(resized, 0.0, 255.0)


def _cubic(x):
    """The kernel of bicubic interpolation at distances x (Keys, 1981, with a = -1/2)."""
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return tf.where(x <= 1, near, tf.where(x <= 2, far, 0.0))


def soft_labels(batch, data, num_classes):
    """The batch after mixup or cutmix. Its 'label' is one-hot or soft, float32 [N, num_classes]."""
    if data.mixup or data.cutmix:
        from official.vision.ops import augment

        mix = augment.MixupAndCutmix(num_classes, data.mixup, data.cutmix, label_smoothing=0.0)
        image, label = mix(batch["image"], batch["label"])
        return {"image": tf.ensure_shape(image, batch["image"].shape), "label": label}
    return {**batch, "label": tf.one_hot(batch["label"], num_classes)}


BINS = 15  # confidence bins of the calibration error, as in Guo et al.
BEST = 5  # number of best classes that a decoded prediction has


def _best(prediction):
    """List of (class index, probability) of the best classes, at most `BEST`, in order of their probability."""
    probability = np.asarray(prediction["probability"], np.float64)
    return [(int(i), float(probability[i])) for i in np.argsort(-probability, kind="stable")[:BEST]]


class ClassificationMetrics(Metrics):
    """Top-1 and top-5 accuracy, accuracy of each class, confusion matrix and calibration error.

    The expected calibration error is sum_b n_b / n |accuracy_b - confidence_b| over bins b of the largest probability
    (Guo et al., ICML 2017, Eq. 3).

    Args:
        spec: `DatasetSpec`.
        shard: (i, n) to score every n-th photo of the split, from the i-th on.
    """

    def __init__(self, spec, shard=(0, 1)):
        super().__init__(spec, shard)
        self.top5, self.pairs = 0, collections.Counter()  # of (true class, predicted class)
        self.right = np.zeros(BINS, np.int64)  # number of correct photos in each bin
        self.confidences = [[] for _ in range(BINS)]  # all values, as `fsum` gives the same sum in any order

    def update(self, example, prediction):
        """Adds one photo. Returns its best classes, at most five, as a list of (class index, probability).

        Args:
            example: an evaluation example with 'image/class' and 'image/file_name'.
            prediction: dict of 'probability' [classes].
        """
        best, truth = _best(prediction), int(example["image/class"])
        guess, confidence = best[0]
        self.pairs[truth, guess] += 1
        self.top5 += truth in dict(best)
        index = min(int(confidence * BINS), BINS - 1)
        self.right[index] += guess == truth
        self.confidences[index].append(confidence)
        self.add_photo(photo_name(example), float(prediction["probability"][truth]))
        return best

    def merge(self, other):
        """Adds the scores of another shard."""
        super().merge(other)
        self.top5 += other.top5
        self.pairs += other.pairs
        self.right += other.right
        for mine, theirs in zip(self.confidences, other.confidences):
            mine.extend(theirs)

    def state(self):
        """The accumulated scores as a dict for JSON."""
        pairs = [[*pair, count] for pair, count in self.pairs.items()]
        return {"pairs": pairs, **super().state(), "top5": self.top5, "bins": [self.right.tolist(), self.confidences]}

    def restore(self, state):
        """Sets the scores from a `state`."""
        super().restore(state)
        self.pairs = collections.Counter({(int(t), int(p)): int(count) for t, p, count in state["pairs"]})
        right, confidences = state["bins"]
        self.top5, self.right = int(state["top5"]), np.reshape(np.asarray(right, np.int64), BINS)
        # states of older versions have the sum of each list instead
        self.confidences = [list(map(float, x if isinstance(x, list) else [x])) for x in confidences]
        if len(self.confidences) != BINS:
            raise ValueError(f"bins: {len(self.confidences)}, expected {BINS}")

    def result(self):
        """dict of 'top1', 'top5', 'calibration_error' and 'per_class' from 0 to 1, and of 'confusions'.

        'per_class' maps the name of a class to its accuracy, or to NaN if it has no photo. 'confusions' are rows
        [true class, predicted class, number of photos], the most frequent first.
        """
        names, weight = self.spec.class_names, 1 / len(self.photos) if self.photos else math.nan
        confidence = np.array([math.fsum(values) for values in self.confidences])
        right, photos = [self.pairs[i, i] for i in range(len(names))], [0] * len(names)
        for (truth, _), number in self.pairs.items():
            photos[truth] += number
        wrong = sorted((-number, *pair) for pair, number in self.pairs.items() if pair[0] != pair[1])
        return {
            "top1": int(self.right.sum()) * weight,
            "top5": self.top5 * weight,
            "calibration_error": float(np.abs(self.right - confidence).sum()) * weight,
            "per_class": {name: r / n if n else math.nan for name, r, n in zip(names, right, photos)},
            "confusions": [[names[truth], names[guess], -number] for number, truth, guess in wrong],
        }


class Guess(schemas.Strict):
    """One of the best classes of a prediction."""

    index: schemas.Count
    class_: str = msgspec.field(name="class")
    probability: typing.Annotated[float, msgspec.Meta(ge=0, le=1)]


class ClassifiedPhoto(schemas.Strict):
    """The prediction of a photo in a classifier's JSON."""

    file_name: str
    best: list[Guess]
    image_id: schemas.Count = 0


class ClassPredictionWriter(PredictionWriter):
    """Writes the best classes of every photo to one JSON, classification_SPLIT.json."""

    kind, schema = "classification", ClassifiedPhoto

    def check(self, where, annotations):
        last = self.spec.num_classes - 1
        for photo in annotations:
            for guess in photo.best:
                if guess.index > last:
                    raise InputError(f"{where}: {photo.file_name} has class index {guess.index}, expected 0 to {last}")

    def add(self, example, best):
        """Adds one photo."""
        name = photo_name(example)
        image_id = int(example["image/id"])
        self.annotations.append({"image_id": image_id, "file_name": name, "best": _classes_json(best, self.spec)})

    def decoded(self, index):
        """The best classes that `add` was given for photo number `index`."""
        return [(guess["index"], guess["probability"]) for guess in self.annotations[index]["best"]]

    def close(self):
        """Writes the JSON."""
        photos = sorted(self.annotations, key=lambda photo: photo.get("image_id", 0))  # older states have no ids
        write_json(self.path, {"photos": photos, "class_names": list(self.spec.class_names)})


def _classes_json(best, spec):
    """The best classes as dicts for JSON."""
    return [{"index": i, "class": spec.class_names[i], "probability": probability} for i, probability in best]


class ClassificationEvaluator(Evaluator):
    """Evaluator of image classification."""

    name, labels = "classification", "class"
    metrics = ClassificationMetrics
    quality = "probability of its class"
    writer = ClassPredictionWriter
    pictures = ("photo",)
    shown = "top1", "top5", "calibration_error"
    briefly = ("top1", "top1"), ("top5", "top5")

    def draw(self, example, best, spec):
        """A tuple of one picture, uint8 [H, w, 3], the photo with its true and predicted class in a line below it."""
        index, probability = best[0]
        truth = spec.class_names[int(example["image/class"])]
        return (caption(decode_photo(example).numpy(), f"{truth} | {spec.class_names[index]} {probability:.0%}"),)

    def describe(self, image, prediction, spec):
        """The `Description` of a photo's prediction: its best classes."""
        classes = _classes_json([(i, round(probability, 6)) for i, probability in _best(prediction)], spec)
        summary = ", ".join(f"{guess['class']} {guess['probability']:.1%}" for guess in classes)
        text = f"{classes[0]['class']} {classes[0]['probability']:.0%}"
        return Description({"best": classes}, summary, draw=functools.partial(caption, image, text))

    def classes(self, result):
        """See `Evaluator.classes`."""
        rows = [[name, percent(value)] for name, value in result["per_class"].items()]
        return ["class", "top-1"], rows, [["all photos", percent(result["top1"])]]


CLASSIFICATION = ClassificationEvaluator()


def caption(photo, text):
    """A photo, uint8 [h, w, 3], with a line of text on a black strip below it."""
    size = max(10, photo.shape[1] // 16)
    strip = Image.new("RGB", (photo.shape[1], 3 * size // 2))
    ImageDraw.Draw(strip).text((size // 4, size // 8), plain(text), fill="white", font=ImageFont.load_default(size))
    return np.concatenate([photo, np.asarray(strip)])


BATCH = 32  # photos on each replica, in prediction


class BestScores(schemas.Struct):
    """best/scores.json of a classifier."""

    top1: float
    top5: float | None = None
    calibration_error: float | None = None


@dataclasses.dataclass(eq=False)
class ClassificationTask(Task):
    """The task of image classification.

    Args:
        model: `ModelConfig`.
        data: `ClassificationData`.
        data_dir: folder of the converted data set. If the folder has neither split of `data`, the task uses the only
            splits there whose names begin with 'train' and 'val'.
        label_smoothing: fraction of the target that is spread evenly over all classes (Szegedy et al., CVPR 2016).
        spec: `DatasetSpec`; by default the spec of the converted training split.

    Raises:
        InputError: the data does not exist, or the model is not a classifier.
    """

    evaluator = CLASSIFICATION
    models = ("classification",)
    configures = (ClassificationData,)
    best_scores = BestScores
    trained_by = ("label_smoothing",)
    served = (
        ("probability", "float32", "[C]", "of every class, 0 to 1"),
        ("class", "string", "[5]", "names of the most probable classes"),
        ("score", "float32", "[5]", "their probabilities, 0 to 1"),
    )
    served_in_file = served[0], ("class", "int32", "[5]", "indices of the most probable classes"), served[2]

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
        """The score by which a training ranks its checkpoints: top-1 accuracy."""
        return scores["top1"]

    def losses(self, model, batch, whole=None):
        """dict with the loss of a train step as 'total'."""
        del whole  # the loss is a mean over images, so it needs no counts of the global batch
        logits = model(batch["image"], training=True)[LOGITS]
        labels = batch["label"] * (1 - self.label_smoothing) + self.label_smoothing / self.spec.num_classes
        return {"total": tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))}

    def predictions(self, model, inference=Inference()):
        """A function that takes examples and yields (example, dict of 'probability' float32 [classes])."""
        if tuple(inference.scales) != (1.0,):
            raise InputError("--scales: a classifier sees a photo at one scale; --image_size chooses it")

        def predict(images, valid_sizes=None):
            del valid_sizes
            views = [images, images[:, :, ::-1]] if inference.flip else [images]
            return {"probability": tf.add_n([tf.nn.softmax(model(view)[LOGITS]) for view in views]) / len(views)}

        return DistributedPredictor(predict, inference.strategy, BATCH, compiled=inference.compiled)

    def example(self, image):
        """An example for `predictions`, from a photo, uint8 [h, w, 3]."""
        return {"image": central_crop(image, self.canvas, self.data.central), "valid_size": tf.constant(self.canvas)}

    def serve(self, model, image):
        """The prediction for one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        probability = tf.nn.softmax(model(self.example(image)["image"][None])[LOGITS])[0]
        score, best = tf.math.top_k(probability, min(BEST, self.spec.num_classes))
        names = best if IN_FILE.get() else tf.gather(self.spec.class_names, best)
        return {"probability": probability, "score": score, "class": names}
