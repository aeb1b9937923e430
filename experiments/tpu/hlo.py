"""Reads the text of an optimised program: the cycles, bytes and products of each part of a model.

The estimated cycles are the compiler's. Bytes and products are counted here, from the shapes in the text. An operation
reads each operand once and writes its result once; results in the core's own memory cost nothing. A kernel's products
are not in the text.
"""

import collections
import dataclasses
import functools
import math
import re

import numpy as np

from axial.analysis.parts import REST, part_of
from axial.errors import InputError

KERNEL = "tpu_custom_call"  # the target of a Pallas kernel
BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
# Operations that move nothing: names for parts of other results.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "iota")
SLICES = ("slice", "dynamic-slice", "gather")
# Operations that compute nothing. A fusion of them moves numbers, or writes them in another type.
MOVES = (*SLICES, "dynamic-update-slice", "copy", "pad", "concatenate", "transpose", "reshape", "reverse", "broadcast")
MOVES += ("convert", "select", "compare", "fusion")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program.

    Attributes:
        name, opcode: of it.
        kind: text of its result's type.
        inputs: text of its operands.
        line: the whole line.
    """

    name: str
    opcode: str
    kind: str
    inputs: str
    line: str

    @functools.cached_property
    def shapes(self):
        """[`Shape`] of the arrays of its result."""
        return shapes(self.kind)

    @functools.cached_property
    def operands(self):
        """Names of instructions of the same computation."""
        return re.findall(r"%([\w.\-]+)", self.inputs)

    def attribute(self, pattern):
        """The first group of a pattern in the line, or None."""
        found = re.search(pattern, self.line)
        return found and found[1]

    @functools.cached_property
    def path(self):
        """The TensorFlow operation that it comes from; empty if none is named."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @functools.cached_property
    def estimate(self):
        """Cycles of the compiler's cost model."""
        return int(self.attribute(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def called(self):
        """Names of the computations that it runs once."""
        return re.findall(r"(?:to_apply|true_computation|false_computation)=%?([\w.\-]+)", self.line)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's type.

    Attributes:
        sides: of its dimensions.
        bits: of an element.
        order: its dimensions, the fastest first; empty if the text does not say.
        tile: sides of a tile of its last dimensions, or ().
        local: whether it lies in the core's own memory.
    """

    sides: tuple
    bits: int
    order: tuple = ()
    tile: tuple = ()
    local: bool = False

    @property
    def count(self):
        """Number of elements."""
        return functools.reduce(int.__mul__, self.sides, 1)

    @property
    def bytes(self):
        """Bytes of the array."""
        return self.count * self.bits // 8

    @property
    def tiled(self):
        """Bytes of the array's whole tiles."""
        sides = [self.sides[axis] for axis in self.order]
        for place, tile in enumerate(reversed(self.tile[: len(sides)])):
            sides[place] = -(-sides[place] // tile) * tile
        return (functools.reduce(int.__mul__, sides, 1) if sides else self.count) * self.bits // 8


def _shape(kind, sides, layout):
    """`Shape` of the type KIND[SIDES]{LAYOUT}, like bf16[8,65]{1,0:T(8,128)S(1)}."""
    order, _, rest = (layout or "").partition(":")
    tile = re.match(r"T\(([\d,]+)\)", rest)
    return Shape(
        tuple(int(side) for side in sides.split(",") if side),
        BITS[kind] if kind in BITS else int(re.search(r"\d+", kind)[0]),
        order=tuple(int(axis) for axis in order.split(",") if axis),
        tile=tuple(int(side) for side in tile[1].split(",")) if tile else (),
        local=bool(re.search(r"S\([1-9]", rest)),
    )


def shapes(text):
    """[`Shape`] of the arrays in the text of a type."""
    return [_shape(*found) for found in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?", text)]


# A type may be a tuple of tuples. No part of it is a space, a word and a parenthesis: the operation is the first.
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)")


def computations(text):
    """dict from the names of computations to their `Instruction`s. The entry computation is 'ENTRY'.

    Raises:
        InputError: a line of a computation is no instruction.
    """
    found, lines = {}, None
    for line in text.splitlines():
        start = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if start:
            lines = found.setdefault("ENTRY" if start[1] else start[2], [])
        elif line.startswith("}"):
            lines = None
        elif lines is not None and line.strip():
            parsed = _LINE.match(line)
            if not parsed:
                raise InputError(f"this libtpu's program has a line that is no instruction: {line.strip()[:150]}")
            name, kind, opcode, inputs = parsed.groups()
            lines.append(Instruction(name, opcode, kind, inputs, line=line))
    return found


# === Cost of parts ===


@dataclasses.dataclass(frozen=True)
class Cost:
    """What operations cost.

    Attributes:
        cycles: estimated by the compiler.
        bytes: read from memory and written to it.
        products: multiply-adds of convolutions and matrix products.
    """

    cycles: int = 0
    bytes: int = 0
    products: int = 0

    def __add__(self, other):
        return Cost(self.cycles + other.cycles, self.bytes + other.bytes, self.products + other.products)

    def times(self, count):
        """The cost of `count` runs."""
        return Cost(self.cycles * count, self.bytes * count, self.products * count)

    def bound(self, products, memory):
        """(cycles that it takes at least, 'products' or 'memory').

        Args:
            products: multiply-adds in a cycle.
            memory: bytes in a cycle.
        """
        return max((self.products / products, "products"), (self.bytes / memory, "memory"))


def costs(text, kernels=None):
    """(`Cost` by opcode, `Cost` by part, `Cost` by (part, name) of what only moves numbers) of a run of a program.

    A loop's body counts once for each iteration. An operation without a part has that of what it reads, or else that of
    what reads it.

    Args:
        text: of the optimised program.
        kernels: cycles of the Pallas kernels by the names of their instructions; the compiler estimates none for them.
    """
    found = computations(text)
    by_op, by_part, moves = (collections.defaultdict(Cost) for _ in range(3))

    def add(name, turns, inherited):
        parts = _parts(found.get(name, []), found, inherited)
        shapes_of = {i.name: i.shapes for i in found.get(name, [])}
        for instruction in found.get(name, []):
            part = parts[instruction.name]
            cost = _cost(instruction, shapes_of, found, kernels or {}).times(turns)
            kind = "kernel" if f'custom_call_target="{KERNEL}"' in instruction.line else instruction.opcode
            if cost != Cost():
                by_op[kind] += cost
                by_part[part] += cost
                if _moves(instruction, found):
                    moves[part, instruction.name] += cost
            if instruction.opcode == "while":
                body = instruction.attribute(r"body=%?([\w.\-]+)")
                add(body, turns * _turns(instruction, found), part)
            elif instruction.opcode in ("call", "conditional"):
                for called in instruction.called:
                    add(called, turns, part)

    add("ENTRY", 1, REST)
    return _sorted(by_op), _sorted(by_part), _sorted(moves)


def _turns(loop, computations):
    """Iterations of a loop: the number that its condition compares the counter with, or 1 where the chip computes it.

    A counter starts at 0 and grows by 1. libtpu's text does not say XLA's known_trip_count.
    """
    condition = computations.get(loop.attribute(r"condition=%?([\w.\-]+)"), [])
    numbers = {i.name: int(i.inputs) for i in condition if i.opcode == "constant" and i.inputs.isdigit()}
    tests = [i.operands[1] for i in condition if i.opcode == "compare" and "direction=LT" in i.line]
    return min((numbers[name] for name in tests if name in numbers), default=1)


def _moves(instruction, computations):
    """Whether an operation, with all that is fused into it, computes nothing."""
    inner = computations.get(instruction.attribute(r"calls=%?([\w.\-]+)"), [])
    return instruction.opcode in MOVES and all(_moves(each, computations) for each in inner if each.opcode not in FREE)


def _sorted(table):
    return dict(sorted(table.items(), key=lambda item: -item[1].cycles))


def _parts(instructions, computations, inherited):
    """dict from the names of instructions to their parts."""
    parts, readers = {}, collections.defaultdict(list)
    for i in instructions:
        part = part_of(i.path, sub=True)
        if part == REST and i.opcode == "fusion":
            inner = computations.get(i.attribute(r"calls=%?([\w.\-]+)"), [])
            # Equal constants of all parts are one, with the name of any of them.
            named = collections.Counter(part_of(each.path, sub=True) for each in inner if each.opcode not in FREE)
            del named[REST]
            part = named.most_common(1)[0][0] if named else REST
        if part == REST:
            part = next((parts[name] for name in i.operands if parts.get(name, REST) != REST), REST)
        parts[i.name] = part
        for name in i.operands:
            readers[name].append(i.name)
    for i in reversed(instructions):
        if parts[i.name] == REST:
            part = next((parts[name] for name in readers[i.name] if parts[name] != REST), inherited)
            parts[i.name] = part
    return parts


def _cost(instruction, shapes_of, computations, kernels):
    still = instruction.opcode == "reshape" and not instruction.estimate  # another name for the same bytes
    if still or instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return Cost(instruction.estimate)
    inner = computations.get(instruction.attribute(r"calls=%?([\w.\-]+)"), [])
    return Cost(
        kernels.get(instruction.name, instruction.estimate),
        _moved(instruction, shapes_of, inner),
        sum(_all_products(inner, computations)) if inner else products(instruction, shapes_of),
    )


def _all_products(instructions, computations):
    """Multiply-adds of each instruction of a fusion, and of the fusions in it."""
    shapes_of = {i.name: i.shapes for i in instructions}
    for i in instructions:
        if i.opcode == "fusion":
            yield from _all_products(computations.get(i.attribute(r"calls=%?([\w.\-]+)"), []), computations)
        else:
            yield products(i, shapes_of)


def _moved(instruction, shapes_of, inner):
    """Bytes that an instruction reads and writes. Of an operand that it only cuts pieces from, the pieces count.

    A Pallas kernel says it itself.
    """
    said = instruction.attribute(rf'custom_call_target="{KERNEL}".*"bytes_accessed":"(\d+)"')
    if said:
        return int(said)

    def size(these):
        return sum(shape.tiled for shape in these if not shape.local)

    if instruction.opcode.endswith("-start"):  # (result, operand, ...) or the like: one of them lies in memory
        return size(instruction.shapes[:2])
    pieces, written = _pieces(inner), size(instruction.shapes)
    updated = [i for i in inner if i.opcode == "dynamic-update-slice" and i.line.lstrip().startswith("ROOT ")]
    if updated:  # it writes into an operand
        inside = {i.name: i.shapes for i in inner}
        target, update = updated[0].operands[:2]
        written = size(inside.get(update, []))
        pieces |= {number: 0 for name, number in _parameters(inner) if name == target}
    read = 0
    for number, name in enumerate(instruction.operands):
        whole = size(shapes_of.get(name, []))
        read += min(whole, pieces.get(number, whole))
    if instruction.opcode in SLICES:
        read = min(read, written)
    return read + written


def _parameters(inner):
    """[(name, number)] of a fusion's parameters."""
    return [(i.name, int(i.attribute(r"parameter\((\d+)\)"))) for i in inner if i.opcode == "parameter"]


def _pieces(inner):
    """dict from numbers of a fusion's parameters to the bytes that it reads of them, if it only cuts pieces."""
    readers = collections.defaultdict(list)
    for i in inner:
        for name in i.operands:
            readers[name].append(i)
    return {
        number: sum(shape.tiled for reader in readers[name] for shape in reader.shapes)
        for name, number in _parameters(inner)
        if readers[name] and all(reader.opcode in SLICES for reader in readers[name])
    }


# === Products ===


def products(instruction, shapes_of):
    """Multiply-adds of a convolution or a matrix product, as XLA's HloCostAnalysis counts them; 0 of anything else."""
    if instruction.opcode not in ("convolution", "dot") or len(instruction.operands) != 2:
        return 0
    left, right = ((shapes_of.get(name) or [None])[0] for name in instruction.operands)
    if left is None or right is None:
        return 0
    if instruction.opcode == "dot":
        axes = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return instruction.shapes[0].count * functools.reduce(
            int.__mul__, [left.sides[int(axis)] for axis in axes.split(",") if axis], 1
        )
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.line)
    image, kernel, output = labels.groups()
    groups, batches = (
        int(instruction.attribute(rf"{name}=(\d+)") or 1) for name in ("feature_group_count", "batch_group_count")
    )
    count = left.sides[image.index("f")] // groups * right.sides[kernel.index("o")]
    count *= left.sides[image.index("b")] // batches
    window = {
        name: (instruction.attribute(rf"window=\{{[^}}]*\b{name}=([\dx_\-]+)") or "").split("x")
        for name in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")
    }
    for place in range(len(image) - 2):

        def of(name, default):
            sizes = window[name]
            return int(sizes[place].partition("_")[0]) if sizes != [""] else default  # noqa: B023

        count *= _valid(
            left.sides[image.index(str(place))],
            instruction.shapes[0].sides[output.index(str(place))],
            right.sides[kernel.index(str(place))],
            stride=of("stride", 1),
            pad=of("pad", 0),
            image_dilation=of("lhs_dilate", 1),
            kernel_dilation=of("rhs_dilate", 1),
        )
    return count


@functools.cache
def _valid(image, output, kernel, *, stride, pad, image_dilation, kernel_dilation):
    """Pairs of an output position and a kernel position, along an axis, that meet a pixel of the image."""
    (few, apart), (many, step) = sorted([(kernel, kernel_dilation), (output, stride)])
    # The j-th of the many positions meets x = start + j step, a pixel if 0 <= x <= the last one and x is a multiple of
    # the dilation. The j between the first and the last that are so have one remainder by a period.
    start = np.arange(few) * apart - pad
    first = np.maximum(-(start // step), 0)
    last = np.minimum(((image - 1) * image_dilation - start) // step, many - 1)
    common = math.gcd(step, image_dilation)
    period = image_dilation // common
    remainder = -start // common * pow(step // common, -1, period) % period
    found = (last - remainder) // period - (first - 1 - remainder) // period
    return int(np.maximum(found, 0)[start % common == 0].sum())


# === Sums over replicas, and padding ===


def all_reduces(text, partitions=1):
    """Bytes of the result of each all-reduce of a program over more than the `partitions` devices of a replica."""
    instructions = [i for each in computations(text).values() for i in each]
    sums = [i for i in instructions if i.opcode in ("all-reduce", "all-reduce-start")]
    return [sum(x.bytes for x in i.shapes) for i in sums if not _is_inside_replicas(i.line, partitions)]


def _is_inside_replicas(line, partitions):
    """Whether an all-reduce sums over devices of one replica at a time, which have `partitions` numbers in a row.

    Groups are of devices where the line has use_global_device_ids, and otherwise of replicas.
    """
    groups = _groups(line) if "use_global_device_ids=true" in line else []
    return bool(groups) and all(len({device // partitions for device in group}) == 1 for group in groups)


def _groups(line):
    """[[number]] of an all-reduce; empty where it sums over all.

    '{{0,1},{2,3}}' and '[2,2]<=[4]' are the same. '[2,2]<=[2,2]T(1,0)' is {{0,2},{1,3}}.
    """
    listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}", line)
    if listed:
        return [[int(number) for number in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    cut = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if not cut:
        return []
    shape, sides, order = ([int(number) for number in (text or "").split(",") if number] for text in cut.groups())
    numbers = np.arange(np.prod(sides)).reshape(sides)
    return numbers.transpose(order or None).reshape(shape).tolist()


def padding_share(text):
    """Share of padding in the bytes of the first array of all instructions' tiled results, those in fusions too."""
    real = padded = 0
    for instructions in computations(text).values():
        for instruction in instructions:
            for shape in instruction.shapes[:1]:
                if shape.tile and len(shape.sides) > 1:
                    real, padded = real + shape.bytes, padded + shape.tiled
    return 1 - real / padded if padded else 0.0
