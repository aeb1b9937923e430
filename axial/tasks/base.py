"""What a task is: a `Task` is trained and exported, its `Evaluator` scores, writes and draws predictions.

A task is a folder of `axial/tasks/` and one line in `registry.py`. Trainer, evaluator, exporter and predictor know only
the classes of this file. An `Evaluator` has neither a model nor data, so that shards can be merged and the results of
other programs be scored without them.
"""

import abc
import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from axial.data.specs import Spec
from axial.data.streams import Stream, decode_photo, evaluation_stream, photo_of, spec_of, training_stream
from axial.data.tfrecord import find_splits
from axial.io.check import Checked
from axial.io.show import counted, percent
from axial.layers import device
from axial.layers.batch_norm import all_reduce_sums
from axial.layers.device import has_tpu, local_replicas
from axial.models.base import Network
from axial.models.registry import ModelConfig, check_model
from axial.tasks.metrics import Metrics, PredictionWriter

MOST_NAMED = 6  # classes or objects in one line
# What makes predictions: it takes examples and yields (example, prediction) for each.
Predictions = Callable[[Iterable[dict]], Iterator[tuple[dict, dict]]]

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


class Evaluator(abc.ABC):
    """How predictions of a task are scored, written, drawn and printed. It needs neither a model nor data.

    A result is what `Metrics.result` returns, and `seen` what `Metrics.update` returns.

    Attributes:
        name: in exports and in the states of evaluations.
        labels: what the records hold, one of `tfrecord.SCHEMAS` or a tuple of those that will do.
        metrics: class of the `Metrics`.
        quality: name of the quality of a photo in `Metrics.photos`.
        writer: class of the `PredictionWriter`.
        pictures: names of what `draw` returns.
        one_file: whether a network of this task fits a file of one canvas, TFLite or ONNX.
        studies: flags and verbs of axial-evaluate that only this task has.
        takes: what a prediction is of, 'photo' or 'text'.
        unit: what is scored one at a time, for people.
        shown: names of the scores of a result that `headline` has by default.
        main: pairs of a name of the headline and how the last of the `lines` calls it; None for all names as they are.
        briefly: the same for `brief`; by default `main`.
        confused: what a result's 'confusions' count, rows (truth, prediction, number), where it has some.
    """

    name: str
    labels: str | tuple[str, ...]
    metrics: type[Metrics]
    quality: str
    writer: type[PredictionWriter]
    pictures: tuple[str, ...]
    shown: tuple[str, ...]
    one_file = True
    studies = ()
    takes = unit = "photo"
    main = briefly = None
    confused = "photos"

    def examples(
        self,
        data_dir: str,
        split: str,
        spec: Spec,
        look: Callable | None = None,
        *,
        shard: tuple[int, int] = (0, 1),
        skip: int = 0,
    ) -> tf.data.Dataset:
        """A `tf.data.Dataset` of the evaluator examples of a converted split, in order: records and their `truth`.

        Args:
            data_dir: folder of the data set.
            split: name of the split.
            spec: `DatasetSpec` or `TextSpec`.
            look: `Task.look`, whose dict each example has too; None where no model of a task looks at it.
            shard: (i, n) for every n-th photo, from the i-th on.
            skip: photos of the shard to leave out.
        """

        def example(record):
            return {**record, **self.truth(record, spec), **(look(record) if look else {})}

        return evaluation_stream(data_dir, split, spec, example, labels=self.labels, shard=shard, skip=skip)

    def truth(self, record: dict[str, tf.Tensor], spec: Spec) -> dict[str, tf.Tensor]:
        """dict of what `metrics` needs of a record beside it: of a photo, its 'size', int32 [2]."""
        del spec
        return {"size": tf.cast(tf.stack([record["image/height"], record["image/width"]]), tf.int32)}

    def given(self, example: dict) -> typing.Any:
        """What a predictor takes of an evaluation example: a photo, uint8 [h, w, 3], or a text."""
        return photo_of(example)

    def example(self, given: typing.Any) -> dict:
        """An example of a photo, uint8 [h, w, 3], or of a text, for `predictions`. `given` gives it back."""
        return {"photo": given, "size": given.shape[:2]}

    def predictions(self, signatures: typing.Any, spec: Spec, about: dict) -> Predictions:
        """A function of examples that yields (example, prediction of an export) for each, in order.

        Args:
            signatures: of the export.
            spec: `DatasetSpec` or `TextSpec`.
            about: dict of arrays: what the export's signature 'classes' returns.
        """
        del spec, about
        return lambda examples: (
            (example, signatures["image"](image=tf.constant(self.given(example)))) for example in examples
        )

    @abc.abstractmethod
    def draw(self, example: dict, decoded: typing.Any, spec: Spec) -> tuple[np.ndarray, ...]:
        """A tuple of pictures, uint8 [h, w, 3], of an example and its prediction; see `pictures`."""

    @abc.abstractmethod
    def describe(self, given: typing.Any, prediction: dict, spec: Spec) -> Description:
        """The `Description` of a photo, uint8 [h, w, 3], or of a text, and a predictor's prediction of it."""

    def headline(self, result: dict) -> dict[str, float]:
        """dict of the main scores of a result, from 0 to 1."""
        return {name: result[name] for name in self.shown}

    def columns(self, result: dict) -> dict[str, float]:
        """dict of all scores of a CSV's row, from 0 to 1."""
        return self.headline(result)

    def summaries(self, result: dict) -> dict[str, float]:
        """dict of the scores that are plotted over training, in percent, without NaNs."""
        return {name: 100 * value for name, value in self.columns(result).items() if value == value}

    def brief(self, result: dict) -> str:
        """The main scores as a short text, in percent, without NaNs."""
        scores = {name: value for name, value in self.headline(result).items() if value == value}
        return scores_line(scores, self.briefly or self.main)

    @abc.abstractmethod
    def classes(self, result: dict) -> tuple[Sequence[str], list, list]:
        """A table of the classes, as texts.

        Returns:
            its header, its rows for the classes, and its last rows for groups of classes.
        """

    def lines(self, result: dict) -> list[str]:
        """List of the lines below the table of `classes`. The last one names the main scores."""
        mistakes, last = self.mistakes(result), scores_line(self.headline(result), self.main)
        if mistakes is None:
            return [last]
        taken = [f"{truth} for {guess} ({number})" for truth, guess, number in mistakes[1][:5]]
        return [f"most often taken: {', '.join(taken) or 'nothing for anything else'}", last]

    def mistakes(self, result: dict) -> tuple[list[str], list] | None:
        """Header and rows of the most frequent confusions of a result; None for a task without classes to confuse."""
        if "confusions" not in result:
            return None
        return [f"{self.confused} of", "taken for", self.confused], result["confusions"][:20]


