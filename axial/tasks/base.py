"""What a task is: a `Task` is trained and exported, its `Evaluation` scores, writes and draws predictions.

A task is a folder of `axial/tasks/` and one line in `registry.py`. Trainer, evaluator, exporter and predictor know only
the classes of this file. An `Evaluation` has neither a model nor data, so that shards can be merged and the results of
other programs be scored without them.
"""

import abc
import dataclasses
import typing

import numpy as np
import tensorflow as tf

from axial.data.streams import Stream, photo_of, spec_of
from axial.data.tfrecord import find_splits
from axial.errors import InputError
from axial.io.check import check_arguments
from axial.io.show import percent
from axial.layers.batch_norm import all_reduce_sums
from axial.layers.device import is_compiled
from axial.models.registry import check_model, find_variant
from axial.tasks.scores import Results, Scores

# === Evaluation ===


@dataclasses.dataclass(frozen=True)
class Description:
    """What a prediction of one photo or text says, in the forms that people and other programs read.

    Attributes:
        content: dict of what a JSON holds of it.
        summary: a short text.
        warning: a line on what is wrong with it, which follows the photo's name; empty where nothing is known.
        draw: function without arguments that returns a picture, uint8 [h, w, 3].
        segments: list of dicts, a part of `content`: the segments or objects of a photo. None of other tasks.
        panoptic: int32 [h, w], the 'id' of each pixel's segment, 0 for void; None but for segmentations.
        categories: int [h, w], each pixel's number in the data set; None where there are none, or none of 16 bits.
        label_image: function without arguments that returns int [h, w]: 0 for the background, and i for the pixels of
            the segment or object whose 'label' is i. None if the network finds no instances, or no pixels of them.
    """

    content: dict
    summary: str
    draw: typing.Callable
    warning: str = ""
    segments: list | None = None
    panoptic: np.ndarray | None = None
    categories: np.ndarray | None = None
    label_image: typing.Callable | None = None


class Evaluation(abc.ABC):
    """How predictions of a task are scored, written, drawn and printed. It needs neither a model nor data.

    A result is what `Scores.result` returns, and `seen` what `Scores.update` returns.

    Attributes:
        name: in exports and in the states of evaluations.
        scores: class of the `Scores`.
        quality: name of the quality of a photo in `Scores.photos`.
        results: class of the `Results`.
        reader: class that reads results of other programs as predictions; see `ResultPredictions`. Its `reads_list`
            says whether their JSON is a list. None if there is none.
        pictures: names of what `draw` returns.
        one_file: whether a network of this task fits a file of one canvas, TFLite or ONNX.
        studies: flags and verbs of axial-evaluate that only this task has.
        takes: what a prediction is of, 'photo' or 'text'.
        unit: what is scored one at a time, for people.
        briefly: names of the headline that `brief` has; None for all.
        confused: what a result's 'confusions' count, rows (truth, prediction, number), where it has some.
    """

    name: str
    scores: type[Scores]
    quality: str
    results: type[Results]
    reader: type | None = None
    pictures: tuple[str, ...]
    one_file = True
    studies: tuple[str, ...] = ()
    takes = "photo"
    unit = "photo"
    briefly: tuple[str, ...] | None = None
    confused = "photos"

    @abc.abstractmethod
    def examples(self, data_dir, split, spec, canvas, *, shard=(0, 1), skip=0):
        """A `tf.data.Dataset` of the evaluation examples of a converted split.

        Args:
            data_dir: folder of the data set.
            split: name of the split.
            spec: `DatasetSpec` or `TextSpec`.
            canvas: (height, width) of the network's input; of texts, (most tokens,).
            shard: (i, n) for every n-th photo, from the i-th on.
            skip: photos of the shard to leave out.
        """

    def given(self, example):
        """What a predictor takes of an evaluation example: a photo, uint8 [h, w, 3], or a text."""
        return photo_of(example)

    def example(self, given):
        """An example of a photo, uint8 [h, w, 3], or of a text, for `predictions`. `given` gives it back."""
        return {"photo": given, "size": given.shape[:2]}

    def call(self, signatures, given):
        """The prediction, a dict, that the signatures of an export compute of a photo or a text."""
        return signatures["image"](image=tf.constant(given))

    def predictions(self, signatures, spec, about):
        """A function of examples that yields (example, prediction of an export) for each, in order.

        Args:
            signatures: of the export.
            spec: `DatasetSpec` or `TextSpec`.
            about: dict of arrays: what the export's signature 'classes' returns.
        """
        del spec, about
        return lambda examples: ((example, self.call(signatures, self.given(example))) for example in examples)

    @abc.abstractmethod
    def draw(self, example, seen, spec):
        """A tuple of pictures, uint8 [h, w, 3], of an example and its prediction; see `pictures`."""

    @abc.abstractmethod
    def describe(self, given, prediction, spec):
        """The `Description` of a photo, uint8 [h, w, 3], or of a text, and a predictor's prediction of it."""

    @abc.abstractmethod
    def headline(self, result):
        """dict of the main scores of a result, from 0 to 1."""

    def columns(self, result):
        """dict of all scores of a CSV's row, from 0 to 1."""
        return self.headline(result)

    def summaries(self, result):
        """dict of the scores that are plotted over training, in percent, without NaNs."""
        return {name: 100 * value for name, value in self.columns(result).items() if value == value}

    def brief(self, result):
        """The main scores as a short text, in percent."""
        return self._line(result, self.briefly)

    def _line(self, result, names=None):
        """The scores of the headline, or those of them with some names, in a line."""
        return " ".join(f"{k}={percent(v)}" for k, v in self.headline(result).items() if names is None or k in names)

    @abc.abstractmethod
    def classes(self, result):
        """A table of the classes, as texts.

        Returns:
            its header, its rows for the classes, and its last rows for groups of classes.
        """

    def lines(self, result):
        """List of the lines below the table of `classes`. The last one names the main scores."""
        if "confusions" not in result:
            return [self._line(result)]
        taken = [f"{truth} for {guess} ({count})" for truth, guess, count in result["confusions"][:5]]
        return [f"most often taken: {', '.join(taken) or 'nothing for anything else'}", self._line(result)]

    def mistakes(self, result):
        """Header and rows of the most frequent confusions of a result; None for a task without classes to confuse."""
        if "confusions" not in result:
            return None
        return [f"{self.confused} of", "taken for", self.confused], result["confusions"][:20]


