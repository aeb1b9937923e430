"""Converts weight names and axes of other public implementations to ours, by the tables in `public_weights.py` files.

`deeplab2_weights`, `csrhddlam_weights` and `keras_weights` convert weights of google-research/deeplab2, of
csrhddlam/axial-deeplab and of tf_keras.applications. Each turns a dict of the source's arrays into a dict of ours,
which `assign_weights` assigns to a layer or model. The offsets of logit batch norms are left out, because softmax
ignores them. `to_csrhddlam` converts our arrays to the source's.
"""

import math
import re

import numpy as np

from axial.errors import InputError, nearest
from axial.models.axial_deeplab.public_weights import CSRHDDLAM, DEEPLAB2
from axial.models.resnet.public_weights import KERAS


def _renamed(name, public):
    """The name after all replacements that `public`, a `PublicWeights`, lists."""
    for pattern, replacement in public.names:
        name = re.sub(pattern, replacement, name)
    return name


def unused(arrays, public):
    """dict from the name of each tensor that our model does not need to the reason."""
    return {name: reason for name in arrays for pattern, reason in public.unused.items() if re.search(pattern, name)}


# === google-research/deeplab2 ===


def deeplab2_weights(arrays):
    """Renames DeepLab2's variables, and splits its stacked batch norms.

    Args:
        arrays: dict from each variable's name, or object path like 'encoder/_stem/_conv/kernel', to its array.
    """
    plain = {"/".join(key.lstrip("_") for key in name.split("/")): array for name, array in arrays.items()}
    ours = {}
    for name, array in plain.items():
        block, first, rest = name.partition("/conv1_bn_act/")
        if first and f"{block}/conv2_bn/conv/kernel" in plain:  # a basic block
            name = f"{block}/first/{rest}"
        name = _renamed(name, DEEPLAB2)
        if "batch_norm_similarity/" in name:
            if not name.endswith("/beta"):
                ours[name.replace("batch_norm_similarity", "logit_norm")] = array.reshape(array.shape[0], -1)
        elif "batch_norm_retrieved_output/" in name:
            for term, row in zip(("content", "position"), array.reshape(array.shape[0], -1)):
                ours[name.replace("batch_norm_retrieved_output", f"{term}_output_norm")] = row
        else:
            ours[name] = array
    return ours


# === csrhddlam/axial-deeplab ===


def to_csrhddlam(values, heads=8):
    """The state dict of an `axialnet` network, of a block or of an attention layer, as a dict of arrays.

    The batch counters of batch norms and the offsets of logit batch norms are 0. `axialnet` orders its r^q and r^v
    tables by the query's position minus the key's, so ours are reversed. `axialnet` groups the rows of qkv by head.

    Args:
        values: dict from the name of each weight of a classifier, a block or an attention layer to its array.
        heads: number of heads of the attention layers.
    """

    def by_head(array):  # [all q | all k | all v] -> [heads x (q | k | v)]; v has twice the channels of q and k
        quarter = len(array) // 4
        chunks = [chunk.reshape(heads, -1, *array.shape[1:]) for chunk in np.split(array, [quarter, 2 * quarter])]
        return np.concatenate(chunks, 1).reshape(array.shape)

    state_dict = {}
    for name, array in values.items():
        if re.search("(key|value)_table$|position_output_norm/", name):
            continue  # converted together with the query table or with content_output_norm
        target = _renamed(name, CSRHDDLAM)
        prefix, _, suffix = target.rpartition(".")
        if suffix == "relative":
            key, value = (values[name.replace("query", other)] for other in ("key", "value"))
            length = len(key) // 2 + 1
            index = np.arange(length)[:, None] - np.arange(length) + length - 1  # row of the table for key - query
            state_dict[target.replace("relative", "flatten_index")] = index.reshape(-1).astype(np.int64)
            array = np.concatenate([array[::-1].T, key.T, value[::-1].T])
        elif prefix.endswith("qkv_transform"):
            array = by_head(array.T)[:, :, None]
        elif prefix.endswith("bn_qkv"):
            array = by_head(array)
        elif prefix.endswith("bn_output"):
            array = np.stack([array, values[name.replace("content", "position")]], 1).reshape(-1)
        elif prefix.endswith("bn_similarity"):
            array = array.reshape(-1)
        elif array.ndim == 4:
            array = array[0, 0].T if prefix == "fc" else array.transpose(3, 2, 0, 1)
        state_dict[target] = array
        if suffix == "running_mean":
            state_dict[f"{prefix}.num_batches_tracked"] = np.array(0, np.int64)
            state_dict.setdefault(f"{prefix}.bias", np.zeros_like(array))
    return {name: np.array(array, order="C") for name, array in state_dict.items()}


def csrhddlam_weights(arrays, shapes, heads=8):
    """The inverse of `to_csrhddlam`.

    All elements of our weights are numbered, and `to_csrhddlam` converts these indices. The result tells which
    element of ours each element of the source belongs to.

    Args:
        arrays: a state dict, from the name of each tensor to its array. Names in `CSRHDDLAM.unused` are not read. A
            weight of ours is left out if some of its elements are missing.
        shapes: dict from our name of each weight to its shape.
        heads: `groups` of the source's attention layers.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    indices = {name: index.reshape(shape) for (name, shape), index in zip(shapes.items(), numbers, strict=True)}
    values, present, sources = np.empty(ends[-1]), np.zeros(ends[-1], bool), to_csrhddlam(indices, heads)
    for name in sources.keys() & arrays.keys() - unused(sources, CSRHDDLAM):
        values[sources[name]], present[sources[name]] = arrays[name], True
    return {name: values[index] for name, index in indices.items() if present[index].all()}


# === ResNets of tf_keras.applications ===


def keras_weights(arrays):
    """Converts weights of a ResNet of tf_keras.applications to the weights of a `Classifier` on `ConvResNet`.

    The source's convolutions have biases before batch norms; the moving means absorb these biases. Its photos have BGR
    channels, so the input channels of the stem's kernel are reversed.

    Args:
        arrays: dict from the name of each weight, like 'conv2_block1_1_conv/kernel', to its array.
    """
    ours = {_renamed(name, KERAS): array for name, array in arrays.items()}
    for name in [name for name in ours if re.match("backbone/.*/conv/bias$", name)]:
        layer, bias = name.removesuffix("/conv/bias"), ours.pop(name)
        mean = f"{layer}/norm/moving_mean"
        if mean not in ours or ours[mean].shape != bias.shape:
            raise InputError(f"the batch norm after {layer!r} does not fit its bias of {bias.size} channels")
        ours[mean] = ours[mean] - bias
    if (stem := "backbone/stem/conv/kernel") in ours:
        ours[stem] = ours[stem][:, :, ::-1]
    if (last := "logits/conv/kernel") in ours:
        ours[last] = ours[last][None, None]
    return ours


# === Assigning ===


def weight_names(module):
    """dict from each weight's name, like 'backbone/stage2_block1/reduce/conv/kernel', to the variable of `module`.

    The names leave out the module's own name.
    """
    return {w.name.split("/", 1)[-1].removesuffix(":0"): w for w in module.weights}


def assign_weights(module, values):
    """Sets every weight of a built layer or model from `values`, a dict from the name of each weight to its array.

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
        shape, given = tuple(weight.shape), tuple(values[name].shape)
        if shape != given:
            raise InputError(f"the weight {name!r} has shape {shape}, its value {given}")
    for name, weight in weights.items():
        weight.assign(values[name])
