"""The arithmetic of position-sensitive axial attention along one axis: windows, statistics, products.

Letters of the shapes below: N images, B = N x the other axis, H heads, L queries, M keys, D query
and key channels of a head, E value channels of a head, R rows of a table.

A batch norm on logits needs no normalised logits: softmax over keys ignores what is constant for
a head, so its mean and beta cancel and only the scale gamma / sqrt(variance + epsilon) is left. The
variance in turn follows from Gram matrices of q, k and the tables wherever these are smaller than the
logits themselves.

Tried on two shared CPU cores, figures in CPU seconds of the products alone, and left out: transposing
small operands beforehand, so that no product has a transposed one, gains nothing at D 32 (520 rows of
129: 17-20 ms for every order), which is why only the gradient for the second operand is turned round (at
D 8, 3584 rows of 56: 12.5 against 5.7 ms); TensorFlow's BFC allocator and larger malloc thresholds: no
difference (less than 4 % of a step is spent in the system).
"""

import numpy as np
import tensorflow as tf

from axial.layers.batch_norm import recompute

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
        self.length, self.span = length, span
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

    @property
    def scope(self):
        """Name scope of the products: the pairs of a row that they need, of those that they compute.

        They need min(span, L) keys for each query, as the paper counts, also at the borders.
        """
        needed = self.length * min(self.span or self.length, self.length)
        return f"pairs_{needed}_of_{self.blocks * self.queries * self.keys}"

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
        return x[:, :, : self.length] if self.blocks > 1 else x


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


def attend(q, k, v, tables, windows, scales, terms=TERMS, keep_softmax=True):
    """Eq. 4 along one axis: a scale on each logit term, the two output terms apart.

    Args:
        q, k: [B, H, L, D].
        v: [B, H, L, E].
        tables: dict of 'query', 'key' [R, D] and 'value' [R, E], those in use; shared by the heads.
        windows: the axis' `Windows`.
        scales: [terms, H] or, where they come from the batch, a function that returns them from
            the sums [terms, H, 2] of s and s^2 over the visible pairs.
        terms: the logit terms in use.
        keep_softmax: whether the backward pass finds w as the forward pass left it, or again.

    Returns:
        sum_p w v_p and sum_p w r^v_{p-o}, both [B, H, L, E]; the second is None without a 'value'
        table. Logits and softmax are float32 under every policy.
    """
    heads = q.shape[1]
    maps = {}
    if callable(scales):
        sums = [_batch_sums(term, q, k, tables.get(term), windows, maps) for term in terms]
        scales = scales(tf.stack(sums))
    rows = {name: tf.cast(table_rows(table, windows.offsets), q.dtype) for name, table in tables.items()}
    run = lambda *tensors: _weigh(*tf.nest.pack_sequence_as(packed, tensors), windows, terms)
    packed = (q, k, v, rows, maps, tf.reshape(scales, [len(terms), heads, 1, 1]))
    tensors = tf.nest.flatten(packed)
    outputs = run(*tensors) if keep_softmax else recompute(run, *tensors)
    content, *position = (windows.join_queries(x, heads) for x in outputs)
    return content, position[0] if position else None


