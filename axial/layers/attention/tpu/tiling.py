"""What all kernels share: how an axis is cut into windows, how a kernel reads it, and how its programs run.

Letters of the shapes: A axes (rows or columns of images), H heads, L queries and M keys of a window, D query and key
channels of a head, E value channels of a head, C channels of a group of heads.

Heads lie side by side in the lanes, in the order of the projection. A group is the heads that fill a register of 128
lanes. A product over 128 lanes costs as much as one over 32, so a product reads the whole group. The other operand is
zero outside the head's own channels (`embed`).

An array x holds q, k and v of whole axes, [A, rows, channels], before their batch norm. `affine` [2, channels] holds
the factors and the summands of that batch norm.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axial.layers.attention.tpu.shear import LANES, SUBLANES, Shear, join, tiles, up
from axial.layers.attention.windows import MASKED

FAST_MEMORY = 100 * 2**20  # bytes that a kernel may use; a v5e and a v4 have 128 MiB
CORES = 2  # of a v4 or v5p chip, which compile as one device; other chips ignore how programs are shared out


def group_lanes(heads, depth):
    """Lanes of a group of heads: whole registers and whole heads."""
    return min(math.lcm(LANES, depth), heads * depth)


def rows_at(first, count):
    """A slice of rows; the first may depend on the program."""
    return slice(first, first + count) if isinstance(first, int) else pl.ds(pl.multiple_of(first, SUBLANES), count)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How an axis is cut for the kernels, and how they read it.

    Without a span, or where the axis fills at most a tile, a window is the whole axis. Otherwise the queries of a
    window fill at most a tile, and its keys are read in place from the axis.

    Attributes:
        length: length of the axis.
        reach: largest visible |offset|.
        heads, depth, value_depth: H, D, E.
        dtype: dtype of the operands of products.
    """

    length: int
    reach: int
    heads: int
    depth: int
    value_depth: int
    dtype: str

    @property
    def blocks(self):
        """Number of windows of an axis."""
        if self.length <= LANES or self.reach >= self.length - 1:
            return 1
        return -(-self.length // LANES)

    @property
    def queries(self):
        return self.length if self.blocks == 1 else up(-(-self.length // self.blocks), SUBLANES)

    @property
    def keys(self):
        return self.length if self.blocks == 1 else up(self.queries + self.before + self.reach, SUBLANES)

    @property
    def before(self):
        """Keys of a window before its first query: the reach, in whole tiles."""
        return 0 if self.blocks == 1 else up(self.reach, SUBLANES)

    @property
    def rows(self):
        """Rows of an axis in memory. With several windows there is padding around them, and room for all `parts`."""
        if self.blocks == 1:
            return self.of_queries.height
        return max((self.blocks - 1) * self.queries + self.keys, self.before + math.prod(self.parts))

    @property
    def sizes(self):
        """Channels of q, k and v."""
        return [self.heads * depth for depth in (self.depth, self.depth, self.value_depth)]

    @property
    def channels(self):
        """Channels of q, k and v together, each in whole tiles."""
        return sum(up(size, LANES) for size in self.sizes)

    @property
    def parts(self):
        """(number, rows) of the parts of an axis in kernels that look at each pixel alone."""
        count = -(-self.length // (2 * LANES))
        return count, up(-(-self.length // count), SUBLANES)

    def together(self, axes):
        """How many of `axes` a kernel of `parts` takes together, so that two rounds of a product's sums are full."""
        most = max(2 * LANES // self.parts[1], 1)
        return max(n for n in range(1, most + 1) if axes % n == 0)

    @property
    def of_queries(self):
        return Shear(self.queries, self.keys)

    @property
    def of_keys(self):
        return Shear(self.keys, self.queries)

    def offsets(self):
        """dict of offsets key - query: which table rows a kernel takes, and in which order.

        'query', 'key' and 'value' are the orders of products that become maps. '_back' are those of sheared maps.
        'key_sums' is for products of the keys at the queries' own positions, in the order of 'query'.
        """
        q, k = self.of_queries, self.of_keys
        return {
            "query": q.forward - self.before,
            "key": -k.forward - self.before,
            "value": q.forward - self.before,
            "query_back": q.backward - self.before,
            "key_back": -k.backward - self.before,
            "value_back": q.backward - self.before,
            "key_sums": self.before - q.forward,
        }

    def mask(self, logits, block):
        """The logits, `MASKED` where a key is beyond the axis or out of reach."""
        visible = self.visible(logits.shape, block)
        return logits if visible is None else jnp.where(visible, logits, MASKED)

    def visible(self, shape, block):
        """bool [keys, queries], or None where all are."""
        key, query = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        visible = []
        if self.reach < self.length - 1:
            visible += [key - query >= self.before - self.reach, key - query <= self.before + self.reach]
        if self.blocks > 1 or self.keys < shape[0]:
            visible += [self.of_axis(self.key_rows(block)[0] - self.before, shape)]
        return functools.reduce(jnp.logical_and, visible) if visible else None

    def counted(self, block):
        """float32 [queries, offsets]: 1 where a pair counts in the sums of the relative terms."""
        shape = self.of_queries.height, len(self.of_queries.forward)
        query = lax.broadcasted_iota(jnp.int32, shape, 0) + block * self.queries
        offset = lax.broadcasted_iota(jnp.int32, shape, 1) + int(self.offsets()["query"][0])
        inside = [query < self.length, query + offset >= 0, query + offset < self.length]
        if self.reach < self.length - 1:
            inside += [offset >= -self.reach, offset <= self.reach]
        return functools.reduce(jnp.logical_and, inside).astype(jnp.float32)

    def of_axis(self, first, shape, axis=0):
        """Whether rows (or lanes) of a window lie on the axis. The first of them is at position `first`."""
        position = lax.broadcasted_iota(jnp.int32, shape, axis) + first
        return (position >= 0) & (position < self.length)

    def query_rows(self, block):
        """(first, number) of the rows of a window's queries, in a ref of a whole axis."""
        return (block * self.queries + self.before if self.blocks > 1 else 0), self.of_queries.height

    def key_rows(self, block):
        """(first, number) of the rows of a window's keys."""
        return (block * self.queries if self.blocks > 1 else 0), self.of_keys.height

    def read(self, x, affine, rows, lanes):
        """Some rows and lanes of an axis, normalised, in float32; zero beyond the axis."""
        y = x[0, rows_at(*rows), lanes].astype(jnp.float32) * affine[0:1, lanes] + affine[1:2, lanes]
        if self.blocks == 1 and self.length % SUBLANES == 0:
            return y
        return jnp.where(self.of_axis(rows[0] - self.before, y.shape), y, 0.0)

    def read_queries(self, x, block, lanes):
        """float32 [height, lanes] of a ref of one window's queries. Whatever memory holds beyond the axis becomes 0."""
        x = x[0, :, lanes].astype(jnp.float32)
        if self.length % x.shape[0] == 0:
            return x
        return jnp.where(self.of_axis(block * self.queries, x.shape), x, 0.0)

    def lanes_of(self, name, lanes):
        """The place of some lanes of q, k or v among the lanes of all three."""
        start = sum(up(size, LANES) for size in self.sizes[: "qkv".index(name)])
        return slice(start + lanes.start, start + lanes.stop)

    def part(self, head, depth):
        """Two slices: a head's group among all lanes, and the head's channels in the group."""
        size = group_lanes(self.heads, depth)
        first = head * depth % size
        start = head * depth - first
        return slice(start, start + size), slice(first, first + depth)

    # === Work of one window, for the compiler ===

    def map_flops(self, depth):
        """FLOPs of the products of one map [keys, queries] of each head with `depth` channels."""
        return 2 * self.heads * self.queries * self.keys * depth

    def offset_flops(self, depth):
        """FLOPs of the products of one map [queries, offsets] of each head with `depth` channels."""
        return 2 * self.heads * self.queries * len(self.of_queries.forward) * depth

    @property
    def exponentials(self):
        """Exponentials of a window's softmax."""
        return self.heads * self.queries * self.keys


class Gradient:
    """The gradient of an x that a kernel reads normalised.

    The scratch `total` sums the gradient of the normalised x over the windows of an axis. After the last window the
    kernel writes the gradient of x itself, plus `more` if it is given, and adds to the gradient of affine.

    Args:
        tiling: `Tiling`.
        x, affine: refs that the kernel reads.
        d_x, d_affine: refs of their gradients.
        total: scratch [rows, channels].
        more: ref of another gradient of x, or None.
    """

    def __init__(self, tiling, *, x, affine, d_x, d_affine, total, more=None):
        self.tiling, self.refs = tiling, (x, affine, d_x, d_affine, total, more)
        clear_at_the_start(d_affine)

        @pl.when(window_of_program() == 0)
        def _():
            total[...] = jnp.zeros_like(total)

    def add(self, name, lanes, rows, d):
        """Adds d to the gradient of some rows and lanes of 'q', 'k' or 'v'."""
        self.refs[4][rows_at(*rows), self.tiling.lanes_of(name, lanes)] += d

    def finish(self):
        """Writes the results after the last window of an axis."""
        x, affine, d_x, d_affine, total, more = self.refs

        @pl.when(window_of_program() == self.tiling.blocks - 1)
        def _():
            for lanes in chunks(total.shape[1]):
                d, value = total[:, lanes], x[0, :, lanes].astype(jnp.float32)
                value = jnp.where(self.tiling.of_axis(-self.tiling.before, value.shape), value, 0.0)
                d_affine[0:1, lanes] += jnp.sum(d * value, 0, keepdims=True)
                d_affine[1:2, lanes] += jnp.sum(d, 0, keepdims=True)
                d = d * affine[0:1, lanes]
                if more is not None:
                    d += more[0, :, lanes].astype(jnp.float32)
                d_x[0, :, lanes] = d.astype(d_x.dtype)


# === Parts of kernels ===


def run_in_step(generators):
    """Runs generators, each one step behind the one before it. While one waits for products, another turns its maps."""
    running, waiting = [], iter(generators)
    while True:
        running += itertools.islice(waiting, 1)
        if not running:
            return
        # The last one goes first: its products begin before the one ahead of it waits for its own.
        running = [x for x in reversed(running) if next(x, StopIteration) is not StopIteration][::-1]


def chunks(size):
    """Slices of `size` lanes or rows, each small enough for the registers to hold its products."""
    return [slice(i, min(i + 2 * LANES, size)) for i in range(0, size, 2 * LANES)]


def pad_rows(x, rows):
    """x with zero rows below."""
    if x.shape[0] == rows:
        return x
    return jnp.concatenate([x, jnp.zeros((rows - x.shape[0], x.shape[1]), x.dtype)], 0)


def turn_over(x, rows):
    """The transpose of x [R, C], with R padded to `rows`."""
    return jnp.transpose(pad_rows(x, rows))


def embed(x, rows, channels):
    """A head's [D, .] as [C, .], zero outside its rows. A product over all channels then has the head's alone."""

    def zeros(count):
        return [jnp.zeros((count, x.shape[1]), x.dtype)] if count else []

    return join([*zeros(rows.start), x, *zeros(channels - rows.stop)], 0)


def add_to_row(ref, row, x):
    """Adds the column sums of x to a row of a ref. If the ref has one tile, the tiles of x are added up."""
    total = jnp.sum(x, 0, keepdims=True)
    ref[row : row + 1] += total if ref.shape[1] == x.shape[1] else sum(tiles(total))


def clear_at_the_start(*refs):
    """Zeroes the refs in the first program of a core. They are summed over all its programs."""

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


# === Programs ===


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a kernel reads and writes.

    Attributes:
        arrays: arrays [A, ., .]. A program has the queries of its window, or the axis in whole parts, of an array with
            `length` rows; it has all rows of any other.
        small: arrays that every program has whole.
        sums: shapes of what is summed over all programs.
        outputs: shapes of further arrays like `arrays`.
        scalars: arrays that are read number by number.
        scratch: shapes of memory that the programs of an axis share.
    """

    arrays: list
    small: list
    sums: list
    outputs: list = ()
    scalars: list = ()
    scratch: list = ()


def run_programs(kernel, tiling, interpret, operands, *, flops, exponentials=0, in_windows=True):
    """Runs a kernel in one program for each window of each axis.

    The programs are shared out over `CORES` cores, each of which has its own sums; they are added up here.

    Args:
        kernel: function of the tiling and of refs: scalars, arrays, small, outputs, sums, scratch.
        tiling: `Tiling`.
        interpret: whether jax computes it on a CPU, slowly.
        operands: `Operands`.
        flops, exponentials: of one program.
        in_windows: False for one program for several axes together (`Tiling.together`).

    Returns:
        list of the outputs and the sums.
    """
    axes = operands.arrays[0].shape[0]
    together, blocks = (1, tiling.blocks) if in_windows else (tiling.together(axes), 1)
    groups = axes // together
    cores = CORES if groups % CORES == 0 else 1
    programs = groups * blocks

    def of_axis(x):
        def index(core, group, block):
            return core * (groups // cores) + group, block if x.shape[1] == tiling.length else 0, 0

        height = tiling.rows
        if x.shape[1] == tiling.length:
            height = tiling.of_queries.height if in_windows else math.prod(tiling.parts)
        return pl.BlockSpec((together, height, x.shape[2]), index)

    def in_place(shape, index):
        """What the programs do not move has one buffer, not two."""
        return pl.BlockSpec(shape, index, pipeline_mode=pl.Buffered(1))

    def all_of(x):
        return in_place(x.shape, lambda core, group, block: (0,) * len(x.shape))

    def of_core(x):
        return in_place((None, *x.shape), lambda core, group, block: (core, *[0] * len(x.shape)))

    moved = [*operands.arrays, *operands.small, *operands.outputs, *operands.sums]
    results = pl.pallas_call(
        functools.partial(kernel, tiling),
        name=kernel.__name__.strip("_"),
        grid=(cores, groups // cores, blocks),
        in_specs=[
            *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in operands.scalars),
            *map(of_axis, operands.arrays),
            *map(all_of, operands.small),
        ],
        out_specs=[*map(of_axis, operands.outputs), *map(of_core, operands.sums)],
        out_shape=[*operands.outputs, *(float_shape(cores, *x.shape) for x in operands.sums)],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in operands.scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=FAST_MEMORY
        ),
        cost_estimate=pl.CostEstimate(
            flops=programs * flops,
            transcendentals=programs * exponentials,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in moved),
        ),
        interpret=interpret,
    )(*operands.scalars, *operands.arrays, *operands.small)
    split = len(operands.outputs)
    return [*results[:split], *(jnp.sum(x, 0) for x in results[split:])]


def window_of_program():
    """The number of the window that a program computes."""
    return pl.program_id(2)


def turned_tables(tiling, rows, *names):
    """Table rows [offsets, D] as the kernels take them, [D, offsets]."""
    return [rows[name].T.astype(tiling.dtype) for name in names]


def flip_matrix(tiling):
    """A matrix that reverses the rows of a tile."""
    return jnp.eye(LANES, dtype=tiling.dtype)[::-1]


def float_shape(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
