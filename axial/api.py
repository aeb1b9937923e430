"""`axial.load` and `axial.predict`: any model by one call, and its predictions by another. Commands share them."""

import dataclasses
import os

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial import configuration
from axial.data.files import find_photos, load_photo
from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.io.read import first_line
from axial.serving.files import LITE, ONNX, network_file
from axial.serving.predictor import RunPredictor, check_length
from axial.serving.result import Result
from axial.serving.zoom import Zoomed
from axial.weights.interchange import SUFFIX, find_tensors
from axial.weights.loading import Features, check_asked, load_weights, local
from axial.weights.restore import find_weights
from axial.weights.shipped import ACCEPTED, unknown


def load(what, *, model=None, num_classes=None, features_only=False, **arguments):
    """A model with its weights, and all that `axial.predict` needs to know of it. Nothing in a file is run as code.

    Args:
        what: name of a model that axial ships, such as 'nuclei'; or the path of

            - a run of axial-train (its best checkpoint, else its latest), or one of its checkpoints by its prefix;
            - an export of axial-export: a SavedModel, a TFLite or an ONNX file, or a folder with a safetensors file;
            - a safetensors file, weights of axial-convert weights, or a checkpoint without a card;
            - one of these on Hugging Face's hub, 'hf://OWNER/REPO' or 'hf://OWNER/REPO/FILE', which needs the package
              huggingface_hub.

            A folder that has a shipped model's name is './NAME'.
        model: name of the model, of `registry.VARIANTS`. A checkpoint without a card needs it; weights of another model
            are refused.
        num_classes: of a checkpoint without a card, by default ImageNet's 1000 or Cityscapes' 19; weights of another
            number of classes are refused.
        features_only: returns the backbone's maps in place of the model's; see `weights.loading.Features`.
        **arguments: of the model; see `build_model`. They replace those that the weights were trained with.

    Returns:
        keras.Model of photos [N, h, w, 3] with values from -1 to 1. It returns a dict of maps: of a classifier
        'logits'; of a segmentation model 'semantic_logits', 'center_heatmap' and 'offset_map' at stride 4. A translator
        takes and returns what `Translator` says, an export what `Exported` says. Its attributes:

            task: 'panoptic', 'segmentation', 'classification', 'detection' or 'translation'.
            spec: `DatasetSpec` with its classes, `TextSpec` of a translator; None if the weights do not tell them.
            photo_scale: factor that photos are scaled by; None where they are fitted to the canvas.
            predictor: what `axial.predict` calls; None where the weights have no recipe (config.gin) beside them.

        With `features_only` it is a `Features`, without these attributes.

    Raises:
        InputError: no such model, none of what is listed above, damaged weights, or weights of another model or of
            other classes.

    Example:
        >>> model = load("nuclei")
        >>> model.task, model.spec.class_names, model.photo_scale
        ('panoptic', ('background', 'nucleus'), 1.5)
        >>> {name: tuple(x.shape) for name, x in model(tf.zeros([1, 65, 65, 3])).items()}["semantic_logits"]
        (1, 17, 17, 2)
        >>> features = load("nuclei", features_only=True)
        >>> features.strides
        {'res2': 4, 'res3': 8, 'res4': 16, 'res5': 16}
    """
    there = find(what)
    path, asked = there.path, (model, num_classes)
    if there.export:
        if features_only or arguments or asked != (None, None):
            raise InputError(f"{path}: an export is as it is; features_only, model and arguments are for runs")
        return Exported(configuration.load_export(there.export))
    if there.run:
        task, found = configuration.restore_run(there.run, there.checkpoint, arguments=arguments)
        check_asked(path, task.model.name, task.num_classes, asked)
        found.predictor = RunPredictor(task, found)
        found.spec, found.photo_scale = task.spec, found.predictor.photo_scale
    else:
        found, card = load_weights(path, model, num_classes=num_classes, **arguments)
        found.predictor = None
        found.spec = DatasetSpec.from_schema(path, card.spec) if card and card.spec else None
        found.photo_scale = card and card.preprocessing.get("photo_scale")
    return Features(found.backbone) if features_only else found


class Exported(keras.Model):
    """An export as a model, which `load` returns: a call gives the predictions of whole photos, or translations.

    It takes uint8 [N, h, w, 3], of a translator string [N]. It returns what the export's signature 'image' or 'text'
    returns, with the axis N in front. The network is run as it was exported, and cannot be trained.

    Args:
        predictor: `Predictor` of a SavedModel, or `RunPredictor` of a file.
    """

    def __init__(self, predictor):
        super().__init__(name="exported", dynamic=True)
        self.predictor, self.spec, self.photo_scale = predictor, predictor.spec, predictor.photo_scale
        self.task = predictor.evaluation.name

    def call(self, inputs):
        given = [x.decode() if isinstance(x, bytes) else x for x in inputs.numpy()]
        rows = [self.predictor(x) for x in given]
        return {name: _stack([row[name] for row in rows]) for name in rows[0]}


def _stack(values):
    """Tensors of one shape stacked; of several shapes as a ragged tensor."""
    alike = len({np.shape(value) for value in values}) == 1
    return tf.stack(values) if alike else tf.ragged.stack(values)


