"""Which keys a query sees, and how an image is cut into windows so that memory stays linear in its size.

`Windows` cuts an image along one axis (Eq. 4). `SquareWindows` cuts it into squares (Eq. 3). `AttentionSpec.windows`
makes either for an image of a given height and width.

Letters of the shapes: N images of h x w pixels, A windows, L queries and M keys of a window, R rows of a table,
D channels of a table.
"""

import math

import numpy as np
import tensorflow as tf

from axial.errors import InputError
from axial.layers.precision import widen

SMALLEST_BLOCK = 16  # a window along an axis has at most max(SMALLEST_BLOCK, reach) queries
BLOCK = 4  # the block of queries of a square window has at most max(BLOCK, reach) rows and columns


def table_rows(table, offsets):
    """Rows of a position table at integer offsets p - o.

    Args:
        table: [R, D]. Its middle row belongs to offset 0. Offsets beyond the table use its first or last row.
        offsets: int array of any shape.

    Returns:
        [*offsets.shape, D].
    """
    last = table.shape[0] - 1
    index = np.asarray(offsets) + table.shape[0] // 2
    if index.ndim != 1 or np.any(np.diff(index) != 1):
        return tf.gather(table, np.clip(index, 0, last))
    # Consecutive offsets need only a slice. The gradient of a gather is a scatter, which XLA cannot partition over
    # cores that share an image.
    within = table[np.clip(index[0], 0, last + 1) : np.clip(index[-1] + 1, 0, last + 1)]
    before, after = ([count, table.shape[1]] for count in (np.sum(index < 0), np.sum(index > last)))
    return tf.concat([tf.broadcast_to(table[:1], before), within, tf.broadcast_to(table[-1:], after)], 0)


def rows_of_tables(tables, windows, dtype):
    """dict from each table's name to its rows for all pairs of a query and a key in a window.

    The rows have the shape [L, M, D] for 'query' and 'value', and [M, L, D] for 'key'.
    """
    offsets = {name: windows.offsets.T if name == "key" else windows.offsets for name in tables}
    return {name: tf.cast(table_rows(table, offsets[name]), dtype) for name, table in tables.items()}


def visible_rows(table, windows, key_term):
    """(mask, rows): `rows` [offsets, D] are the table rows of all visible offsets of `windows`.

    A row of `mask` [length, offsets] belongs to a query and is 1 at the offsets at which the query sees a key. With
    `key_term` a row belongs to a key and is 1 at the offsets at which a query sees the key.
    """
    visible = windows.visible_offsets()[:, ::-1] if key_term else windows.visible_offsets()
    rows = widen(table_rows(table, np.arange(-windows.reach, windows.reach + 1)))
    return tf.constant(visible, rows.dtype), rows