def scores_line(scores: dict[str, float], names: Iterable[tuple[str, str]] | None = None) -> str:
    """Scores from 0 to 1 in a line, in percent. `names` has pairs of those that are shown, and how; None shows all."""
    names = names or zip(scores, scores)
    return " ".join(f"{shown}={percent(scores[name])}" for name, shown in names if name in scores)


def summary_line(count: int, unit: str, items: Sequence[str]) -> str:
    """How many segments or objects a prediction has, and what they are, in a line.

    >>> summary_line(17, "segment", ["16 nucleus", "1 background"]), summary_line(0, "object", [])
    ('17 segments: 16 nucleus, 1 background', '0 objects')
    >>> summary_line(8, "object", "abcdefgh")
    '8 objects: a, b, c, d, e, f, 2 more'
    """
    more = [f"{len(items) - MOST_NAMED} more"] if len(items) > MOST_NAMED else []
    return f"{counted(count, unit)}{': ' * bool(items)}{', '.join([*items[:MOST_NAMED], *more])}"


# === Task ===


@dataclasses.dataclass(frozen=True)
class Inference:
    """How a model predicts, as a command or a training decides it.

    Attributes:
        strategy: `tf.distribute` strategy that the model was made under.
        scales: of the canvas, over which predictions are averaged.
        flip: whether to average over the mirror image as well.
        compiled: whether XLA compiles predictions on canvases of one size. For a single photo it does not pay.
    """

    strategy: tf.distribute.Strategy | None = None
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    compiled: bool = False


