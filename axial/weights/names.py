"""Names and axes of other public implementations, and ours.

`deeplab2_weights` reads the weights of google-research/deeplab2, `pytorch_weights` those of a layer of
csrhddlam/axial-deeplab, `csrhddlam_weights` those of its networks. Each turns a dict of their arrays into a dict of
ours, which `assign_weights` assigns to a layer or model. None converts the offset of a logit batch norm, because
softmax ignores it. `to_csrhddlam` is the way back.
"""

import re

import numpy as np

from axial.errors import InputError, nearest

_DEEPLAB2 = [
    (r":0$", ""),
    (r"^encoder:[^/]+/", "backbone/"),
    (r"^decoder:[^/]+/", ""),
    (r"stage(\d)/block(\d+)/", r"stage\1_block\2/"),
    (r"(stage\d_block\d+|block\d+)/conv1_bn_act/", r"\1/reduce/"),
    (r"(stage\d_block\d+|block\d+)/conv3_bn/", r"\1/expand/"),
    (r"stem/conv(\d)_bn(_act)?/", r"stem/conv\1/"),
    (r"(height|width)_axis/", r"\1/"),
    (r"(^|/)qkv_kernel$", r"\1kernel"),
    (r"batch_norm_qkv", "qkv_norm"),
    (r"(query|key|value)_rpe/embeddings$", r"\1_table"),
    (r"aspp/proj_conv_bn_act/", "context/"),
    (r"low_level_conv1/", "project_res3/"),
    (r"low_level_conv2/", "project_res2/"),
    (r"fusion_conv1/conv1_bn_act/", "fuse_res3/"),
    (r"fusion_conv2/conv1_bn_act/", "fuse_res2/"),
    (r"conv_block/conv1_bn_act/", "hidden/"),
    (r"depthwise/depthwise_conv/", "depthwise/conv/"),
    (r"final_conv/", "logits/conv/"),
    (r"instance_center_head/", "center_head/"),
    (r"instance_regression_head/", "offset_head/"),
    (r"/batch_norm/", "/norm/"),
]


def deeplab2_weights(arrays):
    """Renames DeepLab2's variables and splits the batch norms that it stacks.

    Args:
        arrays: dict from variable names to arrays.
    """
    ours = {}
    for name, array in arrays.items():
        for pattern, replacement in _DEEPLAB2:
            name = re.sub(pattern, replacement, name)
        prefix, _, what = name.rpartition("/")
        if prefix.endswith("batch_norm_similarity"):
            if what != "beta":
                stem = prefix[: -len("batch_norm_similarity")]
                ours[f"{stem}logit_norm/{what}"] = array.reshape(array.shape[0], -1)
        elif prefix.endswith("batch_norm_retrieved_output"):
            stem = prefix[: -len("batch_norm_retrieved_output")]
            for term, row in zip(("content", "position"), array.reshape(array.shape[0], -1)):
                ours[f"{stem}{term}_output_norm/{what}"] = row
        else:
            ours[name] = array
    return ours


# Object paths of its checkpoints, without underscores at the start of their parts, to the names above.
_DEEPLAB2_PATHS = [
    (r"^backbone/encoder/", "encoder/"),
    (r"^encoder/stem/(conv|batch_norm)/", r"backbone/stem/conv/\1/"),
    (r"^encoder/stage1/", "backbone/stem/"),
    (r"^encoder/", "backbone/"),
    (r"(block\d+)/conv2_bn_act/", r"\1/middle/"),
    (r"(block\d+)/conv2_bn/", r"\1/expand/"),
    (r"^(instance_\w+_head|semantic_head)_without_last_layer/conv1_bn_act/", r"\1/hidden/"),
    (r"^semantic_last_layer/", "semantic_head/logits/conv/"),
    (r"^(instance_\w+_head)_last_layer/", r"\1/logits/conv/"),
]
DEEPLAB2_UNUSED = {
    r"/\.OPTIMIZER_SLOT/|^(optimizer|model)/|^(global_step|save_counter)$": "state of its training",
    r"batch_norm_similarity/beta$": "softmax ignores the offset of a logit",
}


def plain_path(path):
    """An object path without the underscores of private attributes: '_stem/_conv' -> 'stem/conv'."""
    return "/".join(part.lstrip("_") for part in path.split("/"))


