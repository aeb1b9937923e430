"""Counts parameters as the tables of the Axial-DeepLab paper do."""

import collections
import dataclasses

import tensorflow as tf

from axial.analysis.parts import part_of
from axial.errors import InputError
from axial.layers.attention.layer import Attention
from axial.models.registry import build_model, find_variant


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model.

    Attributes:
        counted: number in the paper's tables: kernels, biases, position tables, and two parameters for each channel
            of a batch norm outside attention.
        attention_norms: number of scales and offsets of the batch norms inside attention layers.
        parts: `counted`, by part; see `part_of`.
        norm_parts: `attention_norms`, by part.
    """

    counted: int
    attention_norms: int
    parts: dict
    norm_parts: dict


def trace(name, num_classes, height, width, *, batch=1, changes=None):
    """Traces a registered model in inference. Allocates no memory for weights or feature maps.

    Args:
        name, num_classes: arguments of `build_model`.
        height, width, batch: size and number of the images.
        changes: dict of arguments that replace the variant's.

    Returns:
        the model, the traced tf.Graph, and the placeholder of its input, such as float32 [batch, height, width, 3].

    Raises:
        InputError: the image is smaller than the model's output stride.
    """
    with tf.Graph().as_default() as graph:
        model = build_model(name, num_classes, **(changes or {}))
        for side, length in (("height", height), ("width", width)):
            if length < model.output_stride:
                raise InputError(f"{side} {length}: {name!r} takes at least its output stride, {model.output_stride}")
        signature = find_variant(name).model.signature((height, width), batch)
        images = tf.nest.map_structure(lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), signature)
        # The model's code needs no conversion; AutoGraph would rewrite every call.
        tf.autograph.experimental.do_not_convert(model)(images)
    return model, graph, images


def count_parameters(model):
    """`ParameterCount` of a built model. Moving statistics are not parameters."""
    inside = set()
    for layer in model.submodules:
        if isinstance(layer, Attention):
            counted = [layer.kernel, *layer.tables.values()]
            if layer.spec.axis == "square":  # its output norm belongs to the residual block
                counted += layer.content_output_norm.trainable_weights
            inside |= {id(w) for w in layer.trainable_weights} - {id(w) for w in counted}
    parts, norms = collections.Counter(), collections.Counter()
    for weight in model.trainable_weights:
        counter = norms if id(weight) in inside else parts
        counter[part_of(weight.name)] += weight.shape.num_elements()
    return ParameterCount(sum(parts.values()), sum(norms.values()), dict(parts), dict(norms))