def attend_in_parts(q, k, v, tables, windows, scales, terms=TERMS, keep_softmax=True):
    """`attend`, where the logits would exceed `LARGEST_MAP` on some of the B rows after the others.

    Only where the scales are fixed, in inference, and the number of rows is static.
    """
    rows, heads = q.shape[:2]
    if callable(scales) or rows is None:
        return attend(q, k, v, tables, windows, scales, terms, keep_softmax)
    parts = -(-rows * heads * windows.blocks * windows.queries * windows.keys // LARGEST_MAP)
    if parts <= 1:
        return attend(q, k, v, tables, windows, scales, terms, keep_softmax)
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


def _weigh(q, k, v, rows, maps, scales, windows, terms):
    """The sums of `attend` by query blocks, [B*H*blocks, L, E] each, from the tables' rows [L, M, D]."""
    heads = q.shape[1]
    logits = []
    for term, scale in zip(terms, tf.unstack(scales)):
        if term in maps:
            by_head = tf.reshape(maps[term], [-1, heads, windows.blocks, windows.queries * windows.keys])
            logits.append(tf.reshape(by_head * scale, [-1, windows.queries, windows.keys]))
        else:
            scale = tf.cast(scale, q.dtype)
            operands = (q, k * scale) if term == "key" else (q * scale, k)
            logits.append(_logits(term, *operands, rows.get(term), windows))
    logits = tf.add_n(logits)
    if windows.visible is not None:
        bias = np.where(windows.visible, 0.0, MASKED).astype(np.float32)
        logits = tf.reshape(logits, [-1, *bias.shape]) + bias
        logits = tf.reshape(logits, [-1, windows.queries, windows.keys])
    return _softmax_mix(logits, windows.cut_keys(v), *([rows["value"]] if "value" in rows else []))


def _batch_sums(term, q, k, table, windows, maps):
    """Sums of one term; a map that they needed is left in `maps`.

    A Gram matrix serves where it is smaller than the logits, D <= M, and the keys are the same for
    every query.
    """
    if q.shape[3] > windows.keys or (term == "content" and windows.visible is not None):
        rows = None if table is None else tf.cast(table_rows(table, windows.offsets), q.dtype)
        maps[term] = _logits(term, q, k, rows, windows)
        return map_sums(maps[term], q.shape[1], windows.visible)
    if term == "content":
        return content_sums(q, k)
    return position_sums(k if term == "key" else q, table, windows, of_keys=term == "key")


def _logits(term, q, k, rows, windows):
    """q . k, q . r^q or k . r^k: float32 [B*H*blocks, L, M], from the rows [L, M, D] of a table."""
    if term == "content":
        logits = _compare(windows.cut_queries(q), windows.cut_keys(k))
        return tf.cast(logits, tf.float32)
    if term == "query":
        q = _by_position(windows.cut_queries(q))
        return tf.cast(_by_position(_compare(q, rows)), tf.float32)
    k = _by_position(windows.cut_keys(k))  # [M, B*H*blocks, D]
    by_key = _compare(k, _by_position(rows))  # [M, B*H*blocks, L]
    return tf.cast(tf.transpose(by_key, [1, 2, 0]), tf.float32)


# Products between a map [X, Y] and small tensors [X, D], [Y, D]. TensorFlow's own gradient transposes
# the map to reach the second operand; transposing what comes out is up to twice as fast.


@tf.custom_gradient
def _compare(a, b):
    """a b^T: [..., X, D], [..., Y, D] -> [..., X, Y]."""

    def gradient(d):
        return tf.matmul(d, b), _swap(tf.matmul(a, d, transpose_a=True))

    return tf.matmul(a, b, transpose_b=True), gradient


@tf.custom_gradient
def _softmax_mix(logits, v, *rows):
    """w v_p and w r^v_{p-o} for w = softmax(logits); of all maps only w is kept for the gradient.

    Args:
        logits: float32 [B*H, L, M].
        v: [B*H, M, E].
        rows: of the value table, [L, M, E]; without, only the first sum.

    Returns:
        tuple of [B*H, L, E].
    """
    weights = tf.cast(tf.nn.softmax(logits), v.dtype)
    outputs = [tf.matmul(weights, v)]
    outputs += [_by_position(tf.matmul(_by_position(weights), r)) for r in rows]

    def gradient(*d):
        with tf.control_dependencies(d):  # else the map's transpose of the forward pass is kept too
            kept = tf.identity(weights)
        # sum_p w_p dw_p of softmax's gradient is d . y, smaller than any map.
        products = [tf.cast(a, tf.float32) * tf.cast(b, tf.float32) for a, b in zip(d, outputs)]
        mean = tf.reduce_sum(tf.add_n(products), 2, keepdims=True)
        d_weights = [tf.matmul(d[0], v, transpose_b=True)]
        found = [_swap(tf.matmul(d[0], weights, transpose_a=True))]
        for r in rows:
            by_position = _by_position(d[1])
            d_weights.append(_by_position(tf.matmul(by_position, r, transpose_b=True)))
            found.append(_swap(tf.matmul(by_position, _by_position(kept), transpose_a=True)))
        d_weights = tf.cast(tf.add_n(d_weights), tf.float32)
        return [tf.cast(weights, tf.float32) * (d_weights - mean), *found]

    return tuple(outputs), gradient


def _swap(x):
    return tf.transpose(x, [0, 2, 1])
