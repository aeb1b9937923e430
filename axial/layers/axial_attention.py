"""Position-sensitive axial attention (Axial-DeepLab, ECCV 2020, Eq. 4).

Along one axis of an image, for each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})

with a batch norm on q, k, v, on each of the three logit terms (one scale per head) and on each of
the two output terms (one scale per channel). p runs over the whole axis, or over the keys with
|p - o| <= span // 2.

Letters of the shapes below: N images, B = N x the other axis, H heads, L queries, M keys, D query
and key channels of a head, E value channels of a head, R rows of a table.

A batch norm on logits needs no normalised logits: softmax over keys ignores what is constant for
a head, so its mean and beta cancel and only the scale gamma / sqrt(variance + epsilon) is left.
The variance in turn follows
from Gram matrices of q, k and the tables wherever these are smaller than the logits themselves.
"""

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.layers.batch_norm import BatchNorm, BatchNormConfig, all_reduce_sums, update_moving

SMALLEST_BLOCK = 16  # queries of a block under a small span
LARGEST_MAP = 2**27  # logits of one term at a time in inference: 0.5 GB
MASKED = -1e30  # finite: a row with every key masked stays free of NaN


# === Geometry: which keys a query sees, and the tables at their offsets ===


class Windows:
    """How the L queries of an axis are cut into blocks and which keys each block holds.

    Without a span, or where the axis is not longer than it, there is one block of L queries and L
    keys. Otherwise blocks of b queries hold the b + span - 1 keys around them, so that memory is
    linear in L.

    Attributes:
        blocks, queries, keys: number of blocks, queries and keys of a block.
        offsets: int [queries, keys], key position - query position, the same for every block.
        visible: bool [blocks, queries, keys], or None where every key is.
        reach: the largest |offset| that is visible.
    """

    def __init__(self, length, span=None):
        if span is not None and (span < 1 or span % 2 == 0):
            below = max(span - 1, 1)
            raise ValueError(
                f"span must be odd, so that a query is at its middle: got {span}, "
                f"the nearest are {below} and {max(span, 0) + 1}"
            )
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
    def pairs(self):
        """Number of (query, key) pairs that are visible on one row."""
        return int(self.seen_offsets().sum())

    def seen_offsets(self):
        """float32 [L, 2 reach + 1]: 1 where a query sees a key at that offset, -reach first."""
        offset = np.arange(-self.reach, self.reach + 1)[None, :]
        key = np.arange(self.length)[:, None] + offset
        return ((key >= 0) & (key < self.length)).astype(np.float32)

    def cut_queries(self, x):
        """[B, H, L, D] -> [B*H*blocks, queries, D]."""
        if self.blocks > 1:
            x = tf.pad(x, [[0, 0], [0, 0], [0, self.blocks * self.queries - self.length], [0, 0]])
        return tf.reshape(x, [-1, self.queries, x.shape[-1]])

    def cut_keys(self, x):
        """[B, H, L, D] -> [B*H*blocks, keys, D], zero outside the axis."""
        if self.blocks > 1:
            beyond = self.blocks * self.queries - self.length
            x = tf.pad(x, [[0, 0], [0, 0], [self.reach, self.reach + beyond], [0, 0]])
            starts = range(0, self.blocks * self.queries, self.queries)
            x = tf.stack([x[:, :, start : start + self.keys] for start in starts], 2)
        return tf.reshape(x, [-1, self.keys, x.shape[-1]])

    def join_queries(self, x, heads):
        """[B*H*blocks, queries, E] -> [B, H, L, E]."""
        x = tf.reshape(x, [-1, heads, self.blocks * self.queries, x.shape[-1]])
        return x[:, :, : self.length]


def table_rows(table, offsets):
    """Rows of a table [R, D] at integer offsets p - o: [*offsets.shape, D].

    The middle row is offset 0; offsets beyond the table share its end rows.
    """
    middle = table.shape[0] // 2
    return tf.gather(table, np.clip(offsets + middle, 0, table.shape[0] - 1))


# === Statistics of the logits ===
#
# Each function returns the sums [H, 2] of s and of s^2 over the visible pairs. Where they come from
# a Gram matrix, a column of ones beside q or k lets one product give both.