def deeplab2_paths(arrays):
    """`deeplab2_weights` of a checkpoint.

    Args:
        arrays: dict from plain object paths to arrays.
    """
    basic = {name.removesuffix("/conv2_bn/conv/kernel") for name in arrays if name.endswith("/conv2_bn/conv/kernel")}
    named = {}
    for name, array in arrays.items():
        block, found, what = name.partition("/conv1_bn_act/")
        if found and block in basic:
            name = f"{block}/first/{what}"
        for pattern, replacement in _DEEPLAB2_PATHS:
            name = re.sub(pattern, replacement, name)
        named[name] = array
    return deeplab2_weights(named)


_PYTORCH = [
    (r"\.", "/"),
    (r"hight_block/", "attention/height/"),
    (r"width_block/", "attention/width/"),
    (r"conv_down/weight$", "reduce/conv/kernel"),
    (r"conv_up/weight$", "expand/conv/kernel"),
    (r"downsample/0/weight$", "shortcut/conv/kernel"),
    (r"downsample/1/", "shortcut/norm/"),
    (r"(^|/)bn1/", r"\1reduce/norm/"),
    (r"(^|/)bn2/", r"\1expand/norm/"),
    (r"bn_qkv/", "qkv_norm/"),
    (r"/weight$", "/gamma"),
    (r"/bias$", "/beta"),
    (r"running_mean$", "moving_mean"),
    (r"running_var$", "moving_variance"),
]


def pytorch_weights(arrays, heads=8):
    """Renames csrhddlam/axial-deeplab's parameters and brings their axes into our order.

    The order of its r^q and r^v tables is that of o - p, so they are reversed. Its qkv rows are grouped by head.

    Args:
        arrays: dict from state_dict names to arrays (num_batches_tracked left out).
        heads: `groups` of its attention layers.
    """
    ours = {}
    for name, array in arrays.items():
        array = np.asarray(array)
        name = re.sub(r"qkv_transform\.weight$", "qkv_transform", name)
        for pattern, replacement in _PYTORCH:
            name = re.sub(pattern, replacement, name)
        prefix, _, what = name.rpartition("/")
        below = f"{prefix}/" if prefix else ""
        if what == "relative":
            half = array.shape[0] // 4
            query, key, value = array[:half], array[half : 2 * half], array[2 * half :]
            ours[f"{below}query_table"] = query[:, ::-1].T
            ours[f"{below}key_table"] = key.T
            ours[f"{below}value_table"] = value[:, ::-1].T
        elif what == "qkv_transform":
            ours[f"{below}kernel"] = _by_part(array[:, :, 0], heads).T
        elif prefix.endswith("qkv_norm"):
            ours[name] = _by_part(array, heads)
        elif prefix.endswith("bn_similarity"):
            if what != "beta":
                stem = prefix[: -len("bn_similarity")]
                ours[f"{stem}logit_norm/{what}"] = array.reshape(-1, heads)
        elif prefix.endswith("bn_output"):
            stem = prefix[: -len("bn_output")]
            for term, column in zip(("content", "position"), array.reshape(-1, 2).T):
                ours[f"{stem}{term}_output_norm/{what}"] = column
        elif array.ndim == 4:
            ours[name] = array.transpose(2, 3, 1, 0)
        else:
            ours[name] = array
    return ours


def _by_part(array, heads):
    """First axis [heads x (q | k | v)] -> [all q | all k | all v]. v has twice the channels of q and of k."""
    size = array.shape[0] // heads // 4
    grouped = array.reshape(heads, 4 * size, *array.shape[1:])
    parts = grouped[:, :size], grouped[:, size : 2 * size], grouped[:, 2 * size :]
    return np.concatenate([p.reshape(-1, *array.shape[1:]) for p in parts])


def _by_head(array, heads):
    """The inverse of `_by_part`."""
    size = array.shape[0] // 4
    parts = array[:size], array[size : 2 * size], array[2 * size :]
    grouped = [p.reshape(heads, -1, *array.shape[1:]) for p in parts]
    return np.concatenate(grouped, 1).reshape(array.shape)


# === Networks of csrhddlam/axial-deeplab ===

