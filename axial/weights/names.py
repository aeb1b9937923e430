"""Names and axes of other public implementations, and ours.

`deeplab2_weights` reads the weights of google-research/deeplab2, `csrhddlam_weights` those of csrhddlam/axial-deeplab.
Each turns a dict of their arrays into a dict of ours, which `assign_weights` assigns to a layer or model. None converts
the offset of a logit batch norm, because softmax ignores it. `to_csrhddlam` is the way back.
"""

import math
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


def _renamed(name, table):
    """A name after every replacement of a table of patterns."""
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name


def deeplab2_weights(arrays):
    """Renames DeepLab2's variables and splits the batch norms that it stacks.

    Args:
        arrays: dict from variable names to arrays.
    """
    ours = {}
    for name, array in arrays.items():
        name = _renamed(name, _DEEPLAB2)
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
        named[_renamed(name, _DEEPLAB2_PATHS)] = array
    return deeplab2_weights(named)


# === Networks of csrhddlam/axial-deeplab ===

_STATISTICS = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
# Source tensors that the target needs no value for, and why.
CSRHDDLAM_UNUSED = {
    r"flatten_index$": "an index that is computed",
    r"num_batches_tracked$": "a count that inference and training do without",
    r"bn_similarity\.bias$": "softmax ignores the offset of a logit",
}


def to_csrhddlam(values, heads=8):
    """The state dict of an `axialnet` network, as a dict of arrays.

    Batch norms count no batches, and the offsets of logits are 0.

    Args:
        values: dict from names of a `Classifier` on `axial_resnet` to arrays.
        heads: of its attention layers.
    """
    theirs = {
        "conv1.weight": values["backbone/stem/conv/kernel"].transpose(3, 2, 0, 1),
        **_their_norm("bn1", values, "backbone/stem/norm"),
    }
    for place in dict.fromkeys(n.split("/")[1] for n in values if re.match(r"backbone/stage\d+_block\d+/", n)):
        stage, block = map(int, re.findall(r"\d+", place))
        theirs |= to_csrhddlam_block(values, heads, f"layer{stage - 1}.{block - 1}.", f"backbone/{place}/")
    theirs["fc.weight"] = values["logits/conv/kernel"][0, 0].T
    theirs["fc.bias"] = values["logits/conv/bias"]
    return {name: np.array(array, order="C") for name, array in theirs.items()}


def to_csrhddlam_block(values, heads, theirs="", ours=""):
    """`to_csrhddlam` of a block. `theirs` and `ours` are what the names of its arrays begin with."""
    names = {"conv_down.weight": "reduce", "conv_up.weight": "expand"}
    norms = {"bn1": "reduce", "bn2": "expand"}
    if f"{ours}shortcut/conv/kernel" in values:
        names["downsample.0.weight"] = norms["downsample.1"] = "shortcut"
    block = {f"{theirs}{n}": values[f"{ours}{o}/conv/kernel"].transpose(3, 2, 0, 1) for n, o in names.items()}
    for norm, our in norms.items():
        block |= _their_norm(f"{theirs}{norm}", values, f"{ours}{our}/norm")
    for axis, our in (("hight_block", "height"), ("width_block", "width")):
        block |= to_csrhddlam_attention(values, heads, f"{theirs}{axis}.", f"{ours}attention/{our}/")
    return block


