"""Counts multiply-adds from the ops of a traced graph and their static shapes.

The count has convolutions, matrix products and einsums, as in the tables of the Axial-DeepLab paper, and no
element-wise ops. Each call of a function counts. The ops in a loop count as often as the loop's maximum number of
iterations. A conditional counts as its costliest branch.

Attention within windows is computed in blocks, which hold more pairs of query and key than attention's equation needs.
The products of a block have a name scope 'pairs_A_of_B' (`Windows.scope`): they compute B pairs, and the equation needs
A. Both numbers are counted.
"""

import collections
import math
import re
import typing

import tensorflow as tf

_PAIRS = re.compile(r"(?:^|/)pairs_(\d+)_of_(\d+)(?:_\d+)?/")


class Product(typing.NamedTuple):
    """One op that multiplies and adds.

    Attributes:
        name: name of the op, with the names of the enclosing calls as prefix.
        computed: multiply-adds that the op computes.
        needed: multiply-adds that attention's equation needs; the same as `computed` outside of windows.
    """

    name: str
    computed: int
    needed: float


def count_multiply_adds(graph):
    """List of the `Product`s of a graph.

    Args:
        graph: a tf.Graph whose products all have static shapes.

    Raises:
        ValueError: the shape of a product, or the length of a loop with products, is not static.
    """
    products = []
    for name, count in _walk(graph, ""):
        ratio = math.prod(int(needed) / int(computed) for needed, computed in _PAIRS.findall(name))
        products.append(Product(name, count, count * ratio))
    return products


def total(products):
    """The needed multiply-adds of a list of `Product`s, rounded to an integer."""
    return round(sum(p.needed for p in products))


def _walk(graph, prefix):
    """Yields (name, computed multiply-adds) of each product."""
    for op in graph.get_operations():
        name = prefix + op.name
        if op.type in _COUNTERS:
            yield name, _COUNTERS[op.type](op)
        elif op.type in ("While", "StatelessWhile"):
            body = list(_walk(_function(graph, op.get_attr("body").name), f"{name}/"))
            times = _iterations(op) if body else 0
            yield from ((n, times * count) for n, count in body)
        elif op.type in ("If", "StatelessIf", "Case", "StatelessCase"):
            names = ("then_branch", "else_branch") if op.type.endswith("If") else ()
            branches = [op.get_attr(branch) for branch in names] or op.get_attr("branches")
            sides = [list(_walk(_function(graph, b.name), f"{name}/")) for b in branches]
            yield from max(sides, key=lambda side: sum(count for _, count in side))
        elif op.type in ("PartitionedCall", "StatefulPartitionedCall", "SymbolicGradient"):
            yield from _walk(_function(graph, op.get_attr("f").name), f"{name}/")


def _function(graph, name):
    """The graph of a function called by `graph`."""
    while graph is not None:
        function = graph._get_function(name)  # no public API leads from a name to a traced graph
        if function is not None:
            return function.graph
        graph = getattr(graph, "outer_graph", None)
    raise ValueError(f"the graph calls {name!r}, which it does not hold")


def _iterations(op):
    """Maximum iterations of a loop: the `maximum_iterations` of tf.while_loop, an input of the op."""
    most = tf.get_static_value(op.inputs[1]) if len(op.inputs) > 1 else None
    if most is None or most.ndim or most < 0:
        raise ValueError(f"loop {op.name!r} has no static maximum_iterations")
    return int(most)


def _shape(tensor):
    if not tensor.shape.is_fully_defined():
        raise ValueError(f"{tensor.op.name!r} has no static shape: {tensor.shape}")
    return tensor.shape.as_list()


def _convolution(op):
    """An output value takes kernel area x input channels per group multiply-adds; the kernel's shape gives both."""
    kernel = _shape(op.inputs[1])
    return math.prod(_shape(op.outputs[0])) * math.prod(kernel[:-1])


def _depthwise(op):
    return math.prod(_shape(op.outputs[0])) * math.prod(_shape(op.inputs[1])[:2])


def _matmul(op):
    name = "transpose_a" if op.type == "MatMul" else "adj_x"
    inner = _shape(op.inputs[0])[-2 if op.get_attr(name) else -1]
    return math.prod(_shape(op.outputs[0])) * inner


def _einsum(op):
    """The product of the sizes of all letters and of an ellipsis's broadcast axes; 0 for a single operand."""
    operands = op.get_attr("equation").decode().split("->")[0].split(",")
    sizes, ellipsis = {}, ()
    for letters, tensor in zip(operands, op.inputs):
        shape = _shape(tensor)
        before, dots, after = letters.partition("...")
        last = len(shape) - len(after)
        sizes.update(zip(before + after, shape[: len(before)] + shape[last:]))
        if dots:
            ellipsis = tf.broadcast_static_shape(tf.TensorShape(ellipsis), tf.TensorShape(shape[len(before) : last]))
    return math.prod(sizes.values()) * math.prod(ellipsis) if len(operands) > 1 else 0


_COUNTERS = dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul)
_COUNTERS |= {"Conv2D": _convolution, "Conv3D": _convolution, "DepthwiseConv2dNative": _depthwise, "Einsum": _einsum}


# === Parts of a model ===

# Ops that make no new tensor.
_VIEWS = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "ReadVariableOp", "Const", "Shape")


def activation_bytes(graph, inputs, part_of):
    """dict from parts to bytes of all tensors computed from `inputs`, an upper bound of a forward pass's written bytes.

    Args:
        graph: a tf.Graph with static shapes.
        inputs: list of the graph's placeholders.
        part_of: function from an op's name to the op's part of the model.
    """
    reached = {id(tensor) for tensor in inputs}
    counter = collections.Counter()
    for op in graph.get_operations():
        if not any(id(tensor) in reached for tensor in op.inputs):
            continue
        for tensor in op.outputs:
            reached.add(id(tensor))
            if op.type not in _VIEWS and tensor.shape.is_fully_defined():
                counter[part_of(op.name)] += tensor.shape.num_elements() * tensor.dtype.size
    return dict(counter)