@dataclasses.dataclass(eq=False)
class Task(Checked, abc.ABC):
    """A model, its data, its losses and its predictions, without any loop.

    A task stays as it is made. `dataclasses.replace` makes one with another model, data or grouping.

    Args:
        model: `ModelConfig`.
        data: the task's data configuration, with `train_split`, `eval_split` and `shuffle`.
        data_dir: folder of the converted data set. If it lacks both splits of `data`, the only ones whose names begin
            with train and with val take their places.
        spec: `DatasetSpec` or `TextSpec`; by default the one that the training split was converted under.

    Attributes:
        evaluation: its `Evaluator`.
        models: tasks of the models that it takes, as `registry.VARIANTS` have them.
        configures: classes beside the task and `ModelConfig` that gin binds for it, its data configuration first.
        best_scores: schema of what `main_score` needs of a file of scores.
        trained_by: names of arguments that the losses depend on, beside model and data.
        finish: function of a batch of `training_example`s that returns the batch; None to leave it as it is.
        about: dict of what `Evaluator.predictions` of an export needs to know of the task beside spec and canvas.
        settings: dict, for JSON, of what predictions depend on beside the weights and the canvas.
        loss_names: names of the `losses`; 'total' is the last.
        multi_scale: scales of the canvas that multi-scale inference averages over.
        num_classes: of the model.
        canvas: (height, width) of the network's input in evaluation; of texts, (most tokens,).
        scale: the factor by which photos are scaled; None where they are fitted to the canvas.
        instances: whether predictions tell instances of a class apart, where the data has some.
        row: tokens of a row of a batch of texts. A batch is divided into rows; 1 for images.
        counted: whether the losses divide by `counts`. If not, each is a mean over the images of a batch.
        branched: whether `by_shape` has branches.
        server: class of the signatures of an export; None for `axial.serving.export.Server`, which takes photos.
        served: rows (name, type, shape, meaning) of what `serve` returns, for the card of an export.
            [h, w] is a photo's size, and C the number of classes.

    Raises:
        InputError: no such data; a model of another task.
    """

    model: ModelConfig
    data: typing.Any
    data_dir: str
    spec: Spec | None = None

    evaluator: typing.ClassVar[Evaluator]
    models: typing.ClassVar[tuple[str, ...]]
    configures: typing.ClassVar[tuple[type, ...]]
    canvas: typing.ClassVar[tuple[int, ...]]
    trained_by = served = ()
    finish = scale = server = None
    loss_names = ("total",)
    multi_scale = (1.0,)
    instances = True
    row = 1
    counted = branched = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model(self.model, *self.models)
        splits = find_splits(self.data_dir, {"train": self.data.train_split, "val": self.data.eval_split})
        self.data = dataclasses.replace(self.data, train_split=splits[0], eval_split=splits[1])
        self.spec = self.spec or spec_of(self.data_dir, splits[0], self.evaluator.labels)
        self.num_classes = self.spec.num_classes
        self.about, self.settings = {}, {}

    # === Training ===

    def build_model(self, folded: bool = False) -> Network:
        """The model with its weights. With `folded` it has no batch norms."""
        return self.model.build(self.num_classes, self.canvas, folded=folded)

    def train_dataset(
        self, batch: int, seed: int, first_step: int = 0, context: typing.Any = None, service: typing.Any = None
    ) -> tf.data.Dataset:
        """The endless stream of training batches; see `streams.training_stream`."""
        return training_stream(
            self.data_dir,
            self.data.train_split,
            self.spec,
            self.training_example,
            stream=Stream(batch, seed, first_step, context, service=service),
            shuffle=self.data.shuffle,
            labels=self.evaluator.labels,
            finish=self.finish,
        )

    def training_example(self, record: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """The network's input and targets of a parsed record, as a dict. `seed`, int [2], decides what is random."""
        raise NotImplementedError

    @abc.abstractmethod
    def losses(self, model: Network, batch: dict, whole: tuple | None = None) -> dict[str, tf.Tensor]:
        """dict of the losses of a training step, float32 scalars, and of their sum 'total'.

        Args:
            model: a model of `build_model`.
            batch: of `train_dataset`, or a part of it.
            whole: `whole_batch` of the `counts`; None where the part is all that this replica has.
        """

    def counts(self, model: Network, batch: dict) -> dict[str, tf.Tensor]:
        """dict of what `losses` divide by in a part of a batch, float32 scalars, of a task that is `counted`."""
        raise NotImplementedError

    def by_shape(self, compute: Callable[[dict], typing.Any], batch: dict) -> typing.Any:
        """compute(batch). A task that is `branched` has a branch for each shape that a batch can have."""
        return compute(batch)

    @abc.abstractmethod
    def main_score(self, scores: dict) -> float:
        """The number from 0 to 1 by which checkpoints are compared, of a result."""

    # === Prediction ===

    def eval_dataset(
        self, split: str | None = None, data_dir: str | None = None, *, shard: tuple[int, int] = (0, 1), skip: int = 0
    ) -> tf.data.Dataset:
        """The examples of a split, by default of the evaluation split; see `Evaluator.examples`."""
        data_dir, split = data_dir or self.data_dir, split or self.data.eval_split
        return self.evaluator.examples(data_dir, split, self.spec, self.look, shard=shard, skip=skip)  # type: ignore[arg-type]

    def look(self, record: dict[str, tf.Tensor]) -> dict:
        """What `predictions` takes of a parsed record: `example` of its photo."""
        return self.example(decode_photo(record))

    @abc.abstractmethod
    def predictions(self, model: Network, inference: Inference = Inference()) -> Predictions:
        """A function of an iterable of examples that yields (example, prediction) for each, in order.

        Args:
            model: a model of `build_model`.
            inference: `Inference`.

        Raises:
            InputError: scales or mirrors, of a task that has none.
        """

    @abc.abstractmethod
    def example(self, given: typing.Any) -> dict:
        """A photo, uint8 [h, w, 3], or a text, string [], as `predictions` takes it."""

    @abc.abstractmethod
    def serve(self, model: Network, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`.

        What it takes and returns with another `server` is up to that.
        """


def whole_batch(counts: dict[str, tf.Tensor], micro_batches: int = 1) -> tuple[dict[str, tf.Tensor], int]:
    """What a loss needs so that its mean over all micro_batches of a batch is that of the whole batch.

    A part whose sum is s has the loss s x micro_batches / count.

    Args:
        counts: dict of this replica's counts, float32 scalars, over all its micro_batches.
        micro_batches: number of micro_batches that the replica computes one after the other.

    Returns:
        (dict of the counts over all replicas, number of micro_batches of all replicas).
    """
    context = tf.distribute.get_replica_context()
    replicas = 1 if context is None else context.num_replicas_in_sync
    return dict(zip(counts, all_reduce_sums(*counts.values()))), micro_batches * replicas


# === Predictions on all replicas ===


class DistributedPredictor:
    """Runs a function of canvases, or of other inputs, on all replicas. Inputs of one size run together.

    Args:
        function: function of images [batch, H, W, 3] and the sizes [batch, 2] of the photos on them, or of other
            `inputs`; returns a dict of tensors.
        strategy: `tf.distribute` strategy.
        batch: examples on each replica; see `batch_size`.
        compiled: whether XLA compiles the function, a program for each size of canvases.
        inputs: function of an example that returns a tuple of what `function` takes, without the batch axis.
        ahead: examples that are read before the first of them is computed; by default as many as run together.
    """

    def __init__(self, function, strategy=None, batch=1, *, compiled=False, inputs=None, ahead=None):
        self.strategy, self.batch = strategy or tf.distribute.get_strategy(), batch
        self.replicas = local_replicas(self.strategy)  # of several workers, one evaluates
        self.inputs, self.ahead = inputs or (lambda example: (example["image"], example["valid_size"])), ahead
        function = device.compiled(function, compiled)
        self._run = by_size(lambda *x: self.strategy.run(function, x))

    def __call__(self, examples):
        """Yields (example, dict of its tensors, without the batch axis)."""
        size, examples = batch_size(examples, self.batch), iter(examples)
        together = self.replicas * size
        while waiting := list(itertools.islice(examples, self.ahead or together)):
            inputs, numbers_by_size, results = [self.inputs(example) for example in waiting], {}, {}
            for number, given in enumerate(inputs):
                numbers_by_size.setdefault(tuple(given[0].shape), []).append(number)
            for numbers in numbers_by_size.values():
                for first in range(0, len(numbers), together):
                    chosen = numbers[first : first + together]
                    results |= zip(chosen, self._computed([inputs[n] for n in chosen], size))
            yield from ((example, results[number]) for number, example in enumerate(waiting))

    def _computed(self, inputs, size):
        """The results of at most `size` inputs for each replica, in order."""

        def spread(values):
            def pick(context):  # repeats the last one if there are too few
                first = context.replica_id_in_sync_group * size
                return tf.stack([values[min(first + i, len(values) - 1)] for i in range(size)])

            return self.strategy.experimental_distribute_values_from_function(pick)

        results = self._run(*map(spread, zip(*inputs)))
        replica_results = {k: self.strategy.experimental_local_results(v) for k, v in results.items()}
        return [{k: v[i // size][i % size] for k, v in replica_results.items()} for i in range(len(inputs))]


def batch_size(examples, most):
    """How many examples are computed together: 1 for a list of one, which waits for its answer, else `most`.

    The last ones are repeated where there are fewer, as another size takes another graph, which rounds in its own way.
    A TPU takes a minute to compile one.

    >>> [batch_size(examples, 32) for examples in (["a"], ["a", "b"], iter(["a"]))]
    [1, 32, 32]
    """
    alone = isinstance(examples, list) and len(examples) == 1
    return 1 if alone and not has_tpu() else most


def by_size(function):
    """A function that is traced once for each size of its tensors.

    Args:
        function: function of tensors, or of dicts of tensors. Those of one call have one size; replicas have the same.
    """

    @functools.cache
    def graph(shapes):
        return tf.function(functools.partial(function), autograph=False)  # one for all would warn of many traces

    def run(*arguments):
        values = tf.nest.flatten(arguments, expand_composites=True)
        return graph(tuple(tuple(x.shape) for x in values))(*arguments)

    return run
