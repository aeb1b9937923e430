"""Weights as safetensors files, which also hold all that is needed to build the model.

A safetensors file is a JSON header and numbers (https://github.com/huggingface/safetensors). Reading it runs no code.
Our files name the weights by `weight_names`. Their metadata has a `WeightsCard` under 'axial'. `card.write_page` writes
the model card for people.
"""

import hashlib
import json
import math
import typing

import msgspec
import numpy as np
import safetensors.numpy
import tensorflow as tf

from axial.data.preprocess import SCALE
from axial.data.specs import DatasetSpec, Spec, StoredSpec, field_difference
from axial.errors import InputError, named
from axial.io.read import convert, decode_json, first_line, read_file
from axial.io.schemas import Count, Strict, Struct, Text
from axial.io.write import write_bytes
from axial.layers.batch_norm import BatchNormConfig, Norm
from axial.layers.configured import Model
from axial.models.base import Network
from axial.models.registry import ModelConfig, build_model, find_variant, zeros
from axial.models.resnet.network import PIXELS
from axial.weights.names import assign_weights, weight_names

LARGEST_FILE = 2**33  # bytes; Axial-SWideRNet-(1, 1, 4.5) has 2.1 GB
METADATA = "axial"  # key of the `WeightsCard` in a file's metadata
SIDE = 33  # side in pixels of the photo on which a model is built; no weight depends on it


class StoredNorm(Strict):
    """The stored form of a `BatchNormConfig`."""

    momentum: typing.Annotated[float, msgspec.Meta(ge=0, lt=1)]
    epsilon: typing.Annotated[float, msgspec.Meta(gt=0)]
    unbiased: bool
    group: Count = 0
    frozen: bool = False


class CardSplit(Struct):
    """A split of a converted data set, and its number of records; 0 if the number is unknown."""

    split: Text
    photos: Count = 0


class CardScores(Struct):
    """Scores of a split, from 0 to 1, and whether these scores chose the checkpoint."""

    split: Text
    photos: Count
    scores: dict[str, float | None]
    chosen: bool = False


class WeightsCard(Struct):
    """model.json of converted weights, card.json of runs, and the metadata of a safetensors file.

    preprocessing has the side of the photos, the mean and deviation of their pixels from 0 to 255, and the scale of
    photos that are not fitted to that side. input has the SHA-256 of the files that the weights come from. scores has
    numbers from 0 to 1, measured on the split scored_split. By these scores the run chose this checkpoint as its best.
    """

    format: typing.Literal[1]
    model: Text
    num_classes: typing.Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    arguments: dict[str, typing.Any]
    norm: StoredNorm
    source: Text
    preprocessing: dict[str, typing.Any] = {}
    parameters: Count = 0
    input: dict[str, str] = {}
    unused: dict[str, str] = {}
    unfilled: list[str] = []
    spec: StoredSpec | None = None
    scores: dict[str, float | None] = {}
    scored_split: str = ""
    scored_photos: Count = 0
    results: list[CardScores] = []  # scores of later evaluations, which did not choose the checkpoint
    trained: CardSplit | None = None
    license: str = ""  # licence of the weights: an identifier of SPDX or the hub
    made: list[str] = []  # the commands that made the model
    weights: str = ""  # SHA-256 of the tensors of a safetensors file


class TensorsHeader(Struct, rename={"metadata": "__metadata__"}):
    """The header of a safetensors file, without its tensors."""

    metadata: dict[str, str] = {}


def count_parameters(model: Model) -> int:
    """Number of a built model's trainable parameters."""
    return sum(math.prod(w.shape) for w in model.trainable_weights)


def make_card(
    config: ModelConfig,
    num_classes: int,
    photo: int | tuple[int, int] | None = None,
    *,
    spec: Spec | None = None,
    scale: float | None = None,
    source: str = "axial",
) -> WeightsCard:
    """The `WeightsCard` of a model.

    Args:
        config: `ModelConfig`.
        num_classes: see `build_model`.
        photo: side, or (height, width), of the model's photos; None if unknown.
        spec: `DatasetSpec` or `TextSpec` of the model's data; None if unknown.
        scale: factor that scales the photos; None if photos are fitted to the model's input.
        source: origin of the weights.
    """
    preprocessing = {}
    if spec is None or isinstance(spec, DatasetSpec):
        pixels = {"pixels": "symmetric", **find_variant(config.name).arguments, **config.arguments}["pixels"]
        mean, deviation = PIXELS[pixels]
        preprocessing = {"photo": photo, "pixels": pixels, "mean": mean, "deviation": deviation}
        preprocessing |= {} if scale is None else {SCALE: scale}
    card = dict(format=1, model=config.name, num_classes=num_classes, arguments=config.arguments, norm=config.norm)
    card |= dict(source=source, preprocessing=preprocessing, spec=spec and spec.to_json())
    return convert(f"{config.name}: ", msgspec.to_builtins(card), WeightsCard)


