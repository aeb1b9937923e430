"""Scores and results of a split: what sums up predictions, and what writes them."""

import abc
import collections
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from axial.data.specs import Spec
from axial.io.read import convert
from axial.io.show import progress
from axial.io.write import make_folder, output_file


class Metrics(abc.ABC):
    """Sums of scores over photos or texts. Parts of a split add up to the same bits as the whole.

    Args:
        spec: `DatasetSpec` or `TextSpec`.
        shard: (i, n) if it scores every n-th photo of the split, from the i-th on.

    Attributes:
        photos: a list of [number in the split, file name, quality from 0 to 1 or None] of what was scored.
        parts: names of its attributes that are metrics, each with `merge`, `state` and `restore`.
    """

    parts: tuple[str, ...] = ()

    def __init__(self, spec: Spec, shard: tuple[int, int] = (0, 1)):
        self.spec, self.shard, self.photos = spec, shard, []

    def next_number(self) -> int:
        """The number in the split of the next photo that is added."""
        return self.shard[0] + self.shard[1] * len(self.photos)

    def add_photo(self, name: str, quality: float | None) -> None:
        """Adds the next photo to `photos`; see there."""
        self.photos.append([self.next_number(), name, quality])

    @abc.abstractmethod
    def update(self, example: dict, prediction: dict) -> Any:
        """Adds one photo, and its entry by `add_photo`.

        Args:
            example: an evaluation example of the task.
            prediction: what the task's predictions yield for it.

        Returns:
            The prediction in a short form, which `PredictionWriter.add` and `Evaluator.draw` take as `seen`.
        """

    def merge(self, other: "Metrics") -> None:
        """Adds another part of the split."""
        for name in self.parts:
            getattr(self, name).merge(getattr(other, name))
        in_order = self.photos[-1:] <= other.photos[:1]  # as when a split goes on
        self.photos = self.photos + other.photos if in_order else sorted(self.photos + other.photos)

    def state(self) -> dict:
        """The sums as a dict that JSON can hold."""
        return {**{name: getattr(self, name).state() for name in self.parts}, "photos": self.photos}

    def restore(self, state: dict) -> None:
        """Sets the sums to those of a `state`. Raises KeyError, TypeError, ValueError or IndexError for another."""
        for name in self.parts:
            getattr(self, name).restore(state[name])
        self.photos = [list(photo) for photo in state["photos"]]

    @abc.abstractmethod
    def result(self) -> dict:
        """The scores as a nested dict that JSON can hold, from 0 to 1. NaN stands for what nothing was scored of."""


def evaluate(
    examples: Iterable[dict],
    predictions: Callable[[Iterable[dict]], Iterable[tuple[dict, dict]]],
    scores: Metrics,
    total: int | None = None,
    watch: Callable[[dict, Any], None] | None = None,
) -> dict:
    """Scores a stream of photos. Returns the scores' result. Memory grows only by what the scores keep.

    Args:
        examples: iterable of a task's evaluation examples.
        predictions: function of the examples that yields (example, prediction).
        scores: a task's `scores()`.
        total: number of examples, for the progress bar.
        watch: function that is called with each example and what `scores.update` returns for it.
    """
    for example, prediction in progress(predictions(examples), "evaluate", total=total, unit="photo", leave=False):
        seen = scores.update(example, prediction)
        if watch:
            watch(example, seen)
    return scores.result()


class ConfusionMetrics(Metrics):
    """Scores that count pairs (true class, predicted class).

    Attributes:
        pairs: Counter of the pairs.
        kinds: number of predicted classes.
    """

    def __init__(self, spec: Spec, shard: tuple[int, int] = (0, 1)):
        super().__init__(spec, shard)
        self.pairs, self.kinds = collections.Counter(), spec.num_classes

    def merge(self, other: "ConfusionMetrics") -> None:
        super().merge(other)
        self.pairs += other.pairs

    def state(self) -> dict:
        return {"pairs": [[*pair, count] for pair, count in self.pairs.items()], **super().state()}

    def restore(self, state: dict) -> None:
        self.pairs = collections.Counter({(int(t), int(p)): int(count) for t, p, count in state["pairs"]})
        super().restore(state)

    @property
    def confusion(self) -> np.ndarray:
        """int [classes, kinds]: rows are true classes, columns predicted ones."""
        matrix = np.zeros([self.spec.num_classes, self.kinds], np.int64)
        for pair, count in self.pairs.items():
            matrix[pair] = count
        return matrix

    def mistakes(self, names: list[str] | tuple[str, ...]) -> list[list]:
        """List of [true name, predicted name, number] of the pairs that are wrong, the most frequent first."""
        wrong = sorted((-number, *pair) for pair, number in self.pairs.items() if pair[0] != pair[1])
        return [[names[truth], names[guess], -number] for number, truth, guess in wrong]


class PredictionWriter(abc.ABC):
    """Writes the predictions of a split to a folder, at least to one JSON, KIND_SPLIT.json.

    Args:
        folder: where they go.
        spec: `DatasetSpec` or `TextSpec`.
        split: name of the split.
        data_dir: folder of the converted split, for formats that need names of photos.

    Attributes:
        kind: the JSON's name begins with it.
        schema: of one of the `annotations`.
        annotations: list, for JSON, of what `close` needs of each photo; part of an evaluation's state.
    """

    kind: str
    schema: type

    def __init__(self, folder: str, spec: Spec, split: str, data_dir: str | None = None):
        self.folder, self.spec, self.split, self.data_dir = folder, spec, split, data_dir
        self.path, self.annotations = self.path_of(folder, split), []
        make_folder(folder)

    @classmethod
    def path_of(cls, folder: str, split: str) -> str:
        """Path of the JSON of a split's results. An evaluation does not replace such a file."""
        return output_file(folder, f"{cls.kind}_{split}.json", "--split")

    def restore(self, path: str, annotations: list) -> None:
        """Goes on from the annotations in the state `path`. Raises InputError for others."""
        self.check(f"{path}: annotations", convert(f"{path}: annotations", annotations, list[self.schema]))  # type: ignore[name-defined]
        self.annotations = annotations

    def check(self, where: str, annotations: list) -> None:
        """Raises InputError, which begins with `where`, unless annotations of the schema suit the spec."""
        del where, annotations  # here all of them do

    @abc.abstractmethod
    def add(self, example: dict, seen: Any) -> None:
        """Adds one photo. `seen` is what `Metrics.update` returned for it."""

    @abc.abstractmethod
    def seen(self, index: int) -> Any:
        """What `add` was given for photo number `index`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Writes the JSON."""
