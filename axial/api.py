"""`axial.load` loads any model with its weights, and `axial.predict` predicts photos with it."""

import os
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.data.files import find_photos, read_photo
from axial.data.objects import read_objects
from axial.data.preprocess import SCALE
from axial.data.specs import DatasetSpec
from axial.errors import InputError, named
from axial.models.base import Network
from axial.recipes import configuration
from axial.serving.predictor import Predictor, check_length
from axial.serving.result import Result
from axial.serving.zoom import Zoomed
from axial.weights.restore import Features, check_asked, load_weights
from axial.weights.source import resolve, without_recipe


def load(
    what: str | os.PathLike,
    *,
    model: str | None = None,
    num_classes: int | None = None,
    features_only: bool = False,
    **arguments,
) -> keras.Model:
    """Loads a model with its weights and everything that `axial.predict` needs. Runs no code from files.

    Args:
        what: name of a model that axial ships, such as 'nuclei'; name of another row of experiments/zoo.csv; or path of

            - a run of axial-train (loads its best checkpoint, else its latest), or the prefix of one checkpoint;
            - an export of axial-export: a SavedModel, a TFLite or an ONNX file, or a folder with a safetensors file;
            - a safetensors file, the output of `axial-convert weights`, or a checkpoint without a model card;
            - one of these on Hugging Face's hub, 'hf://OWNER/REPO', 'hf://OWNER/REPO@REVISION' or
              'hf://OWNER/REPO/FILE', which needs the package huggingface_hub.

            Write './NAME' for a folder that has the name of a shipped model.
        model: name of the model, from `registry.VARIANTS`. A checkpoint without a model card needs this name;
            weights of another model are refused.
        num_classes: number of classes, for a checkpoint without a model card; the default is ImageNet's 1000 or
            Cityscapes' 19. Weights for another number of classes are refused.
        features_only: whether to return only the backbone, which returns feature maps; see `weights.restore.Features`.
        **arguments: model arguments that override the ones stored with the weights; see `build_model`.

    Returns:
        keras.Model. It takes photos [N, h, w, 3] with values from -1 to 1 and returns a dict of maps: 'logits' for a
        classifier; 'semantic_logits', 'center_heatmap' and 'offset_map' at stride 4 for a segmentation model. See
        `Translator` for a translator, and `Exported` for an export. Its attributes:

            task: 'panoptic', 'segmentation', 'classification', 'detection' or 'translation'.
            spec: `DatasetSpec` with the classes, or `TextSpec` for a translator; None if no spec is stored.
            photo_scale: scale factor of all photos; None if each photo is fitted to the canvas.
            predictor: `Predictor` for `axial.predict`; None if the weights have no recipe (config.gin) beside them.

        With `features_only`, a `Features` without these attributes.

    Raises:
        InputError: there is no such model, the path is none of the above, the weights are damaged, or they belong to
            another model or to other classes.

    Examples:
        >>> model = load("nuclei")
        >>> model.task, model.spec.class_names, model.photo_scale
        ('panoptic', ('background', 'nucleus'), 1.5)
        >>> {name: tuple(x.shape) for name, x in model(tf.zeros([1, 65, 65, 3])).items()}["semantic_logits"]
        (1, 17, 17, 2)
        >>> features = load("nuclei", features_only=True)
        >>> features.strides
        {'res2': 4, 'res3': 8, 'res4': 16, 'res5': 16}
    """
    source, requested = resolve(what), (model, num_classes)
    if source.kind == "export":
        if features_only or arguments or requested != (None, None):
            raise InputError(f"{source.path}: an export is as it is; features_only, model and arguments are for runs")
        return Exported(configuration.load_export(source))
    if source.kind == "run":
        task, network = configuration.restore_run(source, arguments=arguments)
        check_asked(source.path, task.model.name, task.num_classes, requested)
        network.know(task.spec, task.scale, Predictor.of_task(task, network, objects=read_objects(source.folder)))
    else:
        network, card = load_weights(source, model, num_classes=num_classes, arguments=arguments)
        spec = DatasetSpec.from_schema(source.path, card.spec) if card and card.spec else None
        network.know(spec, card.preprocessing.get(SCALE) if card else None)
    return Features(network.backbone) if features_only else network


