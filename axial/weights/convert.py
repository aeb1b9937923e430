"""Converts weights of other public implementations to checkpoints of axial. Each source has a function.

The function finds the registered model and its arguments from the names and shapes of a file's tensors. The card lists
every unused tensor of the file and every weight of the model that the file does not fill.
"""

import dataclasses
import os
import re

import msgspec
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.show import counted
from axial.io.write import file_digest, new_folder, write_bytes, write_text
from axial.models.axial_deeplab.public_weights import CSRHDDLAM, DECODERS, DEEPLAB2
from axial.models.base import Network
from axial.models.panoptic_deeplab.network import CHANNELS
from axial.models.registry import ModelConfig, find_variant
from axial.models.resnet.public_weights import KERAS
from axial.weights import names
from axial.weights.card import write_page
from axial.weights.checkpoint import read_checkpoint, read_h5
from axial.weights.interchange import WeightsCard, build_from_card, make_card, write_safetensors
from axial.weights.pytorch import read_state_dict, state_dict_bytes
from axial.weights.restore import load_weights
from axial.weights.source import SUFFIX

GIN, WEIGHTS = "model.gin", f"weights{SUFFIX}"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A converted file: the `WeightsCard` of its model, and a dict from our name of each weight to its array."""

    card: WeightsCard
    values: dict

    def build(self) -> Network:
        """The model with these weights. Its other weights stay random. Raises InputError if a weight does not fit."""
        model = build_from_card(self.card, self.card.source)
        weights = names.weight_names(model)
        names.assign_weights(model, {**self.values, **{name: weights[name].numpy() for name in self.card.unfilled}})
        return model


# === csrhddlam/axial-deeplab ===


def csrhddlam(path: str, name: str | None = None) -> Conversion:
    """The `Conversion` of a PyTorch file of csrhddlam/axial-deeplab.

    Args:
        path: path of the file.
        name: name of the registered model; by default the name follows from the file's width and numbers of blocks.
    """
    arrays = read_state_dict(path)
    repeats, width = _repeats(arrays, r"layer(\d+)\.(\d+)\."), _shape(arrays, "conv1.weight", 4)[0] / 64
    name = name or CSRHDDLAM.models.get((repeats, width), "axial_resnet_s")
    if find_variant(name).task != "classification":
        raise InputError(f"holds a classifier, and model {name!r} is none")
    photo = 2 * (_shape(arrays, "layer1.0.hight_block.relative", 2)[1] + 1)  # at stride 4
    arguments = dict(width=width, repeats=repeats, stem_width=width, table_photo=photo)
    card = _card(CSRHDDLAM, name, arguments, num_classes=_shape(arrays, "fc.weight", 2)[0], photo=photo)
    card = msgspec.structs.replace(card, unused=names.unused(arrays, CSRHDDLAM))
    weights = names.weight_names(build_from_card(card, path))
    _check_like(arrays, names.to_csrhddlam({n: w.numpy() for n, w in weights.items()}), card.unused)
    return Conversion(card, names.csrhddlam_weights(arrays, {n: w.shape for n, w in weights.items()}))


def _check_like(arrays, network, unused):
    """Raises InputError unless a file has the same tensors, in the same shapes, as the source's network."""
    for name, array in arrays.items():
        if name not in network:
            raise InputError(f"no tensor of this network is called {name!r}{nearest(name, network)}")
        if array.shape != network[name].shape:
            raise InputError(f"{name!r} has shape {list(array.shape)}, expected {list(network[name].shape)}")
        if name not in unused and array.dtype.kind in "iub":
            raise InputError(f"{name!r} holds {array.dtype}, expected numbers with fractions")
    if missing := network.keys() - {*arrays, *names.unused(network, CSRHDDLAM)}:
        raise InputError(f"it has no tensor {min(missing)!r}, and lacks {len(missing)} of {len(network)}")


def write_csrhddlam(folder: str, output: str) -> int:
    """Writes converted weights back as a PyTorch file of csrhddlam/axial-deeplab, a bare state dict.

    Args:
        folder: output of `convert`.
        output: path of the file.

    Returns:
        Number of tensors.

    Raises:
        InputError: csrhddlam/axial-deeplab has no such network.
    """
    model, card = load_weights(folder)
    assert card  # without a card `load_weights` needs a name
    arguments = {**find_variant(card.model).arguments, **card.arguments}
    for name, value in dict(stem="imagenet", average_pool=True, table_photo=224, output_stride=32).items():
        if arguments.get(name) != value:
            raise InputError(f"{folder}: csrhddlam's networks have {name} = {value!r}, this {arguments.get(name)!r}")
    values = {name: weight.numpy() for name, weight in names.weight_names(model).items()}
    state_dict = names.to_csrhddlam(values, arguments.get("heads", 8))
    write_bytes(output, state_dict_bytes(state_dict))
    return len(state_dict)