_STATISTICS = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
_BLOCK = re.compile(r"layer(\d+)\.(\d+)\.(.+)")
# Source tensors that the target needs no value for, and why.
CSRHDDLAM_UNUSED = {
    r"flatten_index$": "an index that is computed",
    r"num_batches_tracked$": "a count that inference and training do without",
    r"bn_similarity\.bias$": "softmax ignores the offset of a logit",
}


def csrhddlam_weights(arrays, heads=8):
    """The weights of an `axialnet` network, under the names of a `Classifier` on `axial_resnet`.

    Args:
        arrays: dict from its state_dict's names to arrays, without those of `CSRHDDLAM_UNUSED`.
        heads: `groups` of its attention layers.
    """
    ours, blocks = {}, {}
    for name, array in arrays.items():
        part, _, what = name.rpartition(".")
        if block := _BLOCK.fullmatch(name):
            place = f"backbone/stage{int(block[1]) + 1}_block{int(block[2]) + 1}"
            blocks.setdefault(place, {})[block[3]] = array
        elif part == "bn1":
            ours[f"backbone/stem/norm/{_STATISTICS[what]}"] = array
        elif name == "conv1.weight":
            ours["backbone/stem/conv/kernel"] = array.transpose(2, 3, 1, 0)
        elif name == "fc.weight":
            ours["logits/conv/kernel"] = array.T[None, None]
        elif name == "fc.bias":
            ours["logits/conv/bias"] = array
        else:
            raise InputError(f"no weight is like {name!r}")
    for place, block in blocks.items():
        ours |= {f"{place}/{name}": array for name, array in pytorch_weights(block, heads).items()}
    return ours


def to_csrhddlam(values, heads=8):
    """The state dict of an `axialnet` network, as a dict of arrays: the inverse of `csrhddlam_weights`.

    Batch norms count no batches, and the offsets of logits are 0.

    Args:
        values: dict from names of a `Classifier` on `axial_resnet` to arrays.
        heads: of its attention layers.
    """
    theirs = {
        "conv1.weight": values["backbone/stem/conv/kernel"].transpose(3, 2, 0, 1),
        **_their_norm("bn1", values, "backbone/stem/norm"),
    }
    places = sorted({n.split("/")[1] for n in values if re.match(r"backbone/stage\d+_block\d+/", n)}, key=_numbers)
    for place in places:
        stage, block = _numbers(place)
        theirs |= _their_block(f"layer{stage - 1}.{block - 1}", values, f"backbone/{place}", heads)
    theirs["fc.weight"] = values["logits/conv/kernel"][0, 0].T
    theirs["fc.bias"] = values["logits/conv/bias"]
    return {name: np.array(array, order="C") for name, array in theirs.items()}


def _numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def _their_norm(theirs, values, ours, change=np.asarray):
    """A batch norm, with every array brought to their order by `change`."""
    norm = {f"{theirs}.{their}": change(values[f"{ours}/{our}"]) for their, our in _STATISTICS.items()}
    return {**norm, f"{theirs}.num_batches_tracked": np.array(0, np.int64)}


def _their_block(theirs, values, ours, heads):
    names = {"conv_down.weight": "reduce", "conv_up.weight": "expand"}
    norms = {"bn1": "reduce", "bn2": "expand"}
    if f"{ours}/shortcut/conv/kernel" in values:
        names["downsample.0.weight"] = norms["downsample.1"] = "shortcut"
    block = {f"{theirs}.{n}": values[f"{ours}/{o}/conv/kernel"].transpose(3, 2, 0, 1) for n, o in names.items()}
    for norm, our in norms.items():
        block |= _their_norm(f"{theirs}.{norm}", values, f"{ours}/{our}/norm")
    for axis, our in (("hight_block", "height"), ("width_block", "width")):
        block |= _their_attention(f"{theirs}.{axis}", values, f"{ours}/attention/{our}", heads)
    return block


