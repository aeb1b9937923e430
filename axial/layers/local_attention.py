"""Stand-alone local attention in two dimensions (Ramachandran et al., NeurIPS 2019), and Eq. 3.

A query o = (i, j) sees the keys p of the span x span square around it. For each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o}) v_p                                     (Eq. 2)
    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})       (Eq. 3)

where r_{p-o} is the sum of a row's and a column's vector, span of each, shared by the heads. The
letters of the shapes are those of `axial_attention`; L = h x w counts the pixels row by row.
"""

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.layers.attend import attend_in_parts
from axial.layers.axial_attention import LogitNorm
from axial.layers.batch_norm import BatchNorm, BatchNormConfig

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

    Attributes: as of `Windows`. An offset is one number, (rows) x span + columns, so that the tables
    have span^2 rows; `reach` is its largest.
    """

    def __init__(self, height, width, span):
        if span < 1 or span % 2 == 0:
            below = max(span - 1, 1)
            raise ValueError(
                f"span must be odd, so that a query is at its middle: got {span}, "
                f"the nearest are {below} and {max(span, 0) + 1}"
            )
        self.height, self.width, self.span = height, width, span
        self.rows, self.columns = _Axis(height, span // 2), _Axis(width, span // 2)
        self.length, self.reach = height * width, span * span // 2
        self.blocks = self.rows.blocks * self.columns.blocks
        self.queries = self.rows.queries * self.columns.queries
        self.keys = self.rows.keys * self.columns.keys
        offsets = span * self.rows.offsets[:, None, :, None] + self.columns.offsets[None, :, None, :]
        self.offsets = offsets.reshape(self.queries, self.keys)
        visible = (
            self.rows.visible[:, None, :, None, :, None]
            & self.columns.visible[None, :, None, :, None, :]
        ).reshape(self.blocks, self.queries, self.keys)
        self.visible = None if visible.all() else visible

    @property
    def pairs(self):
        """Number of (query, key) pairs that are visible on one map."""
        return int(self.rows.visible.sum()) * int(self.columns.visible.sum())

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

    def cut_queries(self, x):
        """[B, H, L, D] -> [B*H*blocks, queries, D]."""
        depth = x.shape[3]
        x = tf.reshape(x, [-1, self.height, self.width, depth])
        x = tf.pad(x, [[0, 0], [0, self.rows.beyond], [0, self.columns.beyond], [0, 0]])
        rows, columns = self.rows, self.columns
        x = tf.reshape(x, [-1, rows.blocks, rows.queries, columns.blocks, columns.queries, depth])
        return tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [-1, self.queries, depth])

    def cut_keys(self, x):
        """[B, H, L, D] -> [B*H*blocks, keys, D], zero outside the map."""
        depth = x.shape[3]
        x = tf.reshape(x, [-1, self.height, self.width, depth])
        x = self.columns.cut(self.rows.cut(x, 1), 3)  # [B*H, blocks, keys, blocks, keys, D]
        return tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [-1, self.keys, depth])

    def join_queries(self, x, heads):
        """[B*H*blocks, queries, E] -> [B, H, L, E]."""
        depth, rows, columns = x.shape[2], self.rows, self.columns
        x = tf.reshape(x, [-1, rows.blocks, columns.blocks, rows.queries, columns.queries, depth])
        x = tf.transpose(x, [0, 1, 3, 2, 4, 5])
        x = tf.reshape(x, [-1, rows.blocks * rows.queries, columns.blocks * columns.queries, depth])
        x = x[:, : self.height, : self.width]
        return tf.reshape(x, [-1, heads, self.length, depth])


class LocalAttention(keras.layers.Layer):
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
        super().__init__(**kwargs)
        if key_channels % heads or value_channels % heads:
            raise ValueError(
                f"{heads} heads must divide key_channels and value_channels: "
                f"got {key_channels} and {value_channels}"
            )
        SquareWindows(1, 1, span)  # refuses an even span
        self.key_channels, self.value_channels, self.heads = key_channels, value_channels, heads
        self.span, self.norm, self.batch_norm = span, norm, batch_norm
        self.terms = TERMS[position_sensitive]
        self.tables_in_use = {t: key_channels for t in self.terms if t != "content"}
        if position_sensitive:
            self.tables_in_use["value"] = value_channels
        if norm is None:
            return
        if batch_norm:
            self.qkv_norm = BatchNorm(norm, name="qkv_norm")
            self.logit_norm = LogitNorm(len(self.terms), heads, norm, name="logit_norm")
        self.content_output_norm = BatchNorm(norm, name="content_output_norm")
        if position_sensitive:
            self.position_output_norm = BatchNorm(norm, name="position_output_norm")

    def build(self, shape):
        channels = 2 * self.key_channels + self.value_channels
        self.kernel = self.add_weight(
            "kernel",
            [shape[-1], channels],
            initializer=keras.initializers.VarianceScaling(1.0, "fan_in"),
        )
        self.tables = {
            f"{name}_{side}": self.add_weight(
                f"{name}_{side}_table",
                [self.span, total // self.heads],
                initializer=keras.initializers.TruncatedNormal(
                    stddev=(self.heads / (2 * total)) ** 0.5
                ),
                experimental_autocast=False,
            )
            for name, total in self.tables_in_use.items()
            for side in ("row", "column")
        }
        if self.norm is None:
            self.qkv_bias = self.add_weight("qkv_bias", [channels])
            self.logit_scales = self.add_weight("logit_scales", [len(self.terms), self.heads])
            self.position_scale = self.add_weight("position_scale", [self.value_channels])
            self.bias = self.add_weight("bias", [self.value_channels])
        elif self.batch_norm:  # the only sublayer that a first call in inference would not build
            with tf.name_scope(self.logit_norm.name):
                self.logit_norm.build(None)
                self.logit_norm.built = True

    def call(self, x, training=False):
        _, height, width, channels = x.shape
        if height is None or width is None:
            raise ValueError(f"local attention needs a static height and width: got {x.shape}")
        windows = SquareWindows(height, width, self.span)
        qkv = tf.matmul(tf.reshape(x, [-1, channels]), self.kernel)
        if self.norm is None:
            qkv = qkv + self.qkv_bias
        elif self.batch_norm:
            qkv = self.qkv_norm(qkv, training=training)
        qkv = tf.split(qkv, [self.key_channels, self.key_channels, self.value_channels], 1)
        q, k, v = (self._split_heads(t, windows.length) for t in qkv)
        scales = self._scales(windows.pairs * tf.cast(tf.shape(q)[0], tf.float32), training)
        with tf.name_scope(windows.scope):
            outputs = attend_in_parts(q, k, v, self.square_tables(), windows, scales, self.terms)
        content, position = (t if t is None else self._join_heads(t) for t in outputs)
        if self.norm is None:
            output = content + self.bias
            if position is not None:
                output += position * self.position_scale
        else:
            output = self.content_output_norm(content, training=training)
            if position is not None:
                output += self.position_output_norm(position, training=training)
        return tf.reshape(output, [-1, height, width, self.value_channels])

    def square_tables(self):
        """dict of tables [span^2, D] at the offsets of `SquareWindows`, of those of the two axes."""
        return {
            name: tf.reshape(
                tf.expand_dims(self.tables[f"{name}_row"], 1) + self.tables[f"{name}_column"],
                [self.span**2, total // self.heads],
            )
            for name, total in self.tables_in_use.items()
        }

    def _scales(self, pairs, training):
        if self.norm is None:
            return self.logit_scales
        if not self.batch_norm:
            return tf.ones([len(self.terms), self.heads])
        if not training:
            return self.logit_norm.stored_scales()
        return lambda sums: self.logit_norm(sums, pairs)

    def _split_heads(self, x, length):
        """[N*h*w, H*D] -> [B, H, L, D], here B = N."""
        x = tf.reshape(x, [-1, length, self.heads, x.shape[1] // self.heads])
        return tf.transpose(x, [0, 2, 1, 3])

    def _join_heads(self, x):
        """[B, H, L, E] -> [N*h*w, H*E]."""
        return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, self.heads * x.shape[3]])

    def folded_weights(self):
        """Values for the weights of the same layer with norm None, as of `AxialAttention`."""
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = tf.ones([self.kernel.shape[1]]), tf.zeros([self.kernel.shape[1]])
        scales = tf.ones([len(self.terms), self.heads])
        if self.batch_norm:
            scale, shift = self.qkv_norm.folded()
            scales = self.logit_norm.stored_scales()
        output_scale, bias = self.content_output_norm.folded()
        position_scale = tf.ones([self.value_channels])
        if "value" in self.tables_in_use:
            position_scale, position_bias = self.position_output_norm.folded()
            bias = bias + position_bias
        on_values = tf.concat([tf.ones([2 * self.key_channels]), output_scale], 0)
        return [
            self.kernel * scale * on_values,
            *self.tables.values(),
            shift * on_values,
            scales,
            position_scale,
            bias,
        ]