# === google-research/deeplab2 ===


def deeplab2(path: str, name: str | None = None) -> Conversion:
    """The `Conversion` of a checkpoint of google-research/deeplab2: MaX-DeepLab-S's backbone, or an Axial-SWideRNet.

    An ImageNet checkpoint holds only the encoder; decoders and heads stay random.

    Args:
        path: see `read_checkpoint`.
        name: name of the registered model. The file does not show whether MaX-S uses ReLU or GELU. The default is ReLU;
            for GELU give 'max_s_backbone_gelu'.
    """
    arrays = read_checkpoint(path)
    unused = names.unused(arrays, DEEPLAB2)
    try:
        values = names.deeplab2_weights({n: a for n, a in arrays.items() if n not in unused})
    except (ValueError, IndexError) as error:
        raise InputError(f"a tensor has not the shape that its name asks for ({error})") from None
    repeats = _repeats(values, r"^backbone/stage([2-9])_block(\d+)/")
    wide = any(n.startswith("backbone/stem/block1/") for n in values)
    name = name or (DEEPLAB2.models.get(repeats, "axial_swidernet_1_1_4_5") if wide else "max_s_backbone")
    stem = _channels(values, "backbone/stem/conv" if wide else "backbone/stem/conv1") / 64
    arguments = dict(width=_channels(values, "backbone/stage2_block1/expand") / 256, repeats=repeats)
    if stem != arguments["width"]:
        arguments["stem_width"] = stem
    classes, decodes = 19, "semantic_head/logits/conv/kernel" in values
    if decodes:
        classes = _channels(values, "semantic_head/logits")
        arguments |= _decoder_channels(values)
    card = msgspec.structs.replace(_card(DEEPLAB2, name, arguments, num_classes=classes), unused=unused)
    if not decodes:
        weights = names.weight_names(build_from_card(card, path))
        card = msgspec.structs.replace(card, unfilled=[n for n in weights if not n.startswith("backbone/")])
    return Conversion(card, values)


def _decoder_channels(values):
    """The argument `channels` of `PanopticDeepLab`; an empty dict if all channels are the default."""
    changed = {}
    for name, layers in DECODERS.items():
        sizes, usual = [_channels(values, layer) for layer in layers], CHANNELS.get(name, 256)
        if sizes != list(usual if isinstance(usual, tuple) else [usual])[-len(sizes) :]:
            changed[name] = sizes if name.endswith("low") else sizes[0]
    return {"channels": changed} if changed else {}


# === tf_keras.applications ===


def keras_applications(path: str, name: str | None = None) -> Conversion:
    """The `Conversion` of a weights file (.h5) of ResNet-50, 101 or 152 of tf_keras.applications, version 1.

    A file without the top fills only the backbone; the last layer stays random.

    Args:
        path: path of the file.
        name: name of the registered model; by default the name follows from the file's numbers of blocks.
    """
    values = names.keras_weights(read_h5(path))
    repeats = _repeats(values, r"^backbone/stage([2-5])_block(\d+)/")
    name, kernel = name or KERAS.models.get(repeats, "resnet_50"), "logits/conv/kernel"
    arguments = dict(width=_channels(values, "backbone/stage2_block1/reduce") / 64, repeats=repeats)
    classes = _channels(values, "logits") if kernel in values else 1000
    card = _card(KERAS, name, arguments, num_classes=classes, photo=224)
    unfilled = [] if kernel in values else [kernel, "logits/conv/bias"]
    return Conversion(msgspec.structs.replace(card, unfilled=unfilled), values)


# === Shared by all sources ===


def _shape(arrays, name, rank):
    """The shape of a tensor. Raises InputError if there is no such tensor, if its rank differs, or if it is empty."""
    if name not in arrays:
        raise InputError(f"it has no tensor {name!r}{nearest(name, arrays)}")
    shape = arrays[name].shape
    if len(shape) != rank or 0 in shape:
        raise InputError(f"{name!r} has shape {list(shape)}, expected {rank} axes of length 1 or more")
    return shape


