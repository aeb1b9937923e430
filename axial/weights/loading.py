"""A registered model with the weights of a file; `axial.load` is over it."""

import os
import pathlib
import re

import tensorflow as tf

from axial.errors import InputError
from axial.io.paths import inside
from axial.io.read import first_line, read_json
from axial.io.schemas import WeightsCard
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.configured import Model
from axial.models.registry import find_variant
from axial.weights.interchange import SUFFIX, assign_tensors, built, built_of_card, find_tensors, read_safetensors
from axial.weights.restore import CARD, find_checkpoint, restore_model
from axial.weights.shipped import check_hub, shipped_folder

RUN_CARD = "card.json"  # of a run
_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:/(.+))?")
# What says what a file of weights is.
_BESIDE = (CARD, RUN_CARD, "config.gin", "spec.json", "objects.json", "assets.extra/*")
_HUB_FILES = [
    *(*_BESIDE, "checkpoint", "ckpt-*", "best/*", f"*{SUFFIX}"),
    *("saved_model.pb", "fingerprint.pb", "variables/*", "assets/*", "*.tflite", "*.onnx"),
]


def load_weights(path, name=None, *, num_classes=None, **arguments):
    """A registered model, built, with the weights of a path.

    Args:
        path: folder of converted weights (axial-convert weights), or with one safetensors file; such a file; or the
            prefix of a checkpoint.
        name: of `registry.VARIANTS`. A card beside the weights has it too; a checkpoint without a card needs it.
        num_classes: for a checkpoint without a card. By default ImageNet's 1000 or Cityscapes' 19.
        **arguments: of the model; see `build_model`. They replace those of the card.

    Returns:
        (the model, its `WeightsCard` or None).

    Raises:
        InputError: there are no weights at the path, they are damaged, or they are those of another model.
    """
    card, arrays, prefix = _find(path)
    model = _build(name, card, path, num_classes=num_classes, arguments=arguments, arrays=arrays)
    if arrays is not None:
        assign_tensors(model, path, arrays)
    else:
        restore_model(model, prefix)
    return model, card


def check_asked(path, model, num_classes, asked):
    """Raises InputError unless a model with weights is the one that is asked for.

    Args:
        path: of the weights.
        model, num_classes: name of the model and number of its classes.
        asked: (name, number of classes); None for any.
    """
    if asked[0] not in (None, model):
        find_variant(asked[0])
        raise InputError(f"{path}: holds {model!r}, not {asked[0]!r}")
    if asked[1] not in (None, num_classes):
        raise InputError(f"{path}: has {num_classes} classes, not {asked[1]}")


def local(path):
    """The path on this machine of a shipped model's name or an hf:// path; any other path as it is."""
    return download(path) if path.startswith("hf://") else shipped_folder(path)


def read_weights(path):
    """The card of the weights at a path, and a function that gives them to a model.

    Args:
        path: of `local`; see `axial.load`. An export has none.

    Returns:
        (`WeightsCard`, or None for a checkpoint without one; function of a built model). The function raises InputError
        unless the path has every weight of the model, in its shape.

    Raises:
        InputError: there are no weights at the path, they are damaged, or some of them are random.
    """
    card, arrays, prefix = _find(path)
    if card and card.unfilled:
        raise InputError(f"{path}: {len(card.unfilled)} weights are random, as the source has none: {card.unfilled[0]}")

    def fill(model):
        if arrays is None:
            restore_model(model, prefix)
        else:
            assign_tensors(model, path, arrays)

    return card, fill


class Features(Model):
    """A model's backbone alone. It returns a dict of maps 'res2' to 'res5', at `strides`.

    A backbone with output stride 16 has this stride twice, one with output stride 8 three times.
    """

    def __init__(self, backbone, name="features", **kwargs):
        super().__init__(name=name, **{"dtype": backbone.dtype_policy, **kwargs})
        self.backbone = backbone

    @property
    def strides(self):
        """dict from the names of the maps to their strides."""
        last = self.backbone.output_stride
        return {"res2": 4, "res3": 8, "res4": min(last, 16), "res5": last}

    def call(self, images, training=False):
        maps = self.backbone(images, training=training and self.trainable)
        return {name: maps[name] for name in self.strides}


def _build(name, card, path, *, num_classes, arguments, arrays):
    if card is None:
        if name is None:
            raise InputError(f"{path}: has no {CARD} beside it that names its model; say which, as model='NAME'")
        return built(name, num_classes or find_variant(name).classes, BatchNormConfig(), arguments)
    check_asked(path, card.model, card.num_classes, (name, num_classes))
    return built_of_card(card, path, arguments, arrays=arrays)


# === What lies at a path ===


def _find(path):
    """(`WeightsCard` or None, arrays or None, prefix of a checkpoint or None) at a path."""
    if not tf.io.gfile.isdir(path) and not path.endswith(SUFFIX):
        if not tf.io.gfile.exists(f"{path}.index"):
            raise InputError(f"{path}: no weights here; expected a folder, a {SUFFIX} file or a checkpoint")
        return _card([os.path.dirname(path), os.path.dirname(os.path.dirname(path))]), None, path
    if file := find_tensors(path):
        return *read_safetensors(file), None
    return _card([path]), None, find_checkpoint(path)


def _card(folders):
    """The card of the first of some folders that has one, or None."""
    for file in [os.path.join(folder, name) for folder in folders for name in (CARD, RUN_CARD)]:
        if tf.io.gfile.exists(file):
            return read_json(file, WeightsCard)[1]
    return None


def download(path):
    """Where Hugging Face's client puts what an hf:// path names, and what lies beside it and in the folders above."""
    parts = _HUB.fullmatch(path)
    if not parts:
        raise InputError(f"{path}: expected hf://OWNER/REPO or hf://OWNER/REPO/FILE")
    check_hub(path)
    import huggingface_hub

    repository, file = parts[1], (parts[2] or "").rstrip("/")
    if os.path.basename(file) == "saved_model.pb":  # an export is a folder
        file = os.path.dirname(file)
    above = [str(folder / name) for folder in pathlib.PurePosixPath(file).parents for name in _BESIDE]
    patterns = [f"{file}*", f"{file}/*", *above] if file else _HUB_FILES
    try:
        folder = huggingface_hub.snapshot_download(repository, allow_patterns=patterns)
    except Exception as error:  # the client has errors of many libraries
        raise InputError(f"{path}: cannot be downloaded ({first_line(error)})") from None
    return inside(folder, file, path) if file else folder
