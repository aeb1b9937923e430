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

from axial.layers.shear import LANES, SUBLANES, Shear, dot, dot_turned, join, tiles, up
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
        """The slice of a head's group among all lanes, and the slice of the head's channels in it."""
        lanes = _group(self.heads, depth)
        start = head * depth // lanes * lanes
        first = head * depth - start
        return slice(start, start + lanes), slice(first, first + depth)

    def last(self, rows, depth):
        """Whether a head is the last of its group."""
        return rows.stop == _group(self.heads, depth)


class _Logits:
    """What w of a group of heads is made of.

    Attributes:
        q_turned, k_turned: float32 [C, width].
    """

    def __init__(self, window, q, k, scales, heads):
        """q, k: float32 [height, C]; scales: ref [terms, H]; heads: the group's, a range."""
        self.window = window
        by_query, by_key = window.of_queries, window.of_keys
        lane = lax.broadcasted_iota(jnp.int32, (1, q.shape[1]), 1)

        def scaled(x, term):
            of_lane = jnp.zeros(lane.shape, jnp.float32)
            for i, head in enumerate(heads):
                of_lane = jnp.where(lane >= i * window.depth, scales[term, head], of_lane)
            return (x * of_lane).astype(window.dtype)

        self.k, self.k_scaled, self.q_scaled = k.astype(window.dtype), scaled(k, 2), scaled(q, 1)
        self.q_turned, self.k_turned = _turn_over(q, by_key.width), _turn_over(k, by_query.width)

    def weigh(self, rows, scale, tables, block):
        """w [keys, queries] of the head of some rows of C, of which `scale` is that of the content term."""
        window = self.window
        by_query, by_key, channels = window.of_queries, window.of_keys, self.k.shape[1]
        embed = lambda x: _embed(x, rows, channels).astype(window.dtype)
        logits = dot(self.k, embed(self.q_turned[rows] * scale))
        logits += by_key.to_map(dot(self.k_scaled, embed(tables[1][...])))
        by_row = by_query.to_map(dot(self.q_scaled, embed(tables[0][...])))  # [queries, keys]
        logits += _turn_over(by_row, by_key.width)[: by_key.height]
        logits = window.mask(logits, block)
        w = jnp.exp(logits - jnp.max(logits, 0, keepdims=True))
        return w * (1.0 / jnp.sum(w, 0, keepdims=True))


def _pad_rows(x, rows):
    if x.shape[0] == rows:
        return x
    return jnp.concatenate([x, jnp.zeros((rows - x.shape[0], x.shape[1]), x.dtype)], 0)


def _turn_over(x, rows):
    """The transpose of [R, C], R padded to `rows`."""
    return jnp.transpose(_pad_rows(x, rows))


def _embed(x, rows, channels):
    """A head's [D, .] among the rows of its group, [C, .], of which all others are zero: [., C] of all heads times this
    is the head's alone."""
    parts = [jnp.zeros((n, x.shape[1]), x.dtype) for n in (rows.start, channels - rows.stop)]
    return join([part for part in (parts[0], x, parts[1]) if part.shape[0]], 0)


