"""The base classes of tasks: a `Task` is trained and exported; its `Evaluator` scores, writes and draws predictions.

Each task has a folder in `axial/tasks/` and one line in `registry.py`. Trainer, evaluator, exporter and predictor use
only the classes of this file. An `Evaluator` has neither a model nor data, so it can also merge the scores of shards
and score the predictions of other programs.
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
from axial.layers.context import holds
from axial.layers.device import has_tpu, local_replicas
from axial.layers.masking import STAYS
from axial.models.base import Network
from axial.models.registry import ModelConfig, check_model
from axial.tasks.metrics import Metrics, PredictionWriter

MOST_NAMED = 6  # largest number of items that `summary_line` lists
# A function that takes examples and yields (example, prediction) for each, in order.
Predictions = Callable[[Iterable[dict]], Iterator[tuple[dict, dict]]]

# === Evaluation ===


@dataclasses.dataclass(frozen=True)
class Description:
    """The prediction for one photo or text, in forms for people and for other programs.

    Attributes:
        content: dict of the prediction, which is written as JSON.
        summary: text that describes the prediction briefly.
        draw: function that returns a picture of the prediction, uint8 [h, w, 3]. If there are segments or objects, it
            takes the strength of their colours, from 0 to 1, as an optional argument.
        warning: a one-line warning, which is printed after the photo's name; empty by default.
        segments: list of dicts in `content`, one for each segment or object; None for tasks that predict neither.
        panoptic: int32 [h, w], the 'id' of each pixel's segment, 0 for void; None for tasks other than segmentation.
        categories: int [h, w], the category id of each pixel; None if the task does not classify pixels, or if an id
            exceeds 16 bits.
        label_image: function without arguments that returns int [h, w]: 0 for the background, and i for the pixels of
            the segment or object whose 'label' is i. None if the network predicts no instances or no masks.
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
    """Scores, writes, draws and prints the predictions of a task. An evaluator needs neither a model nor data.

    In this class, `result` is the dict that `Metrics.result` returns, and `decoded` is the decoded prediction that
    `Metrics.update` returns.

    Attributes:
        name: name of the task, which exports and the saved states of evaluations store.
        labels: kind of labels in the records: a key of `tfrecord.SCHEMAS`, or a tuple of accepted keys.
        metrics: subclass of `Metrics`.
        quality: name of the score that `Metrics.photos` has for each example.
        writer: subclass of `PredictionWriter`.
        pictures: names of the pictures that `draw` returns.
        one_file: whether the task's networks can be exported to TFLite or ONNX files, whose input is a single canvas.
        studies: names of the flags and subcommands of axial-evaluate that only this task supports.
        takes: kind of the predictor's input, 'photo' or 'text'.
        unit: singular noun for an example in messages, such as 'photo'.
        shown: names of the scores that `headline` takes from a result by default.
        main: pairs (name in `headline`, printed name) of the scores in the last line of `lines`; None for all
            scores under their own names.
        briefly: pairs in the form of `main`, for the text that `brief` returns; None to use `main`.
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
        """A `tf.data.Dataset` of a converted split's examples, in order. Each has a record's fields and its `truth`.

        Args:
            data_dir: folder of the data set.
            split: name of the split.
            spec: `DatasetSpec` or `TextSpec`.
            look: `Task.look`, which adds the network's input to each example; None if no network reads the examples.
            shard: (i, n) selects every n-th example, from the i-th on.
            skip: number of the shard's first examples to leave out.
        """

        def example(record):
            return {**record, **self.truth(record, spec), **(look(record) if look else {})}

        return evaluation_stream(data_dir, split, spec, example, labels=self.labels, shard=shard, skip=skip)

    def truth(self, record: dict[str, tf.Tensor], spec: Spec) -> dict[str, tf.Tensor]:
        """dict of the ground truth that `metrics` needs, by default 'size', int32 [2], the photo's (height, width)."""
        del spec
        return {"size": tf.cast(tf.stack([record["image/height"], record["image/width"]]), tf.int32)}

    def given(self, example: dict) -> typing.Any:
        """The predictor's input for an evaluation example: a photo, uint8 [h, w, 3], or a text."""
        return photo_of(example)

    def example(self, given: typing.Any) -> dict:
        """An example for `predictions`, from a photo, uint8 [h, w, 3], or a text. The method `given` is the inverse."""
        return {"photo": given, "size": given.shape[:2]}

    def predictions(self, signatures: typing.Any, spec: Spec, about: dict) -> Predictions:
        """A function that predicts with an export. The function maps examples to (example, prediction), in order.

        Args:
            signatures: the export's signatures.
            spec: `DatasetSpec` or `TextSpec`.
            about: dict of arrays that the export's signature 'classes' returns.
        """
        del spec, about
        predict = signatures["image"]
        return lambda examples: ((example, predict(image=tf.constant(self.given(example)))) for example in examples)

    @abc.abstractmethod
    def draw(self, example: dict, decoded: typing.Any, spec: Spec) -> tuple[np.ndarray, ...]:
        """Tuple of pictures, uint8 [h, w, 3], of an example and its decoded prediction, in the order of `pictures`."""

    @abc.abstractmethod
    def describe(self, given: typing.Any, prediction: dict, spec: Spec) -> Description:
        """The `Description` of a predictor's prediction for a photo, uint8 [h, w, 3], or a text."""

    def headline(self, result: dict) -> dict[str, float]:
        """dict of the main scores of a result, from 0 to 1."""
        return {name: result[name] for name in self.shown}

    def columns(self, result: dict) -> dict[str, float]:
        """dict of all scores that a row of axial-evaluate's CSV has, from 0 to 1."""
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
        """A table of the scores of each class, as text.

        Returns:
            the table's header, a list with a row for each class, and a list of summary rows for the end of the table.
        """

    def lines(self, result: dict) -> list[str]:
        """List of the lines that are printed below the table of `classes`. The last line has the main scores."""
        mistakes, last = self.mistakes(result), scores_line(self.headline(result), self.main)
        if mistakes is None:
            return [last]
        taken = [f"{truth} for {guess} ({number})" for truth, guess, number in mistakes[1][:5]]
        return [f"most often taken: {', '.join(taken) or 'nothing for anything else'}", last]

    def mistakes(self, result: dict) -> tuple[list[str], list] | None:
        """Header and rows of the most frequent confusions in a result; None for a task without classes."""
        if "confusions" not in result:
            return None
        return ["photos of", "taken for", "photos"], result["confusions"][:20]