def _channels(values, layer):
    """Output channels of a convolution."""
    return _shape(values, f"{layer}/conv/kernel", 4)[3]


def _repeats(arrays, pattern):
    """Number of blocks in each stage. `pattern` matches (stage, block) in the names."""
    blocks = {(int(match[1]), int(match[2])) for match in (re.search(pattern, name) for name in arrays) if match}
    stages = sorted({stage for stage, _ in blocks})
    if len(stages) != 4:
        raise InputError(f"it has {len(stages)} stages of blocks, expected 4")
    return tuple(sum(block[0] == stage for block in blocks) for stage in stages)


def _card(public, name, arguments, num_classes, photo=None):
    """The `WeightsCard` of a model with `PublicWeights`. It has only arguments that differ from the variant's."""
    variant, arguments = find_variant(name), {**arguments, **public.arguments}
    usual = {**variant.backbone_arguments({}), **variant.arguments}
    arguments = {key: value for key, value in arguments.items() if key not in usual or usual[key] != value}
    return make_card(ModelConfig(name, public.norm, arguments=arguments), num_classes, photo, source=public.source)


# === The output ===

PUBLIC = {public.source: public for public in (CSRHDDLAM, DEEPLAB2, KERAS)}
SOURCES = dict(zip(PUBLIC, (csrhddlam, deeplab2, keras_applications)))
TARGETS = {"csrhddlam": write_csrhddlam}


def convert(source: str, path: str, output: str, name: str | None = None) -> tuple[Conversion, Network]:
    """Converts a file of another implementation to a safetensors file.

    The folder `output` appears only when it is complete. The folder has the safetensors file, `model.gin` for the
    commands, and the model card.

    Args:
        source: one of `SOURCES`.
        path: path of the file.
        output: folder that does not exist yet.
        name: name of the registered model; by default the source's function chooses it.

    Returns:
        (`Conversion`, the model).

    Raises:
        InputError: the file does not fit the model, or `output` exists.
    """
    with new_folder(output, WEIGHTS) as folder:
        try:
            conversion = SOURCES[source](path, name)
            model = conversion.build()
        except InputError as error:
            text = str(error)
            raise InputError(text if text.startswith(path) else f"{path}: {text}") from None
        made = [f"axial-convert weights --source={source} --input={os.path.basename(path)} --output=FOLDER"]
        files = input_hashes(path)
        card = msgspec.structs.replace(conversion.card, input=files, made=made)
        card = write_safetensors(model, os.path.join(folder, WEIGHTS), card)
        write_text(os.path.join(folder, GIN), gin_text(card))
        write_page(folder, card, "weights")
    return conversion, model


def input_hashes(path: str) -> dict[str, str]:
    """dict from the name of each file to its SHA-256. `path` is a file, a checkpoint's prefix or a folder."""
    if tf.io.gfile.isdir(path):
        path = os.path.join(path, "")
    files = [path] if not path.endswith("/") and tf.io.gfile.exists(path) else gfile.glob(path, "*")
    return {os.path.basename(file): file_digest(file)[1] for file in sorted(files) if not tf.io.gfile.isdir(file)}


def gin_text(card: WeightsCard) -> str:
    """The text of model.gin, which configures the commands for the model of a `WeightsCard`."""
    return f"""\
# Weights of {card.source}: name this file after a recipe's, and its folder as init_checkpoint.
ModelConfig.name = {card.model!r}
ModelConfig.arguments = {card.arguments!r}
ModelConfig.norm = @BatchNormConfig()
BatchNormConfig.momentum = {card.norm.momentum!r}
BatchNormConfig.epsilon = {card.norm.epsilon!r}
BatchNormConfig.unbiased = {card.norm.unbiased!r}
"""


def summary(conversion: Conversion, model: keras.Model) -> list[str]:
    """Lines on the weights that were filled, the unused tensors, and the weights that stay random."""
    card, groups = conversion.card, {}
    for name, reason in card.unused.items():
        groups.setdefault(reason, []).append(name)
    lines = [f"{card.model}: {len(conversion.values)} weights of {len(model.weights)} filled"]
    lines += [f"unused: {counted(len(like), 'tensor')} like {like[0]}, {reason}" for reason, like in groups.items()]
    if card.unfilled:
        parts = sorted({name.split("/")[0] for name in card.unfilled})
        lines.append(f"random: {counted(len(card.unfilled), 'weight')}, of {', '.join(parts)}")
    return lines
