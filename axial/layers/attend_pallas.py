"""`attend` in training on a TPU, as one kernel each way: no map is ever in the TPU's main memory.

Kernels of Pallas: jax, of the extra `kernel`, must be there when a step is traced, and TensorFlow calls what it wrote
as an `XlaCallModule`. A program of the grid has one window in the chip's fast memory and makes its maps head by head,
once for the outputs, and once again for the gradients. A relative term is a product of all q with the whole table,
sheared into a map (axial/layers/shear.py).

Letters of the shapes: A axes (rows or columns of images), H heads, L queries and M keys of a window, D query and key
channels of a head, E value channels of a head, C channels of a group of heads.

Heads lie side by side in the lanes, as the projection left them. A group is the heads that fill a register of 128
lanes; one head's channels are picked from it by setting all others to zero, as a product over 128 lanes costs what
one over 32 does.

Compiled by a TPU's own compiler, with all of Axial-DeepLab-S on COCO, and never run on a TPU: hence a choice
(`memory = 'kernel'`) and no default. Cycles of a training step of one layer, in millions (`axial-analyze tpu
--layer=258x65`; of the kernels, bundles of instructions), are 7.7 for 258 rows of 65, 8.1 for 130 of 129, 5.5
for 128 of 128; `attend_xla` says what they are without. Of these the kernels are 3.1, 3.5 and 2.0, and the rest is
batch norms, projections, and Gram matrices in another order of axes than the kernels'. Tried and left out:

- arrays padded to whole tiles in main memory: 8.8 at 130 x 129;
- projections as products of matrices, not convolutions: 9.0 and 8.5 at 130 x 129 and 258 x 65, as their
  statistics then want another order;
- heads in step, one at its products while the next is turned: 8 % fewer bundles of the forward kernel.
"""

import dataclasses
import functools
import itertools
import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax only lowers: it must not take a TPU that TensorFlow has
import jax
import jax.numpy as jnp
import tensorflow as tf
from jax import lax
from jax.experimental import jax2tf
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axial.layers.shear import LANES, SUBLANES, Shear, dot, dot_turned, join, reverse, reverse_turned, tiles, up
from axial.layers.windows import MASKED, Windows, table_rows

FAST_MEMORY = 100 * 2**20  # that a kernel may use; a v5e has 128 MiB, a v4 as much
LONGEST = 384  # keys of a window

# === The kernels ===


def _group(heads, depth):
    """Lanes of a group: whole registers, whole heads."""
    return min(math.lcm(LANES, depth), heads * depth)


def _rows(first, count):
    """A slice of rows of which the first may depend on the program."""
    return slice(first, first + count) if isinstance(first, int) else pl.ds(pl.multiple_of(first, SUBLANES), count)


