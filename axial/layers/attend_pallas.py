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

from axial.layers.shear import LANES, SUBLANES, Shear, dot, join, up
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

    Without a span, or where the axis fills no more than a tile, a window is the axis. Otherwise a window has as many
    queries as leave whole tiles of keys around them, and its keys are read where they lie in the axis.

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
    def _between(self):
        """Queries of a window among others."""
        return (up(2 * self.reach + SUBLANES, LANES) - 2 * self.reach) // SUBLANES * SUBLANES

    @property
    def blocks(self):
        """Windows of an axis."""
        if self.length <= LANES or self.reach >= self.length - 1:
            return 1
        return -(-self.length // self._between)

    @property
    def queries(self):
        return self.length if self.blocks == 1 else self._between

    @property
    def keys(self):
        return self.length if self.blocks == 1 else up(self.queries + 2 * self.reach, LANES)

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
        query, key = (lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
        visible = []
        if self.reach < self.length - 1:
            visible += [key - query >= self.before - self.reach, key - query <= self.before + self.reach]
        if self.blocks > 1:
            position = key + (block * self.queries - self.before)
            visible += [position >= 0, position < self.length]
        elif self.keys < logits.shape[1]:
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
        """The slice of a head's group among all lanes, and the head's first lane in it."""
        lanes = _group(self.heads, depth)
        start = head * depth // lanes * lanes
        return slice(start, start + lanes), head * depth - start

    def pick(self, x, first, depth, scale=1.0):
        """float32 [., C] of one head, scaled, all else zero."""
        lane = lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
        return x * jnp.where((lane >= first) & (lane < first + depth), scale, 0.0)

    def weigh(self, q, k_turned, k, scales, tables, block, first):
        """w [height, width] of a head.

        Args:
            q, k: float32 [height, C] and [., C] of its group.
            k_turned: [C, width].
            scales: of the three terms.
            tables: refs of [C, forward], of the queries' and keys' terms.
            block: number of the window.
            first: of the head's lanes.
        """
        pick = lambda x, i: self.pick(x, first, self.depth, scales[i]).astype(self.dtype)
        by_query, by_key = self.of_queries, self.of_keys
        logits = dot(pick(q, 0), k_turned) + by_query.to_map(dot(pick(q, 1), tables[0][...]))
        turned = by_key.to_map(dot(pick(k, 2), tables[1][...]))  # [keys, queries]
        logits += _turn_over(turned, by_query.width)[: by_query.height]
        logits = self.mask(logits, block)
        w = jnp.exp(logits - jnp.max(logits, 1, keepdims=True))
        return w * (1.0 / jnp.sum(w, 1, keepdims=True))


def _pad_rows(x, rows):
    if x.shape[0] == rows:
        return x
    return jnp.concatenate([x, jnp.zeros((rows - x.shape[0], x.shape[1]), x.dtype)], 0)


def _turn_over(x, rows=None):
    """The transpose of [R, C], of C a multiple of 128 and R padded to `rows`, one too."""
    return jnp.transpose(_pad_rows(x, rows or x.shape[0]))


def _forward(window, *refs):
    """One window's outputs. Refs: scales, q, k, v, the tables of both terms, of values, reverse; outputs."""
    scales, q, k, v, *tables, value_table, reverse, content, position = refs
    by_query, dtype, block = window.of_queries, window.dtype, pl.program_id(1)
    for head in range(window.heads):
        lanes, first = window.part(head, window.depth)
        if first == 0:
            q_group, k_group = window.queries_in(q, block, lanes), window.keys_in(k, block, lanes)
            k_turned = _turn_over(k_group, by_query.width).astype(dtype)
        w = window.weigh(q_group, k_turned, k_group, [scales[i, head] for i in range(3)], tables, block, first)
        w = w.astype(dtype)
        lanes, first = window.part(head, window.value_depth)
        if first == 0:
            v_group = _pad_rows(window.keys_in(v, block, lanes).astype(dtype), by_query.width)
            sums = [0.0, 0.0]
        products = dot(w, v_group), dot(by_query.to_offsets(w, reverse[...]).astype(dtype), value_table[...])
        sums = [a + window.pick(x, first, window.value_depth) for a, x in zip(sums, products)]
        if first + window.value_depth == v_group.shape[1]:
            content[0, :, lanes], position[0, :, lanes] = (x.astype(dtype) for x in sums)


def _backward(window, *refs):
    """One window's gradients; those of tables and scales are summed over the windows.

    Refs: scales, q, k, v, d_content, d_position, the tables of both terms, both for a map sheared, of values, reverse;
    d_q, d_k, d_v, d of the three tables [D or E, backward], d_scales [8, H*D], of which three rows are used; where an
    axis has several windows, float32 sums of d_k and d_v.
    """
    scales, q, k, v, d_content, d_position, *refs = refs
    tables, (query_back, key_back, value_table, reverse), refs = refs[:2], refs[2:6], refs[6:]
    d_q, d_k, d_v, d_query, d_key, d_value, d_scales, *sums = refs
    block = pl.program_id(1)
    by_query, by_key, dtype, depth = window.of_queries, window.of_keys, window.dtype, window.depth
    reverse = reverse[...]

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
            total[window.rows_of(block), lanes] += x

    sum_k, sum_v = sums or (None, None)

    for head in range(window.heads):
        lanes, first = window.part(head, window.value_depth)
        rows = slice(first, first + window.value_depth)
        value_lanes, value_first = lanes, first
        if first == 0:
            v_turned = _turn_over(window.keys_in(v, block, lanes), by_query.width).astype(dtype)
            d_groups = [window.queries_in(d, block, lanes) for d in (d_content, d_position)]
            d_turned = [jnp.transpose(d) for d in d_groups]  # [C, height]
            d_v_turned = []
        d1, d2 = (window.pick(d, first, window.value_depth).astype(dtype) for d in d_groups)
        d1_turned, d2_turned = (d[rows].astype(dtype) for d in d_turned)
        lanes, first = window.part(head, depth)
        if first == 0:
            q_group, k_group = window.queries_in(q, block, lanes), window.keys_in(k, block, lanes)
            k_turned = _turn_over(k_group, by_query.width).astype(dtype)
            k_padded = _pad_rows(k_group.astype(dtype), by_query.width)
            q_rows, k_rows = jnp.transpose(q_group), jnp.transpose(k_group)  # [C, height]
            d_q_group, d_k_group, d_k_turned = 0.0, 0.0, []
        scale = [scales[i, head] for i in range(3)]
        w = window.weigh(q_group, k_turned, k_group, scale, tables, block, first)

        d_w = dot(d1, v_turned) + by_query.to_map(dot(d2, value_table[...]))
        d_logits = w * (d_w - jnp.sum(w * d_w, 1, keepdims=True))
        w = w.astype(dtype)
        d_v_turned.append(dot(d1_turned, w))
        d_value[...] += dot(d2_turned, by_query.to_offsets(w, reverse).astype(dtype))

        d_map = d_logits.astype(dtype)
        rows = slice(first, first + depth)
        of_head = lambda x, i: (x[rows] * scale[i]).astype(dtype)
        sheared = by_query.to_offsets(d_map, reverse).astype(dtype)
        d_query[...] += dot(of_head(q_rows, 1), sheared)
        d_k_turned.append(dot(of_head(q_rows, 0), d_map))
        # [queries, keys] -> [keys, queries]
        turned = _turn_over(d_logits, by_key.width)[: by_key.height].astype(dtype)
        turned_sheared = by_key.to_offsets(turned, reverse).astype(dtype)
        d_key[...] += dot(of_head(k_rows, 2), turned_sheared)
        terms = [dot(d_map, k_padded), dot(sheared, query_back[...]), dot(turned_sheared, key_back[...])]
        for i, (term, x) in enumerate(zip(terms, (q_group, q_group, k_group))):
            d_scales[i : i + 1, lanes] += jnp.sum(window.pick(term * x, first, depth), 0, keepdims=True)
        d_q_group += sum(window.pick(terms[i], first, depth, scale[i]) for i in (0, 1))
        d_k_group += window.pick(terms[2], first, depth, scale[2])

        if first + depth == q_group.shape[1]:
            d_k_group += jnp.transpose(join(d_k_turned, 0))[: by_key.height]
            d_q[0, :, lanes] = d_q_group.astype(dtype)
            add_to_keys(d_k, sum_k, lanes, d_k_group)
        if value_first + window.value_depth == v_turned.shape[0]:
            add_to_keys(d_v, sum_v, value_lanes, jnp.transpose(join(d_v_turned, 0))[: by_key.height])

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


def _matrices(window, rows, names):
    """Of tables' rows [offsets, D], [C, offsets], a head's under that of another; '_back' transposed."""
    for name in names:
        depth = window.value_depth if name.startswith("value") else window.depth
        matrix = jnp.tile(rows[name].T, (_group(window.heads, depth) // depth, 1)).astype(window.dtype)
        yield matrix.T if name.endswith("_back") else matrix
    yield jnp.eye(LANES, dtype=window.dtype)[::-1]


def _outputs(window, interpret, scales, arrays, rows):
    """Outputs [A, length, H*E].

    Args:
        scales: [terms, H].
        arrays: q [A, length, H*D], k [A, padded, H*D], v [A, padded, H*E].
        rows: dict of the tables' rows at `window.offsets()`.
    """
    q, _, v = arrays
    output = jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), window.dtype)
    tables = _matrices(window, rows, ("query", "key", "value_back"))
    return _run(_forward, window, interpret, scales, arrays, [*tables], [output] * 2)


def _gradients(window, interpret, scales, arrays, d, rows):
    """Gradients for q, k, v, for the rows '_back' of the three tables [D or E, offsets], for scales 8 x [H*D].

    Args:
        d: gradients of the outputs; all others as of `_outputs`.
    """
    q, k, v = arrays
    tables = _matrices(window, rows, ("query", "key", "query_back", "key_back", "value"))
    shapes = [rows[name].shape[::-1] for name in ("query_back", "key_back", "value_back")]
    sums = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, (8, q.shape[2]))]
    outputs = [jax.ShapeDtypeStruct(x.shape, window.dtype) for x in arrays]
    scratch = [k.shape[1:], v.shape[1:]] if window.blocks > 1 else []
    return _run(_backward, window, interpret, scales, [*arrays, *d], [*tables], outputs, sums, scratch)


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
            d_scales = tf.reduce_sum(tf.reshape(d_scales[:3], [3, heads, -1]), 2)
            return (
                *(close(d_q), close(unpad(d_k)), close(unpad(d_v)), d_scales),
                # The same rows in another order: all of a table's gradient is in these.
                *(found.get(name, tf.zeros_like(x)) for name, x in sorted(rows_.items())),
            )

        return [close(x) for x in outputs], gradient

    return run(q, k, v, tf.cast(scales, tf.float32), *tf.nest.flatten(rows))
