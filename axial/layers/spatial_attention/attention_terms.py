"""The four terms of Transformer attention as arithmetic (Zhu et al., ICCV 2019, Eq. 2 and 8).

A query at place q sees the keys at places k. For each head, the weight of a key is softmax_k of the sum of

    E1 = q . k                 query and key content
    E2 = q . R_{q-k}           query content and relative position
    E3 = u . k                 key content only
    E4 = v . R_{q-k}           relative position only

or of some of them. A setting names the terms in use with four bits: '0110' is E2 + E3. R is the sum of a part for the
rows and a part for the columns, so the positions of a map of h x w pixels take (h + w) vectors for each query and never
one for each pair. `pair_free.py` has the settings whose weights need no map of pairs.

Letters of the shapes: B images, M heads, D channels of a head, a map of H x W queries, a map of Y x X keys. A sequence
is a map with one column.
"""

import dataclasses
import functools
import operator

import numpy as np
import tensorflow as tf

from axial.errors import InputError
from axial.layers.masking import adds, hide, mask
from axial.layers.precision import wide, widen

SETTINGS = tuple(f"{number:04b}" for number in range(1, 16))
LARGEST_MAP = 2**24  # logits that one part of the queries makes at a time: 64 MB
MOST_UNROLLED = 32  # parts of a graph that serves without a loop
LEAST_ROWS = 8  # of a part, with a window: each part also reads the rows around it


@dataclasses.dataclass(frozen=True)
class Terms:
    """Which terms a setting has on.

    Attributes:
        query_key, query_position, key, position: E1 to E4.
    """

    query_key: bool
    query_position: bool
    key: bool
    position: bool

    @classmethod
    def of(cls, setting):
        """The terms of a setting such as '0110'. Raises InputError unless it is one of `SETTINGS`."""
        if setting == "0000":
            raise InputError(
                "setting = '0000': expected at least one term, because without any every key has the same weight, "
                "which is mean pooling and no attention"
            )
        if setting not in SETTINGS:
            raise InputError(f"setting = {setting!r}: expected four bits, '0001' to '1111'")
        return cls(*(bit == "1" for bit in setting))

    @property
    def needs_query(self):
        return self.query_key or self.query_position

    @property
    def needs_key(self):
        return self.query_key or self.key

    @property
    def needs_position(self):
        return self.query_position or self.position

    @property
    def key_only(self):
        return not (self.needs_query or self.position)

    @property
    def position_only(self):
        return not (self.needs_query or self.key)


