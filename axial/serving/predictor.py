"""Predictions of a SavedModel or a run for photos."""

import os

import numpy as np
import tensorflow as tf

from axial.data.objects import read_objects
from axial.data.specs import DatasetSpec, TextSpec, text_operations
from axial.errors import InputError
from axial.io import gfile
from axial.io.read import first_line, read_json
from axial.io.show import say
from axial.io.write import folder_digests
from axial.serving.export import HASHES
from axial.tasks.registry import find_evaluation
from axial.weights.card import PAGE


class Predictor:
    """A loaded SavedModel.

    Args:
        path: folder that axial-export wrote.

    Attributes:
        objects: `schemas.Objects` of the training photos, to which the photos of a prediction can be compared; None
            where nobody has told it, and of a model that has no `photo_scale`.

    Raises:
        InputError: the folder is not a SavedModel of axial-export.
    """

    def __init__(self, path):
        self.spec = check_export(path)
        gfile.check_plain(path)
        if isinstance(self.spec, TextSpec):
            text_operations()
        try:
            self._loaded = tf.saved_model.load(path)
            about = {name: value.numpy() for name, value in self._loaded.signatures["classes"]().items()}
            self.canvas = tuple(about["canvas"].tolist())
            self.evaluation = find_evaluation(about.get("kind", b"panoptic").decode(), f"{path}: kind")
            self._predictions = self.evaluation.predictions(self._loaded.signatures, self.spec, about)
            self.photo_scale = float(about["photo_scale"]) if "photo_scale" in about else None
            self.objects = read_objects(os.path.join(path, "assets.extra")) if self.photo_scale else None
        except Exception as error:  # whatever TensorFlow raises for a damaged graph or damaged variables
            raise InputError(f"{path}: not a whole SavedModel of axial-export ({first_line(error)})") from None

    def __call__(self, given):
        """The prediction of an image, uint8 [h, w, 3], or of a text: dict of what the task's server lists.

        Raises:
            InputError: the export scales photos by one factor, which does not suit this one; see `Tiled`.
        """
        ((_, found),) = self.examples([self.evaluation.example(given)])
        return {k: np.asarray(v) for k, v in found.items()}

    def photos(self, data_dir, split, **part):
        """The evaluation examples of a converted split; see `Evaluation.examples`."""
        return self.evaluation.examples(data_dir, split, self.spec, self.canvas, **part)

    def examples(self, examples):
        """Yields (example, prediction) for evaluation examples, in the form that the evaluator takes."""
        return self._predictions(examples)


def check_export(path):
    """The `DatasetSpec` of an export.

    Raises:
        InputError: not an export, or a file without the bytes that were exported. Old exports have no hashes, which it
            says on standard error: without them, a change is not seen.
    """
    spec = os.path.join(path, "assets.extra", "spec.json")
    if not tf.io.gfile.isdir(path):
        raise InputError(f"{path}: no such folder; an export of axial-export is expected")
    if not tf.io.gfile.exists(spec):
        raise InputError(f"{path}: not of axial-export, it has no assets.extra/spec.json")
    hashes = os.path.join(path, HASHES)
    if not tf.io.gfile.exists(hashes):
        say(f"{path}: no {HASHES}: whether the export was changed is not known; export again", error=True)
        return DatasetSpec.read(spec)
    written, found = read_json(hashes, dict[str, str])[1], folder_digests(path, leave=(HASHES, PAGE))
    for name in sorted({*written, *found}):
        if written.get(name) != found.get(name):
            known = {name not in found: "missing", name not in written: "not a file of the export"}
            raise InputError(f"{os.path.join(path, name)}: {known.get(True, 'changed since the export')}; export again")
    return DatasetSpec.read(spec)


class RunPredictor:
    """A model that predicts at several scales, optionally with mirror images.

    Args:
        task, model: of a run, or of a file; see `FileModel`.
        scales, flip: see the task's `predictions`.
    """

    def __init__(self, task, model, scales=(1.0,), flip=False):
        self.spec, self.evaluation, self.task, self.model = task.spec, task.evaluation, task, model
        self.canvas, self.photo_scale = task.canvas, task.photo_scale
        self._looks = scales, flip
        self.objects = task.objects if task.photo_scale else None
        self._predictions = task.predictions(model, scales=scales, flip=flip)

    def copied(self, model):
        """The predictor of a copy of its model."""
        return RunPredictor(self.task, model, *self._looks)

    def __call__(self, image):
        """See `Predictor`."""
        ((_, result),) = self._predictions([self.task.example(tf.constant(image))])
        return {k: np.asarray(v) for k, v in result.items()}

    def photos(self, data_dir, split, **part):
        """See `Predictor`."""
        return self.task.photos(data_dir, split, **part)

    def examples(self, examples):
        """See `Predictor`."""
        return self._predictions(examples)


def check_length(predictor, where, text):
    """Raises InputError, which begins with `where`, for a text that a translator would cut."""
    tokens = len(predictor.spec.encode(text))
    if tokens > predictor.canvas[0]:
        raise InputError(f"{where}: {tokens} tokens, at most {predictor.canvas[0]} are translated; split it")
