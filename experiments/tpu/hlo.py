"""Reads the cycles, bytes and multiply-adds of each part of a model from an optimised XLA program.

A program is an `HloModuleProto`. The compiler estimates the cycles. This module counts bytes and multiply-adds
('products') from the shapes. It assumes that an op reads each operand once and writes its result once, and that results
in the core's own memory cost nothing. The multiply-adds of kernels are unknown and count as 0.
"""

import collections
import functools
import math
import re
import typing

import numpy as np
from google.protobuf import unknown_fields
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from axial.analysis.parts import REST, part_of

_INNER = re.compile(r"/(attention|resize|hardest_pixels)(?=/)")  # see `part_of_op`
KERNEL = "tpu_custom_call"  # the custom call target of Pallas kernels
BITS = {"PRED": 8, "BF16": 16, "TOKEN": 0, "OPAQUE_TYPE": 0}
IOTA = 92  # field number of an instruction's `IotaReplicaGroupListProto`, which TensorFlow's schema does not have yet
# Ops that move no data of their own.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "iota")
SLICES = ("slice", "dynamic-slice", "gather")


class Cost(typing.NamedTuple):
    """The total cost of some ops.

    Attributes:
        cycles: cycles, as the compiler estimates them.
        bytes: bytes that the ops read from and write to main memory.
        products: multiply-adds of convolutions and matrix products.
    """

    cycles: int = 0
    bytes: int = 0
    products: int = 0


# === Shapes ===


def arrays(shape):
    """Returns the list of the `ShapeProto`s of a result's arrays, including arrays in nested tuples."""
    if shape.element_type != xla_data_pb2.TUPLE:
        return [shape]
    return [array for each in shape.tuple_shapes for array in arrays(each)]


@functools.cache
def _bits(element_type):
    name = xla_data_pb2.PrimitiveType.Name(element_type)
    return BITS[name] if name in BITS else int(re.search(r"\d+", name)[0])


def real_bytes(shape):
    """Returns the bytes of an array's elements, without padding."""
    return math.prod(shape.dimensions) * _bits(shape.element_type) // 8