def split_heads(x, windows, heads):
    """[N, h, w, H*D] -> [B, L, H, D]."""
    return tf.reshape(windows.split_lines(x), [-1, windows.length, heads, x.shape[3] // heads])


def join_heads(y, windows):
    """[B, L, H, E] -> [N, h, w, H*E]."""
    return windows.join_lines(tf.reshape(y, [-1, windows.length, 1, y.shape[2] * y.shape[3]]))


def check_span(span):
    """Raises InputError unless `span` is None or an odd number of at least 1."""
    if span is not None and (span < 1 or span % 2 == 0):
        near = f"{max(span - 1, 1)} and {max(span, 0) + 1}"
        raise InputError(f"span must be odd, so that a query is at its centre: got {span}, the nearest are {near}")


# === Windows along an axis ===


def _pairs(blocks, first_key):
    """Offsets, int [queries, keys], and visibility, bool [blocks, queries, keys], of the windows along an axis.

    Args:
        blocks: an object with `length`, `reach`, `blocks`, `queries` and `keys`.
        first_key: offset of a window's first key from its first query.
    """
    query, key = np.arange(blocks.queries)[:, None], np.arange(blocks.keys) + first_key
    start = np.arange(blocks.blocks)[:, None, None] * blocks.queries
    inside = (start + key >= 0) & (start + key < blocks.length) & (start + query < blocks.length)
    return key - query, (np.abs(key - query) <= blocks.reach) & inside


class Windows:
    """The windows of one axis of an image.

    There is one window, with all queries and keys of the axis, if there is no span, or if the axis is at most as long
    as the span or as `SMALLEST_BLOCK`. Otherwise a window is a block of L queries with the L + span - 1 keys around
    them, so memory is linear in the length of the axis.

    Args:
        height, width: size of the image.
        axis: 'height' or 'width'.
        span: odd, or None.

    Attributes:
        length: length of the axis.
        blocks: number of windows along the axis.
        queries, keys: number of queries and of keys in a window.
        abreast: number of lines that a window holds side by side: the width if the axis is the height, else 1.
        offsets: int [queries, keys], key position - query position, the same for every window.
        visible: bool [blocks, queries, keys], or None if every key is visible.
        reach: largest visible |offset|.
    """

    def __init__(self, height, width, axis, span=None):
        self.height, self.width, self.axis, self.span = height, width, axis, span
        length, self.abreast = (height, width) if axis == "height" else (width, 1)
        self.length = length
        self.reach = length - 1 if span is None else min(span // 2, length - 1)
        windowed = span is not None and length > max(span, SMALLEST_BLOCK)
        self.blocks = -(-length // max(self.reach, SMALLEST_BLOCK)) if windowed else 1
        self.queries = -(-length // self.blocks)
        margin = self.reach if windowed else 0  # keys on either side of the queries
        self.keys = self.queries + 2 * margin
        self.offsets, visible = _pairs(self, -margin)
        self.visible = None if visible.all() else visible

    @property
    def lines(self):
        """Number of lines (rows or columns) of an image. The pixels of a line attend only to the same line."""
        return self.width if self.axis == "height" else self.height

    @property
    def pairs(self):
        """Number of visible (query, key) pairs on one line."""
        return int(self.visible_offsets().sum())

    @property
    def scope(self):
        """Name scope of the matrix products. The name has the numbers of needed and of computed pairs of a line.

        As in the paper's counts, every query needs min(span, length) keys, even at the borders.
        """
        needed = self.length * min(self.span or self.length, self.length)
        return f"pairs_{needed}_of_{self.blocks * self.queries * self.keys}"

    def visible_offsets(self):
        """float32 [length, 2 reach + 1]: 1 where a query sees a key at an offset. The first offset is -reach."""
        offset = np.arange(-self.reach, self.reach + 1)[None, :]
        key = np.arange(self.length)[:, None] + offset
        return ((key >= 0) & (key < self.length)).astype(np.float32)

    def all_pairs(self, queries=slice(None)):
        """(offsets, visible), int and bool [L, length], of L `queries` (by default all) and all keys of one line."""
        position = np.arange(self.length)
        offsets = position[None, :] - position[queries, None]
        return offsets, np.abs(offsets) <= self.reach

    def whole(self, x):
        """[N, h, w, C] -> [A, length, abreast * C]: one window for the whole axis."""
        return tf.reshape(x, [-1, self.length, self.abreast * x.shape[3]])

    def cut_queries(self, x):
        """[N, h, w, C] -> [A, queries, abreast * C]."""
        x = self.whole(x)
        if self.blocks > 1:
            x = tf.pad(x, [[0, 0], [0, self.blocks * self.queries - self.length], [0, 0]])
        return tf.reshape(x, [-1, self.queries, x.shape[2]])

    def cut_keys(self, x):
        """[N, h, w, C] -> [A, keys, abreast * C], zero outside the axis."""
        x = self.whole(x)
        if self.blocks > 1:
            beyond = self.blocks * self.queries - self.length
            x = tf.pad(x, [[0, 0], [self.reach, self.reach + beyond], [0, 0]])
            starts = range(0, self.blocks * self.queries, self.queries)
            x = tf.stack([x[:, start : start + self.keys] for start in starts], 1)
        return tf.reshape(x, [-1, self.keys, x.shape[-1]])

    def join_queries(self, x):
        """[A, queries, abreast * C] -> [N, h, w, C]."""
        channels = x.shape[2]
        if self.blocks > 1:
            x = tf.reshape(x, [-1, self.blocks * self.queries, channels])[:, : self.length]
        return tf.reshape(x, [-1, self.height, self.width, channels // self.abreast])

    def one_line(self):
        """The windows of an image that is a single line."""
        height, width = (self.height, 1) if self.axis == "height" else (1, self.width)
        return Windows(height, width, self.axis, self.span)

    def split_lines(self, x):
        """[N, h, w, C] -> [N * lines, h or 1, 1 or w, C]: each line becomes an image, for `one_line`."""
        if self.axis == "height":
            return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, self.height, 1, x.shape[3]])
        return tf.reshape(x, [-1, 1, self.width, x.shape[3]])

    def join_lines(self, x):
        """The inverse of `split_lines`."""
        if self.axis == "height":
            return tf.transpose(tf.reshape(x, [-1, self.width, self.height, x.shape[3]]), [0, 2, 1, 3])
        return tf.reshape(x, [-1, self.height, self.width, x.shape[3]])


# === Square windows ===


class _Side:
    """One side of the square windows, cut into blocks of `queries` pixels.

    A block has `keys` keys, which extend `reach` pixels beyond its queries on either side. A side that is at most as
    long as a block is one block with every key.
    """

    def __init__(self, length, reach):
        block = max(BLOCK, reach)
        self.length, self.reach = length, reach
        self.whole = length <= block
        self.queries, margin = (length, 0) if self.whole else (block, reach)
        self.keys = self.queries + 2 * margin
        self.blocks = -(-length // self.queries)
        self.offsets, self.visible = _pairs(self, -margin)

    @property
    def beyond(self):
        return self.blocks * self.queries - self.length

    def cut(self, x, axis):
        """Splits an axis of `length` into [blocks, keys]. Each block includes the edges of its neighbours."""
        if self.whole:
            return tf.expand_dims(x, axis)
        before, after = x.shape[1:axis], x.shape[axis + 1 :]
        x = tf.reshape(x, [-1, self.length, math.prod(after)])  # TFLite slices at most five axes
        x = tf.pad(x, [[0, 0], [self.queries, self.beyond + self.queries], [0, 0]])
        x = tf.reshape(x, [-1, self.blocks + 2, self.queries, x.shape[2]])
        parts = [x[:, 1:-1]]
        if self.reach:
            parts = [x[:, :-2, self.queries - self.reach :], *parts, x[:, 2:, : self.reach]]
        return tf.reshape(tf.concat(parts, 2), [-1, *before, self.blocks, self.keys, *after])


class SquareWindows:
    """The windows of an image for attention to squares: the counterpart of `Windows` for two axes.

    A block of 4 x 4 queries has the (4 + span - 1)^2 keys around it. So memory holds (1 + (span - 1) / 4)^2 copies of
    the keys and the values, and (4 + span - 1)^2 logits per pixel and head. For span 7 memory holds 6.25 copies. With
    one window per pixel it would hold 49 copies.

    The attributes and methods have the same meaning as in `Windows`. The whole image is one line. An offset is one
    number, row offset x span + column offset, so a table has span^2 rows. `reach` is the largest offset.
    """

    lines = abreast = 1

    def __init__(self, height, width, span):
        self.height, self.width, self.span = height, width, span
        self.rows_cut, self.columns_cut = _Side(height, span // 2), _Side(width, span // 2)
        self.length, self.reach = height * width, span * span // 2
        self.blocks = self.rows_cut.blocks * self.columns_cut.blocks
        self.queries = self.rows_cut.queries * self.columns_cut.queries
        self.keys = self.rows_cut.keys * self.columns_cut.keys
        offsets = span * self.rows_cut.offsets[:, None, :, None] + self.columns_cut.offsets[None, :, None, :]
        self.offsets = offsets.reshape(self.queries, self.keys)
        rows, columns = self.rows_cut.visible, self.columns_cut.visible
        visible = rows[:, None, :, None, :, None] & columns[None, :, None, :, None, :]
        self.visible = None if visible.all() else visible.reshape(self.blocks, self.queries, self.keys)

    @property
    def pairs(self):
        """Number of visible (query, key) pairs of an image."""
        return int(self.rows_cut.visible.sum()) * int(self.columns_cut.visible.sum())

    @property
    def scope(self):
        """See `Windows`."""
        needed = self.length * min(self.span, self.height) * min(self.span, self.width)
        return f"pairs_{needed}_of_{self.blocks * self.queries * self.keys}"

    def visible_offsets(self):
        """float32 [L, span^2]: 1 where a query sees a key at an offset."""
        offset = np.arange(-(self.span // 2), self.span // 2 + 1)[None, :]

        def inside(n):
            return (np.arange(n)[:, None] + offset >= 0) & (np.arange(n)[:, None] + offset < n)

        visible = inside(self.height)[:, None, :, None] & inside(self.width)[None, :, None, :]
        return visible.reshape(self.length, self.span**2).astype(np.float32)

    def all_pairs(self, queries=slice(None)):
        """See `Windows`."""
        rows, columns = (axis.ravel() for axis in np.indices([self.height, self.width]))
        down, right = (side[None, :] - side[queries, None] for side in (rows, columns))
        reach = self.span // 2
        return self.span * down + right, (np.abs(down) <= reach) & (np.abs(right) <= reach)

    def whole(self, x):
        """[N, h, w, C] -> [N, h * w, C]."""
        return tf.reshape(x, [-1, self.length, x.shape[3]])

    def cut_queries(self, x):
        """[N, h, w, C] -> [A, queries, C]."""
        channels, rows, columns = x.shape[3], self.rows_cut, self.columns_cut
        x = tf.pad(x, [[0, 0], [0, rows.beyond], [0, columns.beyond], [0, 0]])
        x = tf.reshape(x, [-1, rows.blocks, rows.queries, columns.blocks, columns.queries, channels])
        return tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [-1, self.queries, channels])

    def cut_keys(self, x):
        """[N, h, w, C] -> [A, keys, C], zero outside the image."""
        channels = x.shape[3]
        x = self.columns_cut.cut(self.rows_cut.cut(x, 1), 3)  # [N, blocks, keys, blocks, keys, C]
        return tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [-1, self.keys, channels])

    def join_queries(self, x):
        """[A, queries, C] -> [N, h, w, C]."""
        channels, rows, columns = x.shape[2], self.rows_cut, self.columns_cut
        x = tf.reshape(x, [-1, rows.blocks, columns.blocks, rows.queries, columns.queries, channels])
        x = tf.transpose(x, [0, 1, 3, 2, 4, 5])
        x = tf.reshape(x, [-1, rows.blocks * rows.queries, columns.blocks * columns.queries, channels])
        return x[:, : self.height, : self.width]

    def one_line(self):
        return self

    def split_lines(self, x):
        return x

    def join_lines(self, x):
        return tf.reshape(x, [-1, self.height, self.width, x.shape[3]])