def to_csrhddlam_attention(values, heads, theirs="", ours=""):
    """`to_csrhddlam_block` of an attention layer.

    The order of its r^q and r^v tables is that of o - p, so they are reversed. Its qkv rows are grouped by head.
    """

    def by_head(array):  # [all q | all k | all v] -> [heads x (q | k | v)]. v has twice the channels of q and of k
        quarter = len(array) // 4
        parts = [part.reshape(heads, -1, *array.shape[1:]) for part in np.split(array, [quarter, 2 * quarter])]
        return np.concatenate(parts, 1).reshape(array.shape)

    query, key, value = (values[f"{ours}{name}_table"] for name in ("query", "key", "value"))
    length = len(key) // 2 + 1
    index = np.arange(length)[:, None] - np.arange(length)[None, :] + length - 1  # of key - query
    norms = {}
    for what in _STATISTICS.values():
        outputs = [values[f"{ours}{term}_output_norm/{what}"] for term in ("content", "position")]
        norms[f"output/{what}"] = np.stack(outputs, 1).reshape(-1)
        logits = values[f"{ours}logit_norm/{'gamma' if what == 'beta' else what}"].reshape(-1)
        norms[f"similarity/{what}"] = np.zeros_like(logits) if what == "beta" else logits
    return {
        f"{theirs}relative": np.concatenate([query[::-1].T, key.T, value[::-1].T]),
        f"{theirs}flatten_index": index.reshape(-1).astype(np.int64),
        f"{theirs}qkv_transform.weight": by_head(values[f"{ours}kernel"].T)[:, :, None],
        **_their_norm(f"{theirs}bn_qkv", values, f"{ours}qkv_norm", by_head),
        **_their_norm(f"{theirs}bn_similarity", norms, "similarity"),
        **_their_norm(f"{theirs}bn_output", norms, "output"),
    }


def _their_norm(theirs, values, ours, change=np.asarray):
    """A batch norm, with every array brought to their order by `change`."""
    norm = {f"{theirs}.{their}": change(values[f"{ours}/{our}"]) for their, our in _STATISTICS.items()}
    return {**norm, f"{theirs}.num_batches_tracked": np.array(0, np.int64)}


def csrhddlam_weights(arrays, shapes, heads=8, change=to_csrhddlam):
    """The inverse of `to_csrhddlam`: where that moves the places of our numbers to, their numbers come from.

    Args:
        arrays: dict from its state_dict's names to arrays. Those of `CSRHDDLAM_UNUSED` are not read. What is not there
            has no values.
        shapes: dict from our names to shapes.
        heads: `groups` of its attention layers.
        change: the function of our values and the heads that is inverted.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    places = {name: own.reshape(shape) for (name, shape), own in zip(shapes.items(), numbers, strict=True)}
    values, there = np.empty(ends[-1]), np.zeros(ends[-1], bool)
    for name, place in change(places, heads).items():
        if name in arrays and not any(re.search(pattern, name) for pattern in CSRHDDLAM_UNUSED):
            values[place], there[place] = arrays[name], True
    return {name: values[own] for name, own in places.items() if there[own].all()}


# === ResNets of tf_keras.applications ===

_KERAS = [
    (r"^predictions/", "logits/conv/"),
    (r"^conv1_(conv|bn)/", r"backbone/stem/\1/"),
    (r"^conv([2-5])_block(\d+)_", r"backbone/stage\1_block\2/"),
    *((f"/{number}_", f"/{part}/") for number, part in enumerate(("shortcut", "reduce", "middle", "expand"))),
    (r"/bn/", "/norm/"),
]


def keras_weights(arrays):
    """The weights of a ResNet of tf_keras.applications, under the names of a `Classifier` on `resnet`.

    Its convolutions have biases in front of batch norms: they go into the moving means. Its photos have the channels
    blue, green, red: the kernel of the stem is turned around.

    Args:
        arrays: dict from names like 'conv2_block1_1_conv/kernel' to arrays.
    """
    ours = {_renamed(name, _KERAS): array for name, array in arrays.items()}
    for name in [name for name in ours if re.match("backbone/.*/conv/bias$", name)]:
        place, bias = name.removesuffix("/conv/bias"), ours.pop(name)
        mean = f"{place}/norm/moving_mean"
        if mean not in ours or ours[mean].shape != bias.shape:
            raise InputError(f"the batch norm after {place!r} does not fit its bias of {bias.size} channels")
        ours[mean] = ours[mean] - bias
    if (stem := "backbone/stem/conv/kernel") in ours:
        ours[stem] = ours[stem][:, :, ::-1]
    if (last := "logits/conv/kernel") in ours:
        ours[last] = ours[last][None, None]
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