def scores_line(scores: dict[str, float], names: Iterable[tuple[str, str]] | None = None) -> str:
    """One line with `scores` (0 to 1) in percent. `names` has pairs (score, printed name); None takes all scores."""
    names = names or zip(scores, scores)
    return " ".join(f"{shown}={percent(scores[name])}" for name, shown in names if name in scores)


def summary_line(count: int, unit: str, items: Sequence[str]) -> str:
    """A line that counts and names the segments or objects of a prediction.

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
    """Options of inference that a command or a training run sets.

    Attributes:
        strategy: `tf.distribute` strategy that the model was built under.
        scales: factors that scale the canvas. Predictions are averaged over these scales.
        flip: whether predictions are also averaged over each photo and its mirror image.
        compiled: whether XLA compiles the prediction if all canvases have one size. XLA takes too long for one photo.
    """

    strategy: tf.distribute.Strategy | None = None
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    compiled: bool = False


@dataclasses.dataclass(eq=False)
class Task(Checked, abc.ABC):
    """A model, its data, its losses and its predictions, without the training loop.

    A task does not change after its construction. `dataclasses.replace` copies it with another model, data or grouping.

    Args:
        model: `ModelConfig`.
        data: the task's data configuration, with `train_split`, `eval_split` and `shuffle`.
        data_dir: folder of the converted data set. If the folder has neither split of `data`, the task uses the only
            splits there whose names begin with 'train' and 'val'.
        spec: `DatasetSpec` or `TextSpec`; by default the spec of the converted training split.

    Attributes:
        evaluator: the task's `Evaluator`.
        models: values of `Network.task` that the task accepts.
        configures: classes whose settings gin binds, other than the task and `ModelConfig`. The data configuration is
            the first.
        best_scores: schema of the scores in best/scores.json that `main_score` reads.
        trained_by: names of the task's arguments, other than model and data, that the losses depend on.
        finish: function that maps a batch of `training_example`s to the final batch; None for the identity.
        about: dict that an export stores for `Evaluator.predictions`, in addition to spec and canvas.
        settings: JSON dict of the settings, other than the weights and the canvas, that predictions depend on.
        loss_names: names of the `losses`; 'total' is the last.
        multi_scale: scales of the canvas that multi-scale inference averages over.
        num_classes: number of classes that the model predicts.
        canvas: (height, width) of the network's input in evaluation; for texts, (largest number of tokens,).
        scale: factor that photos are scaled by; None if photos are fitted to the canvas.
        instances: whether predictions separate the instances of a class, if the data has instances.
        row: number of tokens in a row of a text batch; 1 for images. A batch is only divided into whole rows.
        counted: whether the losses divide by `counts`. Otherwise each loss is a mean over the images of a batch.
        branched: whether `by_shape` makes a branch in the graph for each possible shape of a batch.
        server: class that defines an export's signatures; None for `axial.serving.export.Server`, which takes photos.
        expect: function of the size (h, w), int32 [2], of a photo for `serve`. It returns ops that raise
            InvalidArgumentError for a size that `serve` does not take. None if `serve` takes all sizes.
        served: rows (name, type, shape, meaning) of the outputs of `serve`, for the card of an export. [h, w] is the
            photo's size, C the number of classes.
        served_in_file: the same for ONNX and TFLite files, whose outputs are numbers; None if they equal `served`.

    Raises:
        InputError: the data does not exist, or the model is for another task.
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
    finish = scale = server = expect = served_in_file = None
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

    def resized(self, canvas: tuple[int, int]) -> "Task":
        """A copy with another canvas for predictions. Raises InputError if the data configuration refuses it."""
        return dataclasses.replace(self, data=self.data.resized(canvas))

    # === Training ===

    def build_model(self, folded: bool = False) -> Network:
        """The model with its weights. With `folded`, the model has no batch norms."""
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
        """dict of the network's input and targets, from a parsed record. `seed`, int [2], seeds the augmentation."""
        raise NotImplementedError

    @abc.abstractmethod
    def losses(self, model: Network, batch: dict, whole: tuple | None = None) -> dict[str, tf.Tensor]:
        """dict of the losses of a train step, float32 scalars, and their sum 'total'.

        Args:
            model: a model of `build_model`.
            batch: a batch of `train_dataset`, or one of its micro-batches.
            whole: the result of `whole_batch` for the `counts`; None if the replica has a single micro-batch.
        """

    def counts(self, model: Network, batch: dict) -> dict[str, tf.Tensor]:
        """dict of a micro-batch's divisors in `losses`, float32 scalars. Only `counted` tasks define this method."""
        raise NotImplementedError

    def by_shape(self, compute: Callable[[dict], typing.Any], batch: dict) -> typing.Any:
        """Returns compute(batch). A `branched` task makes a branch in the graph for each possible shape of a batch."""
        return compute(batch)

    @abc.abstractmethod
    def main_score(self, scores: dict) -> float:
        """The score, from 0 to 1, by which a training ranks its checkpoints. `scores` is a result of the metrics."""

    # === Prediction ===

    def eval_dataset(
        self, split: str | None = None, data_dir: str | None = None, *, shard: tuple[int, int] = (0, 1), skip: int = 0
    ) -> tf.data.Dataset:
        """The examples of a split, by default the evaluation split; see `Evaluator.examples`."""
        data_dir, split = data_dir or self.data_dir, split or self.data.eval_split
        spec = typing.cast(Spec, self.spec)  # `__post_init__` sets it
        return self.evaluator.examples(data_dir, split, spec, self.look, shard=shard, skip=skip)

    def look(self, record: dict[str, tf.Tensor]) -> dict:
        """The network's input for a parsed record: the result of `example` for the record's photo."""
        return self.example(decode_photo(record))

    @abc.abstractmethod
    def predictions(self, model: Network, inference: Inference = Inference()) -> Predictions:
        """A function that takes an iterable of examples and yields (example, prediction) for each, in order.

        Args:
            model: a model of `build_model`.
            inference: `Inference`.

        Raises:
            InputError: `inference` asks for several scales or mirror images, and the task does not support this.
        """

    @abc.abstractmethod
    def example(self, given: typing.Any) -> dict:
        """An example for `predictions`, from a photo, uint8 [h, w, 3], or a text, string []."""

    @abc.abstractmethod
    def serve(self, model: Network, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """The prediction for one photo, uint8 [h, w, 3], as an export returns it; see `Server`.

        If the task defines a `server`, input and output may differ.
        """


def whole_batch(counts: dict[str, tf.Tensor], micro_batches: int = 1) -> tuple[dict[str, tf.Tensor], int]:
    """The divisors with which the mean of all micro-batches' losses is the loss of the global batch.

    A micro-batch whose summed loss is s has the loss s x micro_batches / count.

    Args:
        counts: dict of this replica's counts, float32 scalars, summed over its micro-batches.
        micro_batches: gradient accumulation steps: the number of micro-batches of a replica.

    Returns:
        (dict of the counts over all replicas, number of micro-batches over all replicas).
    """
    context = tf.distribute.get_replica_context()
    replicas = 1 if context is None else context.num_replicas_in_sync
    return dict(zip(counts, all_reduce_sums(*counts.values()))), micro_batches * replicas


# === Distributed prediction ===


class DistributedPredictor:
    """Runs a function of canvases, or of other inputs, on all replicas. Inputs of one size are batched together.

    Args:
        function: function that takes canvases [batch, H, W, 3] and the valid sizes [batch, 2] of the photos on them,
            or other `inputs`, and returns a dict of tensors.
        strategy: `tf.distribute` strategy.
        batch: largest batch on each replica; see `batch_size`.
        compiled: whether XLA compiles the function, once for each canvas size.
        inputs: function that maps an example to the tuple of the arguments of `function`, without the batch axis.
        ahead: number of examples to read before the first batch runs; by default one global batch.
    """

    def __init__(self, function, strategy=None, batch=1, *, compiled=False, inputs=None, ahead=None):
        self.strategy, self.batch = strategy or tf.distribute.get_strategy(), batch
        self.replicas = local_replicas(self.strategy)  # only one of several workers evaluates
        self.inputs, self.ahead = inputs or (lambda example: (example["image"], example["valid_size"])), ahead
        function = device.compiled(function, compiled)
        self._run = by_size(lambda *x: self.strategy.run(function, x))

    def __call__(self, examples):
        """Yields (example, dict of the example's outputs, without the batch axis)."""
        size, examples = batch_size(examples, self.batch), iter(examples)
        global_batch = self.replicas * size
        while waiting := list(itertools.islice(examples, self.ahead or global_batch)):
            inputs, numbers_by_size, results = [self.inputs(example) for example in waiting], {}, {}
            for number, given in enumerate(inputs):
                numbers_by_size.setdefault(tuple(given[0].shape), []).append(number)
            for numbers in numbers_by_size.values():
                for first in range(0, len(numbers), global_batch):
                    chosen = numbers[first : first + global_batch]
                    results |= zip(chosen, self._computed([inputs[n] for n in chosen], size))
            yield from ((example, results[number]) for number, example in enumerate(waiting))

    def _computed(self, inputs, size):
        """List of the function's outputs for `inputs`, in order. There are at most `size` inputs for each replica."""

        def spread(values):
            def pick(context):  # repeats the last input if there are too few
                first = context.replica_id_in_sync_group * size
                return tf.stack([values[min(first + i, len(values) - 1)] for i in range(size)])

            return self.strategy.experimental_distribute_values_from_function(pick)

        with holds(STAYS, True):
            results = self._run(*map(spread, zip(*inputs)))
        replica_results = {k: self.strategy.experimental_local_results(v) for k, v in results.items()}
        return [{k: v[i // size][i % size] for k, v in replica_results.items()} for i in range(len(inputs))]


def batch_size(examples, most):
    """The batch size on a replica: 1 for a list of one example on a machine without a TPU, else `most`.

    A smaller last batch is filled by repeating its last example. Another batch size would need another graph, which
    rounds differently and takes a minute to compile on a TPU.

    >>> [batch_size(examples, 32) for examples in (["a"], ["a", "b"], iter(["a"]))]
    [1, 32, 32]
    """
    alone = isinstance(examples, list) and len(examples) == 1
    return 1 if alone and not has_tpu() else most


def by_size(function):
    """The function as a `tf.function` that is traced once for each combination of input shapes.

    Args:
        function: function of tensors or of dicts of tensors. Their shapes are static and the same on every replica.
    """

    @functools.cache
    def graph(shapes):
        return tf.function(functools.partial(function), autograph=False)  # one for all shapes would warn of retracing

    def run(*arguments):
        values = tf.nest.flatten(arguments, expand_composites=True)
        return graph(tuple(tuple(x.shape) for x in values))(*arguments)

    return run
