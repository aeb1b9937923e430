"""The arithmetic of position-sensitive attention: windows, statistics of logits, products.

Letters of the shapes below: N images of h x w pixels, H heads, G lanes (heads x pixels that
attend side by side), A windows, L queries and M keys of a window, D query and key channels of
a head, E value channels of a head, R rows of a table.

A batch norm on logits needs no normalised logits: softmax over keys ignores what is constant for
a head, so its mean and beta cancel and only the scale gamma / sqrt(variance + epsilon) is left. The
variance in turn follows from Gram matrices of q, k and the tables wherever these are smaller than the
logits themselves.

The content term is one product for each lane, of rows [A*G, L, D]; a relative term is one product for
each position, of [L, A*G, D], which all lanes share. Both orders are made from the image itself, so
that positions are moved in pieces of all heads together, and for one image's height not at all.

Tried on two shared CPU cores and left out. Steps of Axial-ResNet-L, batch 8; single runs of separate
processes on a noisy machine, seconds and GB (kept form 4.5-5.1 and 4.24, textbook 8.6-10.3 and 8.5):

- parts of half the size (`PART_BYTES`): 4.5-4.8 and 4.45; no parts at all: 4.9-8.2 and 4.28;
- orders of q and k kept for the gradient, not made again: 4.1-6.8 and 5.24 in small parts;

and of products alone:

- small operands transposed beforehand, so that no product has a transposed one: nothing (520 rows of 129,
  D 32: 17-20 ms for every order), so only the gradient for the second operand is turned round (3584 rows of
  56, D 8: 12.5 against 5.7 ms);
- TensorFlow's BFC allocator and larger malloc thresholds: nothing.
"""

import numpy as np
import tensorflow as tf

SMALLEST_BLOCK = 16  # queries of a block under a small span
LARGEST_MAP = 2**27  # logits of one term at a time in inference: 0.5 GB
PART_BYTES, MOST_PARTS = 2**23, 16  # of a map that a processor makes at a time in training
MASKED = -1e30  # finite: a row with every key masked stays free of NaN


# === Geometry: which keys a query sees, and the tables at their offsets ===


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
        if span is not None and (span < 1 or span % 2 == 0):
            below = max(span - 1, 1)
            raise ValueError(
                f"span must be odd, so that a query is at its middle: got {span}, "
                f"the nearest are {below} and {max(span, 0) + 1}"
            )
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


def table_rows(table, offsets):
    """Rows of a table [R, D] at integer offsets p - o: [*offsets.shape, D].

    The middle row is offset 0; offsets beyond the table share its end rows.
    """
    middle = table.shape[0] // 2
    return tf.gather(table, np.clip(offsets + middle, 0, table.shape[0] - 1))


# === Orders of the axes ===


