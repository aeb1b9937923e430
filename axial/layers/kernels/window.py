"""What all kernels share: how an axis is cut into windows, and how a program of each is run.

Letters of the shapes: A axes (rows or columns of images), H heads, L queries and M keys of a window, D query and key
channels of a head, E value channels of a head, C channels of a group of heads.

Heads lie side by side in the lanes, as the projection left them. A group is the heads that fill a register of 128
lanes; of another matrix a head takes its own channels of these, as all other rows of that are zero (`embed`): a
product over 128 lanes costs what one over 32 does.

An array x is q, k and v of whole axes, [A, rows, channels], before their batch norm; `affine` [2, channels] is what
that multiplies by and adds.
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

from axial.layers.kernels.shear import LANES, SUBLANES, Shear, join, tiles, up
from axial.layers.windows import MASKED

FAST_MEMORY = 100 * 2**20  # that a kernel may use; a v5e has 128 MiB, a v4 as much


def group_lanes(heads, depth):
    """Lanes of a group: whole registers, whole heads."""
    return min(math.lcm(LANES, depth), heads * depth)


def rows_at(first, count):
    """A slice of rows of which the first may depend on the program."""
    return slice(first, first + count) if isinstance(first, int) else pl.ds(pl.multiple_of(first, SUBLANES), count)


@dataclasses.dataclass(frozen=True)
class Window:
    """How an axis is cut for the kernels, and how these read it.

    Without a span, or where the axis fills no more than a tile, a window is the axis. Otherwise its queries fill no
    more than a tile, and its keys are read where they lie in the axis.

    Attributes:
        length: of the axis.
        reach: the largest |offset| that is visible.
        heads, depth, value_depth: H, D, E.
        dtype: of operands of products.
    """

    length: int
    reach: int
    heads: int
    depth: int
    value_depth: int
    dtype: str

    @property
    def blocks(self):
        """Windows of an axis."""
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
        """Keys of a window before its first query: those in reach, in whole tiles."""
        return 0 if self.blocks == 1 else up(self.reach, SUBLANES)

    @property
    def rows(self):
        """Of an axis as the kernels see it: those of `parts` too, and others around, where there are several windows."""
        if self.blocks == 1:
            return self.of_queries.height
        return max((self.blocks - 1) * self.queries + self.keys, self.before + math.prod(self.parts))

    @property
    def sizes(self):
        """Channels of q, of k, of v."""
        return [self.heads * depth for depth in (self.depth, self.depth, self.value_depth)]

    @property
    def channels(self):
        """Of q, k and v together, each in whole tiles."""
        return sum(up(size, LANES) for size in self.sizes)

    @property
    def parts(self):
        """Of an axis' rows, where pixels are taken for themselves: how many parts, and the rows of each."""
        count = -(-self.length // (2 * LANES))
        return count, up(-(-self.length // count), SUBLANES)

    def together(self, axes):
        """Of so many axes, how many are taken together where pixels are: two rounds of a product's sums are full."""
        most = max(2 * LANES // self.parts[1], 1)
        return max(n for n in range(1, most + 1) if axes % n == 0)

    @property
    def of_queries(self):
        return Shear(self.queries, self.keys)

    @property
    def of_keys(self):
        return Shear(self.keys, self.queries)

    def offsets(self):
        """dict of the offsets key - query of the tables' rows: for products to become maps, '_back' of maps sheared.

        Those of 'key_sums' are of products of a window's queries' own keys, in the order of 'query'.
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
        """`MASKED` where a key is beyond the axis or out of reach."""
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
        """float32 [queries, offsets]: 1 where a pair counts, of the products for the sums of the relative terms."""
        shape = self.of_queries.height, len(self.of_queries.forward)
        query = lax.broadcasted_iota(jnp.int32, shape, 0) + block * self.queries
        offset = lax.broadcasted_iota(jnp.int32, shape, 1) + int(self.offsets()["query"][0])
        inside = [query < self.length, query + offset >= 0, query + offset < self.length]
        if self.reach < self.length - 1:
            inside += [offset >= -self.reach, offset <= self.reach]
        return functools.reduce(jnp.logical_and, inside).astype(jnp.float32)

    def of_axis(self, first, shape, axis=0):
        """Whether rows (or lanes) of a window are of the axis, the first of them at position `first`."""
        position = lax.broadcasted_iota(jnp.int32, shape, axis) + first
        return (position >= 0) & (position < self.length)

    def query_rows(self, block):
        """Of a window's queries, in a ref of all rows of an axis: the first and how many."""
        return (block * self.queries + self.before if self.blocks > 1 else 0), self.of_queries.height

    def key_rows(self, block):
        """The same of its keys."""
        return (block * self.queries if self.blocks > 1 else 0), self.of_keys.height

    def read(self, x, affine, rows, lanes):
        """float32 of some rows and lanes of an axis, normalised; zero beyond the axis."""
        y = x[0, rows_at(*rows), lanes].astype(jnp.float32) * affine[0:1, lanes] + affine[1:2, lanes]
        if self.blocks == 1 and self.length % SUBLANES == 0:
            return y
        return jnp.where(self.of_axis(rows[0] - self.before, y.shape), y, 0.0)

    def read_queries(self, x, block, lanes):
        """float32 [height, lanes] of a ref of one window's queries, zero beyond the axis, where anything may be."""
        x = x[0, :, lanes].astype(jnp.float32)
        if self.length % x.shape[0] == 0:
            return x
        return jnp.where(self.of_axis(block * self.queries, x.shape), x, 0.0)

    def lanes_of(self, name, lanes):
        """Where lanes of q, k or v are among those of all three."""
        start = sum(up(size, LANES) for size in self.sizes[: "qkv".index(name)])
        return slice(start + lanes.start, start + lanes.stop)

    def part(self, head, depth):
        """The slice of a head's group among all lanes, and the slice of the head's channels in the group."""
        size = group_lanes(self.heads, depth)
        first = head * depth % size
        start = head * depth - first
        return slice(start, start + size), slice(first, first + depth)


class Gradient:
    """The gradient of an x that is read normalised.

    That of x normalised is summed in a scratch, `total`, over the windows of an axis. After the last of them that of
    x itself goes out, with `more` added if there is some, and sums over the axis, of which that of affine consists.
    """

    def __init__(self, window, x, affine, d_x, d_affine, total, more=None):
        self.window, self.refs = window, (x, affine, d_x, d_affine, total, more)
        clear_at_the_start(d_affine)

        @pl.when(pl.program_id(1) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

    def add(self, name, lanes, rows, d):
        self.refs[4][rows_at(*rows), self.window.lanes_of(name, lanes)] += d

    def finish(self):
        x, affine, d_x, d_affine, total, more = self.refs

        @pl.when(pl.program_id(1) == self.window.blocks - 1)
        def _():
            for lanes in chunks(total.shape[1]):
                d, value = total[:, lanes], x[0, :, lanes].astype(jnp.float32)
                value = jnp.where(self.window.of_axis(-self.window.before, value.shape), value, 0.0)
                d_affine[0:1, lanes] += jnp.sum(d * value, 0, keepdims=True)
                d_affine[1:2, lanes] += jnp.sum(d, 0, keepdims=True)
                d = d * affine[0:1, lanes]
                if more is not None:
                    d += more[0, :, lanes].astype(jnp.float32)
                d_x[0, :, lanes] = d.astype(d_x.dtype)


# === Parts of kernels ===


def run_in_step(generators):
    """Runs generators, each a step behind the one before it: while one waits for products, another turns its maps."""
    running, waiting = [], iter(generators)
    while True:
        running += itertools.islice(waiting, 1)
        if not running:
            return
        # The last first: the next one's products are begun before those of the one ahead of it are waited for.
        running = [x for x in reversed(running) if next(x, StopIteration) is not StopIteration][::-1]


def chunks(size):
    """Slices of so many lanes or rows, of no more at a time than registers hold the products of."""
    return [slice(i, min(i + 2 * LANES, size)) for i in range(0, size, 2 * LANES)]


def pad_rows(x, rows):
    """x with zeros below."""
    if x.shape[0] == rows:
        return x
    return jnp.concatenate([x, jnp.zeros((rows - x.shape[0], x.shape[1]), x.dtype)], 0)


def turn_over(x, rows):
    """The transpose of [R, C], R padded to `rows`."""
    return jnp.transpose(pad_rows(x, rows))


def embed(x, rows, channels):
    """A head's [D, .] as [C, .], zero but for its rows: what multiplies all heads' channels takes its own alone."""

    def zeros(count):
        return [jnp.zeros((count, x.shape[1]), x.dtype)] if count else []

    return join([*zeros(rows.start), x, *zeros(channels - rows.stop)], 0)


def add_to_row(ref, row, x):
    """Adds the sums of the columns of x to the row of a ref, those of a tile over those of another where it has one."""
    total = jnp.sum(x, 0, keepdims=True)
    ref[row : row + 1] += total if ref.shape[1] == x.shape[1] else sum(tiles(total))


def clear_at_the_start(*refs):
    """Zeroes what is summed over all programs."""

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


# === Programs ===


def run_programs(kernel, window, interpret, scalars, arrays, small, outputs, sums, scratch=(), in_windows=True):
    """Runs a kernel in a program for each window of each axis, or, not `in_windows`, for some axes together.

    Args:
        kernel: function of the window and of refs of all arguments below, in this order.
        scalars: arrays whose numbers are read one by one.
        arrays, outputs: arrays [A, ., .], and the shapes of such: a program has of those of `length` rows its window's
            queries, or the axis in whole parts, and all rows of the others.
        small, sums: arrays, and the shapes of such, of which every program has all.
        scratch: shapes of what the programs of an axis share.
    """
    axes = arrays[0].shape[0]
    together, blocks = (1, window.blocks) if in_windows else (window.together(axes), 1)

    def of_axis(x):
        if x.shape[1] != window.length:
            return pl.BlockSpec((together, window.rows, x.shape[2]), lambda a, b: (a, 0, 0))
        height = window.of_queries.height if in_windows else math.prod(window.parts)
        return pl.BlockSpec((together, height, x.shape[2]), lambda a, b: (a, b, 0))

    def all_of(x):
        return pl.BlockSpec(x.shape, lambda a, b: (0,) * len(x.shape))

    programs = axes // together * blocks
    return pl.pallas_call(
        functools.partial(kernel, window),
        name=f"{kernel.__name__.strip('_')}_{programs}_programs",  # how many, a compiled program does not say elsewhere
        grid=(axes // together, blocks),
        in_specs=[
            *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in scalars),
            *map(of_axis, arrays),
            *map(all_of, small),
        ],
        out_specs=[*map(of_axis, outputs), *map(all_of, sums)],
        out_shape=[*outputs, *sums],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=FAST_MEMORY
        ),
        interpret=interpret,
    )(*scalars, *arrays, *small)


def turned_tables(window, rows, *names):
    """Tables' rows [offsets, D] as the kernels want them, [D, offsets]."""
    return [rows[name].T.astype(window.dtype) for name in names]


def flip_matrix(window):
    """What reverses a tile's rows."""
    return jnp.eye(LANES, dtype=window.dtype)[::-1]


def float_shape(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