def content_sums(q, k):
    """Of s = q_l . k_m over all pairs, row by row.

    sum s = (sum_l q_l) . (sum_m k_m) and sum s^2 = <sum_l q_l q_l^T, sum_m k_m k_m^T>.

    Args: q, k: [B, H, L, D].
    """
    heads, depth = q.shape[1], q.shape[3]
    gram = lambda x: tf.matmul(x, x, transpose_a=True)  # [B*H, D + 1, D + 1]
    products = gram(_append_ones(_by_row(q))) * gram(_append_ones(_by_row(k)))
    pick = np.zeros([depth + 1, depth + 1, 2], np.float32)
    pick[depth, :depth, 0] = pick[:depth, :depth, 1] = 1
    return _sum_rows(tf.reshape(products, [-1, (depth + 1) ** 2]), heads, pick.reshape(-1, 2))


def position_sums(q, table, windows, of_keys=False):
    """Of s = q_l . r_{m-l}: sum_m s^2 = q_l^T (sum_m r r^T) q_l over the offsets that l sees.

    For the keys' term, s = k_m . r_{m-l}, over the offsets at which m is seen.

    Args: q: [B, H, L, D] (the keys when `of_keys`); table: [R, D].
    """
    heads, length, depth = q.shape[1:]
    seen = windows.seen_offsets()[:, ::-1] if of_keys else windows.seen_offsets()
    rows = table_rows(table, np.arange(-windows.reach, windows.reach + 1))  # [offsets, D]
    outer = tf.expand_dims(rows, 2) * tf.expand_dims(_append_ones(rows), 1)
    moments = tf.matmul(seen, tf.reshape(outer, [-1, depth * (depth + 1)]))
    q = _by_position(_by_row(q))  # [L, B*H, D]
    products = tf.matmul(q, tf.reshape(moments, [length, depth, depth + 1])) * _append_ones(q)
    pick = np.zeros([depth + 1, 2], np.float32)
    pick[depth, 0] = pick[:depth, 1] = 1
    return _sum_rows(tf.reduce_sum(products, 0), heads, pick)


def map_sums(logits, heads, visible=None):
    """Of the visible entries of a map [B*H*blocks, L, M]."""
    blocks = 1
    if visible is not None:
        blocks = visible.shape[0]
        logits = tf.reshape(logits, [-1, *visible.shape]) * visible.astype(np.float32)
    logits = tf.reshape(logits, [-1, blocks * logits.shape[-2] * logits.shape[-1]])
    moments = tf.stack([tf.reduce_sum(logits, 1), tf.reduce_sum(logits * logits, 1)], 1)
    return _sum_rows(moments, heads)


def _sum_rows(x, heads, pick=None):
    """[B*H, X] -> [H, X], or [H, 2] by the columns of `pick`."""
    x = tf.reduce_sum(tf.reshape(x, [-1, heads, x.shape[1]]), 0)
    return x if pick is None else tf.matmul(x, pick)


def _append_ones(x):
    return tf.pad(x, [[0, 0]] * (x.shape.rank - 1) + [[0, 1]], constant_values=1)


def _by_row(x):
    """[B, H, L, D] -> float32 [B*H, L, D]."""
    return tf.cast(tf.reshape(x, [-1, *x.shape[2:]]), tf.float32)


def _by_position(x):
    """[B, L, D] <-> [L, B, D]: the order in which a table meets all rows in one product."""
    return tf.transpose(x, [1, 0, 2])


# === Attention ===

TERMS = ("content", "query", "key")  # of the logits, in the order of their scales