@dataclasses.dataclass(frozen=True)
class _Window:
    """How an axis is cut for the kernels, and what both do with a window.

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
        """Of an axis as the kernels see it: with others around where there are several windows."""
        return self.of_queries.height if self.blocks == 1 else (self.blocks - 1) * self.queries + self.keys

    @property
    def sizes(self):
        """Channels of q, of k, of v."""
        return [self.heads * depth for depth in (self.depth, self.depth, self.value_depth)]

    @property
    def channels(self):
        """Of q, k and v together, each in whole tiles."""
        return sum(up(size, LANES) for size in self.sizes)

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
        return (block * self.queries if self.blocks > 1 else 0), self.of_keys.height

    def read(self, x, affine, rows, lanes):
        """float32 of some rows and lanes of an axis, normalised; zero beyond the axis."""
        y = x[0, _rows(*rows), lanes].astype(jnp.float32) * affine[0:1, lanes] + affine[1:2, lanes]
        if self.blocks == 1 and self.length % SUBLANES == 0:
            return y
        return jnp.where(self.of_axis(rows[0] - self.before, y.shape), y, 0.0)

    def read_queries(self, x, block, lanes):
        """float32 [height, lanes] of a ref of one window's queries, zero beyond the axis, where anything may be."""
        x = x[0, :, lanes].astype(jnp.float32)
        if self.length % x.shape[0] == 0:
            return x
        return jnp.where(self.of_axis(block * self.queries, x.shape), x, 0.0)

    def groups(self, depth):
        """Slices of lanes, each of a group of heads."""
        lanes = _group(self.heads, depth)
        return [slice(i, i + lanes) for i in range(0, self.heads * depth, lanes)]

    def lanes_of(self, lanes, name):
        """Where the lanes of a group of q, k or v are among those of all three."""
        start = sum(up(size, LANES) for size in self.sizes[: "qkv".index(name)])
        return slice(start + lanes.start, start + lanes.stop)

    def part(self, head, depth):
        """The slice of a head's group among all lanes, and the slice of the head's channels in the group."""
        lanes = self.groups(depth)[head * depth // _group(self.heads, depth)]
        first = head * depth - lanes.start
        return lanes, slice(first, first + depth)


class _Logits:
    """What w of a group of heads is made of.

    Attributes:
        q_turned, k_turned: float32 [C, width].
    """

    def __init__(self, window, q, k, scales, first):
        """q, k: float32 [height, C]; scales: ref [terms, H]; first: the number of the group's first head."""
        self.window, self.channels = window, q.shape[1]
        lane = lax.broadcasted_iota(jnp.int32, (1, self.channels), 1)

        def scaled(x, term):
            of_lane = jnp.zeros(lane.shape, jnp.float32)
            for i in range(self.channels // window.depth):
                of_lane = jnp.where(lane >= i * window.depth, scales[term, first + i], of_lane)
            return (x * of_lane).astype(window.dtype)

        self.k, self.k_scaled, self.q_scaled = k.astype(window.dtype), scaled(k, 2), scaled(q, 1)
        self.q_turned, self.k_turned = _turn_over(q, window.of_keys.width), _turn_over(k, window.of_queries.width)

    def weigh(self, rows, scale, tables, block):
        """w, float32 [keys, queries], of the head of some rows of C, in steps; `scale` is of the content term."""
        window, by_query, by_key = self.window, self.window.of_queries, self.window.of_keys
        embed = lambda x: _embed(x, rows, self.channels).astype(window.dtype)
        logits = dot(self.k, embed(self.q_turned[rows] * scale))
        key_term = dot(self.k_scaled, embed(tables[1][...]))
        query_term = dot(self.q_scaled, embed(tables[0][...]))
        yield
        logits += by_key.to_map(key_term)
        logits += _turn_over(by_query.to_map(query_term), by_key.width)[: by_key.height]
        yield
        logits = window.mask(logits, block)
        w = jnp.exp(logits - jnp.max(logits, 0, keepdims=True))
        return w * (1.0 / jnp.sum(w, 0, keepdims=True))


def _run_in_step(generators):
    """Runs generators, each a step behind the one before it: while one waits for products, another turns its maps."""
    running, waiting = [], iter(generators)
    while True:
        running += itertools.islice(waiting, 1)
        if not running:
            return
        # The furthest on last: what it has in registers is free soonest.
        running = [x for x in reversed(running) if next(x, StopIteration) is not StopIteration][::-1]


def _pad_rows(x, rows):
    if x.shape[0] == rows:
        return x
    return jnp.concatenate([x, jnp.zeros((rows - x.shape[0], x.shape[1]), x.dtype)], 0)


def _turn_over(x, rows):
    """The transpose of [R, C], R padded to `rows`."""
    return jnp.transpose(_pad_rows(x, rows))


def _embed(x, rows, channels):
    """A head's [D, .] as [C, .], zero but for its rows: what multiplies all heads' channels takes its own alone."""
    zeros = lambda count: [jnp.zeros((count, x.shape[1]), x.dtype)] if count else []
    return join([*zeros(rows.start), x, *zeros(channels - rows.stop)], 0)


def _add(ref, row, x):
    """Adds the sums of the columns of x to the row of a ref, those of a tile over those of another where it has one."""
    total = jnp.sum(x, 0, keepdims=True)
    ref[row : row + 1] += total if ref.shape[1] == x.shape[1] else sum(tiles(total))


def _clear_at_the_start(*refs):
    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


def _forward(window, *refs):
    """One window's outputs, and their sums.

    Refs: scales, x, affine, the tables of both terms, of values, flip; outputs, sums [4, H*E] of the content, of its
    squares, of the positions, of their squares.
    """
    scales, x, affine, *tables, value_table, flip, content, position, sums = refs
    by_query, by_key, block = window.of_queries, window.of_keys, pl.program_id(1)
    height, flip = by_query.height, flip[...]
    cast = lambda x: x.astype(window.dtype)
    _clear_at_the_start(sums)

    @functools.cache
    def logits_of(start):
        lanes = slice(start, start + _group(window.heads, window.depth))
        q = window.read(x, affine, window.query_rows(block), window.lanes_of(lanes, "q"))
        k = window.read(x, affine, window.key_rows(block), window.lanes_of(lanes, "k"))
        return _Logits(window, q, k, scales, start // window.depth)

    @functools.cache
    def values_of(start):
        """v [C, keys], and where the outputs [E, queries] of the group's heads are put, positions in reverse."""
        lanes = slice(start, start + _group(window.heads, window.value_depth))
        v = window.read(x, affine, window.key_rows(block), window.lanes_of(lanes, "v"))
        return _turn_over(v, by_query.width), [], []

    def run(head):
        lanes, rows = window.part(head, window.depth)
        w = yield from logits_of(lanes.start).weigh(rows, scales[0, head], tables, block)
        w = _pad_rows(cast(w), by_query.width)
        yield
        lanes, rows = window.part(head, window.value_depth)
        v_turned, contents, positions = values_of(lanes.start)
        contents.append(dot(cast(v_turned[rows]), w))
        reversed_ = reverse_turned(w, height, flip)
        yield
        sheared = _pad_rows(cast(by_query.to_offsets(reversed_)), by_key.width)
        yield
        positions.append(dot_turned(value_table[...], sheared))
        if rows.stop == len(v_turned):
            outputs = jnp.transpose(join(contents, 0))[:height], reverse_turned(cast(join(positions, 0)), height, flip)
            for i, (ref, y) in enumerate(zip((content, position), outputs)):
                ref[0, :, lanes] = cast(y)
                if window.length % height:
                    y = jnp.where(window.of_axis(block * window.queries, y.shape), y, 0.0)
                for row, z in ((2 * i, y), (2 * i + 1, y * y)):
                    sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)

    _run_in_step(map(run, range(window.heads)))


def _parts(window):
    """Of an axis' rows, as the projection takes them one after the other: how many parts, and the rows of each."""
    count = -(-window.length // (2 * LANES))
    return count, up(-(-window.length // count), SUBLANES)


def _abreast(window, axes):
    """Axes that the projection takes together: those whose rows fill what a product sums in two rounds."""
    most = 2 * LANES // _parts(window)[1]
    return max(n for n in range(1, max(most, 1) + 1) if axes % n == 0)


def _for_parts(window, run):
    """Calls run(first, rows) for each part of an axis."""
    count, rows = _parts(window)
    if count == 1:
        run(0, rows)
    else:
        lax.fori_loop(0, count, lambda i, _: run(i * rows, rows), None)


def _chunks(size, most=2 * LANES):
    return [slice(i, min(i + most, size)) for i in range(0, size, most)]


def _stack(window, ref, first, rows, before=0):
    """float32 [axes * rows, .] of some rows of each axis of a ref, zero beyond the axis, where anything may be."""
    seen = window.of_axis(first, (rows, 1))
    parts = [ref[i, _rows(first + before, rows), :].astype(jnp.float32) for i in range(ref.shape[0])]
    return join([jnp.where(seen, part, 0.0) for part in parts], 0)


def _project(window, *refs):
    """q, k and v of some axes. Refs: x, kernel; qkv, the sums of it and of its squares [2, C]."""
    x, kernel, qkv, sums = refs
    _clear_at_the_start(sums)
    if window.blocks > 1:
        qkv[...] = jnp.zeros_like(qkv)

    def run(first, rows):
        part = _stack(window, x, first, rows).astype(x.dtype)
        for lanes in _chunks(window.channels):
            y = dot(part, kernel[:, lanes])
            for i in range(x.shape[0]):
                qkv[i, _rows(first + window.before, rows), lanes] = y[i * rows : (i + 1) * rows].astype(qkv.dtype)
            for row, z in ((0, y), (1, y * y)):
                sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)

    _for_parts(window, run)


def _project_backward(window, *refs):
    """Refs: x, qkv, d_qkv, kernel, d_sums [2, C]; d_x, d_kernel."""
    x, qkv, d_qkv, kernel, d_sums, d_x, d_kernel = refs
    _clear_at_the_start(d_kernel)

    def run(first, rows):
        d, y = (_stack(window, ref, first, rows, window.before) for ref in (d_qkv, qkv))
        seen = join([window.of_axis(first, (rows, 1))] * x.shape[0], 0)
        d = jnp.where(seen, d + d_sums[0:1] + 2.0 * d_sums[1:2] * y, 0.0).astype(x.dtype)
        for channels in _chunks(x.shape[2]):
            z = dot_turned(d, kernel[channels, :]).astype(d_x.dtype)
            for i in range(x.shape[0]):
                d_x[i, _rows(first, rows), channels] = z[i * rows : (i + 1) * rows]
        size = up(len(d), LANES)
        turned = _turn_over(_stack(window, x, first, rows), size).astype(x.dtype)
        d = _pad_rows(d, size)
        for lanes in _chunks(window.channels):
            d_kernel[:, lanes] += dot(turned, d[:, lanes])

    _for_parts(window, run)


class _Gradient:
    """What both backward kernels do with the gradient of x.

    The gradient of x normalised is summed over an axis in a scratch, `total`; at its end goes the gradient of x out,
    added to another if there is one, and so do the sums over the axis that are that of the affine.
    """

    def __init__(self, window, x, affine, d_x, d_affine, total, more=None):
        self.window, self.refs = window, (x, affine, d_x, d_affine, total, more)
        _clear_at_the_start(d_affine)

        @pl.when(pl.program_id(1) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

    def add(self, name, lanes, rows, d):
        self.refs[4][_rows(*rows), self.window.lanes_of(lanes, name)] += d

    def finish(self):
        x, affine, d_x, d_affine, total, more = self.refs

        @pl.when(pl.program_id(1) == self.window.blocks - 1)
        def _():
            size = total.shape[1]
            for lanes in [slice(i, min(i + LANES, size)) for i in range(0, size, LANES)]:
                d, value = total[:, lanes], x[0, :, lanes].astype(jnp.float32)
                value = jnp.where(self.window.of_axis(-self.window.before, value.shape), value, 0.0)
                d_affine[0:1, lanes] += jnp.sum(d * value, 0, keepdims=True)
                d_affine[1:2, lanes] += jnp.sum(d, 0, keepdims=True)
                d = d * affine[0:1, lanes]
                if more is not None:
                    d += more[0, :, lanes].astype(jnp.float32)
                d_x[0, :, lanes] = d.astype(d_x.dtype)


def _backward(window, *refs):
    """One window's gradients; those of tables, affine and scales are summed over the windows.

    Refs: scales, x, d_content, d_position, affine, the tables of both terms, both for a map sheared, of values, flip;
    d_x, d_affine, d of the three tables [D or E, backward], d_scales [terms*H, 128], of which a head's is the sum of a
    row; the scratch of `_Gradient`.
    """
    scales, x, d_content, d_position, affine, *tables, query_back, key_back, value_table, flip = refs[:11]
    d_x, d_affine, d_query, d_key, d_value, d_scales, total = refs[11:]
    by_query, by_key, block = window.of_queries, window.of_keys, pl.program_id(1)
    query_rows, key_rows = window.query_rows(block), window.key_rows(block)
    depth, value_depth, flip = window.depth, window.value_depth, flip[...]
    cast = lambda x: x.astype(window.dtype)
    _clear_at_the_start(d_query, d_key, d_value, d_scales)
    gradient = _Gradient(window, x, affine, d_x, d_affine, total)

    def reversed_and_turned(x, width):
        return _turn_over(reverse(_pad_rows(cast(x), width), len(x), flip), width)

    def upright(parts, reversed_, height):
        """[height, C] of the gradients [D, width] of a group's heads, and of those in reverse."""
        return jnp.transpose(join(parts, 0))[:height] + reverse_turned(cast(join(reversed_, 0)), height, flip)

    @functools.cache
    def logits_of(start):
        """Of a group: `_Logits`, q and k [C, .] in reverse, lists of its heads' d_q and d_k, the same in reverse."""
        lanes = slice(start, start + _group(window.heads, depth))
        q = window.read(x, affine, query_rows, window.lanes_of(lanes, "q"))
        k = window.read(x, affine, key_rows, window.lanes_of(lanes, "k"))
        logits = _Logits(window, q, k, scales, start // depth)
        reversed_ = reversed_and_turned(q, by_key.width), reversed_and_turned(k, by_query.width)
        return logits, reversed_, ([], []), ([], [])

    @functools.cache
    def values_of(start):
        """Of a group: v, d_position, d_content [C, .], d_position the same in reverse, a list of its heads' d_v."""
        lanes = slice(start, start + _group(window.heads, value_depth))
        d1, d2 = (window.read_queries(d, block, lanes) for d in (d_content, d_position))
        turned, reversed_ = _turn_over(d1, by_key.width), reversed_and_turned(d2, by_key.width)
        v = window.read(x, affine, key_rows, window.lanes_of(lanes, "v"))
        return cast(v), cast(d2), turned, reversed_, []

    def run(head):
        lanes, rows = window.part(head, depth)
        value_lanes, value_rows = window.part(head, value_depth)
        logits, (q_reversed, k_reversed), (d_qs, d_ks), (d_qs_reversed, d_ks_reversed) = logits_of(lanes.start)
        scale = [scales[i, head] for i in range(3)]
        w = yield from logits.weigh(rows, scale[0], tables, block)

        v, d2, d1_turned, d2_reversed, d_vs = values_of(value_lanes.start)
        embed = lambda x: cast(_embed(x, value_rows, len(d1_turned)))
        position_term = dot(d2, embed(value_table[...]))
        d_w = dot(v, embed(d1_turned[value_rows]))
        yield
        d_w += _turn_over(by_query.to_map(position_term), by_key.width)[: by_key.height]
        yield
        d_map = _pad_rows(cast(w * (d_w - jnp.sum(w * d_w, 0, keepdims=True))), by_query.width)
        w = _pad_rows(cast(w), by_query.width)
        d_vs.append(dot_turned(cast(d1_turned[value_rows]), w))
        w, of_queries = (reverse_turned(x, by_query.height, flip) for x in (w, d_map))
        of_keys = reverse(d_map, by_key.height, flip)
        d_ks.append(dot_turned(cast(logits.q_turned[rows] * scale[0]), d_map))
        content_term = dot(cast(logits.k_turned[rows]), d_map)
        d_qs.append(content_term * scale[0])
        yield
        w, of_queries = (_pad_rows(cast(by_query.to_offsets(x)), by_key.width) for x in (w, of_queries))
        of_keys = _pad_rows(cast(by_key.to_offsets(of_keys)), by_query.width)
        yield
        d_value[...] += dot(cast(d2_reversed[value_rows]), w)
        d_query[...] += dot(cast(q_reversed[rows] * scale[1]), of_queries)
        d_key[...] += dot(cast(k_reversed[rows] * scale[2]), of_keys)
        query_term, key_term = dot_turned(query_back[...], of_queries), dot_turned(key_back[...], of_keys)
        d_qs_reversed.append(query_term * scale[1])
        d_ks_reversed.append(key_term * scale[2])
        for i, product in enumerate(
            (content_term * logits.q_turned[rows], query_term * q_reversed[rows], key_term * k_reversed[rows])
        ):
            _add(d_scales, i * window.heads + head, product)

        if rows.stop == logits.channels:
            gradient.add("q", lanes, query_rows, upright(d_qs, d_qs_reversed, by_query.height))
            gradient.add("k", lanes, key_rows, upright(d_ks, d_ks_reversed, by_key.height))
        if value_rows.stop == len(d1_turned):
            gradient.add("v", value_lanes, key_rows, jnp.transpose(join(d_vs, 0))[: by_key.height])

    _run_in_step(map(run, range(window.heads)))
    gradient.finish()


class _Terms:
    """The unscaled logits of a group of heads, as their sums want them, relative terms as [queries, offsets]."""

    def __init__(self, window, x, affine, tables, block, lanes):
        self.window, self.tables, self.channels = window, tables, lanes.stop - lanes.start
        query_rows, key_rows = window.query_rows(block), window.key_rows(block)
        self.q = window.read(x, affine, query_rows, window.lanes_of(lanes, "q"))
        self.k = window.read(x, affine, key_rows, window.lanes_of(lanes, "k"))
        own = window.read(x, affine, query_rows, window.lanes_of(lanes, "k")) if window.blocks > 1 else self.k
        self.own = own  # keys where the queries are
        self.q_turned = _turn_over(self.q, window.of_keys.width)
        shape = window.of_keys.height, window.of_keys.width
        self.visible = window.visible(shape, block)
        if self.visible is not None:
            self.visible &= window.of_axis(block * window.queries, shape, 1)

    def products(self, rows):
        """float32 content [keys, queries], query and key term [queries, offsets] of a head."""
        cast = lambda x: x.astype(self.window.dtype)
        embed = lambda x: cast(_embed(x, rows, self.channels))
        relative = zip((self.q, self.own), self.tables)
        return [dot(cast(self.k), embed(self.q_turned[rows])), *(dot(cast(x), embed(t[...])) for x, t in relative)]

    def counted(self, products, counted):
        """Zero where no pair counts."""
        content, *relative = products
        if self.visible is not None:
            content = jnp.where(self.visible, content, 0.0)
        return [content, *(x * counted for x in relative)]


def _sums(window, *refs):
    """One window's part of the sums of the logits and of their squares.

    Refs: x, affine, tables of the query's and of the key's term; sums [2*terms*H, 128], of which a
    number is the sum of a row.
    """
    x, affine, *tables, sums = refs
    _clear_at_the_start(sums)
    block = pl.program_id(1)
    counted = window.counted(block)

    @functools.cache
    def terms_of(start):
        return _Terms(window, x, affine, tables, block, slice(start, start + _group(window.heads, window.depth)))

    def run(head):
        lanes, rows = window.part(head, window.depth)
        logits = terms_of(lanes.start).products(rows)
        yield
        for i, s in enumerate(terms_of(lanes.start).counted(logits, counted)):
            _add(sums, i * window.heads + head, s)
            _add(sums, (3 + i) * window.heads + head, s * s)

    _run_in_step(map(run, range(window.heads)))


def _sums_backward(window, *refs):
    """Adds what comes from the sums of one window to a gradient of x.

    Refs: d_sums [2*terms, H], x, another gradient of x, affine, the tables; d_x, d_affine of the sums alone, d of the
    tables [D, offsets]; the scratch of `_Gradient`.
    """
    d_sums, x, more, affine, *tables, d_x, d_affine, d_query, d_key, total = refs
    by_query, by_key, block = window.of_queries, window.of_keys, pl.program_id(1)
    query_rows, key_rows = window.query_rows(block), window.key_rows(block)
    cast = lambda x: x.astype(window.dtype)
    _clear_at_the_start(d_query, d_key)
    gradient = _Gradient(window, x, affine, d_x, d_affine, total, more)
    counted = window.counted(block)

    @functools.cache
    def terms_of(start):
        """Of a group: `_Terms`, its keys turned, those where the queries are, lists of d_q, d_k and of these."""
        lanes = slice(start, start + _group(window.heads, window.depth))
        terms = _Terms(window, x, affine, tables, block, lanes)
        return terms, *(_turn_over(y, up(len(y), LANES)) for y in (terms.k, terms.own)), [], [], []

    def run(head):
        lanes, rows = window.part(head, window.depth)
        terms, k_turned, own_turned, d_qs, d_ks, d_owns = terms_of(lanes.start)
        products = terms.products(rows)
        yield
        d = [d_sums[i, head] + 2.0 * d_sums[3 + i, head] * s for i, s in enumerate(products)]
        d = [_pad_rows(cast(x), up(len(x), LANES)) for x in terms.counted(d, counted)]
        yield
        d_qs.append(dot(cast(k_turned[rows]), d[0]) + dot_turned(tables[0][...], d[1]))
        d_ks.append(dot_turned(cast(terms.q_turned[rows]), d[0]))
        d_owns.append(dot_turned(tables[1][...], d[2]))
        d_query[...] += dot(cast(terms.q_turned[rows]), d[1])
        d_key[...] += dot(cast(own_turned[rows]), d[2])
        if rows.stop == terms.channels:
            upright = lambda parts, height: jnp.transpose(join(parts, 0))[:height]
            gradient.add("q", lanes, query_rows, upright(d_qs, by_query.height))
            gradient.add("k", lanes, key_rows, upright(d_ks, by_key.height))
            gradient.add("k", lanes, query_rows, upright(d_owns, by_query.height))

    _run_in_step(map(run, range(window.heads)))
    gradient.finish()


# === The calls ===


def _run(kernel, window, interpret, scalars, arrays, small, outputs, sums, scratch=(), in_windows=True):
    """Runs a kernel in a program for each window of each axis, or for each axis.

    Args:
        arrays, outputs: arrays [A, ., .], and the shapes of such: a program has of those of `length` rows its window's
            queries, or the axis in whole parts, and all rows of the others.
        small, sums: arrays, and the shapes of such, of which every program has all.
        scratch: shapes of what the programs of an axis share.
    """

    def of_axis(x):
        if x.shape[1] != window.length:
            return pl.BlockSpec((1, window.rows, x.shape[2]), lambda a, b: (a, 0, 0))
        height = window.of_queries.height if in_windows else _parts(window)[0] * _parts(window)[1]
        return pl.BlockSpec((1, height, x.shape[2]), lambda a, b: (a, b, 0))

    all_of = lambda x: pl.BlockSpec(x.shape, lambda a, b: (0,) * len(x.shape))
    axes = arrays[0].shape[0]
    abreast, blocks = (1, window.blocks) if in_windows else (_abreast(window, axes), 1)

    def of_axis(x):
        if x.shape[1] != window.length:
            return pl.BlockSpec((abreast, window.rows, x.shape[2]), lambda a, b: (a, 0, 0))
        height = window.of_queries.height if in_windows else math.prod(_parts(window))
        return pl.BlockSpec((abreast, height, x.shape[2]), lambda a, b: (a, b, 0))

    all_of = lambda x: pl.BlockSpec(x.shape, lambda a, b: (0,) * len(x.shape))
    axes, blocks = arrays[0].shape[0], window.blocks if in_windows else 1
    return pl.pallas_call(
        functools.partial(kernel, window),
        name=f"attend_{axes // abreast * blocks}_programs",  # which the compiled program does not say elsewhere
        grid=(axes // abreast, blocks),
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


def _turned(window, rows, *names):
    """Tables' rows [offsets, D] as the kernels want them, [D, offsets]."""
    return [rows[name].T.astype(window.dtype) for name in names]


def _flip(window):
    """What reverses a tile's rows."""
    return jnp.eye(LANES, dtype=window.dtype)[::-1]


def _float(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call_project(window, interpret, x, kernel):
    """qkv [A, ., C], and the sums of it and of its squares [2, C]: of x [A, length, .] and kernel [., C]."""
    rows = window.length if window.blocks == 1 else window.rows
    qkv = jax.ShapeDtypeStruct((x.shape[0], rows, window.channels), window.dtype)
    return _run(_project, window, interpret, [], [x], [kernel], [qkv], [_float(2, window.channels)], in_windows=False)


def _call_project_backward(window, interpret, x, qkv, d_qkv, kernel, d_sums):
    """d_x and d_kernel."""
    sums = [_float(*kernel.shape)]
    arrays = [x, qkv, d_qkv]
    return _run(_project_backward, window, interpret, [], arrays, [kernel, d_sums], [x], sums, in_windows=False)


def _call_sums(window, interpret, x, affine, rows):
    """Sums of the logits and of their squares, [2*terms*H, 128]: of x [A, ., C] and affine [2, C]."""
    tables = _turned(window, rows, "query", "key_sums")
    return _run(_sums, window, interpret, [], [x], [affine, *tables], [], [_float(6 * window.heads, LANES)])[0]


def _call_sums_backward(window, interpret, d_sums, x, more, affine, rows):
    """d_x, d_affine, d of the rows 'query' and 'key_sums' [D, offsets]: d_sums is [2*terms, H], `more` added to d_x."""
    tables = _turned(window, rows, "query", "key_sums")
    sums = [_float(*affine.shape), *(_float(*table.shape) for table in tables)]
    scratch = [(window.rows, window.channels)]
    return _run(_sums_backward, window, interpret, [d_sums], [x, more], [affine, *tables], [x], sums, scratch)


def _call_forward(window, interpret, scales, x, affine, rows):
    """Content and position [A, ., H*E], and the sums of both and of their squares, [4, H*E]; scales is [terms, H]."""
    size = window.heads * window.value_depth
    output = jax.ShapeDtypeStruct((x.shape[0], window.length, size), window.dtype)
    small = [affine, *_turned(window, rows, "query", "key", "value_back"), _flip(window)]
    return _run(_forward, window, interpret, [scales], [x], small, [output] * 2, [_float(4, size)])


def _call_backward(window, interpret, scales, x, affine, d, rows):
    """d_x, d_affine, d of the rows '_back' of the three tables [D or E, offsets], of scales [terms*H, 128]."""
    small = [affine, *_turned(window, rows, "query", "key", "query_back", "key_back", "value"), _flip(window)]
    shapes = [rows[name].shape[::-1] for name in ("query_back", "key_back", "value_back")]
    sums = [_float(*shape) for shape in (affine.shape, *shapes, (3 * window.heads, LANES))]
    scratch = [(window.rows, window.channels)]
    return _run(_backward, window, interpret, [scales], [x, *d], small, [x], sums, scratch)


def _as_tensorflow(function, window, interpret):
    """A function of arrays as one of tensors; the check left out would refuse to trace for a TPU elsewhere."""
    return jax2tf.convert(
        functools.partial(function, window, interpret),
        with_gradient=False,
        native_serialization_platforms=("cpu" if interpret else "tpu",),
        native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
    )


def _window(x, kernel, heads, value_channels, windows):
    depth = (kernel.shape[1] - value_channels) // 2 // heads
    return _Window(windows.length, windows.reach, heads, depth, value_channels // heads, x.dtype.name)


def can_attend(x, kernel, heads, value_channels, tables, windows, terms):
    """Whether the kernels serve `attend` with these arguments: static shapes, all terms, windows of one axis."""
    if not (x.shape.is_fully_defined() and len(terms) == len(tables) == 3 and isinstance(windows, Windows)):
        return False
    window = _window(x, kernel, heads, value_channels, windows)
    depths = window.depth, window.value_depth
    whole_groups = all(heads * depth % _group(heads, depth) == 0 for depth in depths)
    # The projection's kernel and its gradient, and one of each on its way.
    fits = 2 * (x.dtype.size + 4) * kernel.shape.num_elements() < 0.7 * FAST_MEMORY
    return whole_groups and fits and window.keys <= LONGEST


def attend(x, kernel, heads, value_channels, tables, windows, normalise, logit_scales, interpret=False):
    """What a layer of `axial.layers.attention` computes but for its output norms, where `can_attend`.

    Args:
        x: [N, h, w, C].
        kernel: [C, 2 H*D + value_channels], the projection to q, k and v.
        heads: H.
        tables, windows: as of `axial.layers.attend.attend`.
        normalise: function that returns what the norm of q, k and v multiplies by and adds, [2, .], from the sums
            [2, .] of these and of their squares.
        logit_scales: function that returns the scales [terms, H] from the sums [terms, H, 2] of s and of s^2.
        interpret: whether jax computes it on a processor, slowly.

    Returns:
        sum_p w v_p and sum_p w r^v_{p-o}, both [N, h, w, value_channels], and of both the sums over all pixels, and of
        their squares, float32 [2, 2, value_channels].
    """
    window = _window(x, kernel, heads, value_channels, windows)
    length, abreast = window.length, windows.abreast
    call = lambda function, *args: _as_tensorflow(function, window, interpret)(*args)

    def open_(x):
        """[N, h, w, C] -> [A, length, C]."""
        x = tf.reshape(windows.whole(x), [-1, length, abreast, x.shape[3]])
        return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, length, x.shape[3]])

    def close(x):
        x = tf.reshape(x, [-1, abreast, length, x.shape[2]])
        return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, windows.height, windows.width, x.shape[3]])

    def align(x):
        """[., channels of q, k and v], each in whole tiles."""
        parts = tf.split(x, window.sizes, 1)
        return tf.concat([tf.pad(part, [[0, 0], [0, -part.shape[1] % LANES]]) for part in parts], 1)

    def unalign(x):
        parts = tf.split(x, [up(size, LANES) for size in window.sizes], 1)
        return tf.concat([part[:, :size] for part, size in zip(parts, window.sizes)], 1)

    rows = {
        name: table_rows(tables[name.removesuffix("_back").removesuffix("_sums")], offsets)
        for name, offsets in window.offsets().items()
    }

    def gradients_of_rows(**found):
        """In the order of rows: of a table's rows at other offsets all of the gradient is in those found."""
        return [tf.transpose(found[name]) if name in found else tf.zeros_like(x) for name, x in sorted(rows.items())]

    @tf.custom_gradient
    def project(x, kernel):
        qkv, sums = call(_call_project, x, kernel)

        def gradient(d_qkv, d_sums):
            return call(_call_project_backward, x, qkv, d_qkv, kernel, d_sums)

        return (qkv, sums), gradient

    @tf.custom_gradient
    def logit_sums(x, affine, *rows_):
        """Sums, and x: what comes back for x is added to here."""
        rows_ = tf.nest.pack_sequence_as(rows, rows_)

        def gradient(d_sums, more):
            d_sums = tf.reshape(tf.transpose(d_sums, [2, 0, 1]), [-1, heads])
            d_x, d_affine, d_query, d_key = call(_call_sums_backward, d_sums, x, more, affine, rows_)
            return d_x, d_affine, *gradients_of_rows(query=d_query, key_sums=d_key)

        sums = tf.reshape(tf.reduce_sum(call(_call_sums, x, affine, rows_), 1), [2, -1, heads])
        return (tf.transpose(sums, [1, 2, 0]), tf.identity(x)), gradient

    @tf.custom_gradient
    def outputs(x, affine, scales, *rows_):
        rows_ = tf.nest.pack_sequence_as(rows, rows_)
        content, position, sums = call(_call_forward, scales, x, affine, rows_)

        def gradient(d_content, d_position, d_sums):
            def whole(d, y, d_sums):
                d = tf.cast(d, tf.float32) + d_sums[0] + 2.0 * d_sums[1] * tf.cast(y, tf.float32)
                return tf.cast(d, y.dtype)

            d = whole(d_content, content, d_sums[:2]), whole(d_position, position, d_sums[2:])
            d_x, d_affine, *d_rows, d_scales = call(_call_backward, scales, x, affine, d, rows_)
            d_scales = tf.reshape(tf.reduce_sum(d_scales, 1), [-1, heads])
            d_rows = dict(zip(("query_back", "key_back", "value_back"), d_rows))
            return d_x, d_affine, d_scales, *gradients_of_rows(**d_rows)

        return (content, position, sums), gradient

    flat = tf.nest.flatten(rows)
    qkv, sums = project(open_(x), align(kernel))
    affine = align(normalise(unalign(sums)))
    sums, qkv = logit_sums(qkv, affine, *flat)
    content, position, sums = outputs(qkv, affine, logit_scales(sums), *flat)
    return close(content), close(position), tf.reshape(sums, [2, 2, -1])
