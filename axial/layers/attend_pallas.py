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
        return self.length if self.blocks == 1 else up(self.queries + 2 * self.reach, SUBLANES)

    @property
    def before(self):
        """Keys of a window before its first query."""
        return 0 if self.blocks == 1 else self.reach

    @property
    def padded(self):
        """Keys of an axis as the kernels want them: zeros around those of several windows."""
        return self.length if self.blocks == 1 else (self.blocks - 1) * self.queries + self.keys

    @property
    def of_queries(self):
        return Shear(self.queries, self.keys)

    @property
    def of_keys(self):
        return Shear(self.keys, self.queries)

    def offsets(self):
        """dict of the offsets key - query of the tables' rows: for products to become maps, and '_back' of maps sheared."""
        q, k = self.of_queries, self.of_keys
        return {
            "query": q.forward - self.before,
            "key": -k.forward - self.before,
            "value": q.forward - self.before,
            "query_back": q.backward - self.before,
            "key_back": -k.backward - self.before,
            "value_back": q.backward - self.before,
        }

    def mask(self, logits, block):
        """`MASKED` where a key is beyond the axis or out of reach."""
        key, query = (lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
        visible = []
        if self.reach < self.length - 1:
            visible += [key - query >= self.before - self.reach, key - query <= self.before + self.reach]
        if self.blocks > 1:
            position = key + (block * self.queries - self.before)
            visible += [position >= 0, position < self.length]
        elif self.keys < logits.shape[0]:
            visible += [key < self.keys]
        return jnp.where(functools.reduce(jnp.logical_and, visible), logits, MASKED) if visible else logits

    def queries_in(self, ref, block, lanes):
        """float32 [height, lanes] of a ref of one window's queries, zero beyond the axis, where anything may be."""
        x = ref[0, :, lanes].astype(jnp.float32)
        row = lax.broadcasted_iota(jnp.int32, x.shape, 0) + block * self.queries
        return jnp.where(row < self.length, x, 0.0) if self.length % x.shape[0] else x

    def keys_in(self, ref, block, lanes):
        """float32 [height, lanes] of a window, of a ref of all keys, zero beyond the axis."""
        if self.blocks == 1:
            return self.queries_in(ref, block, lanes)
        return ref[0, self.rows_of(block), lanes].astype(jnp.float32)

    def rows_of(self, block):
        """A window's keys among all, where there are several."""
        return pl.ds(pl.multiple_of(block * self.queries, SUBLANES), self.keys)

    def part(self, head, depth):
        """The slice of a head's group among all lanes, and the slice of the head's channels in the group."""
        lanes = _group(self.heads, depth)
        start = head * depth // lanes * lanes
        first = head * depth - start
        return slice(start, start + lanes), slice(first, first + depth)


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
    parts = [jnp.zeros((n, x.shape[1]), x.dtype) for n in (rows.start, channels - rows.stop)]
    return join([part for part in (parts[0], x, parts[1]) if part.shape[0]], 0)


def _forward(window, *refs):
    """One window's outputs. Refs: scales, q, k, v, the tables of both terms, of values, flip; outputs."""
    scales, q, k, v, *tables, value_table, flip, content, position = refs
    by_query, by_key, block = window.of_queries, window.of_keys, pl.program_id(1)
    height, flip = by_query.height, flip[...]
    cast = lambda x: x.astype(window.dtype)

    @functools.cache
    def logits_of(start):
        lanes = slice(start, start + _group(window.heads, window.depth))
        q_, k_ = window.queries_in(q, block, lanes), window.keys_in(k, block, lanes)
        return _Logits(window, q_, k_, scales, start // window.depth)

    @functools.cache
    def values_of(start):
        """v [C, keys], and where the outputs [E, queries] of the group's heads are put, positions in reverse."""
        lanes = slice(start, start + _group(window.heads, window.value_depth))
        return _turn_over(window.keys_in(v, block, lanes), by_query.width), [], []

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
            content[0, :, lanes] = cast(jnp.transpose(join(contents, 0))[:height])
            position[0, :, lanes] = cast(reverse_turned(cast(join(positions, 0)), height, flip))

    _run_in_step(map(run, range(window.heads)))


def _backward(window, *refs):
    """One window's gradients; those of tables and scales are summed over the windows.

    Refs: scales, q, k, v, d_content, d_position, the tables of both terms, both for a map sheared, of values, flip;
    d_q, d_k, d_v, d of the three tables [D or E, backward], d_scales [terms*H, 128], of which a head's is the sum of a
    row; where an axis has several windows, float32 sums of d_k and d_v.
    """
    scales, q, k, v, d_content, d_position, *tables, query_back, key_back, value_table, flip = refs[:12]
    d_q, d_k, d_v, d_query, d_key, d_value, d_scales, *sums = refs[12:]
    by_query, by_key, block = window.of_queries, window.of_keys, pl.program_id(1)
    depth, value_depth, flip = window.depth, window.value_depth, flip[...]
    cast = lambda x: x.astype(window.dtype)

    @pl.when((pl.program_id(0) == 0) & (block == 0))
    def _():
        for ref in (d_query, d_key, d_value, d_scales):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(block == 0)
    def _():
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    def add_to_keys(gradient, total, lanes, x):
        if total is None:
            gradient[0, :, lanes] = cast(x)
        else:
            total[window.rows_of(block), lanes] += x

    sum_k, sum_v = sums or (None, None)

    def reversed_and_turned(x, width):
        return _turn_over(reverse(_pad_rows(cast(x), width), len(x), flip), width)

    def upright(parts, reversed_, height):
        """[height, C] of the gradients [D, width] of a group's heads, and of those in reverse."""
        return jnp.transpose(join(parts, 0))[:height] + reverse_turned(cast(join(reversed_, 0)), height, flip)

    @functools.cache
    def logits_of(start):
        """Of a group: `_Logits`, q and k [C, .] in reverse, lists of its heads' d_q and d_k, the same in reverse."""
        lanes = slice(start, start + _group(window.heads, depth))
        q_, k_ = window.queries_in(q, block, lanes), window.keys_in(k, block, lanes)
        logits = _Logits(window, q_, k_, scales, start // depth)
        reversed_ = reversed_and_turned(q_, by_key.width), reversed_and_turned(k_, by_query.width)
        return logits, reversed_, ([], []), ([], [])

    @functools.cache
    def values_of(start):
        """Of a group: v, d_position, d_content [C, .], d_position the same in reverse, a list of its heads' d_v."""
        lanes = slice(start, start + _group(window.heads, value_depth))
        d1, d2 = (window.queries_in(d, block, lanes) for d in (d_content, d_position))
        turned, reversed_ = _turn_over(d1, by_key.width), reversed_and_turned(d2, by_key.width)
        return cast(window.keys_in(v, block, lanes)), cast(d2), turned, reversed_, []

    def run(head):
        lanes, rows = window.part(head, depth)
        value_lanes, value_rows = window.part(head, value_depth)
        logits, (q_reversed, k_reversed), (d_qs, d_ks), (d_qs_reversed, d_ks_reversed) = logits_of(lanes.start)
        scale = [scales[i, head] for i in range(3)]
        w = yield from logits.weigh(rows, scale[0], tables, block)

        v_group, d2, d1_turned, d2_reversed, d_vs = values_of(value_lanes.start)
        embed = lambda x: cast(_embed(x, value_rows, len(d1_turned)))
        position_term = dot(d2, embed(value_table[...]))
        d_w = dot(v_group, embed(d1_turned[value_rows]))
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
            row = slice(i * window.heads + head, i * window.heads + head + 1)
            d_scales[row] += sum(tiles(jnp.sum(product, 0, keepdims=True)))

        if rows.stop == logits.channels:
            d_q[0, :, lanes] = cast(upright(d_qs, d_qs_reversed, by_query.height))
            add_to_keys(d_k, sum_k, lanes, upright(d_ks, d_ks_reversed, by_key.height))
        if value_rows.stop == len(d1_turned):
            add_to_keys(d_v, sum_v, value_lanes, jnp.transpose(join(d_vs, 0))[: by_key.height])

    _run_in_step(map(run, range(window.heads)))

    if sums:

        @pl.when(block == window.blocks - 1)
        def _():
            d_k[0], d_v[0] = cast(sum_k[...]), cast(sum_v[...])


# === The calls ===


def _run(kernel, window, interpret, scales, arrays, tables, outputs, sums=(), scratch=()):
    """Runs a kernel in a program for each window of each axis.

    Args:
        arrays, outputs: arrays [A, length or padded, .], and the shapes of such: a program has a window of those of
            length, as of queries, and the whole axis of the others, as of keys.
        tables, sums: arrays, and the shapes of such, of which every program has all.
        scratch: shapes of what the programs of an axis share.
    """

    def of_axis(x):
        if x.shape[1] == window.length:
            return pl.BlockSpec((1, window.of_queries.height, x.shape[2]), lambda a, b: (a, b, 0))
        return pl.BlockSpec((1, *x.shape[1:]), lambda a, b: (a, 0, 0))

    all_of = lambda x: pl.BlockSpec(x.shape, lambda a, b: (0,) * len(x.shape))
    axes = arrays[0].shape[0]
    return pl.pallas_call(
        functools.partial(kernel, window),
        name=f"attend_{axes * window.blocks}_programs",  # which the compiled program does not say elsewhere
        grid=(axes, window.blocks),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *map(of_axis, arrays), *map(all_of, tables)],
        out_specs=[*map(of_axis, outputs), *map(all_of, sums)],
        out_shape=[*outputs, *sums],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=FAST_MEMORY
        ),
        interpret=interpret,
    )(scales, *arrays, *tables)


def _turned(window, rows, names):
    """Tables' rows [offsets, D] as the kernels want them, [D, offsets], and what reverses a tile's rows."""
    return [*(rows[name].T.astype(window.dtype) for name in names), jnp.eye(LANES, dtype=window.dtype)[::-1]]


def _outputs(window, interpret, scales, arrays, rows):
    """Outputs [A, length, H*E].

    Args:
        scales: [terms, H].
        arrays: q [A, length, H*D], k [A, padded, H*D], v [A, padded, H*E].
        rows: dict of the tables' rows at `window.offsets()`.
    """
    q, _, v = arrays
    output = jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), window.dtype)
    tables = _turned(window, rows, ("query", "key", "value_back"))
    return _run(_forward, window, interpret, scales, arrays, tables, [output] * 2)