class Exported(keras.Model):
    """An export as a Keras model, which `load` returns. It predicts whole photos, or translates texts.

    A call takes uint8 [N, h, w, 3], or string [N] for a translator. It returns the outputs of the export's signature
    'image' or 'text', with a leading axis N. The network cannot be trained.

    Args:
        predictor: `Predictor` of the export.
    """

    def __init__(self, predictor: Predictor):
        super().__init__(name="exported", dynamic=True)
        self.predictor, self.spec, self.photo_scale = predictor, predictor.spec, predictor.scale
        self.task = predictor.evaluator.name

    def call(self, inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = [self.predictor(x.decode() if isinstance(x, bytes) else x) for x in inputs.numpy()]
        return {name: _stack([row[name] for row in rows]) for name in rows[0]}


def _stack(values):
    """Stacks values of equal shapes to a tensor, and values of different shapes to a ragged tensor."""
    alike = len({np.shape(value) for value in values}) == 1
    return tf.stack(values) if alike else tf.ragged.stack(values)


def predict(
    model: keras.Model, photos: Any, diameter: float | str | None = None, size: int | tuple[int, int] | None = None
) -> Any:
    """Predicts photos, or translates texts.

    Args:
        model: a model from `load`.
        photos: a photo or a list of photos. A photo is the path of a file, or uint8 [h, w, 3]. The path of a folder
            stands for all photos in it. A translator takes a text or a list of texts.
        diameter: median diameter of the photos' objects in pixels; 'auto' to estimate it for each photo. Photos are
            scaled so that their objects get the median diameter of the objects in the training photos. None for no
            scaling.
        size: (height, width) of the network's canvas, or the side of a square; by default that of its recipe. A model
            that scales all photos by one factor keeps their scale: its canvas only decides the size of tiles.

    Returns:
        `Result` of one photo or text; a list of `Result`s for a list, or for a folder in the order of its file names.

    Raises:
        InputError: the model is not from `load`; there is no photo; a photo is damaged, or has a wrong type or shape; a
            text is too long for the model; the model cannot use a diameter (see `Zoomed`) or a size (see
            `Predictor.resized`).

    Examples:

        result = axial.predict(axial.load("nuclei"), "cells.png")
        result.save("out.png")
    """
    if not isinstance(model, (Network, Exported)):
        raise InputError(f"{_described(model)}: expected a model of axial.load, with its heads")
    if model.predictor is None:
        raise InputError(without_recipe(model.name))
    predictor = model.predictor if size is None else model.predictor.resized(size)
    predictor = predictor if diameter is None else Zoomed(predictor, diameter)
    several, inputs = isinstance(photos, (list, tuple)), []
    for number, item in enumerate(photos if several else [photos], 1):
        if predictor.evaluator.takes == "text":
            inputs.append(_checked_text(predictor, f"text {number}", item))
        elif isinstance(item, (str, os.PathLike)) and tf.io.gfile.isdir(item):
            several, inputs = True, inputs + find_photos([os.fspath(item)])
        else:
            inputs.append(_checked_photo(f"photo {number}", item))
    if not inputs:
        raise InputError(f"no {predictor.evaluator.takes}: the list is empty")
    results = [_result(predictor, item) for item in inputs]
    return results if several else results[0]


def _result(predictor, item):
    """`Result` of a photo, as an array or a path, or of a text."""
    if predictor.evaluator.takes == "text" or not isinstance(item, str):
        return Result.of(predictor, item)
    image, stored = read_photo(item, predictor.spec.levels)
    with named(item):  # the photo's size may not suit the scale, or there are too many instances
        return Result.of(predictor, image, item, stored)


def _checked_photo(where, photo):
    """A photo's path as str, or its array, uint8 [h, w, 3]. Raises InputError."""
    if isinstance(photo, (str, os.PathLike)):
        path = os.fspath(photo)
        if not tf.io.gfile.exists(path):
            raise InputError(f"{path}: no such photo")
        return path
    array = photo.numpy() if tf.is_tensor(photo) else photo
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise InputError(f"{where}: {_described(array)}; expected the path of a file, or uint8 [h, w, 3]")
    if not array.size:
        raise InputError(f"{where}: {_described(array)} has no pixel")
    return array


def _checked_text(predictor, where, text):
    if not isinstance(text, str):
        raise InputError(f"{where}: {_described(text)}; the model does {predictor.evaluator.name}, it takes a str")
    if not text.strip():
        raise InputError(f"{where}: is empty")
    check_length(predictor, where, text)
    return text.strip()


def _described(value):
    """Describes a value for a message: an array by its dtype and shape, another value by its type and first letters."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {str(value)[:40]!r}"
