"""Stand-alone local attention in two dimensions (Ramachandran et al., NeurIPS 2019), and Eq. 3.

A query o = (i, j) sees the keys p of the span x span square around it. For each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o}) v_p                                     (Eq. 2)
    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})       (Eq. 3)

where r_{p-o} is the sum of a row's and a column's vector, span of each, shared by the heads. The
letters of the shapes are those of `axial_attention`; L = h x w counts the pixels row by row.
"""

import numpy as np
import tensorflow as tf

from axial.layers.attention import Attention
from axial.layers.batch_norm import BatchNormConfig

BLOCK = 4  # rows and columns of a block of queries
TERMS = {False: ("content", "query"), True: ("content", "query", "key")}


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
            (np.abs(self.offsets) <= reach)
            & (start + key >= 0)
            & (start + key < length)
            & (start + query < length)
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
        if span < 1 or span % 2 == 0:
            below = max(span - 1, 1)
            raise ValueError(
                f"span must be odd, so that a query is at its middle: got {span}, "
                f"the nearest are {below} and {max(span, 0) + 1}"
            )
        self.height, self.width, self.span = height, width, span
        self.rows_cut, self.columns_cut = _Axis(height, span // 2), _Axis(width, span // 2)
        self.length, self.reach = height * width, span * span // 2
        self.blocks = self.rows_cut.blocks * self.columns_cut.blocks
        self.queries = self.rows_cut.queries * self.columns_cut.queries
        self.keys = self.rows_cut.keys * self.columns_cut.keys
        offsets = span * self.rows_cut.offsets[:, None, :, None] + self.columns_cut.offsets[None, :, None, :]
        self.offsets = offsets.reshape(self.queries, self.keys)
        visible = (
            self.rows_cut.visible[:, None, :, None, :, None]
            & self.columns_cut.visible[None, :, None, :, None, :]
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
        inside = lambda n: (np.arange(n)[:, None] + offset >= 0) & (np.arange(n)[:, None] + offset < n)
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


class LocalAttention(Attention):
    """Multi-head attention of every pixel to the square around it.

    The same weights serve every image size, also one smaller than the window.

    Args:
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        heads: number of heads; divides both channel counts.
        span: odd; rows and columns of the window.
        position_sensitive: Eq. 3; otherwise Eq. 2, with r^q alone.
        batch_norm: whether batch norms stand on q, k, v and on the logit terms. The one on the output,
            that of the 3x3 convolution whose place the layer takes, is always there.
        norm: `BatchNormConfig`, or None for the folded layer, as of `AxialAttention`.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        ValueError: an even span, channels that heads do not divide.

    Example:
        >>> layer = LocalAttention(64, 64, position_sensitive=True)
        >>> layer(tf.random.normal([1, 33, 5, 128])).shape
        TensorShape([1, 33, 5, 64])
    """

    def __init__(
        self,
        key_channels,
        value_channels,
        heads=8,
        span=7,
        position_sensitive=False,
        batch_norm=True,
        norm=BatchNormConfig(),
        **kwargs,
    ):
        SquareWindows(1, 1, span)  # refuses an even span
        self.span = span
        terms = TERMS[position_sensitive]
        uses = [t for t in terms if t != "content"] + ["value"] * position_sensitive
        tables = {f"{use}_{side}": (span, use, 0.5) for use in uses for side in ("row", "column")}
        super().__init__(key_channels, value_channels, heads, terms, tables, norm, batch_norm, **kwargs)

    def windows(self, height, width):
        return SquareWindows(height, width, self.span)

    def lookup_tables(self):
        """dict of tables [span^2, D] at the offsets of `SquareWindows`, of those of the two axes."""
        both = lambda use: tf.expand_dims(self.tables[f"{use}_row"], 1) + self.tables[f"{use}_column"]
        uses = {use for _, use, _ in self.table_shapes.values()}
        return {use: tf.reshape(both(use), [self.span**2, -1]) for use in sorted(uses)}