def _by_row(x, depth):
    """[A, L, G*D] -> [A*G, L, D]."""
    x = tf.reshape(x, [-1, x.shape[1], x.shape[2] // depth, depth])
    return tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [-1, x.shape[1], depth])


def _from_rows(x, lanes):
    """[A*G, L, E] -> [A, L, G*E]."""
    _, length, depth = x.shape
    x = tf.transpose(tf.reshape(x, [-1, lanes, length, depth]), [0, 2, 1, 3])
    return tf.reshape(x, [-1, length, lanes * depth])


def _by_position(x, depth):
    """[A, L, G*D] -> [L, A*G, D]."""
    return tf.reshape(_exchange(x), [x.shape[1], -1, depth])


def _from_positions(x, lanes):
    """[L, A*G, E] -> [A, L, G*E]."""
    return _exchange(tf.reshape(x, [x.shape[0], -1, lanes * x.shape[2]]))


def _exchange(x):
    """The first two axes."""
    return tf.transpose(x, [1, 0, 2])


def _swap(x):
    """The last two axes."""
    return tf.transpose(x, [0, 2, 1])


# === Statistics of the logits ===
#
# Each function returns the sums [G, 2] of s and of s^2 over the visible pairs of each lane. What orders
# of q and k they need is made again for the gradient.


def content_sums(q, k, depth):
    """Of s = q_l . k_m over all pairs.

    sum s = (sum_l q_l) . (sum_m k_m) and sum s^2 = <sum_l q_l q_l^T, sum_m k_m k_m^T>.

    Args: q, k: float32 [A, L, G*D].
    """
    lanes = q.shape[2] // depth

    @tf.custom_gradient
    def run(q, k):
        by_row_q, by_row_k = _by_row(q, depth), _by_row(k, depth)
        total_q, total_k = tf.reduce_sum(by_row_q, 1), tf.reduce_sum(by_row_k, 1)
        gram_q = tf.matmul(by_row_q, by_row_q, transpose_a=True)
        gram_k = tf.matmul(by_row_k, by_row_k, transpose_a=True)
        first, second = tf.reduce_sum(total_q * total_k, 1), tf.reduce_sum(gram_q * gram_k, [1, 2])
        sums = tf.reduce_sum(tf.reshape(tf.stack([first, second], 1), [-1, lanes, 2]), 0)

        def gradient(d):
            by_row_q, by_row_k = (_by_row(x, depth) for x in _in_turn((q, k), d))
            d = tf.tile(d * [1.0, 2.0], [tf.shape(q)[0], 1])[:, None]  # [A*G, 1, 2]
            first, second = d[:, :, :1], d[:, :, 1:]
            d_q = tf.matmul(by_row_q, gram_k * second) + total_k[:, None] * first
            d_k = tf.matmul(by_row_k, gram_q * second) + total_q[:, None] * first
            return _from_rows(d_q, lanes), _from_rows(d_k, lanes)

        return sums, gradient

    return run(q, k)


def position_sums(q, table, windows, of_keys=False):
    """Of s = q_l . r_{m-l}: sum_m s^2 = q_l^T (sum_m r r^T) q_l over the offsets that l sees.

    For the keys' term, s = k_m . r_{m-l}, over the offsets at which m is seen.

    Args: q: float32 [whole axes, length, G*D] (the keys when `of_keys`); table: [R, D].
    """
    seen = windows.seen_offsets()[:, ::-1] if of_keys else windows.seen_offsets()
    rows = tf.cast(table_rows(table, np.arange(-windows.reach, windows.reach + 1)), tf.float32)
    outer = tf.expand_dims(rows, 2) * tf.expand_dims(rows, 1)  # [offsets, D, D]
    length, depth = windows.length, table.shape[1]
    lanes = q.shape[2] // depth
    grams = tf.reshape(tf.matmul(seen, tf.reshape(outer, [-1, depth * depth])), [length, depth, depth])
    totals = tf.matmul(seen, rows)

    @tf.custom_gradient
    def run(q, grams, totals):
        by_position = _by_position(q, depth)  # [length, A*G, D]
        first = tf.reduce_sum(tf.reshape(tf.matmul(by_position, totals[:, :, None]), [-1, lanes]), 0)
        second = _sum_lanes(by_position * tf.matmul(by_position, grams), lanes, depth)

        def gradient(d):
            by_position = _by_position(_in_turn(q, d), depth)
            first, second = tf.unstack(d, axis=1)
            first = tf.tile(first[None, :, None], [length, tf.shape(q)[0], 1])  # [length, A*G, 1]
            scaled = tf.reshape(by_position, [-1, lanes * depth]) * tf.repeat(second, depth)
            scaled = tf.reshape(scaled, tf.shape(by_position))
            d_q = 2.0 * tf.matmul(scaled, grams) + tf.matmul(first, totals[:, None])
            return (
                _from_positions(d_q, lanes),
                tf.matmul(scaled, by_position, transpose_a=True),
                tf.matmul(by_position, first, transpose_a=True)[:, :, 0],
            )

        return tf.stack([first, second], 1), gradient

    return run(q, grams, totals)


def map_sums(logits, windows, lanes):
    """Of the visible entries of a map [A*G, L, M]."""
    if windows.visible is not None:
        logits = _by_block(logits, windows, lanes) * windows.visible[:, None].astype(np.float32)
    logits = tf.reshape(logits, [-1, windows.queries * windows.keys])
    moments = tf.stack([tf.reduce_sum(logits, 1), tf.reduce_sum(logits * logits, 1)], 1)
    return tf.reduce_sum(tf.reshape(moments, [-1, lanes, 2]), 0)


def _by_block(logits, windows, lanes):
    """[A*G, L, M] -> [rows, blocks, G, L, M]."""
    return tf.reshape(logits, [-1, windows.blocks, lanes, windows.queries, windows.keys])


# === Attention ===

TERMS = ("content", "query", "key")  # of the logits, in the order of their scales


def attend(q, k, v, heads, tables, windows, scales, terms=TERMS, keep_softmax=True):
    """Eq. 4 within windows: a scale on each logit term, the two output terms apart.

    Args:
        q, k: [N, h, w, H*D].
        v: [N, h, w, H*E].
        heads: H.
        tables: dict of 'query', 'key' [R, D] and 'value' [R, E], those in use; shared by the heads.
        windows: `Windows` of the image, or `SquareWindows`.
        scales: [terms, H] or, where they come from the batch, a function that returns them from
            the sums [terms, H, 2] of s and s^2 over the visible pairs.
        terms: the logit terms in use.
        keep_softmax: whether the backward pass finds w as the forward pass left it, or again.

    Returns:
        sum_p w v_p and sum_p w r^v_{p-o}, both [N, h, w, H*E]; the second is None without a 'value'
        table. Logits and softmax are float32 under every policy.
    """
    depth, lanes = q.shape[3] // heads, windows.abreast * heads
    rows = {
        name: tf.cast(table_rows(table, windows.offsets.T if name == "key" else windows.offsets), q.dtype)
        for name, table in tables.items()
    }
    cut = {"q": windows.cut_queries(q), "k": windows.cut_keys(k), "v": windows.cut_keys(v)}
    maps = {}
    training = callable(scales)
    if training:
        sums = []
        for term in terms:
            if depth > windows.keys or (term == "content" and windows.visible is not None):
                # The map is smaller than Gram matrices, or these would see too much.
                maps[term] = _map(term, *_factors(term, cut, rows, depth))
                sums.append(map_sums(maps[term], windows, lanes))
            elif term == "content":
                sums.append(content_sums(*(tf.cast(cut[x], tf.float32) for x in "qk"), depth))
            else:
                x = tf.cast(windows.whole(k if term == "key" else q), tf.float32)
                sums.append(position_sums(x, tables[term], windows, of_keys=term == "key"))
        scales = scales(tf.reduce_sum(tf.reshape(tf.stack(sums), [len(terms), -1, heads, 2]), 1))
    scales = dict(zip(terms, tf.unstack(tf.tile(scales, [1, windows.abreast]))))  # [G] each
    parts = _parts(cut["q"].shape[0], windows, lanes) if training else None
    outputs = _mix(cut, maps, rows, scales, windows, depth, parts, keep_softmax)
    content, *position = (windows.join_queries(x) for x in outputs)
    return content, position[0] if position else None


def attend_in_parts(q, k, v, heads, tables, windows, scales, terms=TERMS, keep_softmax=True):
    """`attend`, where the logits would exceed `LARGEST_MAP` on some rows of the images after the others.

    Only where the scales are fixed, in inference, and the number of images is static.
    """
    if callable(scales) or q.shape[0] is None:
        return attend(q, k, v, heads, tables, windows, scales, terms, keep_softmax)
    rows = q.shape[0] * windows.rows
    parts = -(-rows * heads * windows.blocks * windows.queries * windows.keys // LARGEST_MAP)
    if parts <= 1:
        return attend(q, k, v, heads, tables, windows, scales, terms, keep_softmax)
    size = -(-rows // parts)
    parts = -(-rows // size)

    def cut(x):
        x = tf.pad(windows.split_rows(x), [[0, parts * size - rows], [0, 0], [0, 0], [0, 0]])
        return tf.reshape(x, [parts, size, *x.shape[1:]])

    def one(x):
        return [y for y in attend(*x, heads, tables, windows.one_row(), scales, terms) if y is not None]

    inputs = cut(q), cut(k), cut(v)
    spec = tf.TensorSpec(inputs[2].shape[1:], v.dtype)
    signature = [spec] * (1 + ("value" in tables))
    outputs = tf.map_fn(one, inputs, parallel_iterations=1, fn_output_signature=signature)
    outputs = [windows.join_rows(tf.reshape(y, [-1, *y.shape[2:]])[:rows]) for y in outputs]
    return (*outputs, None)[:2]


# How a term's product [X, Y, Z] becomes a map [A*G, L, M], and back.
_TO_MAP = {"content": None, "query": [1, 0, 2], "key": [1, 2, 0]}
_FROM_MAP = {"content": None, "query": [1, 0, 2], "key": [2, 0, 1]}
_FIRST = {"content": "q", "query": "q", "key": "k"}  # what a term's first factor is made of


def _factors(term, cut, rows, depth):
    """The two factors of a term's product, of windows [A, L, G*D] and tables' rows."""
    order = _by_row if term == "content" else _by_position
    return order(cut[_FIRST[term]], depth), _by_row(cut["k"], depth) if term == "content" else rows[term]


def _map(term, a, b):
    """q . k, q . r^q or k . r^k: float32 [A*G, L, M], from the factors of a term."""
    return _order(tf.cast(_compare(a, b), tf.float32), _TO_MAP[term])


def _order(x, axes):
    return x if axes is None else tf.transpose(x, axes)


@tf.custom_gradient
def _compare(a, b):
    """a b^T: [..., X, D], [..., Y, D] -> [..., X, Y]."""

    def gradient(d):
        return _compare_gradient(a, b, d)

    return tf.matmul(a, b, transpose_b=True), gradient


def _compare_gradient(a, b, d):
    """TensorFlow's own transposes d to reach b; transposing what comes out is up to twice as fast."""
    return tf.matmul(d, b), _swap(tf.matmul(a, d, transpose_a=True))


def _mix(cut, maps, rows, scales, windows, depth, parts, keep_softmax):
    """The two sums of `attend` for w = softmax(sum of scaled maps), part after part.

    Of all maps only w is kept for the gradient, or none.

    Args:
        cut: dict of windows 'q' [A, L, G*D], 'k' [A, M, G*D], 'v' [A, M, G*E].
        maps: dict of those terms' maps [A*G, L, M] that are there already.
        rows: dict of the rows of each table: 'query', 'value' [L, M, .], 'key' [M, L, .].
        scales: dict of [G].
        parts: how many of the A windows are taken at a time, a list, or None: all.

    Returns:
        list of [A, L, G*E]: content and, with a value table, position.
    """
    packed = cut, maps, rows, scales
    lanes = next(iter(scales.values())).shape[0]
    value_depth = cut["v"].shape[2] // lanes
    dtype = cut["v"].dtype
    position = "value" in rows

    def split(cut, maps):
        """(cut, maps) of each part."""
        if parts is None:
            return [(cut, maps)]
        cut = {name: tf.split(x, parts) for name, x in cut.items()}
        maps = {name: tf.split(x, [lanes * n for n in parts]) for name, x in maps.items()}
        return [tuple({name: x[i] for name, x in d.items()} for d in (cut, maps)) for i in range(len(parts))]

    def scaled_factors(term, cut, rows, scales):
        name = _FIRST[term]
        scale = tf.cast(tf.repeat(scales[term], depth), dtype)
        return _factors(term, {**cut, name: cut[name] * scale}, rows, depth)

    def weigh(cut, maps, rows, scales):
        logits = []
        for term, scale in scales.items():
            if term in maps:
                by_lane = tf.reshape(maps[term], [-1, lanes, windows.queries * windows.keys]) * scale[:, None]
                logits.append(tf.reshape(by_lane, [-1, windows.queries, windows.keys]))
            else:
                logits.append(_map(term, *scaled_factors(term, cut, rows, scales)))
        logits = tf.add_n(logits)
        if windows.visible is not None:
            bias = np.where(windows.visible, 0.0, MASKED).astype(np.float32)[:, None]
            logits = tf.reshape(_by_block(logits, windows, lanes) + bias, tf.shape(logits))
        return tf.cast(tf.nn.softmax(logits), dtype)

    @tf.custom_gradient
    def run(*tensors):
        cut, maps, rows, scales = tf.nest.pack_sequence_as(packed, tensors)
        weights, outputs = [], []
        for part in split(cut, maps):
            part_cut, part_maps = _in_turn(part, outputs[-1:])
            w = weigh(part_cut, part_maps, rows, scales)
            weights.append(w)
            outputs.append([_from_rows(tf.matmul(w, _by_row(part_cut["v"], value_depth)), lanes)])
            if position:
                outputs[-1].append(_from_positions(tf.matmul(_exchange(w), rows["value"]), lanes))
        outputs = [tf.concat(x, 0) if parts else x[0] for x in zip(*outputs)]

        def gradient(*d):
            # What depends on d cannot be what the forward pass computed, for grappler as for XLA.
            after = {term: x + 0.0 * tf.cast(d[0][0, 0, 0], tf.float32) for term, x in scales.items()}
            ends = zip(*(tf.split(x, parts) if parts else [x] for x in (*d, *outputs)))
            d_cut = {name: [] for name in cut}
            d_maps = {name: [] for name in maps}
            d_rows = {name: [] for name in rows}
            d_scales = {name: [] for name in scales}
            for part, w, end in zip(split(cut, maps), weights, ends):
                before = [x[-1:] for found in (d_cut, d_rows, d_scales) for x in found.values()]
                (part_cut, part_maps), w, end = _in_turn((part, w, end), before or d)
                d_part, y = end[: len(d)], end[len(d) :]
                if not keep_softmax:
                    w = weigh(part_cut, part_maps, rows, after)
                d_content, v = (_by_row(x, value_depth) for x in (d_part[0], part_cut["v"]))
                d_weights = [tf.matmul(d_content, v, transpose_b=True)]
                d_cut["v"].append(_from_rows(_swap(tf.matmul(d_content, w, transpose_a=True)), lanes))
                if position:
                    d_position = _by_position(d_part[1], value_depth)
                    d_weights.append(_exchange(tf.matmul(d_position, rows["value"], transpose_b=True)))
                    d_rows["value"].append(_swap(tf.matmul(d_position, _exchange(w), transpose_a=True)))
                # sum_p w_p dw_p of softmax's gradient is d . y, smaller than any map.
                mean = tf.add_n([_sum_channels(a, b, value_depth) for a, b in zip(d_part, y)])  # [A, L, G]
                mean = tf.reshape(_swap(mean), [-1, windows.queries, 1])
                d_logits = tf.cast(w, tf.float32) * (tf.cast(tf.add_n(d_weights), tf.float32) - mean)
                d_qk = {"q": [], "k": []}
                for term, scale in after.items():
                    if term in maps:
                        by_lane = [-1, lanes, windows.queries * windows.keys]
                        d_map, a_map = (tf.reshape(x, by_lane) for x in (d_logits, part_maps[term]))
                        d_maps[term].append(tf.reshape(d_map * scale[:, None], tf.shape(d_logits)))
                        d_scales[term].append(tf.reduce_sum(tf.reduce_sum(d_map * a_map, 2), 0))
                        continue
                    d_product = _order(tf.cast(d_logits, dtype), _FROM_MAP[term])
                    factors = scaled_factors(term, part_cut, rows, after)
                    d_first, d_second = _compare_gradient(*factors, d_product)
                    name = _FIRST[term]
                    if term == "content":
                        d_first = _from_rows(d_first, lanes)
                        d_qk["k"].append(_from_rows(d_second, lanes))
                    else:
                        d_first = _from_positions(d_first, lanes)
                        d_rows[term].append(d_second)
                    d_qk[name].append(d_first * tf.cast(tf.repeat(scale, depth), dtype))
                    product = tf.cast(d_first, tf.float32) * tf.cast(part_cut[name], tf.float32)
                    d_scales[term].append(_sum_lanes(product, lanes, depth))
                for name, many in d_qk.items():
                    d_cut[name].append(tf.add_n(many) if many else tf.zeros_like(part_cut[name]))
            join = lambda found: {name: tf.concat(x, 0) if parts else x[0] for name, x in found.items()}
            add = lambda found: {name: tf.add_n(x) for name, x in found.items()}
            for name in rows:  # of a term whose map was there already
                d_rows[name] = d_rows[name] or [tf.zeros_like(rows[name])]
            return tf.nest.flatten((join(d_cut), join(d_maps), add(d_rows), add(d_scales)))

        return outputs, gradient

    return run(*tf.nest.flatten(packed))


def _parts(count, windows, lanes):
    """Numbers of windows of the parts of a map that stay in a processor's cache, or None: all at once.

    Only where the number of windows is static, and a processor is what runs them.
    """
    if count is None or any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU")):
        return None
    rows = count // windows.blocks  # the windows of one share a mask
    size = 4 * count * lanes * windows.queries * windows.keys
    parts = min(rows, MOST_PARTS, -(-size // PART_BYTES))
    if parts == 1:
        return None
    return [windows.blocks * (rows // parts + (i < rows % parts)) for i in range(parts)]


def _in_turn(tensors, before):
    """The tensors, once those of `before` are there."""
    before = tf.nest.flatten(before)
    if not before:
        return tensors
    with tf.control_dependencies(before):
        return tf.nest.map_structure(tf.identity, tensors)


def _sum_lanes(x, lanes, depth):
    """[..., G*D] in any grouping -> [G]."""
    channels = tf.reduce_sum(tf.reshape(x, [-1, lanes * depth]), 0)
    return tf.reduce_sum(tf.reshape(channels, [lanes, depth]), 1)


def _sum_channels(a, b, depth):
    """float32 [A, L, G] of [A, L, G*E]: a . b."""
    product = tf.cast(a, tf.float32) * tf.cast(b, tf.float32)
    return tf.reduce_sum(tf.reshape(product, [-1, a.shape[1], a.shape[2] // depth, depth]), 3)
