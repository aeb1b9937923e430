"""Metrics accumulate the scores of a split; prediction writers write its predictions to disk."""

import abc
from collections.abc import Callable, Iterable
from typing import Any

from axial.data.specs import Spec
from axial.io.read import convert
from axial.io.show import progress
from axial.io.write import make_folder, output_file


class Metrics(abc.ABC):
    """Scores accumulated over examples. Merged shards give exactly the scores of the whole split, to the last bit.

    Args:
        spec: `DatasetSpec` or `TextSpec`.
        shard: (i, n) to score every n-th example of the split, from the i-th on.

    Attributes:
        photos: list of [number in the split, file name, quality from 0 to 1 or None], a row for each scored example.
        parts: names of the attributes that hold metrics with `merge`, `state` and `restore`.
    """

    parts: tuple[str, ...] = ()

    def __init__(self, spec: Spec, shard: tuple[int, int] = (0, 1)):
        self.spec, self.shard, self.photos = spec, shard, []

    def next_number(self) -> int:
        """The next example's number in the split."""
        return self.shard[0] + self.shard[1] * len(self.photos)

    def add_photo(self, name: str, quality: float | None) -> None:
        """Adds the next example's row to `photos`."""
        self.photos.append([self.next_number(), name, quality])

    @abc.abstractmethod
    def update(self, example: dict, prediction: dict) -> Any:
        """Adds one example, and calls `add_photo` once.

        Args:
            example: an evaluation example of the task.
            prediction: the example's prediction, from `Task.predictions`.

        Returns:
            The decoded prediction, such as the best classes, the objects or the translation. `PredictionWriter.add` and
            `Evaluator.draw` take this value as `decoded`.
        """

    def merge(self, other: "Metrics") -> None:
        """Adds the scores of another shard."""
        for name in self.parts:
            getattr(self, name).merge(getattr(other, name))
        in_order = self.photos[-1:] <= other.photos[:1]  # true when an evaluation is resumed
        self.photos = self.photos + other.photos if in_order else sorted(self.photos + other.photos)

    def state(self) -> dict:
        """The accumulated scores as a dict for JSON."""
        return {**{name: getattr(self, name).state() for name in self.parts}, "photos": self.photos}

    def restore(self, state: dict) -> None:
        """Sets the scores from a `state`. Raises KeyError, TypeError, ValueError or IndexError for an invalid state."""
        for name in self.parts:
            getattr(self, name).restore(state[name])
        self.photos = [list(photo) for photo in state["photos"]]

    @abc.abstractmethod
    def result(self) -> dict:
        """The scores as a nested dict for JSON, from 0 to 1. A score without any example is NaN."""


def evaluate(
    examples: Iterable[dict],
    predictions: Callable[[Iterable[dict]], Iterable[tuple[dict, dict]]],
    metrics: Metrics,
    total: int | None = None,
) -> dict:
    """Scores a stream of examples. Returns `metrics.result()`. Only `metrics` takes more memory for more examples.

    Args:
        examples: iterable of evaluation examples of a task.
        predictions: function that takes the examples and yields (example, prediction).
        metrics: the task's `Metrics`, to which the examples are added.
        total: number of examples, for the progress bar.
    """
    for example, prediction in progress(predictions(examples), "evaluate", total=total, unit="photo", leave=False):
        metrics.update(example, prediction)
    return metrics.result()


class PredictionWriter(abc.ABC):
    """Writes the predictions of a split to a folder: the file KIND_SPLIT.json and, for some tasks, images.

    Args:
        folder: output folder.
        spec: `DatasetSpec` or `TextSpec`.
        split: name of the split.
        data_dir: folder of the converted split; only formats that need the names of all photos read it.

    Attributes:
        kind: prefix of the JSON file's name.
        schema: msgspec type of an element of `annotations`.
        annotations: JSON list with an element for each example. `close` writes it, and an evaluation's state stores it.
    """

    kind: str
    schema: type

    def __init__(self, folder: str, spec: Spec, split: str, data_dir: str | None = None):
        self.folder, self.spec, self.split, self.data_dir = folder, spec, split, data_dir
        self.path, self.annotations = self.path_of(folder, split), []
        make_folder(folder)

    @classmethod
    def path_of(cls, folder: str, split: str) -> str:
        """Path of the JSON of a split. An evaluation never overwrites an existing file."""
        return output_file(folder, f"{cls.kind}_{split}.json", "--split")

    def restore(self, path: str, annotations: list) -> None:
        """Resumes from the annotations in the state file `path`. Raises InputError if they do not fit the schema."""
        schema: Any = self.schema  # each subclass has its own type
        self.check(f"{path}: annotations", convert(f"{path}: annotations", annotations, list[schema]))
        self.annotations = annotations

    def check(self, where: str, annotations: list) -> None:
        """Raises InputError if the annotations do not fit the spec. The message begins with `where`."""
        del where, annotations  # by default all annotations fit

    @abc.abstractmethod
    def add(self, example: dict, decoded: Any) -> None:
        """Adds one example with its decoded prediction, from `Metrics.update`."""

    @abc.abstractmethod
    def decoded(self, index: int) -> Any:
        """The decoded prediction of example number `index`, which `add` took."""

    @abc.abstractmethod
    def close(self) -> None:
        """Writes the JSON."""