# === Task ===


class Task(abc.ABC):
    """A model, its data, its losses and its predictions, without any loop.

    Args:
        model: `ModelConfig`.
        data: the task's data configuration, with `train_split` and `eval_split`.
        data_dir: folder of the converted data set. If it lacks both splits of `data`, the only ones whose names begin
            with train and with val take their places.
        spec: `DatasetSpec` or `TextSpec`; by default the one that the training split was converted under.

    Attributes:
        evaluation: its `Evaluation`.
        models: tasks of the models that it takes, as `registry.VARIANTS` have them.
        labels: what its records hold; see `tfrecord.SCHEMAS`.
        configures: classes beside the task and `ModelConfig` that gin binds for it, its data configuration first.
        best_scores: schema of what `main_score` needs of a file of scores.
        trained_by: names of arguments that the losses depend on, beside model and data.
        batches: function of (data_dir, data, spec) and of what `train_dataset` takes: the stream of training batches.
        targets, looks: dicts of further arguments: of `batches`, and of `Evaluation.examples`.
        loss_names: names of the `losses`; 'total' is the last.
        multi_scale: scales of the canvas that multi-scale inference averages over.
        num_classes: of the model.
        canvas: (height, width) of the network's input in evaluation; of texts, (most tokens,).
        crop: (height, width) of the network's input in training; None of other tasks than maps of photos.
        photo_scale: the factor by which photos are scaled; None where they are fitted to the canvas.
        instances: whether predictions tell instances of a class apart, where the data has some.
        objects: `schemas.Objects` of the training photos; None where nobody has told it.
        row: tokens of a row of a batch of texts. A batch is divided into rows; 1 for images.
        counted: whether the losses divide by `counts`. If not, each is a mean over the images of a batch.
        branched: whether `by_shape` has branches.
        title, hub: what it does in words and as Hugging Face's hub names it; by default what its model is for.
        server: class of the signatures of an export; None for `axial.serving.export.Server`, which takes photos.
        jit_compile: whether XLA compiles predictions on canvases of one size, as `TrainingConfig.jit_compile`. A
            training and axial-evaluate set it: for a single photo it does not pay.
        served: rows (name, type, shape, meaning) of what `serve` returns, for the card of an export.
            [h, w] is a photo's size, and C the number of classes.

    Raises:
        InputError: no such data; a model of another task.
    """

    evaluation: Evaluation
    models: tuple[str, ...]
    labels: str | tuple[str, ...]
    configures: tuple[type, ...]
    best_scores: type
    trained_by: tuple[str, ...] = ()
    batches: typing.Callable
    loss_names: tuple[str, ...] = ("total",)
    multi_scale: tuple[float, ...] = (1.0,)
    canvas: tuple[int, ...]
    crop = None
    photo_scale = None
    instances = True
    objects = None
    row = 1
    counted = False
    branched = False
    server: type | None = None
    jit_compile = "no"
    served: tuple[tuple[str, str, str, str], ...] = ()

    def __init__(self, model, data, data_dir, spec=None):
        self.model, self.data, self.data_dir = model, data, data_dir
        check_arguments(self)
        check_model(model, *self.models)
        train_split, eval_split = find_splits(data_dir, {"train": data.train_split, "val": data.eval_split})
        self.data = dataclasses.replace(data, train_split=train_split, eval_split=eval_split)
        self.spec = spec or spec_of(data_dir, train_split, self.labels)
        self.num_classes = self.spec.num_classes
        self.targets, self.looks = {}, {}

    @property
    def canvases(self):
        """What photos are put on in evaluation."""
        return self.canvas

    @property
    def title(self):
        return find_variant(self.model.name).head.title

    @property
    def hub(self):
        return find_variant(self.model.name).head.hub

    # === Training ===

    def build_model(self, folded=False):
        """The model with its weights. With `folded` it has no batch norms."""
        return self.model.build(self.num_classes, self.canvas, folded=folded)

    def train_dataset(self, batch, seed, first_step=0, context=None, service=None):
        """The endless stream of training batches; see `streams.training_stream`."""
        stream = Stream(batch, seed, first_step, context=context, service=service)
        return self.batches(self.data_dir, self.data, self.spec, stream, **self.targets)

    def feed_stages(self):
        """dict from the name of a stage of the feed to its function of a parsed record, for `axial-analyze input`."""
        return {}

    @abc.abstractmethod
    def losses(self, model, batch, whole=None):
        """dict of the losses of a training step, float32 scalars, and of their sum 'total'.

        Args:
            model: a model of `build_model`.
            batch: of `train_dataset`, or a part of it.
            whole: `whole_batch` of the `counts`; None where the part is all that this replica has.
        """

    def counts(self, model, batch):
        """dict of what `losses` divide by in a part of a batch, float32 scalars, of a task that is `counted`."""
        raise NotImplementedError

    def by_shape(self, compute, batch):
        """compute(batch). A task that is `branched` has a branch for each shape that a batch can have."""
        return compute(batch)

    @abc.abstractmethod
    def main_score(self, scores):
        """The number from 0 to 1 by which checkpoints are compared, of a result."""

    # === Prediction ===

    def eval_dataset(self, split=None, canvas=None, shard=(0, 1), skip=0):
        """The examples of a split; by default of the evaluation split, on the task's canvas."""
        split = split or self.data.eval_split
        return self.photos(self.data_dir, split, canvas=canvas, shard=shard, skip=skip)

    def photos(self, data_dir, split, canvas=None, **part):
        """The examples of any converted split; see `Evaluation.examples`."""
        return self.evaluation.examples(data_dir, split, self.spec, canvas or self.canvases, **self.looks, **part)

    @abc.abstractmethod
    def predictions(self, model, strategy=None, scales=(1.0,), flip=False):
        """A function of an iterable of examples that yields (example, prediction) for each, in order.

        Args:
            model: a model of `build_model`.
            strategy: `tf.distribute` strategy that it was made under.
            scales: of the canvas, over which predictions are averaged.
            flip: whether to average over the mirror image as well.

        Raises:
            InputError: scales or mirrors, of a task that has none.
        """

    @abc.abstractmethod
    def example(self, given):
        """A photo, uint8 [h, w, 3], or a text, string [], as `predictions` takes it."""

    @abc.abstractmethod
    def serve(self, model, image):
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`.

        What it takes and returns with another `server` is up to that.
        """

    def is_compiled(self):
        """Whether XLA compiles the predictions; see `jit_compile`."""
        return self.photo_scale is None and is_compiled(self.jit_compile)

    def about(self):
        """dict of what `Evaluation.predictions` of an export needs to know of the task beside spec and canvas."""
        return {}

    def segments(self, model, images):
        """The segmentations of a batch of canvases, for `experiments/tpu/tpu.py --mode=serve`. Raises InputError."""
        raise InputError(f"--mode=serve: {self.model.name} gives no segments; it compiles models for segmentation")

    def settings(self):
        """dict, for JSON, of what predictions depend on beside the weights and the canvas."""
        return self.looks

    def scores(self):
        """Empty `Scores` of a split."""
        return self.evaluation.scores(self.spec)

    def picture(self, example, seen):
        """The pictures of an example and its prediction side by side, uint8 [h, w, 3]."""
        return np.concatenate(self.evaluation.draw(example, seen, self.spec), 1)


def whole_batch(counts, parts=1):
    """What a loss needs so that its mean over all parts of a batch is that of the whole batch.

    A part whose sum is s has the loss s x parts / count.

    Args:
        counts: dict of this replica's counts, float32 scalars, over all its parts.
        parts: number of parts that the replica computes one after the other.

    Returns:
        (dict of the counts over all replicas, number of parts of all replicas).
    """
    context = tf.distribute.get_replica_context()
    replicas = 1 if context is None else context.num_replicas_in_sync
    return dict(zip(counts, all_reduce_sums(*counts.values()))), parts * replicas