def tiled_bytes(shape):
    """Returns the bytes of an array, including its padding to whole tiles."""
    sides = [shape.dimensions[axis] for axis in shape.layout.minor_to_major] or list(shape.dimensions)
    tile = shape.layout.tiles[0].dimensions if shape.layout.tiles else ()
    for index, side in enumerate(reversed(tile[: len(sides)])):
        sides[index] = -(-sides[index] // side) * side
    return math.prod(sides) * _bits(shape.element_type) // 8


def _size(shapes):
    """Returns the bytes of the arrays in main memory. Arrays in the core's own memory count as 0."""
    return sum(tiled_bytes(shape) for shape in shapes if not shape.layout.memory_space)


def _said(instruction, name):
    """Returns the number in the field `name` of an instruction's backend config; 0 if the field is absent."""
    match = re.search(rf'"{name}":"(\d+)"'.encode(), instruction.backend_config)
    return int(match[1]) if match else 0


# === Cost of parts ===


def part_of_op(name):
    """Returns the part of an op; attention, resizing and the choice of the hardest pixels are separate parts."""
    part = part_of(name)
    inner = _INNER.search(name, name.find(part))
    return f"{part} {inner[1]}" if inner and part != REST else part


def layer_of_op(name):
    """Returns the layer of an op: its part, with the block and the axis of attention if it has them."""
    part, block, axis = part_of_op(name), re.search(r"/stage\d_(block\d+)/", name), re.search("/(height|width)/", name)
    return " ".join([part, *(match[1] for match in (block, axis) if match and part != REST)])


def costs(program, kernels=None, *, name_part=part_of_op, side=1):
    """Returns (`Cost` by opcode, `Cost` by part) of one run of a program, most expensive first.

    A loop's body counts once for each iteration. An op without a part inherits its operands' part, else its consumers'.

    Args:
        program: optimised `HloModuleProto`.
        kernels: dict from the name of each Pallas kernel's instruction to its cycles, which the compiler does not
            estimate.
        name_part: function from an op's name to its part, like `part_of_op`.
        side: see `products`.
    """
    bodies = {computation.id: computation.instructions for computation in program.computations}
    tables = [collections.defaultdict(lambda: np.zeros(3, np.int64)) for _ in range(2)]

    def add(computation, turns, inherited):
        """Adds the cost of `turns` runs of a computation. `inherited` is the part of the op that calls it."""
        body = bodies[computation]
        fused = {i.id: bodies[i.called_computation_ids[0]] if i.opcode == "fusion" else () for i in body}
        parts, shapes = _parts(body, fused, inherited, name_part), _shapes(body)
        for i in body:
            part, called = parts[i.id], list(i.called_computation_ids)
            cost = turns * np.array(_cost(i, shapes, fused[i.id], kernels or {}, side))
            if cost.any():
                for table, name in zip(tables, ("kernel" if i.custom_call_target == KERNEL else i.opcode, part)):
                    table[name] += cost
            if i.opcode == "while":
                body_of_loop, condition = called
                add(body_of_loop, turns * _turns(bodies[condition]), part)
            elif i.opcode in ("call", "conditional"):
                for each in called:
                    add(each, turns, part)

    add(program.entry_computation_id, 1, REST)
    return [
        {name: Cost(*cost.tolist()) for name, cost in sorted(table.items(), key=lambda item: -item[1][0])}
        for table in tables
    ]


def _shapes(body):
    """Returns a dict from the id of each instruction to the arrays of its result."""
    return {i.id: arrays(i.shape) for i in body}


def _parts(body, fused, inherited, name_part):
    """Returns a dict from the id of each instruction to its part.

    Args:
        body: instructions of a computation.
        fused: dict from the id of each instruction to the instructions inside its fusion, () for other ops.
        inherited: part of ops whose operands and consumers have no part.
        name_part: see `costs`.
    """
    parts, readers = {}, collections.defaultdict(list)
    for i in body:
        part = name_part(i.metadata.op_name)
        if part == REST:
            # Constants in a fusion do not count: XLA merges equal constants of several parts under one part's name.
            inner = [each for each in fused[i.id] if each.opcode not in FREE]
            named = collections.Counter(name_part(each.metadata.op_name) for each in inner)
            del named[REST]
            read = (parts[id] for id in i.operand_ids if parts.get(id, REST) != REST)
            part = named.most_common(1)[0][0] if named else next(read, REST)
        parts[i.id] = part
        for id in i.operand_ids:
            readers[id].append(i.id)
    for i in reversed(body):
        if parts[i.id] == REST:
            parts[i.id] = next((parts[id] for id in readers[i.id] if parts[id] != REST), inherited)
    return parts


def _cost(instruction, shapes, inner, kernels, side):
    """Returns (cycles, bytes, multiply-adds) of an instruction, without the loops and computations that it calls.

    Args:
        instruction: instruction of the program.
        shapes: result of `_shapes` for the instruction's computation.
        inner: instructions inside a fusion; () for other ops.
        kernels, side: see `costs`.
    """
    opcode, estimate = instruction.opcode, _said(instruction, "estimated_cycles")
    still = opcode == "reshape" and not estimate  # a reshape that is a view of its operand
    if still or opcode in FREE or opcode.endswith("-done"):
        return estimate, 0, 0
    said = _said(instruction, "bytes_accessed") if instruction.custom_call_target == KERNEL else 0
    count = sum(products(i, _shapes(inner), side) for i in inner) if inner else products(instruction, shapes, side)
    return kernels.get(instruction.name, estimate), said or _moved(instruction, shapes, inner), count


def _turns(condition):
    """Returns the iterations of a loop: the constant limit of the counter in its condition, or 1 for a computed limit.

    The counter starts at 0 and grows by 1. libtpu's programs do not contain XLA's known_trip_count.
    """
    limits = {i.id: (*i.literal.s32s, *i.literal.u32s, *i.literal.s64s) for i in condition if i.opcode == "constant"}
    tests = [i.operand_ids[1] for i in condition if i.opcode == "compare" and i.comparison_direction == "LT"]
    return min((limits[id][0] for id in tests if limits.get(id)), default=1)


def _moved(instruction, shapes, inner):
    """Returns the bytes that an instruction reads and writes. If it only slices an operand, only the slices count.

    Args: see `_cost`.
    """
    result = arrays(instruction.shape)
    if instruction.opcode.endswith("-start"):  # one of the first two arrays, operand and result, is in main memory
        return _size(result[:2])
    parameters = {i.id: i.parameter_number for i in inner if i.opcode == "parameter"}
    pieces, written = _pieces(inner, parameters), _size(result)
    if inner and inner[-1].opcode == "dynamic-update-slice":  # the fusion writes `update` into its operand `target`
        target, update = inner[-1].operand_ids[:2]
        written = sum(_size(arrays(i.shape)) for i in inner if i.id == update)
        pieces |= {parameters[target]: 0} if target in parameters else {}
    read = 0
    for number, id in enumerate(instruction.operand_ids):
        whole = _size(shapes[id])
        read += min(whole, pieces.get(number, whole))
    if instruction.opcode in SLICES:
        read = min(read, written)
    return read + written


def _pieces(inner, parameters):
    """Returns a dict from the number of each parameter that a fusion only slices to the bytes of the slices."""
    readers = collections.defaultdict(list)
    for i in inner:
        for id in i.operand_ids:
            readers[id].append(i)
    return {
        number: sum(tiled_bytes(shape) for reader in readers[id] for shape in arrays(reader.shape))
        for id, number in parameters.items()
        if readers[id] and all(reader.opcode in SLICES for reader in readers[id])
    }


# === The least traffic ===

# Inputs of a program, and ops whose result is an operand's array, perhaps in another layout or memory.
INPUTS = ("parameter", "constant")
VIEWS = ("bitcast", "copy", "copy-start", "copy-done", "reshape", "optimization-barrier")


def shared_bytes(program, name_part):
    """Returns a dict from each part to the bytes that it must move, however well the compiler fuses it.

    These are the arrays that it shares with other parts, or with the inputs and results of the program. A part reads
    and writes each of these arrays once, without padding. Arrays in the core's own memory count as 0. A loop belongs to
    one part.

    Args:
        program: see `costs`.
        name_part: see `costs`. Forward and backward pass should be separate parts, because memory holds the arrays
            between the two.
    """
    bodies = {computation.id: computation.instructions for computation in program.computations}
    entry = next(each for each in program.computations if each.id == program.entry_computation_id)
    body = entry.instructions
    fused = {i.id: bodies[i.called_computation_ids[0]] if i.opcode == "fusion" else () for i in body}
    parts, shapes = _parts(body, fused, REST, name_part), _shapes(body)
    ids, sources, moved = {i.id: i for i in body}, {}, {}

    def move(id, array, most=math.inf):
        """Counts an array for the part of an instruction that reads or writes it, unless it is an input."""
        if ids[id].opcode not in INPUTS:
            shape = shapes[array[0]][array[1]]
            size = 0 if shape.layout.memory_space else min(real_bytes(shape), most)
            moved[parts[id], array] = max(moved.get((parts[id], array), 0), size)

    for i in body:
        known = [sources[id] for id in i.operand_ids]
        if i.opcode == "get-tuple-element":
            sources[i.id] = known[0][i.tuple_index : i.tuple_index + 1]
        elif i.opcode == "tuple":
            sources[i.id] = [array for each in known for array in each]
        elif i.opcode in VIEWS:
            sources[i.id] = known[0][:1] * len(shapes[i.id])
        else:
            sources[i.id] = [(i.id, index) for index in range(len(shapes[i.id]))]
            pieces = _pieces(fused[i.id], {p.id: p.parameter_number for p in fused[i.id] if p.opcode == "parameter"})
            for number, array in ((number, array) for number, each in enumerate(known) for array in each):
                maker = array[0]
                if ids[maker].opcode in INPUTS or parts[maker] != parts[i.id]:
                    move(maker, array)
                    move(i.id, array, pieces.get(number, math.inf))
    for array in sources[entry.root_id]:
        move(array[0], array)
    totals = collections.Counter()
    for (part, _), size in moved.items():
        totals[part] += size
    return dict(totals)


# === Products ===


def products(instruction, shapes, side=1):
    """Returns the multiply-adds of a convolution or matrix product, as in XLA's HloCostAnalysis; 0 for other ops.

    Args:
        instruction, shapes: see `_cost`.
        side: side of the matrix unit's tile of weights. A tile has the summed axis on one side, and on the other side
            the axis of the operand that needs less padding. The padding of axes to whole tiles counts too, except in
            grouped convolutions, which the matrix unit may not compute.
    """
    if instruction.opcode not in ("convolution", "dot"):
        return 0
    left, right = (shapes[id][0].dimensions for id in instruction.operand_ids)
    output = arrays(instruction.shape)[0].dimensions
    if instruction.opcode == "dot":
        axes = instruction.dot_dimension_numbers
        summed = math.prod(left[axis] for axis in axes.lhs_contracting_dimensions)
        shared = math.prod(left[axis] for axis in axes.lhs_batch_dimensions)
        sides = [math.prod(x) // summed // shared for x in (left, right)]
        return int(math.prod(output) * summed * _padding(summed, sides, side))
    axes = instruction.convolution_dimension_numbers
    features = left[axes.input_feature_dimension] // max(instruction.feature_group_count, 1)
    images = left[axes.input_batch_dimension] // max(instruction.batch_group_count, 1)
    count = features * images * right[axes.kernel_output_feature_dimension]
    for index, window in enumerate(instruction.window.dimensions):
        count *= _valid(
            left[axes.input_spatial_dimensions[index]],
            output[axes.output_spatial_dimensions[index]],
            window.size,
            stride=window.stride,
            pad=window.padding_low,
            image_dilation=window.base_dilation,
            kernel_dilation=window.window_dilation,
        )
    if max(instruction.feature_group_count, instruction.batch_group_count) > 1:
        return count
    outputs = output[axes.output_feature_dimension]
    summed = features * math.prod(window.size for window in instruction.window.dimensions)
    return int(count * _padding(summed, [outputs, math.prod(output) // outputs], side))


def _padding(summed, sides, side):
    """Returns (multiply-adds with padding) / (multiply-adds). `summed` and `sides` are the sizes of the axes."""

    def fill(size):
        return -(-size // side) * side / size

    return fill(summed) * min(map(fill, sides))


@functools.cache
def _valid(image, output, kernel, *, stride, pad, image_dilation, kernel_dilation):
    """Returns the number of (output position, kernel tap) pairs along an axis that read a pixel of the image."""
    x = np.arange(output)[:, None] * stride + np.arange(kernel) * kernel_dilation - pad
    return int(np.sum((x >= 0) & (x <= (image - 1) * image_dilation) & (x % image_dilation == 0)))


# === Sums over replicas, padding, and calls ===


def all_reduces(program, partitions=1):
    """Returns the list of the result bytes of each all-reduce across replicas. A replica has `partitions` devices."""
    sums = [i for c in program.computations for i in c.instructions if i.opcode in ("all-reduce", "all-reduce-start")]
    return [sum(map(real_bytes, arrays(i.shape))) for i in sums if not _is_inside_replicas(i, partitions)]


def _is_inside_replicas(instruction, partitions):
    """Returns whether an all-reduce only sums within replicas of `partitions` devices with consecutive numbers.

    The groups of an all-reduce list devices if use_global_device_ids is set, and replicas otherwise.
    """
    groups = _groups(instruction) if instruction.use_global_device_ids else []
    return bool(groups) and all(len({device // partitions for device in group}) == 1 for group in groups)


def _groups(instruction):
    """Returns the groups of an all-reduce, lists of numbers. The list is empty if the sum is over all replicas."""
    listed = instruction.collective_device_list
    cuts = [listed.iota_replica_group_list] if listed.HasField("iota_replica_group_list") else []
    fields = unknown_fields.UnknownFieldSet(instruction)
    cuts += [xla_data_pb2.IotaReplicaGroupListProto.FromString(f.data) for f in fields if f.field_number == IOTA]
    for cut in cuts:
        numbers = np.arange(math.prod(cut.iota_reshape_dims)).reshape(cut.iota_reshape_dims)
        numbers = numbers.transpose(list(cut.iota_transpose_perm) or None)
        return numbers.reshape(cut.num_replica_groups, cut.num_devices_per_group).tolist()
    return [list(group.replica_ids) for group in listed.replica_groups or instruction.replica_groups]


def padding_share(program):
    """Returns the fraction of padding in the bytes of all tiled results. Only the first array of a tuple counts."""
    real = padded = 0
    for shape in (arrays(i.shape)[0] for c in program.computations for i in c.instructions if arrays(i.shape)):
        if shape.layout.tiles and len(shape.dimensions) > 1:
            real, padded = real + real_bytes(shape), padded + tiled_bytes(shape)
    return 1 - real / padded if padded else 0.0


def custom_calls(program):
    """Returns the custom-call instructions of a program, which call routines outside XLA."""
    return [i for c in program.computations for i in c.instructions if i.opcode == "custom-call"]


def parse(serialised):
    """Parses serialised bytes to an `HloModuleProto`."""
    return hlo_pb2.HloModuleProto.FromString(serialised)