@dataclasses.dataclass(frozen=True)
class Axis:
    """Places of the queries and keys of one axis: query i is at i, key j at stride * j.

    Attributes:
        queries, keys: how many there are.
        stride: of the keys.
        before, after: how far a query sees to either side; None for any distance.
    """

    queries: int
    keys: int
    stride: int = 1
    before: int | None = None
    after: int | None = None

    def differences(self):
        """int [R]: every q - k from the least to the largest."""
        return np.arange(-self.stride * (self.keys - 1), self.queries)

    def rows(self):
        """int [queries, keys]: the index of each pair in `differences`."""
        return np.arange(self.queries)[:, None] - self.stride * np.arange(self.keys) + self.stride * (self.keys - 1)

    def visible(self):
        """bool [queries, keys]: where a query sees a key."""
        return self.visible_at(self.rows() - self.stride * (self.keys - 1))

    def visible_at(self, difference):
        """bool: where a query sees a key at q - k. The differences are an int array."""
        before = np.inf if self.before is None else self.before
        after = np.inf if self.after is None else self.after
        return (difference <= before) & (difference >= -after)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The rows and columns of a map of queries and a map of keys.

    Attributes:
        rows, columns: `Axis` of each.
    """

    rows: Axis
    columns: Axis

    def visible(self):
        """bool [H, Y] of rows and [W, X] of columns that see each other, or () if every query sees every key."""
        visible = self.rows.visible(), self.columns.visible()
        return () if visible[0].all() and visible[1].all() else visible


def encode(differences, channels, wavelength):
    """float64 [R, channels]: sines, then cosines of the differences at channels / 2 wavelengths.

    The wavelengths are 2 pi wavelength^(2i / channels).
    """
    factors = float(wavelength) ** (2 * np.arange(channels // 2) / channels)
    angles = np.asarray(differences)[:, None] / factors
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)


# === Logits and weights ===


def logits(query, key, visible, training=False):
    """float32 or float64 [B, M, h * W, Y * X]: the sum of the terms that are there.

    See `hide` for keys that are not visible.

    Args:
        query: dict of what belongs to the queries of some rows: 'content' [B, M, h, W, D] meets the keys, 'place' [B,
            M, h, W, D] meets the relative positions, 'rows' [M, h, Y, D] are these positions. Without 'place', 'rows'
            [M, h, Y] are the logits of the positions themselves.
        key: dict of what all queries share: 'key' [B, M, Y, X, D], 'value' [B, M, Y, X, D], 'saliency' [B, M or 1, Y,
            X], 'columns' [M, W, X, D] or [M, W, X], and 'real' [B, 1, Y, X], 0 for padding and 1 for other keys.
        visible: bool of rows [h, Y] and of columns [W, X], or () if every query sees every key.
        training: see `hide`.
    """
    total = []
    if "content" in query:
        product = tf.matmul(_flat(query["content"]), _flat(key["key"]), transpose_b=True)
        total.append(widen(product))
    places = _place_logits(query, key) if "rows" in query else ()
    if visible and adds(training):
        # Each axis has its mask before the map of pairs is made, which costs no pass over the map.
        dtype = (total or places or [key["saliency"]])[0].dtype
        masks = mask(visible[0], dtype)[:, None], mask(visible[1], dtype)
        alone = masks[0][None, None], masks[1][None, None, None]
        places = tuple(map(operator.add, places, masks)) if places else alone
        visible = ()
    if places:
        total.append(_outer_sum(*places))
    if "saliency" in key:
        total.append(_flatten_keys(key["saliency"]))
    kept = [_flatten_keys(key["real"]) > 0] if "real" in key else []
    if visible:
        rows, columns = visible
        pairs = rows[:, None, :, None] & columns[None, :, None]  # [h, W, Y, X]
        height, width, *keys = pairs.shape
        kept.append(tf.reshape(pairs, [height * width, keys[0] * keys[1]]))
    return hide(sum(total), functools.reduce(operator.and_, kept), training) if kept else sum(total)


def _flatten_keys(x):
    """[B, M, Y, X] -> [B, M, 1, Y * X]."""
    return tf.reshape(x, [-1, x.shape[1], 1, x.shape[2] * x.shape[3]])


def _place_logits(query, key):
    """The logits of rows [B, M, h, W, Y] and of columns [B, M, h, W, X]. Axes that share them have size 1."""
    if "position" in query:
        rows = tf.einsum("bmhwd,mhyd->bmhwy", query["position"], query["rows"])
        columns = tf.einsum("bmhwd,mwxd->bmhwx", query["position"], key["columns"])
    else:
        rows, columns = query["rows"][None, :, :, None], key["columns"][None, :, None]
    return widen(rows), widen(columns)


def _outer_sum(rows, columns):
    """[B, M, h * W, Y * X]: the sum of a logit of the row and one of the column, for every key."""
    height, width = rows.shape[2], columns.shape[3]
    rows = tf.repeat(rows, width // rows.shape[3], 3)
    columns = tf.repeat(columns, height // columns.shape[2], 2)
    _, heads, _, _, keys = rows.shape
    rows = tf.reshape(rows, [-1, heads, height * width, keys, 1])
    columns = tf.reshape(columns, [-1, heads, height * width, 1, columns.shape[4]])
    return tf.reshape(rows + columns, [-1, heads, height * width, keys * columns.shape[4]])


def _flat(x):
    """[B, M, h, W, D] -> [B, M, h * W, D]."""
    return tf.reshape(x, [-1, x.shape[1], x.shape[2] * x.shape[3], x.shape[4]])


def weigh(query, key, visible, width, training=False):
    """[B, M, h, W, D]: the weighted sums of the values.

    Args:
        query, key, visible, training: see `logits`.
        width: W.
    """
    v = key["value"]
    y = tf.matmul(tf.cast(tf.nn.softmax(logits(query, key, visible, training)), v.dtype), _flat(v))
    return tf.reshape(y, [-1, v.shape[1], y.shape[2] // width, width, v.shape[4]])


# === All queries, whole or in parts ===


def attend(query, key, tables, grid, *, keeps_weights=True, training=False):
    """`weigh` for all rows of queries. Large maps are computed in parts of some rows, again in the backward pass.

    With a window, a part takes only the rows of keys that its queries see.

    Args:
        query: dict of 'content' and 'place', [B, M, H, W, D] each; see `logits`.
        key: dict of 'key', 'value', 'saliency' and 'real'; see `logits`.
        tables: dict of 'rows' and 'columns', [M, R, D] or [M, R]: one entry for each of `Axis.differences`; or empty.
        grid: `Grid`.
        keeps_weights: whether the weights of small maps are kept for the backward pass. Those of large maps never are.
        training: see `hide`.
    """
    images, heads, keys, width, _ = key["value"].shape
    pairs = (images or 1) * heads * grid.columns.queries * width  # of one row of queries and one row of keys
    if tables:
        key = {**key, "columns": tf.gather(tables["columns"], grid.columns.rows(), axis=1)}
    near = _rows_near(grid.rows)
    if near:
        rows = _fitting(near, pairs, grid.rows)
        return _by_windows(query, key, tables, grid, rows=rows, training=training)
    if tables:
        query = {**query, "rows": tf.gather(tables["rows"], grid.rows.rows(), axis=1)}
    rows = max(1, min(grid.rows.queries, LARGEST_MAP // (pairs * keys)))
    if rows == grid.rows.queries and keeps_weights:
        return weigh(query, key, grid.visible(), grid.columns.queries, training=training)
    return _by_rows(query, key, grid, rows=rows, training=training)


def _rows_near(axis):
    """Rows of queries in a part where a window is smaller than the map, else 0."""
    if axis.before is None or axis.after is None or axis.queries != axis.keys or axis.stride != 1:
        return 0
    reach = axis.before + axis.after
    rows = max(LEAST_ROWS, reach // 2)
    return rows if rows + reach < axis.keys else 0


def _fitting(rows, pairs, axis):
    """The most rows, up to `rows`, whose logits are at most `LARGEST_MAP`."""
    while rows > 1 and rows * (rows + axis.before + axis.after) * pairs > LARGEST_MAP:
        rows -= 1
    return rows


def _by_rows(query, key, grid, *, rows, training):
    """`weigh` in parts of so many rows. Every part reads all keys."""
    count = -(-grid.rows.queries // rows)
    chunks = {name: _cut(x, 1 if name == "rows" else 2, count, rows) for name, x in query.items()}
    visible = grid.visible()
    if visible:
        padded = np.pad(visible[0], [[0, count * rows - grid.rows.queries], [0, 0]])
        masks = tf.constant(padded.reshape([count, rows, -1]))

    def compute(i, chunk, shared):
        return weigh(chunk, shared, (masks[i], visible[1]) if visible else (), grid.columns.queries, training=training)

    return _join(in_chunks(compute, chunks, key, _like(key, count, rows, grid), training=training), grid.rows.queries)


def _by_windows(query, key, tables, grid, *, rows, training):
    """`weigh` in parts of so many rows. A part reads the rows of keys that its queries see."""
    axis = grid.rows
    count, near = -(-axis.queries // rows), rows + axis.before + axis.after
    below = count * rows - axis.queries + axis.after
    shared = {name: x if name == "columns" else pad(x, 2, axis.before, below) for name, x in key.items()}
    # The differences of the queries and keys of a part are the same in every part.
    difference = np.arange(rows)[:, None] + axis.before - np.arange(near)
    if tables:
        index = np.clip(difference + axis.keys - 1, 0, 2 * axis.keys - 2)
        shared["rows"] = tf.gather(tables["rows"], index, axis=1)
    position = np.arange(count)[:, None] * rows - axis.before + np.arange(near)  # of the keys of each part
    inside = (position >= 0) & (position < axis.keys)
    masks = tf.constant(axis.visible_at(difference) & inside[:, None])

    def compute(i, chunk, shared):
        near_keys = {name: _slice_rows(x, i * rows, near) for name, x in shared.items() if name not in tables}
        if tables:
            chunk, near_keys["columns"] = {**chunk, "rows": shared["rows"]}, shared["columns"]
        return weigh(chunk, near_keys, (masks[i], grid.columns.visible()), grid.columns.queries, training=training)

    chunks = {name: _cut(x, 2, count, rows) for name, x in query.items()}
    return _join(in_chunks(compute, chunks, shared, _like(key, count, rows, grid), training=training), axis.queries)


def pad(x, axis, before, after):
    """x with zeros before and after an axis."""
    return tf.pad(x, [[before, after] if i == axis else [0, 0] for i in range(x.shape.rank)])


def _cut(x, axis, count, size):
    """An axis in `count` parts of so many entries, zeros at the end: [..., H, ...] -> [count, ..., size, ...]."""
    x = pad(x, axis, 0, count * size - x.shape[axis])
    x = tf.reshape(x, [-1 if n is None else n for n in [*x.shape[:axis], count, size, *x.shape[axis + 1 :]]])
    return tf.transpose(x, [axis, *(i for i in range(x.shape.rank) if i != axis)])


def _join(chunks, rows):
    """[parts, B, M, h, W, D] -> [B, M, rows, W, D]."""
    count, _, heads, size, width, depth = chunks.shape
    y = tf.reshape(tf.transpose(chunks, [1, 2, 0, 3, 4, 5]), [-1, heads, count * size, width, depth])
    return y[:, :, :rows]


def _slice_rows(x, start, size):
    """Some rows of [B, M, Y, X, ...]."""
    rest = x.shape.as_list()[3:]
    return tf.slice(x, [0, 0, start, *[0] * len(rest)], [x.shape[0] or -1, x.shape[1], size, *rest])


def _like(key, count, rows, grid):
    """The shape and type of the stacked results."""
    images, heads, _, _, depth = key["value"].shape
    return tf.TensorSpec([count, images, heads, rows, grid.columns.queries, depth], key["value"].dtype)


def in_chunks(compute, chunks, shared, like, *, training=False):
    """Stacks compute(i, part i, shared) for each part, one after the other. The backward pass computes each again.

    Inference has no loop up to `MOST_UNROLLED` parts: files of TFLite with a loop fail or have large errors.

    Args:
        compute: function that closes over no variable.
        parts: dict of tensors [parts, ...].
        shared: dict of tensors.
        like: tf.TensorSpec of the result.
        training: whether the graph trains; a tensor counts as true.
    """
    unrolled = not tf.is_tensor(training) and not training and like.shape[0] <= MOST_UNROLLED
    structure = chunks, shared

    @tf.custom_gradient
    def run(*inputs):
        chunks, shared = tf.nest.pack_sequence_as(structure, inputs)
        # TFLite slices five axes at most, so in the loop images and heads are one axis.
        cut = {name: tf.reshape(x, [x.shape[0], -1, *x.shape[3:]]) for name, x in chunks.items()}

        def step(i):
            chunk = {name: tf.reshape(cut[name][i], _sizes(x.shape[1:])) for name, x in chunks.items()}
            return tf.reshape(compute(i, chunk, shared), [-1, *like.shape[3:]])

        if unrolled:
            rows = []
            for i in range(like.shape[0]):
                with tf.control_dependencies(rows[-1:]):  # one after the other, so that memory holds one map of pairs
                    rows.append(step(i))
            y = tf.stack(rows)
        else:
            row = tf.TensorSpec([like.shape[1:3].num_elements(), *like.shape[3:]], like.dtype)
            y = tf.map_fn(step, tf.range(like.shape[0]), parallel_iterations=1, fn_output_signature=row)
        return tf.reshape(y, _sizes(like.shape)), lambda upstream: _gradients(compute, chunks, shared, upstream)

    return run(*tf.nest.flatten(structure))


def _sizes(shape):
    """The sizes of a shape for a reshape: -1 where one is unknown."""
    return [-1 if n is None else n for n in shape]


def _gradients(compute, chunks, shared, upstream):
    """The gradients of `in_parts`, in the order of its flat inputs. Those of `shared` are summed in `wide` numbers."""
    count = upstream.shape[0]

    def step(i, chunk_gradients, shared_gradients):
        chunk = {name: x[i] for name, x in chunks.items()}
        with tf.GradientTape() as tape:
            tape.watch((chunk, shared))
            y = compute(i, chunk, shared)
        gradients, more = tape.gradient(y, (chunk, shared), upstream[i], unconnected_gradients="zero")
        chunk_gradients = {name: array.write(i, gradients[name]) for name, array in chunk_gradients.items()}
        # A slice of a map has a gradient without a static shape, and a loop keeps the shapes it starts with.
        more = {name: tf.ensure_shape(widen(more[name]), x.shape) for name, x in shared_gradients.items()}
        return i + 1, chunk_gradients, {name: x + more[name] for name, x in shared_gradients.items()}

    arrays = {name: tf.TensorArray(x.dtype, count, element_shape=x.shape[1:]) for name, x in chunks.items()}
    sums = {name: tf.zeros(tf.shape(x), wide(x.dtype)) for name, x in shared.items()}
    sums = {name: tf.ensure_shape(x, shared[name].shape) for name, x in sums.items()}
    start = tf.constant(0), arrays, sums
    _, arrays, sums = tf.while_loop(
        lambda i, *_: i < count, step, start, parallel_iterations=1, maximum_iterations=count
    )
    gradients = {name: array.stack() for name, array in arrays.items()}
    return tf.nest.flatten((gradients, {name: tf.cast(x, shared[name].dtype) for name, x in sums.items()}))