def attend(q, k, v, tables, windows, scales, terms=TERMS):
    """Eq. 4 along one axis: a scale on each logit term, the two output terms apart.

    Args:
        q, k: [B, H, L, D].
        v: [B, H, L, E].
        tables: dict of 'query', 'key' [R, D] and 'value' [R, E], those in use; shared by the heads.
        windows: the axis' `Windows`.
        scales: [terms, H] or, where they come from the batch, a function that returns them from
            the sums [terms, H, 2] of s and s^2 over the visible pairs.
        terms: the logit terms in use.

    Returns:
        sum_p w v_p and sum_p w r^v_{p-o}, both [B, H, L, E]; the second is None without a 'value'
        table. Logits and softmax are float32 under every policy.
    """
    heads = q.shape[1]
    maps = {}
    if callable(scales):
        sums = [_batch_sums(term, q, k, tables.get(term), windows, maps) for term in terms]
        scales = scales(tf.stack(sums))
    logits = []
    for term, scale in zip(terms, tf.unstack(tf.reshape(scales, [len(terms), heads, 1, 1]))):
        if term in maps:
            by_head = tf.reshape(maps[term], [-1, heads, windows.blocks, windows.queries * windows.keys])
            logits.append(tf.reshape(by_head * scale, [-1, windows.queries, windows.keys]))
        else:
            scale = tf.cast(scale, q.dtype)
            operands = (q, k * scale) if term == "key" else (q * scale, k)
            logits.append(_logits(term, *operands, tables.get(term), windows))
    logits = tf.add_n(logits)
    if windows.visible is not None:
        bias = np.where(windows.visible, 0.0, MASKED).astype(np.float32)
        logits = tf.reshape(logits, [-1, *bias.shape]) + bias
        logits = tf.reshape(logits, [-1, windows.queries, windows.keys])
    weights = tf.cast(tf.nn.softmax(logits), v.dtype)  # [B*H*blocks, L, M]
    content = windows.join_queries(tf.matmul(weights, windows.cut_keys(v)), heads)
    if "value" not in tables:
        return content, None
    rows = tf.cast(table_rows(tables["value"], windows.offsets), v.dtype)  # [L, M, E]
    position = _by_position(tf.matmul(_by_position(weights), rows))
    return content, windows.join_queries(position, heads)


