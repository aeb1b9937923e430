"""Parameters, counted as the paper's tables count them."""

import collections
import dataclasses

import tensorflow as tf

from axial.layers.axial_attention import AxialAttention
from axial.layers.local_attention import LocalAttention
from axial.models.registry import build_model


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


def abstract_model(name, num_classes):
    """A registered model with its weights made, traced with abstract shapes: nothing is computed."""
    model = build_model(name, num_classes)
    trace = tf.function(model, autograph=False)
    trace.get_concrete_function(tf.TensorSpec([1, 65, 65, 3]))
    return model


def count_parameters(model):
    """`ParameterCount` of a built model; moving statistics are not parameters."""
    inside = set()
    for layer in model.submodules:
        if isinstance(layer, (AxialAttention, LocalAttention)):
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
            path = weight.name.split("/")[1:]
            part = path[1] if path[0] == "backbone" else path[0]
            parts[part.split("_block")[0] if path[0] == "backbone" else part] += size
    return ParameterCount(sum(parts.values()), norms, dict(parts))