def built(name: str, num_classes: int, norm: Norm, arguments: dict) -> Network:
    """A registered model, built with random weights; see `build_model`."""
    model = build_model(name, num_classes, norm, **arguments)
    model(zeros(find_variant(name).model.signature((SIDE, SIDE))))
    return model


def build_from_card(
    card: WeightsCard, path: str, arguments: dict | tuple = (), *, arrays: dict[str, np.ndarray] | None = None
) -> Network:
    """The model that a `WeightsCard` describes, built with random weights. Raises InputError, which names the path.

    Args:
        card: the card.
        path: path of the card's file.
        arguments: arguments of the model that override the card's.
        arrays: dict of the file's arrays, or None. A much larger model, which a hostile card may ask for, is refused.
    """
    norm = BatchNormConfig(card.norm.momentum, card.norm.epsilon, card.norm.unbiased)
    remaining = math.inf if arrays is None else 2**20 + 4 * sum(array.size for array in arrays.values())

    def count_weights(create, **options):
        nonlocal remaining
        remaining -= math.prod(options.get("shape") or ())
        if remaining < 0:
            raise InputError(f"{card.model!r} with {card.num_classes} classes has many more weights than the file")
        return create(**options)

    try:
        with tf.variable_creator_scope(count_weights):
            return built(card.model, card.num_classes, norm, {**card.arguments, **dict(arguments)})
    except (InputError, TypeError, ValueError, tf.errors.OpError) as error:
        raise InputError(f"{path}: no model can be built of its card ({first_line(error)})") from None


def write_safetensors(model: Model, path: str, card: WeightsCard) -> WeightsCard:
    """Writes a model's weights and card to one file, which appears only when it is complete.

    Args:
        model: a built model whose batch norms are not folded.
        path: path of the new file, which ends in .safetensors.
        card: `WeightsCard`; see `make_card`. This function fills in the number of parameters and the weights' hash.

    Returns:
        The card as it is written.
    """
    arrays = {name: np.ascontiguousarray(weight.numpy()) for name, weight in weight_names(model).items()}
    card = msgspec.structs.replace(card, parameters=count_parameters(model), weights=weights_digest(arrays))
    write_bytes(path, safetensors.numpy.save(arrays, {METADATA: msgspec.json.encode(card).decode()}))
    return card


def read_safetensors(path: str) -> tuple[WeightsCard, dict[str, np.ndarray]]:
    """(`WeightsCard`, dict from the name of each weight to a float32 array) of a file of `write_safetensors`.

    Raises:
        InputError: the file is damaged, has no card, or its weights do not match the card's hash.
    """
    data = read_file(path, LARGEST_FILE)
    try:
        arrays = safetensors.numpy.load(data)
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        metadata = decode_json(path, header, TensorsHeader).metadata
    except (safetensors.SafetensorError, KeyError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({first_line(error)})") from None
    if METADATA not in metadata:
        raise InputError(f"{path}: its metadata have no {METADATA!r}; a file of axial is expected")
    card = decode_json(path, metadata[METADATA].encode(), WeightsCard)
    if weights_digest(arrays) != card.weights:
        raise InputError(f"{path}: its weights are not those that its metadata have the SHA-256 of")
    return card, arrays


def restore_tensors(model: Model, path: str, name: str, spec: Spec) -> None:
    """Loads a built model's weights from a safetensors file.

    Args:
        model: a built model.
        path: path of the file.
        name: name of the registered model.
        spec: `DatasetSpec` of the model's data.

    Raises:
        InputError: the file is damaged, or its weights belong to another model or to other classes.
    """
    card, arrays = read_safetensors(path)
    if card.model != name:
        raise InputError(f"{path}: holds {card.model!r}, not {name!r}")
    classes = card.spec.class_names if card.spec and isinstance(spec, DatasetSpec) else None
    if classes is not None and (difference := field_difference("class_names", classes, spec.class_names)):
        raise InputError(f"{path}: has weights for other classes: {difference}")
    assign_tensors(model, path, arrays)


def assign_tensors(model: Model, path: str, arrays: dict[str, np.ndarray]) -> None:
    """Assigns a file's arrays by `assign_weights`. An InputError names the file."""
    with named(path):
        assign_weights(model, arrays)


def weights_digest(arrays: dict[str, np.ndarray]) -> str:
    """Hexadecimal SHA-256 of the names, shapes and bytes of arrays, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(json.dumps([name, arrays[name].shape]).encode())
        digest.update(np.ascontiguousarray(arrays[name], "<f4").data)
    return digest.hexdigest()
