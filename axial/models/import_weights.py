"""Weights of other public implementations under this project's names.

`deeplab2_weights` reads the weights of google-research/deeplab2, `pytorch_weights` those of csrhddlam/axial-deeplab.
Both turn a dict of their arrays into a dict of ours, which `assign_weights` assigns to a layer or model. Neither
converts the offset of a logit batch norm, because softmax ignores it.
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
