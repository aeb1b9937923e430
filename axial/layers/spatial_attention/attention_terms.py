"""The arithmetic of the four terms of Transformer attention (Zhu et al., ICCV 2019, Eq. 2 and 8).

For each head, the weight of the key at position k for the query at position q is softmax_k of the sum of

    E1 = q . k                 query and key content
    E2 = q . R_{q-k}           query content and relative position
    E3 = u . k                 key content only
    E4 = v . R_{q-k}           relative position only

or of some of these terms. u and v are learned vectors. An attention type has one bit per term: '0110' is E2 + E3. R is
the sum of a row vector and a column vector. So the relative positions of a map of h x w pixels need only h + w vectors
per query. `pair_free.py` has the attention types that need no map of (query, key) pairs.

Letters of the shapes: N images, M heads, D channels per head, a map of h x w queries, a map of Y x X keys, R
differences q - k along an axis, r rows of queries in a chunk. A sequence is a map with one column.
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
LARGEST_MAP = 2**24  # largest number of logits of a chunk of queries: 64 MB in float32
MOST_UNROLLED = 32  # largest number of chunks that inference computes without a loop
LEAST_ROWS = 8  # smallest number of rows of a chunk with a window, because a chunk also reads the rows around it


@dataclasses.dataclass(frozen=True)
class Terms:
    """The terms that an attention type uses.

    Attributes:
        query_key, query_position, key, position: whether the type uses E1, E2, E3 and E4.
    """

    query_key: bool
    query_position: bool
    key: bool
    position: bool

    @classmethod
    def of(cls, setting):
        """The terms of an attention type such as '0110'. Raises InputError unless it is one of `SETTINGS`."""
        if setting not in SETTINGS:
            raise InputError(f"setting = {setting!r}: expected four bits, '0001' to '1111'")
        return cls(*(bit == "1" for bit in setting))

    @property
    def needs_query(self):
        return self.query_key or self.query_position

    @property
    def needs_position(self):
        return self.query_position or self.position

    @property
    def key_only(self):
        return not (self.needs_query or self.position)


@dataclasses.dataclass(frozen=True)
class Axis:
    """Positions of the queries and keys along one axis: query i is at i, key j at stride * j.

    Attributes:
        queries, keys: number of queries and of keys.
        stride: stride of the keys.
        before, after: number of positions that a query sees before and after itself; None for all.
    """

    queries: int
    keys: int
    stride: int = 1
    before: int | None = None
    after: int | None = None

    def differences(self):
        """int [R]: all differences q - k, in ascending order."""
        return np.arange(-self.stride * (self.keys - 1), self.queries)

    def rows(self):
        """int [queries, keys]: the index of each pair's difference in `differences`."""
        return np.arange(self.queries)[:, None] - self.stride * np.arange(self.keys) + self.stride * (self.keys - 1)

    def visible(self):
        """bool [queries, keys]: whether a query sees a key."""
        return self.visible_at(self.rows() - self.stride * (self.keys - 1))

    def visible_at(self, difference):
        """bool, for an int array of differences q - k: whether the query sees the key."""
        before = np.inf if self.before is None else self.before
        after = np.inf if self.after is None else self.after
        return (difference <= before) & (difference >= -after)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The axes of a map of queries and a map of keys.

    Attributes:
        rows, columns: `Axis` of the rows and of the columns.
    """

    rows: Axis
    columns: Axis

    def visible(self):
        """Masks of rows, bool [h, Y], and of columns, bool [w, X]; () if every query sees every key."""
        visible = self.rows.visible(), self.columns.visible()
        return () if visible[0].all() and visible[1].all() else visible


def encode(differences, channels, wavelength):
    """float64 [R, channels]: the sines, then the cosines, of the differences at channels / 2 wavelengths.

    Wavelength number i is 2 pi `wavelength`^(2i / channels).
    """
    factors = float(wavelength) ** (2 * np.arange(channels // 2) / channels)
    angles = np.asarray(differences)[:, None] / factors
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)


# === Logits and weights ===


def logits(query, key, visible, training=False):
    """float32 or float64 [N, M, r * w, Y * X]: the sum of the terms whose operands are given.

    `hide` hides the keys that are not visible.

    Args:
        query: dict of the operands of r rows of queries. 'content' [N, M, r, w, D] multiplies the keys. 'position' [N,
            M, r, w, D] multiplies the relative positions of the rows, 'rows' [M, r, Y, D]. Without 'position', 'rows'
            [M, r, Y] are the logits of these positions.
        key: dict of the operands that all queries share: 'key' and 'value' [N, M, Y, X, D], 'saliency' [N, M or 1, Y,
            X], 'columns' [M, w, X, D] or [M, w, X], and 'real' [N, 1, Y, X], 0 for padded keys and 1 for all others.
        visible: masks of rows, bool [r, Y], and of columns, bool [w, X]; () if every query sees every key.
        training: see `hide`.
    """
    total = []
    if "content" in query:
        total.append(widen(tf.matmul(_flat(query["content"]), _flat(key["key"]), transpose_b=True)))
    axis_logits = _axis_logits(query, key) if "rows" in query else ()
    if visible and adds(training):
        # Masking each axis before the map of pairs is made saves a pass over the map.
        dtype = (total or axis_logits or [key["saliency"]])[0].dtype
        masks = mask(visible[0], dtype)[:, None], mask(visible[1], dtype)
        alone = masks[0][None, None], masks[1][None, None, None]
        axis_logits = tuple(map(operator.add, axis_logits, masks)) if axis_logits else alone
        visible = ()
    if axis_logits:
        total.append(_outer_sum(*axis_logits))
    if "saliency" in key:
        total.append(_flatten_keys(key["saliency"]))
    kept = [_flatten_keys(key["real"]) > 0] if "real" in key else []
    if visible:
        rows, columns = visible
        pairs = rows[:, None, :, None] & columns[None, :, None]  # [r, w, Y, X]
        height, width, *keys = pairs.shape
        kept.append(tf.reshape(pairs, [height * width, keys[0] * keys[1]]))
    return hide(sum(total), functools.reduce(operator.and_, kept), training) if kept else sum(total)


def _flatten_keys(x):
    """[N, M, Y, X] -> [N, M, 1, Y * X]."""
    return tf.reshape(x, [-1, x.shape[1], 1, x.shape[2] * x.shape[3]])


def _axis_logits(query, key):
    """Position logits of rows [N, M, r, w, Y] and of columns [N, M, r, w, X].

    An axis along which the logits are constant has size 1.
    """
    if "position" in query:
        rows = tf.einsum("nmrwd,mryd->nmrwy", query["position"], query["rows"])
        columns = tf.einsum("nmrwd,mwxd->nmrwx", query["position"], key["columns"])
    else:
        rows, columns = query["rows"][None, :, :, None], key["columns"][None, :, None]
    return widen(rows), widen(columns)


def _outer_sum(rows, columns):
    """[N, M, r * w, Y * X]: the sum of the row logit and the column logit of every pair."""
    height, width = rows.shape[2], columns.shape[3]
    rows = tf.repeat(rows, width // rows.shape[3], 3)
    columns = tf.repeat(columns, height // columns.shape[2], 2)
    _, heads, _, _, keys = rows.shape
    rows = tf.reshape(rows, [-1, heads, height * width, keys, 1])
    columns = tf.reshape(columns, [-1, heads, height * width, 1, columns.shape[4]])
    return tf.reshape(rows + columns, [-1, heads, height * width, keys * columns.shape[4]])


def _flat(x):
    """[N, M, r, w, D] -> [N, M, r * w, D]."""
    return tf.reshape(x, [-1, x.shape[1], x.shape[2] * x.shape[3], x.shape[4]])


def weigh(query, key, visible, width, training=False):
    """[N, M, r, w, D]: the weighted sums of the values.

    Args:
        query, key, visible, training: see `logits`.
        width: w.
    """
    v = key["value"]
    y = tf.matmul(tf.cast(tf.nn.softmax(logits(query, key, visible, training)), v.dtype), _flat(v))
    return tf.reshape(y, [-1, v.shape[1], y.shape[2] // width, width, v.shape[4]])


# === All queries, in one piece or in chunks ===


def attend(query, key, tables, grid, *, keeps_weights=True, training=False):
    """`weigh` for all rows of queries. Large maps are computed in chunks of rows, which the backward pass recomputes.

    With a window, a chunk reads only the rows of keys that its queries see.

    Args:
        query: dict of 'content' and 'position', [N, M, h, w, D] each; see `logits`.
        key: dict of 'key', 'value', 'saliency' and 'real'; see `logits`.
        tables: dict of 'rows' and 'columns', [M, R, D] or [M, R], with an entry per difference (`Axis.differences`).
            The dict is empty without E2 and E4.
        grid: `Grid`.
        keeps_weights: whether small maps store the weights for the backward pass. Large maps never do.
        training: see `hide`.
    """
    images, heads, keys, width, _ = key["value"].shape
    pairs = (images or 1) * heads * grid.columns.queries * width  # pairs of a row of queries and a row of keys
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
    """Number of rows of queries in a chunk if the window is smaller than the map, else 0."""
    if axis.before is None or axis.after is None or axis.queries != axis.keys or axis.stride != 1:
        return 0
    reach = axis.before + axis.after
    rows = max(LEAST_ROWS, reach // 2)
    return rows if rows + reach < axis.keys else 0


def _fitting(rows, pairs, axis):
    """The largest number of rows, at most `rows`, whose chunk has at most `LARGEST_MAP` logits."""
    while rows > 1 and rows * (rows + axis.before + axis.after) * pairs > LARGEST_MAP:
        rows -= 1
    return rows


def _by_rows(query, key, grid, *, rows, training):
    """`weigh` in chunks of `rows` rows. Every chunk reads all keys."""
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
    """`weigh` in chunks of `rows` rows. A chunk reads the rows of keys that its queries see."""
    axis = grid.rows
    count, near = -(-axis.queries // rows), rows + axis.before + axis.after
    below = count * rows - axis.queries + axis.after
    shared = {name: x if name == "columns" else pad(x, 2, axis.before, below) for name, x in key.items()}
    # The differences between queries and keys are the same in every chunk.
    difference = np.arange(rows)[:, None] + axis.before - np.arange(near)
    if tables:
        index = np.clip(difference + axis.keys - 1, 0, 2 * axis.keys - 2)
        shared["rows"] = tf.gather(tables["rows"], index, axis=1)
    position = np.arange(count)[:, None] * rows - axis.before + np.arange(near)  # positions of each chunk's keys
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
    """x, padded with zeros before and after an axis."""
    return tf.pad(x, [[before, after] if i == axis else [0, 0] for i in range(x.shape.rank)])


def _cut(x, axis, count, size):
    """Cuts an axis into `count` chunks with zeros at the end: [..., h, ...] -> [count, ..., size, ...]."""
    x = pad(x, axis, 0, count * size - x.shape[axis])
    x = tf.reshape(x, [-1 if n is None else n for n in [*x.shape[:axis], count, size, *x.shape[axis + 1 :]]])
    return tf.transpose(x, [axis, *(i for i in range(x.shape.rank) if i != axis)])


def _join(chunks, rows):
    """[chunks, N, M, r, w, D] -> [N, M, rows, w, D]."""
    count, _, heads, size, width, depth = chunks.shape
    y = tf.reshape(tf.transpose(chunks, [1, 2, 0, 3, 4, 5]), [-1, heads, count * size, width, depth])
    return y[:, :, :rows]


def _slice_rows(x, start, size):
    """`size` rows of [N, M, Y, X, ...] from row `start` on."""
    rest = x.shape.as_list()[3:]
    return tf.slice(x, [0, 0, start, *[0] * len(rest)], [x.shape[0] or -1, x.shape[1], size, *rest])


def _like(key, count, rows, grid):
    """tf.TensorSpec of the stacked results of all chunks, [chunks, N, M, r, w, D]."""
    images, heads, _, _, depth = key["value"].shape
    return tf.TensorSpec([count, images, heads, rows, grid.columns.queries, depth], key["value"].dtype)


def in_chunks(compute, chunks, shared, like, *, training=False):
    """Calls compute(i, chunk i, shared) for one chunk after the other, and stacks the results.

    The backward pass calls it again for each chunk. Inference unrolls up to `MOST_UNROLLED` chunks, because TFLite
    files with a loop fail or have large errors.

    Args:
        compute: function that closes over no variable.
        chunks: dict of tensors [chunks, ...].
        shared: dict of the tensors that all chunks use.
        like: tf.TensorSpec of the stacked result.
        training: whether the graph trains. A tensor counts as true.
    """
    unrolled = not tf.is_tensor(training) and not training and like.shape[0] <= MOST_UNROLLED
    structure = chunks, shared

    @tf.custom_gradient
    def run(*inputs):
        chunks, shared = tf.nest.pack_sequence_as(structure, inputs)
        # TFLite slices at most five axes, so images and heads are one axis in the loop.
        cut = {name: tf.reshape(x, [x.shape[0], -1, *x.shape[3:]]) for name, x in chunks.items()}

        def step(i):
            chunk = {name: tf.reshape(cut[name][i], _sizes(x.shape[1:])) for name, x in chunks.items()}
            return tf.reshape(compute(i, chunk, shared), [-1, *like.shape[3:]])

        if unrolled:
            rows = []
            for i in range(like.shape[0]):
                with tf.control_dependencies(rows[-1:]):  # so that memory holds one map of pairs at a time
                    rows.append(step(i))
            y = tf.stack(rows)
        else:
            row = tf.TensorSpec([like.shape[1:3].num_elements(), *like.shape[3:]], like.dtype)
            y = tf.map_fn(step, tf.range(like.shape[0]), parallel_iterations=1, fn_output_signature=row)
        return tf.reshape(y, _sizes(like.shape)), lambda upstream: _gradients(compute, chunks, shared, upstream)

    return run(*tf.nest.flatten(structure))


def _sizes(shape):
    """The sizes of a shape, with -1 for an unknown size, for a reshape."""
    return [-1 if n is None else n for n in shape]


def _gradients(compute, chunks, shared, upstream):
    """The gradients of `in_chunks`, in the order of its flat inputs. Gradients of `shared` add up in a wide dtype."""
    count = upstream.shape[0]

    def step(i, chunk_gradients, shared_gradients):
        chunk = {name: x[i] for name, x in chunks.items()}
        with tf.GradientTape() as tape:
            tape.watch((chunk, shared))
            y = compute(i, chunk, shared)
        gradients, more = tape.gradient(y, (chunk, shared), upstream[i], unconnected_gradients="zero")
        chunk_gradients = {name: array.write(i, gradients[name]) for name, array in chunk_gradients.items()}
        # The gradient of a slice has no static shape, but the shapes of a loop must not change.
        more = {name: tf.ensure_shape(widen(more[name]), x.shape) for name, x in shared_gradients.items()}
        return i + 1, chunk_gradients, {name: x + more[name] for name, x in shared_gradients.items()}

    arrays = {name: tf.TensorArray(x.dtype, count, element_shape=x.shape[1:]) for name, x in chunks.items()}
    sums = {name: tf.zeros(tf.shape(x), wide(x.dtype)) for name, x in shared.items()}
    sums = {name: tf.ensure_shape(x, shared[name].shape) for name, x in sums.items()}
    start = tf.constant(0), arrays, sums
    one_by_one = functools.partial(tf.while_loop, parallel_iterations=1, maximum_iterations=count)
    _, arrays, sums = one_by_one(lambda i, *_: i < count, step, start)
    gradients = {name: array.stack() for name, array in arrays.items()}
    return tf.nest.flatten((gradients, {name: tf.cast(x, shared[name].dtype) for name, x in sums.items()}))
