"""Which keys a query sees: windows of one axis of an image, and square ones.

Letters of the shapes: N images of h x w pixels, A windows, L queries and M keys of a window.
"""

import numpy as np
import tensorflow as tf

SMALLEST_BLOCK = 16  # queries of a window of one axis under a small span
BLOCK = 4  # rows and columns of a square window of queries
MASKED = -1e30  # a logit that is not visible; finite: a row with every key masked stays free of NaN


def table_rows(table, offsets):
    """Rows of a table [R, D] at integer offsets p - o: [*offsets.shape, D].

    The middle row is offset 0; offsets beyond the table share its end rows.
    """
    middle = table.shape[0] // 2
    return tf.gather(table, np.clip(offsets + middle, 0, table.shape[0] - 1))


def rows_of_tables(tables, windows, dtype):
    """dict of the rows that a window's pairs are at: of 'query' and 'value' [L, M, .], of 'key' [M, L, .]."""
    return {
        name: tf.cast(table_rows(table, windows.offsets.T if name == "key" else windows.offsets), dtype)
        for name, table in tables.items()
    }


def check_span(span):
    """ValueError, naming the neighbours, unless `span` is odd or None."""
    if span is not None and (span < 1 or span % 2 == 0):
        below = max(span - 1, 1)
        raise ValueError(
            f"span must be odd, so that a query is at its middle: got {span}, "
            f"the nearest are {below} and {max(span, 0) + 1}"
        )