def _forward(window, *refs):
    """One window's outputs. Refs: scales, q, k, v, the tables of both terms, of values, `_flip`; outputs."""
    scales, q, k, v, *tables, value_table, flip, content, position = refs
    by_query, by_key, dtype, block = window.of_queries, window.of_keys, window.dtype, pl.program_id(1)
    flip = flip[: by_query.height]
    for head in range(window.heads):
        lanes, rows = window.part(head, window.depth)
        if rows.start == 0:
            heads = range(head, head + _group(window.heads, window.depth) // window.depth)
            logits = _Logits(window, window.queries_in(q, block, lanes), window.keys_in(k, block, lanes), scales, heads)
        w = _pad_rows(logits.weigh(rows, scales[0, head], tables, block), by_query.width).astype(dtype)
        lanes, rows = window.part(head, window.value_depth)
        if rows.start == 0:
            v_turned = _turn_over(window.keys_in(v, block, lanes), by_query.width)
            contents, positions = [], []
        contents.append(dot(v_turned[rows].astype(dtype), w))  # [E, queries]
        sheared = by_query.to_offsets(dot_turned(flip, w)).astype(dtype)
        positions.append(dot_turned(value_table[...], _pad_rows(sheared, by_key.width)))
        if window.last(rows, window.value_depth):
            content[0, :, lanes] = jnp.transpose(join(contents, 0))[: by_query.height].astype(dtype)
            position[0, :, lanes] = dot_turned(flip, join(positions, 0).astype(dtype)).astype(dtype)


def _backward(window, *refs):
    """One window's gradients; those of tables and scales are summed over the windows.

    Refs: scales, q, k, v, d_content, d_position, the tables of both terms, both for a map sheared, of values, `_flip`
    of queries and of keys; d_q, d_k, d_v, d of the three tables [D or E, backward], d_scales [3*H, 128], a lane's part
    each; where an axis has several windows, float32 sums of d_k and d_v.
    """
    scales, q, k, v, d_content, d_position, *refs = refs
    tables, (query_back, key_back, value_table, flip_queries, flip_keys), refs = refs[:2], refs[2:7], refs[7:]
    d_q, d_k, d_v, d_query, d_key, d_value, d_scales, *sums = refs
    block = pl.program_id(1)
    by_query, by_key, dtype, depth = window.of_queries, window.of_keys, window.dtype, window.depth
    cast = lambda x: x.astype(dtype)

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
            gradient[0, :, lanes] = x.astype(dtype)
        else:
            total[window.rows_of(block), lanes] += x[: window.keys]

    def upright(parts, flipped, flip, height):
        """[height, C] of a group's [D, width], and of those in reverse."""
        return jnp.transpose(join(parts, 0))[:height] + dot_turned(flip[:height], cast(join(flipped, 0)))

    sum_k, sum_v = sums or (None, None)

    for head in range(window.heads):
        value_lanes, value_rows = window.part(head, window.value_depth)
        if value_rows.start == 0:
            v_group = cast(window.keys_in(v, block, value_lanes))
            d1, d2 = (window.queries_in(d, block, value_lanes) for d in (d_content, d_position))
            d1_turned, d2_turned = _turn_over(d1, by_key.width), _turn_over(d2, by_key.width)
            d2_flipped = dot(cast(d2_turned), flip_queries[...])
            d2, d_vs = cast(d2), []
        lanes, rows = window.part(head, depth)
        if rows.start == 0:
            heads = range(head, head + _group(window.heads, depth) // depth)
            q_group, k_group = window.queries_in(q, block, lanes), window.keys_in(k, block, lanes)
            logits = _Logits(window, q_group, k_group, scales, heads)
            q_flipped = dot(cast(logits.q_turned), flip_queries[...])
            k_flipped = dot(cast(logits.k_turned), flip_keys[...])
            d_qs, d_qs_flipped, d_ks, d_ks_flipped = [], [], [], []
        scale = [scales[i, head] for i in range(3)]
        w = logits.weigh(rows, scale[0], tables, block)

        channels = v_group.shape[1]
        by_row = by_query.to_map(dot(d2, cast(_embed(value_table[...], value_rows, channels))))
        d_w = _turn_over(by_row, by_key.width)[: by_key.height]
        d_w += dot(v_group, cast(_embed(d1_turned[value_rows], value_rows, channels)))
        d_logits = _pad_rows(cast(w * (d_w - jnp.sum(w * d_w, 0, keepdims=True))), by_query.width)
        w = _pad_rows(cast(w), by_query.width)

        d_vs.append(dot_turned(cast(d1_turned[value_rows]), w))
        flipped = lambda x: _pad_rows(cast(by_query.to_offsets(dot_turned(flip_queries[: by_query.height], x))), by_key.width)
        d_value[...] += dot(cast(d2_flipped[value_rows]), flipped(w))

        q_head, k_head = logits.q_turned[rows], logits.k_turned[rows]
        d_ks.append(dot_turned(cast(q_head * scale[0]), d_logits))
        sheared = flipped(d_logits)
        d_query[...] += dot(cast(q_flipped[rows] * scale[1]), sheared)
        of_keys = cast(by_key.to_offsets(dot(flip_keys[: by_key.height], d_logits)))
        of_keys = _pad_rows(of_keys, by_query.width)
        d_key[...] += dot(cast(k_flipped[rows] * scale[2]), of_keys)

        terms = dot(cast(k_head), d_logits), dot_turned(query_back[...], sheared), dot_turned(key_back[...], of_keys)
        for i, (term, x) in enumerate(zip(terms, (q_head, q_flipped[rows], k_flipped[rows]))):
            row = slice(i * window.heads + head, i * window.heads + head + 1)
            d_scales[row] += sum(tiles(jnp.sum(term * x, 0, keepdims=True)))
        d_qs.append(terms[0] * scale[0])
        d_qs_flipped.append(terms[1] * scale[1])
        d_ks_flipped.append(terms[2] * scale[2])

        if window.last(rows, depth):
            d_q[0, :, lanes] = cast(upright(d_qs, d_qs_flipped, flip_queries, by_query.height))
            add_to_keys(d_k, sum_k, lanes, upright(d_ks, d_ks_flipped, flip_keys, by_key.height))
        if window.last(value_rows, window.value_depth):
            add_to_keys(d_v, sum_v, value_lanes, jnp.transpose(join(d_vs, 0))[: by_key.height])

    if sums:

        @pl.when(block == window.blocks - 1)
        def _():
            d_k[0], d_v[0] = sum_k[...].astype(dtype), sum_v[...].astype(dtype)


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


def _flip(shear, dtype):
    """[n, n] that reverses the rows of a map [height, .], n being height in whole tiles."""
    size = up(shear.height, LANES)
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return (row + column == shear.height - 1).astype(dtype)


def _turned(window, rows, names):
    """Tables' rows [offsets, D] as the kernels want them: [D, offsets]."""
    return [rows[name].T.astype(window.dtype) for name in names]


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
    return _run(_forward, window, interpret, scales, arrays, [*tables, _flip(window.of_queries, window.dtype)], [output] * 2)


def _gradients(window, interpret, scales, arrays, d, rows):
    """Gradients for q, k, v, for the rows '_back' of the three tables [D or E, offsets], for scales [terms*H, 128].

    Args:
        d: gradients of the outputs; all others as of `_outputs`.
    """
    k, v = arrays[1:]
    tables = _turned(window, rows, ("query", "key", "query_back", "key_back", "value"))
    flips = [_flip(shear, window.dtype) for shear in (window.of_queries, window.of_keys)]
    shapes = [rows[name].shape[::-1] for name in ("query_back", "key_back", "value_back")]
    sums = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, (3 * window.heads, LANES))]
    outputs = [jax.ShapeDtypeStruct(x.shape, window.dtype) for x in arrays]
    scratch = [k.shape[1:], v.shape[1:]] if window.blocks > 1 else []
    return _run(_backward, window, interpret, scales, [*arrays, *d], [*tables, *flips], outputs, sums, scratch)


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
