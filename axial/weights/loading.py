"""`load`: a registered model with the weights of a file, by one call."""

import os
import re

import tensorflow as tf

from axial.errors import InputError, pip_install
from axial.io.paths import inside
from axial.io.read import first_line, read_json
from axial.io.schemas import WeightsCard
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.configured import Model
from axial.models.registry import build_model, find_variant, zeros
from axial.weights.interchange import SUFFIX, read_safetensors
from axial.weights.names import assign_weights
from axial.weights.restore import CARD, find_checkpoint, restore_model

RUN_CARD = "card.json"  # of a run
SIDE = 33  # of the photo that builds a model; its weights do not depend on it
_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:/(.+))?")
_HUB_FILES = [CARD, RUN_CARD, "checkpoint", "ckpt-*", "best/*", f"*{SUFFIX}"]


def load(name, path=None, *, features_only=False, num_classes=None, **arguments):
    """A registered model, built, with the weights of `path`.

    Args:
        name: of `registry.VARIANTS`.
        path: folder of converted weights (axial-convert weights), of a run (its best checkpoint, else its latest), or
            with one .safetensors file; such a file; the prefix of a checkpoint; 'hf://OWNER/REPO' or
            'hf://OWNER/REPO/FILE', which is one of these on Hugging Face's hub and needs the package huggingface_hub.
            None for random weights.
        features_only: returns the backbone's maps in place of the model's; see `Features`.
        num_classes: without a path, and for a checkpoint without a card beside it. By default ImageNet's
            1000 or Cityscapes' 19.
        **arguments: of the model; see `build_model`. Where the path tells arguments, these replace them.

    Returns:
        keras.Model of photos [N, h, w, 3] with values from -1 to 1. It returns a dict of maps: of a classifier
        'logits'; of a segmentation model 'semantic_logits', 'center_heatmap' and 'offset_map' at stride 4.

    Raises:
        InputError: there are no weights at the path, they are damaged, or they are those of another model.

    Example:
        >>> model = load("axial_resnet_nano", features_only=True)
        >>> {name: tuple(x.shape) for name, x in model(tf.zeros([1, 64, 96, 3])).items()}["res5"]
        (1, 2, 3, 512)
        >>> model.strides
        {'res2': 4, 'res3': 8, 'res4': 16, 'res5': 32}
    """
    find_variant(name)
    card, arrays, prefix = None, None, None
    if path is not None:
        card, arrays, prefix = _find(path)
    model = _build(name, card, path, num_classes=num_classes, arguments=arguments)
    if arrays is not None:
        try:
            assign_weights(model, arrays)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    elif prefix:
        restore_model(model, prefix)
    return Features(model.backbone) if features_only else model


def read_weights(path):
    """The card of the weights at a path, and a function that gives them to a model.

    Args:
        path: see `load`.

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
            return
        try:
            assign_weights(model, arrays)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

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


def built(name, num_classes, norm, arguments):
    """A registered model with its weights made; see `build_model`."""
    model = build_model(name, num_classes, norm, **arguments)
    model(zeros(find_variant(name).signature((SIDE, SIDE))))
    return model


def _build(name, card, path, *, num_classes, arguments):
    if card is None:
        return built(name, num_classes or find_variant(name).classes, BatchNormConfig(), arguments)
    if card.model != name:
        raise InputError(f"{path}: holds {card.model!r}, not {name!r}")
    if num_classes not in (None, card.num_classes):
        raise InputError(f"{path}: has {card.num_classes} classes, not {num_classes}")
    return built_of_card(card, path, arguments)


def built_of_card(card, path, arguments=()):
    """The model that a `WeightsCard` describes, with random weights. Raises InputError, which names the path."""
    norm = BatchNormConfig(card.norm.momentum, card.norm.epsilon, card.norm.unbiased)
    try:
        return built(card.model, card.num_classes, norm, {**card.arguments, **dict(arguments)})
    except (InputError, TypeError, ValueError, tf.errors.OpError) as error:
        raise InputError(f"{path}: no model can be built of its card ({first_line(error)})") from None


# === What lies at a path ===


def _find(path):
    """(`WeightsCard` or None, arrays or None, prefix of a checkpoint or None) at a path."""
    if path.startswith("hf://"):
        return _find(_download(path))
    if path.endswith(SUFFIX):
        return *read_safetensors(path), None
    if not tf.io.gfile.isdir(path):
        prefix, folders = path, [os.path.dirname(path), os.path.dirname(os.path.dirname(path))]
        if not tf.io.gfile.exists(f"{path}.index"):
            raise InputError(f"{path}: no weights here; expected a folder, a {SUFFIX} file or a checkpoint")
        return _card(folders), None, prefix
    files = tf.io.gfile.glob(os.path.join(path, f"*{SUFFIX}"))
    if len(files) == 1:
        return *read_safetensors(files[0]), None
    if files:
        raise InputError(f"{path}: holds {len(files)} {SUFFIX} files; name one of them")
    prefix, card = find_checkpoint(path), _card([path])
    if card is None and tf.io.gfile.exists(os.path.join(path, "config.gin")):
        raise InputError(f"{path}: a run without {RUN_CARD}; axial-train writes it when it is called on the run again")
    return card, None, prefix


def _card(folders):
    """The card of the first of some folders that has one, or None."""
    for file in [os.path.join(folder, name) for folder in folders for name in (CARD, RUN_CARD)]:
        if tf.io.gfile.exists(file):
            return read_json(file, WeightsCard)[1]
    return None


def _download(path):
    """Where Hugging Face's client puts what an hf:// path names."""
    parts = _HUB.fullmatch(path)
    if not parts:
        raise InputError(f"{path}: expected hf://OWNER/REPO or hf://OWNER/REPO/FILE")
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(f"{path}: needs huggingface_hub; {pip_install('hub')}") from None
    repository, file = parts[1], (parts[2] or "").rstrip("/")
    try:
        if file.endswith(SUFFIX):
            return huggingface_hub.hf_hub_download(repository, file)
        patterns = [f"{file}*", f"{file}/*", CARD, RUN_CARD] if file else _HUB_FILES
        folder = huggingface_hub.snapshot_download(repository, allow_patterns=patterns)
    except Exception as error:  # the client has errors of many libraries
        raise InputError(f"{path}: cannot be downloaded ({first_line(error)})") from None
    return inside(folder, file, path) if file else folder
