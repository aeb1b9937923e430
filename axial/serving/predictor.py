"""Predicts photos and texts with a model or an export."""

import dataclasses
import os
import threading
import typing

import numpy as np
import tensorflow as tf

from axial.data.objects import Objects, read_objects
from axial.data.preprocess import SCALE
from axial.data.specs import DatasetSpec, TextSpec, text_operations
from axial.errors import InputError
from axial.io import gfile
from axial.io.check import Size, convert_argument
from axial.io.read import first_line, read_json
from axial.io.show import say
from axial.io.write import folder_digests
from axial.models.base import Network
from axial.serving.export import HASHES
from axial.tasks.base import Evaluator, Inference, Task
from axial.tasks.registry import find_evaluator
from axial.weights.card import PAGE
from axial.weights.source import resolve


@dataclasses.dataclass(frozen=True, eq=False)
class Predictor:
    """Predicts photos or texts. A call takes a photo, uint8 [h, w, 3], or a text, and returns a dict of arrays.

    `of_task` makes a predictor from a task and its model. `of_saved_model` makes one from a SavedModel. A call raises
    InputError if the model scales photos by one factor and `is_whole` or `join` refuses the photo; see `Tiled`.

    Attributes:
        spec: `DatasetSpec` or `TextSpec` of the predictions.
        evaluator: `Evaluator` of the predictions.
        canvas, scale: see `Task`.
        objects: `Objects` of the training photos, for comparison with predicted photos; None if unknown or if the model
            has no scale.
        example: function that maps a photo or a text to an evaluation example.
        predictions: function that maps evaluation examples to an iterator of (example, prediction).
        task, model: the task and its model or `FileModel`; None for a SavedModel.
        copies: dict from sizes to the predictors of `resized`.
        lock: held while the network runs. Calls of several threads run one after the other, to bound the memory.
    """

    spec: DatasetSpec | TextSpec
    evaluator: Evaluator
    canvas: tuple
    scale: float | None
    objects: Objects | None
    example: typing.Callable
    predictions: typing.Callable
    task: Task | None = None
    model: typing.Callable | None = None
    copies: dict = dataclasses.field(default_factory=dict)
    lock: typing.Any = dataclasses.field(default_factory=threading.Lock)

    def __call__(self, value):
        example = self.example(value)
        with self.lock:
            ((_, prediction),) = self.predictions([example])
        return {name: np.asarray(value) for name, value in prediction.items()}

    @classmethod
    def of_task(cls, task, model, inference=Inference(), objects=None):
        """The predictor of a task and its model; see `Task.predictions`. `objects` describes its training photos."""
        return cls(
            *(task.spec, task.evaluator, task.canvas, task.scale),
            objects=objects if task.scale else None,
            example=lambda value: {**task.evaluator.example(value), **task.example(tf.constant(value))},
            predictions=task.predictions(model, inference),
            task=task,
            model=model,
        )

    @classmethod
    def of_saved_model(cls, what):
        """The predictor of a SavedModel of axial-export; see `resolve`. Raises InputError for anything else."""
        source = resolve(what)
        path, spec = source.folder, check_export(source)
        gfile.check_plain(path)
        if isinstance(spec, TextSpec):
            text_operations()
        try:
            loaded = tf.saved_model.load(path)
            about = {name: value.numpy() for name, value in loaded.signatures["classes"]().items()}
            canvas = tuple(about["canvas"].tolist())
            evaluator = find_evaluator(about.get("kind", b"panoptic").decode(), f"{path}: kind")
            scale = float(about[SCALE]) if SCALE in about else None
            predictions = evaluator.predictions(loaded.signatures, spec, about)
            objects = read_objects(source.extra) if scale else None
        except Exception as error:  # TensorFlow raises many types for a damaged graph or damaged variables
            raise InputError(f"{path}: not a whole SavedModel of axial-export ({first_line(error)})") from None
        return cls(*(spec, evaluator, canvas, scale, objects), example=evaluator.example, predictions=predictions)

    def examples(self, data_dir, split, *, shard=(0, 1), skip=0):
        """The evaluation examples of a converted split; see `Evaluator.examples`."""
        look = self.task and self.task.look
        return self.evaluator.examples(data_dir, split, self.spec, look, shard=shard, skip=skip)

    def resized(self, size):
        """A predictor like this one for another canvas: (height, width), or the side of a square.

        Raises:
            InputError: the predictor takes texts or is of an export, or the network takes no such canvas. The network
                takes sides that differ from its recipe's by multiples of its `side_step`.
        """
        if not isinstance(self.model, Network) or self.evaluator.takes != "photo":
            raise InputError(f"size={size}: not for an export, whose size is fixed, nor a translator; a run takes it")
        size = size.tolist() if isinstance(size, np.generic) else size
        step, sides = self.model.side_step, [size] * 2 if isinstance(size, int) else size
        sides = convert_argument("size", sides, Size)
        for side, usual in zip(sides, self.canvas):
            below = side - (side - usual) % step
            if below != side or side < step:
                nearest = " or ".join(str(k) for k in (below, below + step) if k >= step)
                raise InputError(f"size={size}: the network takes no side of {side} pixels; expected {nearest}")
        if sides not in self.copies:
            self.copies[sides] = Predictor.of_task(self.task.resized(sides), self.model, objects=self.objects)
        return self.copies[sides]

    def copied(self, model):
        """A predictor like this one, but with a copy of its model."""
        return Predictor.of_task(self.task, model, objects=self.objects)


def check_export(what):
    """Checks the files of an export against its hashes. Returns its `DatasetSpec` or `TextSpec`.

    An old export has no hashes, so changes of its files cannot be detected. A line on standard error then says so.

    Args:
        what: see `resolve`.

    Raises:
        InputError: `what` is not an export, or a file has changed since the export.
    """
    source = resolve(what)
    path, spec, hashes = source.folder, os.path.join(source.extra, "spec.json"), os.path.join(source.folder, HASHES)
    if source.kind != "export":
        raise InputError(f"{path}: this folder is not an export: it has no assets.extra/spec.json")
    if not tf.io.gfile.exists(hashes):
        say(f"{path}: no {HASHES}: whether the export was changed is not known; export again", error=True)
        return DatasetSpec.read(spec)
    written, digests = read_json(hashes, dict[str, str])[1], folder_digests(path, leave=(HASHES, PAGE))
    for name in sorted({*written, *digests}):
        if written.get(name) != digests.get(name):
            fault = {name not in digests: "missing", name not in written: "not a file of the export"}
            raise InputError(f"{os.path.join(path, name)}: {fault.get(True, 'changed since the export')}; export again")
    return DatasetSpec.read(spec)


def check_length(predictor, where, text):
    """Raises InputError for a text that a translator would cut. The message begins with `where`."""
    tokens = len(predictor.spec.encode(text))
    if tokens > predictor.canvas[0]:
        raise InputError(f"{where}: {tokens} tokens, at most {predictor.canvas[0]} are translated; split it")