def attend_in_parts(q, k, v, tables, windows, scales, terms=TERMS):
    """`attend`, where the logits would exceed `LARGEST_MAP` on some of the B rows after the others.

    Only where the scales are fixed, in inference, and the number of rows is static.
    """
    rows, heads = q.shape[:2]
    if callable(scales) or rows is None:
        return attend(q, k, v, tables, windows, scales, terms)
    parts = -(-rows * heads * windows.blocks * windows.queries * windows.keys // LARGEST_MAP)
    if parts <= 1:
        return attend(q, k, v, tables, windows, scales, terms)
    size = -(-rows // parts)
    parts = -(-rows // size)
    cut = lambda x: tf.reshape(
        tf.pad(x, [[0, parts * size - rows], [0, 0], [0, 0], [0, 0]]), [parts, size, *x.shape[1:]]
    )

    def one(x):
        return [y for y in attend(*x, tables, windows, scales, terms) if y is not None]

    spec = tf.TensorSpec([size, *v.shape[1:]], v.dtype)
    signature = [spec] * (1 + ("value" in tables))
    inputs = cut(q), cut(k), cut(v)
    outputs = tf.map_fn(one, inputs, parallel_iterations=1, fn_output_signature=signature)
    outputs = [tf.reshape(y, [parts * size, *v.shape[1:]])[:rows] for y in outputs]
    return (*outputs, None)[:2]


def _batch_sums(term, q, k, table, windows, maps):
    """Sums of one term; a map that they needed is left in `maps`.

    A Gram matrix serves where it is smaller than the logits, D <= M, and the keys are the same for
    every query.
    """
    if q.shape[3] > windows.keys or (term == "content" and windows.visible is not None):
        maps[term] = _logits(term, q, k, table, windows)
        return map_sums(maps[term], q.shape[1], windows.visible)
    if term == "content":
        return content_sums(q, k)
    return position_sums(k if term == "key" else q, table, windows, of_keys=term == "key")


def _logits(term, q, k, table, windows):
    """q . k, q . r^q or k . r^k: float32 [B*H*blocks, L, M]."""
    if term == "content":
        logits = tf.matmul(windows.cut_queries(q), windows.cut_keys(k), transpose_b=True)
        return tf.cast(logits, tf.float32)
    rows = tf.cast(table_rows(table, windows.offsets), q.dtype)  # [L, M, D]
    if term == "query":
        q = _by_position(windows.cut_queries(q))
        return tf.cast(_by_position(tf.matmul(q, rows, transpose_b=True)), tf.float32)
    k = _by_position(windows.cut_keys(k))  # [M, B*H*blocks, D]
    by_key = tf.matmul(k, tf.transpose(rows, [1, 2, 0]))  # [M, B*H*blocks, L]
    return tf.cast(tf.transpose(by_key, [1, 2, 0]), tf.float32)


# === Layers ===


class LogitNorm(keras.layers.Layer):
    """The scales [terms, H] that batch norms put on logits, gamma / sqrt(variance + epsilon).

    The moving mean is kept for implementations that subtract it; softmax ignores it.
    """

    def __init__(self, terms, heads, config, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        self.shape, self.config = [terms, heads], config

    def build(self, _):
        moving = dict(
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
        weight = lambda name, initializer, **kwargs: self.add_weight(
            name, self.shape, tf.float32, initializer, experimental_autocast=False, **kwargs
        )
        self.gamma = weight("gamma", "ones")
        self.moving_mean = weight("moving_mean", "zeros", **moving)
        self.moving_variance = weight("moving_variance", "ones", **moving)

    def stored_scales(self):
        return self.gamma * tf.math.rsqrt(self.moving_variance + self.config.epsilon)

    def call(self, sums, pairs):
        """From the sums [terms, H, 2] over `pairs` logits; moves the moving statistics."""
        sums, pairs = all_reduce_sums(sums, pairs)
        mean, square = tf.unstack(sums / pairs, axis=2)
        variance = tf.maximum(square - mean * mean, 0.0)
        update_moving(
            self.config, self.moving_mean, self.moving_variance, mean, variance, pairs
        )
        return self.gamma * tf.math.rsqrt(variance + self.config.epsilon)


class AxialAttention(keras.layers.Layer):
    """Multi-head position-sensitive attention along the height or the width of an image.

    The same weights serve every image size and every span: tables are looked up by p - o.

    Args:
        key_channels: channels of the queries, and of the keys, of all heads together.
        value_channels: channels of the values of all heads together, and of the output.
        axis: 'height' or 'width'.
        heads: number of heads; divides both channel counts.
        span: odd; a query sees the keys with |p - o| <= span // 2. None: the whole axis.
        terms: logit terms in use, of 'content', 'query', 'key'.
        value_position: whether r^v is in use.
        max_distance: the tables hold offsets below it, 2 max_distance - 1 rows; positions farther
            apart share the end rows.
        norm: `BatchNormConfig`, or None for the folded layer: no batch norm, a bias on q, k, v and
            on the output, and fixed scales.

    Shapes: [N, h, w, C] -> [N, h, w, value_channels]; h and w must be static.

    Raises:
        ValueError: an even span, channels that heads do not divide, no logit term.

    Example:
        >>> layer = AxialAttention(64, 128, axis="width", span=65)
        >>> layer(tf.random.normal([1, 33, 129, 128])).shape
        TensorShape([1, 33, 129, 128])
    """

    def __init__(
        self,
        key_channels,
        value_channels,
        axis,
        heads=8,
        span=None,
        terms=TERMS,
        value_position=True,
        max_distance=255,
        norm=BatchNormConfig(),
        **kwargs,
    ):
        super().__init__(**kwargs)
        if key_channels % heads or value_channels % heads:
            raise ValueError(
                f"{heads} heads must divide key_channels and value_channels: "
                f"got {key_channels} and {value_channels}"
            )
        if not terms or not set(terms) <= set(TERMS):
            raise ValueError(f"terms must be some of {TERMS}: got {terms}")
        if axis not in ("height", "width"):
            raise ValueError(f"axis must be 'height' or 'width': got {axis!r}")
        Windows(1, span)  # refuses an even span
        self.key_channels, self.value_channels, self.heads = key_channels, value_channels, heads
        self.axis, self.span, self.norm = axis, span, norm
        self.terms = tuple(t for t in TERMS if t in terms)
        self.tables_in_use = {t: key_channels for t in self.terms if t != "content"}
        if value_position:
            self.tables_in_use["value"] = value_channels
        self.max_distance = max_distance
        if norm is not None:
            self.qkv_norm = BatchNorm(norm, name="qkv_norm")
            self.logit_norm = LogitNorm(len(self.terms), heads, norm, name="logit_norm")
            self.content_output_norm = BatchNorm(norm, name="content_output_norm")
            if value_position:
                self.position_output_norm = BatchNorm(norm, name="position_output_norm")

    def build(self, shape):
        channels = 2 * self.key_channels + self.value_channels
        self.kernel = self.add_weight(
            "kernel",
            [shape[-1], channels],
            initializer=keras.initializers.VarianceScaling(1.0, "fan_in"),
        )
        self.tables = {
            name: self.add_weight(
                f"{name}_table",
                [2 * self.max_distance - 1, total // self.heads],
                initializer=keras.initializers.TruncatedNormal(
                    stddev=(self.heads / total) ** 0.5
                ),
                experimental_autocast=False,
            )
            for name, total in self.tables_in_use.items()
        }
        if self.norm is None:
            self.qkv_bias = self.add_weight("qkv_bias", [channels])
            self.logit_scales = self.add_weight("logit_scales", [len(self.terms), self.heads])
            self.position_scale = self.add_weight("position_scale", [self.value_channels])
            self.bias = self.add_weight("bias", [self.value_channels])
        else:  # the only sublayer that a first call in inference would not build
            with tf.name_scope(self.logit_norm.name):
                self.logit_norm.build(None)
                self.logit_norm.built = True

    def call(self, x, training=False):
        _, height, width, channels = x.shape
        if height is None or width is None:
            raise ValueError(f"axial attention needs a static height and width: got {x.shape}")
        windows = Windows(height if self.axis == "height" else width, self.span)
        qkv = tf.matmul(tf.reshape(x, [-1, channels]), self.kernel)
        qkv = qkv + self.qkv_bias if self.norm is None else self.qkv_norm(qkv, training=training)
        qkv = tf.split(qkv, [self.key_channels, self.key_channels, self.value_channels], 1)
        q, k, v = (self._split_heads(t, height, width) for t in qkv)
        scales = self._scales(windows.pairs * tf.cast(tf.shape(q)[0], tf.float32), training)
        outputs = attend_in_parts(q, k, v, self.tables, windows, scales, self.terms)
        content, position = (t if t is None else self._join_heads(t, height, width) for t in outputs)
        if self.norm is None:
            output = content + self.bias
            if position is not None:
                output += position * self.position_scale
        else:
            output = self.content_output_norm(content, training=training)
            if position is not None:
                output += self.position_output_norm(position, training=training)
        return tf.reshape(output, [-1, height, width, self.value_channels])

    def _scales(self, pairs, training):
        if self.norm is None:
            return self.logit_scales
        if not training:
            return self.logit_norm.stored_scales()
        return lambda sums: self.logit_norm(sums, pairs)

    def _split_heads(self, x, height, width):
        """[N*h*w, H*D] -> [B, H, L, D]."""
        depth = x.shape[1] // self.heads
        x = tf.reshape(x, [-1, height, width, self.heads, depth])
        order, length = ([0, 2, 3, 1, 4], height) if self.axis == "height" else ([0, 1, 3, 2, 4], width)
        return tf.reshape(tf.transpose(x, order), [-1, self.heads, length, depth])

    def _join_heads(self, x, height, width):
        """[B, H, L, E] -> [N*h*w, H*E]."""
        depth = x.shape[3]
        if self.axis == "height":
            x = tf.transpose(tf.reshape(x, [-1, width, self.heads, height, depth]), [0, 3, 1, 2, 4])
        else:
            x = tf.transpose(tf.reshape(x, [-1, height, self.heads, width, depth]), [0, 1, 3, 2, 4])
        return tf.reshape(x, [-1, self.heads * depth])

    def folded_weights(self):
        """Values for the weights of the same layer with norm None.

        The batch norm of q, k and v goes into the projection, and with it the scale of the content
        output into v's columns; the logit scales and the position output's scale stay as numbers
        beside the tables, which all heads share; what the output norms add is one bias.
        """
        if self.norm is None:
            return [tf.convert_to_tensor(w) for w in self.weights]
        scale, shift = self.qkv_norm.folded()
        output_scale, bias = self.content_output_norm.folded()
        position_scale = tf.ones([self.value_channels])
        if "value" in self.tables:
            position_scale, position_bias = self.position_output_norm.folded()
            bias = bias + position_bias
        on_values = tf.concat([tf.ones([2 * self.key_channels]), output_scale], 0)
        return [
            self.kernel * scale * on_values,
            *self.tables.values(),
            shift * on_values,
            self.logit_norm.stored_scales(),
            position_scale,
            bias,
        ]