class Windows:
    """How one axis of an image is cut into windows of queries, and which keys each of them holds.

    Without a span, or where the axis is not longer than it, there is one window of L queries and L
    keys. Otherwise windows of L queries hold the L + span - 1 keys around them, so that memory is
    linear in the length of the axis.

    Args:
        height, width: of the image.
        axis: 'height' or 'width'.
        span: odd, or None.

    Attributes:
        length: of the axis.
        blocks, queries, keys: number of windows along the axis, of queries and of keys in each.
        abreast: pixels of a window that attend side by side: the width, where the axis is the height.
        offsets: int [queries, keys], key position - query position, the same for every window.
        visible: bool [blocks, queries, keys], or None where every key is.
        reach: the largest |offset| that is visible.
    """

    def __init__(self, height, width, axis, span=None):
        if axis not in ("height", "width"):
            raise ValueError(f"axis must be 'height' or 'width': got {axis!r}")
        check_span(span)
        self.height, self.width, self.axis, self.span = height, width, axis, span
        length, self.abreast = (height, width) if axis == "height" else (width, 1)
        self.length = length
        self.reach = length - 1 if span is None else min(span // 2, length - 1)
        windowed = span is not None and length > max(span, SMALLEST_BLOCK)
        self.blocks = -(-length // max(self.reach, SMALLEST_BLOCK)) if windowed else 1
        self.queries = -(-length // self.blocks)
        if windowed:
            self.keys, first_key = self.queries + 2 * self.reach, -self.reach
        else:
            self.keys, first_key = length, 0
        query = np.arange(self.queries)[:, None]
        key = np.arange(self.keys)[None, :] + first_key
        start = np.arange(self.blocks)[:, None, None] * self.queries
        self.offsets = key - query
        visible = (
            (np.abs(self.offsets) <= self.reach)
            & (start + key >= 0)
            & (start + key < length)
            & (start + query < length)
        )
        self.visible = None if visible.all() else visible

    @property
    def rows(self):
        """Number of rows of an image that attend apart."""
        return self.width if self.axis == "height" else self.height

    @property
    def pairs(self):
        """Number of (query, key) pairs that are visible on one row."""
        return int(self.seen_offsets().sum())

    @property
    def scope(self):
        """Name scope of the products: the pairs of a row that they need, of those that they compute.

        They need min(span, L) keys for each query, as the paper counts, also at the borders.
        """
        needed = self.length * min(self.span or self.length, self.length)
        return f"pairs_{needed}_of_{self.blocks * self.queries * self.keys}"

    def seen_offsets(self):
        """float32 [length, 2 reach + 1]: 1 where a query sees a key at that offset, -reach first."""
        offset = np.arange(-self.reach, self.reach + 1)[None, :]
        key = np.arange(self.length)[:, None] + offset
        return ((key >= 0) & (key < self.length)).astype(np.float32)

    def whole(self, x):
        """[N, h, w, C] -> [windows of a whole axis, length, abreast * C]."""
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

    def one_row(self):
        """The windows of an image of one row."""
        height, width = (self.height, 1) if self.axis == "height" else (1, self.width)
        return Windows(height, width, self.axis, self.span)

    def split_rows(self, x):
        """[N, h, w, C] -> [N * rows, h or 1, 1 or w, C], for `one_row`."""
        if self.axis == "height":
            return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, self.height, 1, x.shape[3]])
        return tf.reshape(x, [-1, 1, self.width, x.shape[3]])

    def join_rows(self, x):
        """Back from `split_rows`."""
        if self.axis == "height":
            return tf.transpose(tf.reshape(x, [-1, self.width, self.height, x.shape[3]]), [0, 2, 1, 3])
        return tf.reshape(x, [-1, self.height, self.width, x.shape[3]])


class _Axis:
    """One axis of the blocks: `queries` of each block, and its `keys` with `reach` more on each side.

    An axis not longer than a block is one block that holds every key.
    """

    def __init__(self, length, reach):
        block = max(BLOCK, reach)
        self.length, self.reach = length, reach
        self.whole = length <= block
        self.queries = length if self.whole else block
        self.keys = length if self.whole else block + 2 * reach
        self.blocks = -(-length // self.queries)
        query = np.arange(self.queries)[:, None]
        key = np.arange(self.keys)[None, :] - (0 if self.whole else reach)
        start = np.arange(self.blocks)[:, None, None] * self.queries
        self.offsets = key - query  # [queries, keys]
        self.visible = (  # [blocks, queries, keys]
            (np.abs(self.offsets) <= reach) & (start + key >= 0) & (start + key < length) & (start + query < length)
        )

    @property
    def beyond(self):
        return self.blocks * self.queries - self.length

    def cut(self, x, axis):
        """Splits an axis [length] in two, [blocks, keys]: each block between its neighbours' edges."""
        if self.whole:
            return tf.expand_dims(x, axis)
        before = [[0, 0]] * axis
        after = [[0, 0]] * (x.shape.rank - axis - 1)
        x = tf.pad(x, before + [[self.queries, self.beyond + self.queries]] + after)
        shape = [-1, *x.shape[1:axis], self.blocks + 2, self.queries, *x.shape[axis + 1 :]]
        x = tf.reshape(x, shape)
        here = [slice(None)] * axis
        parts = [x[(*here, slice(1, -1))]]
        if self.reach:
            edge = slice(self.queries - self.reach, None)
            parts = [x[(*here, slice(None, -2), edge)], *parts]
            parts.append(x[(*here, slice(2, None), slice(None, self.reach))])
        return tf.concat(parts, axis + 1)


class SquareWindows:
    """The blocks of queries of a map, and the keys that each block holds: `Windows` of two axes.

    Blocks of 4 x 4 queries hold the (4 + span - 1)^2 keys around them. What is in memory at once is
    (1 + (span - 1) / 4)^2 times the keys and as much of the values (6.25 times for span 7, where one
    window a pixel would be 49 times), and (4 + span - 1)^2 logits for a pixel and head.

    Attributes and methods as of `Windows`, on maps of one row. An offset is one number, (rows) x span +
    columns, so that the tables have span^2 rows; `reach` is its largest.
    """

    rows = abreast = 1

    def __init__(self, height, width, span):
        check_span(span)
        self.height, self.width, self.span = height, width, span
        self.rows_cut, self.columns_cut = _Axis(height, span // 2), _Axis(width, span // 2)
        self.length, self.reach = height * width, span * span // 2
        self.blocks = self.rows_cut.blocks * self.columns_cut.blocks
        self.queries = self.rows_cut.queries * self.columns_cut.queries
        self.keys = self.rows_cut.keys * self.columns_cut.keys
        offsets = span * self.rows_cut.offsets[:, None, :, None] + self.columns_cut.offsets[None, :, None, :]
        self.offsets = offsets.reshape(self.queries, self.keys)
        visible = (
            self.rows_cut.visible[:, None, :, None, :, None] & self.columns_cut.visible[None, :, None, :, None, :]
        ).reshape(self.blocks, self.queries, self.keys)
        self.visible = None if visible.all() else visible

    @property
    def pairs(self):
        """Number of (query, key) pairs that are visible on one map."""
        return int(self.rows_cut.visible.sum()) * int(self.columns_cut.visible.sum())

    @property
    def scope(self):
        """As of `Windows`."""
        needed = self.length * min(self.span, self.height) * min(self.span, self.width)
        return f"pairs_{needed}_of_{self.blocks * self.queries * self.keys}"

    def seen_offsets(self):
        """float32 [L, span^2]: 1 where a query sees a key at that offset."""
        offset = np.arange(-(self.span // 2), self.span // 2 + 1)[None, :]

        def inside(n):
            return (np.arange(n)[:, None] + offset >= 0) & (np.arange(n)[:, None] + offset < n)

        seen = inside(self.height)[:, None, :, None] & inside(self.width)[None, :, None, :]
        return seen.reshape(self.length, self.span**2).astype(np.float32)

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
        """[N, h, w, C] -> [A, keys, C], zero outside the map."""
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

    def one_row(self):
        return self

    def split_rows(self, x):
        return x

    def join_rows(self, x):
        return x