def _their_attention(theirs, values, ours, heads):
    def by_head(array):
        return _by_head(array, heads)

    query, key, value = (values[f"{ours}/{name}_table"] for name in ("query", "key", "value"))
    length = len(key) // 2 + 1
    index = np.arange(length)[:, None] - np.arange(length)[None, :] + length - 1  # of key - query
    statistics = ("gamma", "beta", "moving_mean", "moving_variance")
    outputs = {
        f"both/{s}": np.stack([values[f"{ours}/{t}_output_norm/{s}"] for t in ("content", "position")], 1).reshape(-1)
        for s in statistics
    }
    logits = {f"logits/{s}": values[f"{ours}/logit_norm/{s}"].reshape(-1) for s in statistics if s != "beta"}
    logits["logits/beta"] = np.zeros_like(logits["logits/gamma"])
    return {
        f"{theirs}.relative": np.concatenate([query[::-1].T, key.T, value[::-1].T]),
        f"{theirs}.flatten_index": index.reshape(-1).astype(np.int64),
        f"{theirs}.qkv_transform.weight": by_head(values[f"{ours}/kernel"].T)[:, :, None],
        **_their_norm(f"{theirs}.bn_qkv", values, f"{ours}/qkv_norm", by_head),
        **_their_norm(f"{theirs}.bn_similarity", logits, "logits"),
        **_their_norm(f"{theirs}.bn_output", outputs, "both"),
    }


# === ResNets of tf_keras.applications ===

_KERAS_BLOCK = re.compile(r"conv([2-5])_block(\d+)_([0-3])_(conv|bn)/(\w+)")
_KERAS_PARTS = {"0": "shortcut", "1": "reduce", "2": "middle", "3": "expand"}


def keras_weights(arrays):
    """The weights of a ResNet of tf_keras.applications, under the names of a `Classifier` on `resnet`.

    Its convolutions have biases in front of batch norms: they go into the moving means. Its photos have the channels
    blue, green, red: the kernel of the stem is turned around.

    Args:
        arrays: dict from names like 'conv2_block1_1_conv/kernel' to arrays.
    """
    ours, biases = {}, {}
    for name, array in arrays.items():
        block = _KERAS_BLOCK.fullmatch(name)
        if block:
            place = f"backbone/stage{block[1]}_block{block[2]}/{_KERAS_PARTS[block[3]]}"
        elif name.startswith(("conv1_conv/", "conv1_bn/")):
            place = "backbone/stem"
        elif name in ("predictions/kernel", "predictions/bias"):
            ours[f"logits/conv/{name.split('/')[1]}"] = array[None, None] if name.endswith("kernel") else array
            continue
        else:
            raise InputError(f"no weight is like {name!r}")
        kind, what = (block[4], block[5]) if block else (name.split("/")[0].removeprefix("conv1_"), name.split("/")[1])
        if what == "bias" and kind == "conv":
            biases[place] = array
        else:
            ours[f"{place}/{'conv' if kind == 'conv' else 'norm'}/{what}"] = array
    for place, bias in biases.items():
        mean = f"{place}/norm/moving_mean"
        if mean not in ours or ours[mean].shape != bias.shape:
            raise InputError(f"the batch norm after {place!r} does not fit its bias of {bias.size} channels")
        ours[mean] = ours[mean] - bias
    if "backbone/stem/conv/kernel" in ours:
        ours["backbone/stem/conv/kernel"] = ours["backbone/stem/conv/kernel"][:, :, ::-1]
    return ours


# === Assigning ===


def weight_names(module):
    """Dict from names like 'backbone/stage2_block1/reduce/conv/kernel' to the variables of `module`.

    The module's own name is left out.
    """
    return {w.name.split("/", 1)[-1].removesuffix(":0"): w for w in module.weights}


def assign_weights(module, values):
    """Sets every weight of a built layer or model from a dict under our names.

    Raises:
        InputError: a weight has no value, a value has no weight, or their shapes differ.
    """
    weights = weight_names(module)
    for name in values:
        if name not in weights:
            raise InputError(f"no weight is called {name!r}{nearest(name, weights)}")
    for name, weight in weights.items():
        if name not in values:
            raise InputError(f"there is no value for the weight {name!r}")
        if tuple(weight.shape) != tuple(values[name].shape):
            raise InputError(
                f"the weight {name!r} has shape {tuple(weight.shape)}, its value {tuple(values[name].shape)}"
            )
    for name, weight in weights.items():
        weight.assign(values[name])