def _gradients(window, interpret, scales, arrays, d, rows):
    """Gradients for q, k, v, for the rows '_back' of the three tables [D or E, offsets], for scales [terms*H, 128].

    Args:
        d: gradients of the outputs; all others as of `_outputs`.
    """
    k, v = arrays[1:]
    tables = _turned(window, rows, ("query", "key", "query_back", "key_back", "value"))
    shapes = [rows[name].shape[::-1] for name in ("query_back", "key_back", "value_back")]
    sums = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, (3 * window.heads, LANES))]
    outputs = [jax.ShapeDtypeStruct(x.shape, window.dtype) for x in arrays]
    scratch = [k.shape[1:], v.shape[1:]] if window.blocks > 1 else []
    return _run(_backward, window, interpret, scales, [*arrays, *d], tables, outputs, sums, scratch)


def _as_tensorflow(function, window, interpret):
    """A function of arrays as one of tensors; the check left out would refuse to trace for a TPU elsewhere."""
    return jax2tf.convert(
        functools.partial(function, window, interpret),
        with_gradient=False,
        native_serialization_platforms=("cpu" if interpret else "tpu",),
        native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
    )


def _window(q, v, heads, windows):
    depths = [x.shape[3] // heads for x in (q, v)]
    return _Window(windows.length, windows.reach, heads, *depths, v.dtype.name)


def can_attend(q, v, heads, tables, windows, terms):
    """Whether the kernels serve `attend` with these arguments: static shapes, all terms, windows of one axis."""
    if not (q.shape.is_fully_defined() and len(terms) == len(tables) == 3 and isinstance(windows, Windows)):
        return False
    depths = [x.shape[3] // heads for x in (q, v)]
    whole_groups = all(heads * depth % _group(heads, depth) == 0 for depth in depths)
    return whole_groups and _window(q, v, heads, windows).keys <= LONGEST


def attend(q, k, v, heads, tables, windows, scales, interpret=False):
    """The sums of `axial.layers.attend.attend`, where `can_attend` and scales are a dict.

    Args:
        interpret: whether jax computes it on a processor, slowly.
    """
    window = _window(q, v, heads, windows)
    length, abreast = window.length, windows.abreast

    def open_(x):
        """[N, h, w, C] -> [A, length, C]."""
        x = tf.reshape(windows.whole(x), [-1, length, abreast, x.shape[3]])
        return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, length, x.shape[3]])

    def close(x):
        x = tf.reshape(x, [-1, abreast, length, x.shape[2]])
        return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, windows.height, windows.width, x.shape[3]])

    def pad(x):
        after = window.padded - window.before - length
        return tf.pad(x, [[0, 0], [window.before, after], [0, 0]]) if window.blocks > 1 else x

    def unpad(x):
        return x[:, window.before : window.before + length]

    rows = {
        name: table_rows(tables[name.removesuffix("_back")], offsets) for name, offsets in window.offsets().items()
    }
    scales = tf.stack([scales.get(term, tf.ones([heads])) for term in ("content", "query", "key")])

    @tf.custom_gradient
    def run(q, k, v, scales, *rows_):
        rows_ = tf.nest.pack_sequence_as(rows, rows_)
        arrays = open_(q), pad(open_(k)), pad(open_(v))
        outputs = _as_tensorflow(_outputs, window, interpret)(scales, arrays, rows_)

        def gradient(*d):
            d_q, d_k, d_v, *d_rows, d_scales = _as_tensorflow(_gradients, window, interpret)(
                scales, arrays, [open_(x) for x in d], rows_
            )
            found = dict(zip(("query_back", "key_back", "value_back"), map(tf.transpose, d_rows)))
            d_scales = tf.reduce_sum(tf.reshape(d_scales, [3, heads, -1]), 2)
            return (
                *(close(d_q), close(unpad(d_k)), close(unpad(d_v)), d_scales),
                # The same rows in another order: all of a table's gradient is in these.
                *(found.get(name, tf.zeros_like(x)) for name, x in sorted(rows_.items())),
            )

        return [close(x) for x in outputs], gradient

    return run(q, k, v, tf.cast(scales, tf.float32), *tf.nest.flatten(rows))
