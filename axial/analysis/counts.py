"""Parameters, counted as the paper's tables count them."""

import collections
import dataclasses
import re

import tensorflow as tf

from axial.errors import InputError
from axial.layers.axial_attention import AxialAttention
from axial.layers.local_attention import LocalAttention
from axial.models.registry import build_model

ATTENTION = (AxialAttention, LocalAttention)


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model.

    Attributes:
        counted: kernels, biases, position tables and two for each channel of a batch norm outside
            attention: what the paper's tables print.
        attention_norms: scales and offsets of the batch norms inside attention layers.
        parts: `counted` by part: stem, stages, decoders, heads.
    """

    counted: int
    attention_norms: int
    parts: dict


def trace(name, num_classes, height, width, batch=1, **changes):
    """A registered model traced in inference, without memory for its weights or maps.

    Returns:
        the model with its weights, none of them filled, the traced tf.Graph, and its image
        placeholder, float32 [batch, height, width, 3].

    Raises:
        InputError: an image smaller than the model's output stride.
    """
    with tf.Graph().as_default() as graph:
        model = build_model(name, num_classes, **changes)
        for side, length in (("height", height), ("width", width)):
            if length < model.output_stride:
                raise InputError(
                    f"{side} {length}: {name!r} has output stride {model.output_stride}, "
                    f"the least size is {model.output_stride} x {model.output_stride}"
                )
        images = tf.compat.v1.placeholder(tf.float32, [batch, height, width, 3])
        # Our calls are plain graph code; Keras' layers would rewrite each of them here.
        tf.autograph.experimental.do_not_convert(model)(images)
    return model, graph, images


def abstract_model(name, num_classes):
    """A registered model with its weights made, in shape only: nothing is computed."""
    return trace(name, num_classes, 65, 65)[0]


def part_of(name):
    """The part of a model that a weight or an operation belongs to: stem, stage2 .., decoders, heads."""
    path = name.split("/")[1:]
    if len(path) < 2:
        return "rest"
    if path[0] != "backbone":
        return path[0]
    return re.sub(r"_block\d+$|(?<=^middle)\d+$|(?<=^entry)\d+$|(?<=^exit)\d+$", "", path[1])


def count_parameters(model):
    """`ParameterCount` of a built model; moving statistics are not parameters."""
    inside = set()
    for layer in model.submodules:
        if isinstance(layer, ATTENTION):
            own = [layer.kernel, *layer.tables.values()]
            if isinstance(layer, LocalAttention):  # this norm is the residual block's own
                own += layer.content_output_norm.trainable_weights
            inside |= {id(w) for w in layer.trainable_weights} - {id(w) for w in own}
    parts = collections.Counter()
    norms = 0
    for weight in model.trainable_weights:
        size = weight.shape.num_elements()
        if id(weight) in inside:
            norms += size
        else:
            parts[part_of(weight.name)] += size
    return ParameterCount(sum(parts.values()), norms, dict(parts))
