"""Weights of other public implementations as checkpoints of this one: one function for each source.

A source says which registered model its file holds, and with which arguments, from the file's names and shapes. It is
strict: each tensor of the file is used or named, and each weight of the model is filled or named.
"""

import dataclasses
import os
import re

import tensorflow as tf

from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.read import read_json
from axial.io.schemas import WeightsCard
from axial.io.show import counted
from axial.io.write import file_digest, new_folder, write_bytes, write_json, write_text
from axial.layers.batch_norm import BatchNormConfig
from axial.models.panoptic_deeplab.network import CHANNELS
from axial.models.registry import find_variant
from axial.weights.card import write_page
from axial.weights.checkpoint import read_checkpoint, read_h5
from axial.weights.interchange import built, count_parameters, preprocessing
from axial.weights.loading import load_weights
from axial.weights.names import (
    CSRHDDLAM_UNUSED,
    DEEPLAB2_UNUSED,
    assign_weights,
    csrhddlam_weights,
    deeplab2_paths,
    keras_weights,
    plain_path,
    to_csrhddlam,
    weight_names,
)
from axial.weights.pytorch import read_state_dict, state_dict_bytes
from axial.weights.source import CARD

GIN = "model.gin"
# Arguments of every model of a source, which its files do not tell.
OWN_ARGUMENTS = {
    "csrhddlam": dict(average_pool=True, pixels="torchvision"),
    "deeplab2": {},
    "keras_applications": dict(stride_first=True, pixels="caffe"),
}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a file holds.

    Attributes:
        model: of `registry.VARIANTS`.
        num_classes: channels of the last layer.
        arguments: those of the model that are not the variant's own.
        norm: `BatchNormConfig`.
        values: dict from our names to arrays.
        unused: dict from the names of source tensors that are not needed to the reason.
        unfilled: names of weights that the source has not; they stay random.
        photo: side of the photos that the source trained with, or None.
    """

    model: str
    num_classes: int
    arguments: dict
    norm: BatchNormConfig
    values: dict
    unused: dict = dataclasses.field(default_factory=dict)
    unfilled: list = dataclasses.field(default_factory=list)
    photo: int | None = None

    def build(self):
        """The model with these weights. Raises InputError unless all fit."""
        model = built(self.model, self.num_classes, self.norm, self.arguments)
        weights = weight_names(model)
        kept = {name: weights[name].numpy() for name in self.unfilled}
        assign_weights(model, {**self.values, **kept})
        return model


# === csrhddlam/axial-deeplab ===

_TORCH_NORM = BatchNormConfig(momentum=0.9, epsilon=1e-5, unbiased=True)
_AXIALNETS = {
    ((1, 2, 4, 1), 0.5): "axial_resnet_26_s",
    ((3, 4, 6, 3), 0.5): "axial_resnet_s",
    ((3, 4, 6, 3), 0.75): "axial_resnet_m",
    ((3, 4, 6, 3), 1.0): "axial_resnet_l",
}


def csrhddlam(path, name=None):
    """The `Conversion` of a PyTorch file of csrhddlam/axial-deeplab.

    Args:
        path: of the file.
        name: of the registered model; by default the one of the file's widths and numbers of blocks.
    """
    arrays = read_state_dict(path)
    unused = _unused(arrays, CSRHDDLAM_UNUSED)
    repeats = _repeats(arrays, r"layer(\d+)\.(\d+)\.")
    width = _shape(arrays, "conv1.weight", 4)[0] / 64
    name = name or _AXIALNETS.get((repeats, width), "axial_resnet_s")
    if find_variant(name).task != "classification":
        raise InputError(f"holds a classifier, and model {name!r} is none")
    wanted = dict(
        width=width,
        repeats=repeats,
        stem_width=width,
        table_photo=2 * (_shape(arrays, "layer1.0.hight_block.relative", 2)[1] + 1),  # at stride 4
        **OWN_ARGUMENTS["csrhddlam"],
    )
    num_classes, arguments = _shape(arrays, "fc.weight", 2)[0], _changes(name, wanted)
    weights = weight_names(built(name, num_classes, _TORCH_NORM, arguments))
    _check_like(arrays, to_csrhddlam({n: w.numpy() for n, w in weights.items()}), unused)
    values = csrhddlam_weights(arrays, {n: w.shape for n, w in weights.items()})
    own = dict(norm=_TORCH_NORM, values=values, unused=unused, photo=wanted["table_photo"])
    return Conversion(name, num_classes, arguments, **own)


def _check_like(arrays, wanted, unused):
    """Raises InputError unless a file has the tensors of a network of its source, in the same shapes."""
    for name, array in arrays.items():
        if name not in wanted:
            raise InputError(f"no tensor of this network is called {name!r}{nearest(name, wanted)}")
        if array.shape != wanted[name].shape:
            raise InputError(f"{name!r} has shape {list(array.shape)}, expected {list(wanted[name].shape)}")
        if name not in unused and array.dtype.kind in "iub":
            raise InputError(f"{name!r} holds {array.dtype}, expected numbers with fractions")
    missing = [name for name in wanted if name not in {**arrays, **_unused(wanted, CSRHDDLAM_UNUSED)}]
    if missing:
        raise InputError(f"it has no tensor {missing[0]!r}, and lacks {len(missing)} of {len(wanted)}")


def write_csrhddlam(folder, output):
    """Writes converted weights back as a PyTorch file of csrhddlam/axial-deeplab, {'net': ...} left out.

    Args:
        folder: what `convert` wrote.
        output: path of the file.

    Returns:
        Number of tensors.

    Raises:
        InputError: the model is not one of its networks.
    """
    model, card = load_weights(folder)
    arguments = {**find_variant(card.model).arguments, **card.arguments}
    needed = dict(stem="imagenet", average_pool=True, table_photo=224, output_stride=32)
    for name, value in needed.items():
        if arguments.get(name) != value:
            raise InputError(f"{folder}: csrhddlam's networks have {name} = {value!r}, this {arguments.get(name)!r}")
    theirs = to_csrhddlam({name: w.numpy() for name, w in weight_names(model).items()}, arguments.get("heads", 8))
    write_bytes(output, state_dict_bytes(theirs))
    return len(theirs)


# === google-research/deeplab2 ===

_DEEPLAB2_NORM = BatchNormConfig(momentum=0.99, epsilon=1e-3)  # Keras' own
_SWIDERNETS = {(3, 6, 3, 3): "axial_swidernet_1_1_1", (9, 18, 9, 9): "axial_swidernet_1_1_3"}
_POINT = "conv1_bn_act/pointwise/conv/kernel"
# Where a checkpoint shows each of `PanopticDeepLab`'s channels.
_DECODERS = {
    "semantic": [f"semantic_decoder/fusion_conv1/{_POINT}"],
    "semantic_low": [f"semantic_decoder/low_level_conv{i}/conv/kernel" for i in (1, 2)],
    "semantic_projection": ["semantic_decoder/aspp/proj_conv_bn_act/conv/kernel"],
    "semantic_head": [f"semantic_head_without_last_layer/{_POINT}"],
    "instance": [f"instance_decoder/fusion_conv1/{_POINT}"],
    "instance_low": [f"instance_decoder/low_level_conv{i}/conv/kernel" for i in (1, 2)],
    "instance_projection": ["instance_decoder/aspp/proj_conv_bn_act/conv/kernel"],
    "center_head": [f"instance_center_head_without_last_layer/{_POINT}"],
    "offset_head": [f"instance_regression_head_without_last_layer/{_POINT}"],
}


def deeplab2(path, name=None):
    """The `Conversion` of a checkpoint of google-research/deeplab2: MaX-DeepLab-S's backbone, or an Axial-SWideRNet.

    A checkpoint of ImageNet holds the encoder alone; decoders and heads stay random.

    Args:
        path: see `read_checkpoint`.
        name: of the registered model. The file does not tell ReLU from GELU: for MaX-S with GELU give
            'max_s_backbone_gelu'.
    """
    arrays = {plain_path(n): a for n, a in read_checkpoint(path).items()}
    arrays = {re.sub("^backbone/encoder/", "encoder/", n): a for n, a in arrays.items()}
    unused = _unused(arrays, DEEPLAB2_UNUSED)
    repeats = _repeats(arrays, r"^encoder/stage([2-9])/block(\d+)/")
    wide = any(n.startswith("encoder/stage1/") for n in arrays)
    name = name or (_SWIDERNETS.get(repeats, "axial_swidernet_1_1_4_5") if wide else "max_s_backbone")
    stem, last = ("stem/conv", "conv2_bn") if wide else ("stem/conv1_bn_act/conv", "conv3_bn")
    wanted = dict(
        width=_shape(arrays, f"encoder/stage2/block1/{last}/conv/kernel", 4)[3] / 256,
        stem_width=_shape(arrays, f"encoder/{stem}/kernel", 4)[3] / 64,
        repeats=repeats,
    )
    if wanted["stem_width"] == wanted["width"]:
        del wanted["stem_width"]
    classes, decodes = 19, "semantic_last_layer/kernel" in arrays
    if decodes:
        classes = _shape(arrays, "semantic_last_layer/kernel", 4)[3]
        wanted |= _decoder_channels(arrays)
    arguments = _changes(name, wanted, **_PLAIN_RESNET)
    try:
        values = deeplab2_paths({n: a for n, a in arrays.items() if n not in unused})
    except (ValueError, IndexError) as error:
        raise InputError(f"a tensor has not the shape that its name asks for ({error})") from None
    model = built(name, classes, _DEEPLAB2_NORM, arguments)
    heads = [n for n in weight_names(model) if not n.startswith("backbone/")]
    own = dict(norm=_DEEPLAB2_NORM, values=values, unused=unused, unfilled=[] if decodes else heads)
    return Conversion(name, classes, arguments, **own)


def _decoder_channels(arrays):
    """The argument `channels` of `PanopticDeepLab`, where they are not the default."""
    found = {}
    for name, places in _DECODERS.items():
        sizes = [_shape(arrays, place, 4)[3] for place in places]
        own = CHANNELS.get(name, 256)
        if sizes != list(own if isinstance(own, tuple) else [own])[-len(sizes) :]:
            found[name] = sizes if name.endswith("low") else sizes[0]
    return {"channels": found} if found else {}


# === tf_keras.applications ===

_KERAS_NORM = BatchNormConfig(momentum=0.99, epsilon=1.001e-5, unbiased=True)
_RESNETS = {(3, 4, 6, 3): "resnet_50", (3, 4, 23, 3): "resnet_101", (3, 8, 36, 3): "resnet_152"}


def keras_applications(path, name=None):
    """The `Conversion` of a weights file (.h5) of ResNet-50, 101 or 152 of tf_keras.applications, version 1.

    A file without the top gives the backbone; the last layer stays random.

    Args:
        path: of the file.
        name: of the registered model; by default the one of the file's numbers of blocks.
    """
    arrays = read_h5(path)
    repeats = _repeats(arrays, r"^conv([2-5])_block(\d+)_")
    name = name or _RESNETS.get(repeats, "resnet_50")
    width = _shape(arrays, "conv2_block1_1_conv/kernel", 4)[3] / 64
    wanted = dict(width=width, repeats=repeats, **OWN_ARGUMENTS["keras_applications"])
    arguments = _changes(name, wanted, **_PLAIN_RESNET)
    classes, unfilled = 1000, ["logits/conv/kernel", "logits/conv/bias"]
    if "predictions/kernel" in arrays:
        classes, unfilled = _shape(arrays, "predictions/kernel", 2)[1], []
    own = dict(norm=_KERAS_NORM, values=keras_weights(arrays), unfilled=unfilled, photo=224)
    return Conversion(name, classes, arguments, **own)


# === What sources share ===

_PLAIN_RESNET = dict(width=1.0, repeats=(3, 4, 6, 3))  # arguments that a variant need not name


def _shape(arrays, name, rank):
    """The shape of a tensor that must be there."""
    if name not in arrays:
        raise InputError(f"it has no tensor {name!r}{nearest(name, arrays)}")
    shape = arrays[name].shape
    if len(shape) != rank or 0 in shape:
        raise InputError(f"{name!r} has shape {list(shape)}, expected {rank} axes of length 1 or more")
    return shape


def _repeats(names, pattern):
    """Number of blocks of each stage, from names that hold (stage, block)."""
    blocks = {(int(found[1]), int(found[2])) for found in (re.search(pattern, name) for name in names) if found}
    stages = sorted({stage for stage, _ in blocks})
    if len(stages) != 4:
        raise InputError(f"it has {len(stages)} stages of blocks, expected 4")
    return tuple(sum(stage == own for stage, _ in blocks) for own in stages)


def _unused(names, patterns):
    """dict from those of some names that match a pattern to its reason."""
    return {name: reason for name in names for pattern, reason in patterns.items() if re.search(pattern, name)}


def _changes(name, wanted, **defaults):
    """The arguments of `wanted` that a variant does not have itself, or by these defaults."""
    own = {**defaults, **find_variant(name).arguments}
    return {key: value for key, value in wanted.items() if key not in own or own[key] != value}


# === The output ===

SOURCES = {"csrhddlam": csrhddlam, "deeplab2": deeplab2, "keras_applications": keras_applications}
TARGETS = {"csrhddlam": write_csrhddlam}


def convert(source, path, output, name=None):
    """Writes the checkpoint of a file of another implementation.

    The folder `output` appears when it is complete. It holds a checkpoint for `init_checkpoint`, `model.json` for
    Python and `model.gin` for the commands.

    Args:
        source: of `SOURCES`.
        path: the file.
        output: folder that does not exist yet.
        name: of the registered model; by default the source's choice.

    Returns:
        (`Conversion`, the model).

    Raises:
        InputError: the file does not fit, or `output` exists.
    """
    with new_folder(output, "checkpoint") as folder:
        try:
            conversion = SOURCES[source](path, name)
            model = conversion.build()
        except InputError as error:
            text = str(error)
            raise InputError(text if text.startswith(path) else f"{path}: {text}") from None
        tf.train.Checkpoint(model=model).save(os.path.join(folder, "ckpt"))
        write_json(os.path.join(folder, CARD), _card(source, path, conversion, model))
        write_text(os.path.join(folder, GIN), gin_text(source, conversion))
        write_page(folder, read_json(os.path.join(folder, CARD), WeightsCard)[1], "weights")
    return conversion, model


def _card(source, path, conversion, model):
    return {
        "format": 1,
        "model": conversion.model,
        "num_classes": conversion.num_classes,
        "arguments": conversion.arguments,
        "norm": dataclasses.asdict(conversion.norm),
        # The model does this itself, from values between -1 and 1.
        "preprocessing": preprocessing(conversion.arguments, conversion.photo),
        "parameters": count_parameters(model),
        "source": source,
        "input": input_hashes(path),
        "unused": conversion.unused,
        "unfilled": conversion.unfilled,
        "made": [f"axial-convert weights --source={source} --input={os.path.basename(path)} --output=FOLDER"],
    }


def input_hashes(path):
    """dict from the names of the files at a path, a prefix or a folder, to their SHA-256."""
    if tf.io.gfile.isdir(path):
        path = os.path.join(path, "")
    files = [path] if not path.endswith("/") and tf.io.gfile.exists(path) else gfile.glob(path, "*")
    files = [file for file in sorted(files) if not tf.io.gfile.isdir(file)]
    return {os.path.basename(file): file_digest(file)[1] for file in files}


def gin_text(source, conversion):
    """model.gin: the model of a `Conversion` or a `WeightsCard`, for the commands."""
    lines = [
        f"# Weights of {source}: name this file after a recipe's, and its folder as init_checkpoint.",
        f"ModelConfig.name = {conversion.model!r}",
        f"ModelConfig.arguments = {conversion.arguments!r}",
        "ModelConfig.norm = @BatchNormConfig()",
        *(
            f"BatchNormConfig.{name} = {getattr(conversion.norm, name)!r}"
            for name in ("momentum", "epsilon", "unbiased")
        ),
    ]
    return "\n".join(lines) + "\n"


def summary(conversion, model):
    """Lines that say what was taken, left out and left random."""
    groups = {}
    for name, reason in conversion.unused.items():
        groups.setdefault(reason, []).append(name)
    lines = [f"{conversion.model}: {len(conversion.values)} weights of {len(model.weights)} filled"]
    lines += [f"unused: {counted(len(names), 'tensor')} like {names[0]}, {reason}" for reason, names in groups.items()]
    if conversion.unfilled:
        parts = sorted({name.split("/")[0] for name in conversion.unfilled})
        lines.append(f"random: {counted(len(conversion.unfilled), 'weight')}, of {', '.join(parts)}")
    return lines
