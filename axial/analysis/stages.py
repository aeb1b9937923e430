"""One model, part by part."""

import collections
import dataclasses

from axial.analysis.counts import ATTENTION, count_parameters, part_of, trace
from axial.analysis.multiply_adds import activation_bytes, count_multiply_adds

REST = "rest"  # what belongs to no part: pooling between parts, upsampling


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a model.

    Attributes:
        part: its name, as of `part_of`.
        output: shape of what it hands on, or None.
        spans, heads: of its attention layers, in order, each once; a span of None is the whole axis.
        params: parameters, as of `ParameterCount.counted`.
        macs: multiply-adds.
        activations: bytes that it writes, as of `activation_bytes`.
    """

    part: str
    output: tuple | None
    spans: tuple
    heads: tuple
    params: int
    macs: int
    activations: int


def stages(name, num_classes, batch, height, width):
    """List of the `Stage`s of a registered model on images [batch, height, width, 3]."""
    model, graph, images = trace(name, num_classes, height, width, batch)
    params = count_parameters(model).parts

    def own(op):
        return part if (part := part_of(op)) in params else REST

    macs = collections.Counter()
    for product in count_multiply_adds(graph):
        macs[own(product.name)] += product.needed
    activations = activation_bytes(graph, [images], own)
    outputs, spans, heads = {}, collections.defaultdict(list), collections.defaultdict(list)
    for op in graph.get_operations():
        for tensor in op.outputs:
            if tensor.dtype.is_floating and tensor.shape.rank in (2, 4) and tensor.shape[0] == batch:
                outputs[own(op.name)] = tuple(tensor.shape)
    for layer in model.submodules:
        if isinstance(layer, ATTENTION):
            spans[part_of(layer.kernel.name)].append(layer.span)
            heads[part_of(layer.kernel.name)].append(layer.heads)

    def once(values):
        return tuple(dict.fromkeys(values))

    result = [
        Stage(
            part,
            outputs.get(part),
            once(spans[part]),
            once(heads[part]),
            count,
            round(macs[part]),
            activations.get(part, 0),
        )
        for part, count in params.items()
    ]
    rest = Stage(REST, None, (), (), 0, round(macs[REST]), activations.get(REST, 0))
    return [*result, rest]