def predict(model, photos, diameter=None):
    """What a model finds on photos, or its translations of texts.

    Args:
        model: of `load`.
        photos: a photo or a list of photos. A photo is the path of a file, or uint8 [h, w, 3]. The path of a folder
            stands for all photos in it. A translator takes a text or a list of texts.
        diameter: median diameter of the photos' objects in pixels; 'auto' to find it for each photo. Photos are scaled
            so that these objects have the size of the training's. None leaves them as they are.

    Returns:
        `Result` of one photo or text; a list of them for a list or a folder, in the order of their names.

    Raises:
        InputError: not a model of `load`; no photo; a photo that is broken, of another type or of another shape; a text
            that is longer than the model takes; a diameter for a model that cannot take one, see `Zoomed`.

    Example:

        result = axial.predict(axial.load("nuclei"), "cells.png")
        result.save("out.png")
    """
    predictor = predictor_of(model) if diameter is None else Zoomed(predictor_of(model), diameter)
    several = isinstance(photos, (list, tuple))
    given = photos if several else [photos]
    if predictor.evaluation.takes == "text":
        found = [_checked_text(predictor, f"text {i}", text) for i, text in enumerate(given, 1)]
    else:
        found = []
        for number, photo in enumerate(given, 1):
            folder = isinstance(photo, (str, os.PathLike)) and tf.io.gfile.isdir(photo)
            several = several or folder
            found += find_photos([os.fspath(photo)]) if folder else [_checked_photo(f"photo {number}", photo)]
    if not found:
        raise InputError(f"no {predictor.evaluation.takes}: the list is empty")
    results = [_result(predictor, one) for one in found]
    return results if several else results[0]


def predictor_of(model, where=None):
    """What predicts with a model of `load`. Raises InputError where the model has none; it begins with `where`."""
    if not hasattr(model, "predictor"):
        raise InputError(f"{_described(model)}: expected a model of axial.load, with its heads")
    if model.predictor is None:
        raise InputError(without_recipe(where or model.name))
    return model.predictor


def without_recipe(where):
    """The message on weights that cannot predict."""
    return (
        f"{where}: these weights have no recipe (config.gin) beside them, which says how photos are scaled; expected a "
        "run, an export, or what axial-export --format=safetensors writes. axial-evaluate --gin_file=RECIPE scores "
        "them, and axial-train starts from them"
    )


def _result(predictor, given):
    """`Result` of an array, of the path of a photo, or of a text."""
    if predictor.evaluation.takes == "text" or not isinstance(given, str):
        return Result.of(predictor, given)
    image = load_photo(given, predictor.spec.levels)
    try:
        return Result.of(predictor, image, given)
    except InputError as error:  # its size does not suit the scale, or it has too many instances
        raise InputError(f"{given}: {error}") from None


def _checked_photo(where, photo):
    """A path as text, or uint8 [h, w, 3]. Raises InputError."""
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
        raise InputError(f"{where}: {_described(text)}; the model does {predictor.evaluation.name}, it takes a str")
    if not text.strip():
        raise InputError(f"{where}: is empty")
    check_length(predictor, where, text)
    return text.strip()


def _described(value):
    """A value for a message: its type, and of an array its shape."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


# === What lies at a path ===


@dataclasses.dataclass(frozen=True)
class Found:
    """A model that `load` takes, as it lies on this machine.

    Attributes:
        path: of the model.
        export: folder of an export; None for all else.
        run: folder with the config.gin of a run; None for an export, and for weights without a recipe.
        checkpoint: prefix or safetensors file in the run; None for its best checkpoint.
    """

    path: str
    export: str | None = None
    run: str | None = None
    checkpoint: str | None = None


def find(what):
    """The `Found` of what `load` takes. Raises InputError where there is no model."""
    path = _path(what)
    export = _export(path)
    return Found(path, export) if export else Found(path, None, *_run(path))


def _path(what):
    """The path that a name, a path or an hf:// path stands for. Raises InputError."""
    if not isinstance(what, (str, os.PathLike)):
        raise InputError(f"{_described(what)}: expected the name of a model, or the path of {ACCEPTED}")
    path = local(os.fspath(what))
    try:
        if tf.io.gfile.exists(path) or tf.io.gfile.exists(f"{path}.index"):
            return path
    except tf.errors.OpError as error:  # a file system that TensorFlow does not have
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from None
    raise InputError(unknown(path))


def _export(path):
    """The folder of an export, by its own path or by that of its network; None for anything else."""
    inside = os.path.basename(path) in (LITE, ONNX, "saved_model.pb")
    folder = os.path.dirname(path) if inside else path
    is_export = tf.io.gfile.exists(os.path.join(folder, "assets.extra", "spec.json"))
    if not is_export and (inside or network_file(folder) or tf.io.gfile.exists(os.path.join(folder, "saved_model.pb"))):
        raise InputError(f"{path}: not of axial-export, it has no assets.extra/spec.json")
    return folder if is_export else None


def _run(path):
    """(folder with config.gin, prefix or safetensors file in it or None) for a path in a run; (None, None) for others.

    Raises:
        InputError: there are no weights at the path.
    """
    if tf.io.gfile.isdir(path):
        if _has_recipe(path):
            return path, None
        try:
            find_weights(path)
        except InputError:
            if tf.io.gfile.exists(os.path.join(path, "checkpoint")) or find_tensors(path):
                raise
            raise InputError(f"{path}: this folder is none of {ACCEPTED}") from None
        return None, None
    if not path.endswith(SUFFIX) and not tf.io.gfile.exists(f"{path}.index"):
        raise InputError(f"{path}: this file is none of {ACCEPTED}; axial-convert weights converts those of others")
    parents = [os.path.dirname(path)]
    if not path.endswith(SUFFIX):
        parents.append(os.path.dirname(parents[0]))  # of a run's best checkpoint
    folder = next((folder for folder in parents if _has_recipe(folder)), None)
    return folder, folder and path


def _has_recipe(folder):
    """Whether a folder has the files of a run that say what was trained."""
    exists = tf.io.gfile.exists
    return exists(os.path.join(folder, "config.gin")) and exists(os.path.join(folder, "spec.json"))
