"""Position-sensitive attention for CPUs: batched matrix products, each in its fastest order of axes.

Three ideas make it fast. `NOTES.md` has their timings and the timings of alternatives.

- The batch norm of a logit term needs only the mean and the variance of the term's map. Gram matrices of q, k and the
  tables give both (`content_sums`, `position_sums`). If the Gram matrices are larger than the map, the code sums the
  map.
- The content term is one product per lane, [A*G, L, D] with [A*G, M, D]. A relative term is one product per position,
  [L, A*G, D] with [L, M, D], because all lanes share the table rows of a position.
- Training makes the L x L maps in chunks that stay in the cache, two chunks at a time.

Letters of the shapes: N images of h x w pixels; H heads; A windows; G lanes of a window (heads x lines side by side);
L queries and M keys of a window; D query and key channels per head; E value channels per head; R rows of a table.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from axial.layers.attention.windows import rows_of_tables, visible_rows
from axial.layers.batch_norm import BatchScales
from axial.layers.masking import hide
from axial.layers.precision import widen

CHUNK_BYTES, MOST_CHUNKS = 2**23, 16  # bytes of the largest chunk of a map, and the largest number of chunks


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
    """Exchanges the first two axes."""
    return tf.transpose(x, [1, 0, 2])


def _swap(x):
    """Exchanges the last two axes."""
    return tf.transpose(x, [0, 2, 1])


# === Statistics of the logits ===
#
# Each function returns the sums [G, 2] of the logits s of a term and of s^2 over the visible pairs of each lane. The
# backward pass reorders q and k again, so that memory does not hold the reordered tensors.


def content_sums(q, k, depth):
    """Sums of s = q_l . k_m and of s^2 over all pairs.

    sum s = (sum_l q_l) . (sum_m k_m) and sum s^2 = <sum_l q_l q_l^T, sum_m k_m k_m^T>.

    Args:
        q, k: float32 [A, L, G*D].
        depth: D.
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


def position_sums(q, table, windows, key_term=False):
    """Sums of s = q_l . r_{m-l} and of s^2 over the visible pairs.

    sum_m s^2 = q_l^T (sum_m r r^T) q_l, where m - l are the offsets that query l sees. For the key term, s = k_m .
    r_{m-l}, and the sum is over the offsets at which queries see key m.

    Args:
        q: float32 [A, length, G*D]: the queries, or for the key term the keys, in windows of the whole axis.
        table: [R, D].
        windows: `Windows` or `SquareWindows`.
        key_term: whether this is the key term.
    """
    visible, rows = visible_rows(table, windows, key_term)
    outer = tf.expand_dims(rows, 2) * tf.expand_dims(rows, 1)  # [offsets, D, D]
    length, depth = windows.length, table.shape[1]
    lanes = q.shape[2] // depth
    grams = tf.reshape(tf.matmul(visible, tf.reshape(outer, [-1, depth * depth])), [length, depth, depth])
    totals = tf.matmul(visible, rows)

    @tf.custom_gradient
    def run(q, grams, totals):
        by_position = _by_position(q, depth)  # [length, A*G, D]
        first = tf.reduce_sum(tf.reshape(tf.matmul(by_position, totals[:, :, None]), [-1, lanes]), 0)
        second = _sum_lanes(by_position * tf.matmul(by_position, grams), lanes, depth)

        def gradient(d):
            by_position = _by_position(_in_turn(q, d), depth)
            first, second = tf.unstack(d, axis=1)
            first = tf.tile(first[None, :, None], [length, tf.shape(q)[0], 1])  # [length, A*G, 1]
            scaled = tf.reshape(by_position, [-1, lanes * depth]) * _by_channel(second, lanes, depth)
            scaled = tf.reshape(scaled, tf.shape(by_position))
            d_q = 2.0 * tf.matmul(scaled, grams) + tf.matmul(first, totals[:, None])
            d_grams = tf.matmul(scaled, by_position, transpose_a=True)
            d_totals = tf.matmul(by_position, first, transpose_a=True)[:, :, 0]
            return _from_positions(d_q, lanes), d_grams, d_totals

        return tf.stack([first, second], 1), gradient

    return run(q, grams, totals)


def map_sums(logits, windows, lanes):
    """Sums of the visible logits of a map [A*G, L, M] and of their squares."""
    if windows.visible is not None:
        logits = _by_block(logits, windows, lanes) * windows.visible[:, None].astype(np.float32)
    logits = tf.reshape(logits, [-1, windows.queries * windows.keys])
    moments = tf.stack([tf.reduce_sum(logits, 1), tf.reduce_sum(logits * logits, 1)], 1)
    return tf.reduce_sum(tf.reshape(moments, [-1, lanes, 2]), 0)


def _by_block(logits, windows, lanes):
    """[A*G, L, M] -> [rows, blocks, G, L, M]."""
    return tf.reshape(logits, [-1, windows.blocks, lanes, windows.queries, windows.keys])


# === Attention ===


def attend(q, k, v, tables, *, windows, options, scales, training=False):
    """Computes the equation; see `layer.attend`. With recompute='softmax' the backward pass recomputes the weights w.

    Logits and softmax are float32 under every policy except float64.
    """
    heads, terms = options.heads, options.terms
    depth, lanes = q.shape[3] // heads, windows.abreast * heads
    cut = {"q": windows.cut_queries(q), "k": windows.cut_keys(k), "v": windows.cut_keys(v)}
    rows = rows_of_tables(tables, windows, q.dtype)
    maps = {}
    from_batch = isinstance(scales, BatchScales)
    if from_batch:
        sums = []
        for term in terms:
            if depth > windows.keys or (term == "content" and windows.visible is not None):
                # The map is smaller than its Gram matrices, or the Gram matrices would count invisible pairs.
                maps[term] = _map(term, *_factors(term, cut, rows, depth))
                sums.append(map_sums(maps[term], windows, lanes))
            elif term == "content":
                sums.append(content_sums(*(widen(cut[x]) for x in "qk"), depth))
            else:
                x = widen(windows.whole(k if term == "key" else q))
                sums.append(position_sums(x, tables[term], windows, key_term=term == "key"))
        scales = scales.from_sums(tf.reduce_sum(tf.reshape(tf.stack(sums), [len(terms), -1, heads, 2]), 1))
    scales = dict(zip(terms, tf.unstack(tf.tile(scales, [1, windows.abreast]))))  # [G] each
    chunk_sizes = _chunk_sizes(cut["q"].shape[0], windows, lanes) if from_batch else None
    chunk = _Chunk(windows, terms, lanes, depth, value_depth=v.shape[3] // heads, dtype=v.dtype, training=training)
    outputs = _mix(chunk, chunk_sizes, options.recompute, inputs=(cut, maps, rows, scales))
    content, *position = (windows.join_queries(x) for x in outputs)
    return content, position[0] if position else None


# Transpositions of a term's product [X, Y, Z] to a map [A*G, L, M], and back.
_TO_MAP = {"content": None, "query": [1, 0, 2], "key": [1, 2, 0]}
_FROM_MAP = {"content": None, "query": [1, 0, 2], "key": [2, 0, 1]}
_FIRST = {"content": "q", "query": "q", "key": "k"}  # the tensor that gives a term's first factor


def _factors(term, cut, rows, depth):
    """The two factors of a term's product, from the windows [A, L, G*D] and the table rows."""
    if term == "content":
        return _by_row(cut["q"], depth), _by_row(cut["k"], depth)
    return _by_position(cut[_FIRST[term]], depth), rows[term]


def _map(term, a, b):
    """q . k, q . r^q or k . r^k: float32 [A*G, L, M], from the factors of a term."""
    return _order(widen(_compare(a, b)), _TO_MAP[term])


def _order(x, axes):
    return x if axes is None else tf.transpose(x, axes)


@tf.custom_gradient
def _compare(a, b):
    """a b^T: [..., X, D], [..., Y, D] -> [..., X, Y]."""

    def gradient(d):
        return _compare_gradient(a, b, d)

    return tf.matmul(a, b, transpose_b=True), gradient


def _compare_gradient(a, b, d):
    """(d_a, d_b). TensorFlow's gradient transposes d for d_b. Transposing the result instead is up to twice as fast."""
    return tf.matmul(d, b), _swap(tf.matmul(a, d, transpose_a=True))


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """The softmax, the outputs and the gradients of one chunk of the windows.

    The methods take `cut`, `maps`, `rows` and `scales` of the chunk (see `_mix`) and the weights w [A*G, L, M].
    """

    windows: object
    terms: tuple
    lanes: int
    depth: int
    value_depth: int
    dtype: tf.DType
    training: bool

    def factors(self, term, cut, rows, scales):
        """The two factors of a term. The first factor is multiplied by the scale of each lane."""
        name = _FIRST[term]
        return _factors(term, {**cut, name: self._scale(cut[name], term, scales)}, rows, self.depth)

    def weigh(self, cut, maps, rows, scales):
        """w = softmax of the scaled logits."""
        logits = []
        for term in self.terms:
            if term in maps:
                logits.append(self._scale_map(maps[term], scales[term]))
            else:
                logits.append(_map(term, *self.factors(term, cut, rows, scales)))
        logits = tf.add_n(logits)
        if self.windows.visible is not None:
            by_block = _by_block(logits, self.windows, self.lanes)
            logits = tf.reshape(hide(by_block, self.windows.visible[:, None], self.training), tf.shape(logits))
        return tf.cast(tf.nn.softmax(logits), self.dtype)

    def mix(self, w, cut, rows):
        """list of [A, L, G*E]: the content output and, with a value table, the position output."""
        outputs = [_from_rows(tf.matmul(w, _by_row(cut["v"], self.value_depth)), self.lanes)]
        if "value" in rows:
            outputs.append(_from_positions(tf.matmul(_exchange(w), rows["value"]), self.lanes))
        return outputs

    def gradient(self, w, y, d, inputs):
        """Gradients of (cut, maps, rows, scales), as dicts, from the gradients d of the outputs y.

        The dicts have no entry for an input whose gradient is zero.
        """
        cut, maps, rows, scales = inputs
        d_row, v = (_by_row(x, self.value_depth) for x in (d[0], cut["v"]))
        d_weights = [tf.matmul(d_row, v, transpose_b=True)]
        d_cut = {"v": [_from_rows(_swap(tf.matmul(d_row, w, transpose_a=True)), self.lanes)]}
        d_maps, d_rows, d_scales = {}, {}, {}
        if "value" in rows:
            d_position = _by_position(d[1], self.value_depth)
            d_weights.append(_exchange(tf.matmul(d_position, rows["value"], transpose_b=True)))
            d_rows["value"] = _swap(tf.matmul(d_position, _exchange(w), transpose_a=True))
        # The gradient of softmax needs sum_p w_p dw_p, which equals d . y and needs no map.
        mean = tf.add_n([_sum_channels(a, b, self.value_depth) for a, b in zip(d, y)])  # [A, L, G]
        mean = tf.reshape(_swap(mean), [-1, self.windows.queries, 1])
        d_logits = widen(w) * (widen(tf.add_n(d_weights)) - mean)
        for term in self.terms:
            if term in maps:
                d_maps[term] = self._scale_map(d_logits, scales[term])
                product = tf.reduce_sum(d_logits * maps[term], [1, 2])
                d_scales[term] = tf.reduce_sum(tf.reshape(product, [-1, self.lanes]), 0)
                continue
            d_product = _order(tf.cast(d_logits, self.dtype), _FROM_MAP[term])
            d_first, d_second = _compare_gradient(*self.factors(term, cut, rows, scales), d_product)
            if term == "content":
                d_first = _from_rows(d_first, self.lanes)
                d_cut.setdefault("k", []).append(_from_rows(d_second, self.lanes))
            else:
                d_first = _from_positions(d_first, self.lanes)
                d_rows[term] = d_second
            name = _FIRST[term]
            d_cut.setdefault(name, []).append(self._scale(d_first, term, scales))
            d_scales[term] = _sum_lanes(widen(d_first) * widen(cut[name]), self.lanes, self.depth)
        return {name: tf.add_n(x) for name, x in d_cut.items()}, d_maps, d_rows, d_scales

    def _scale(self, x, term, scales):
        return x * tf.cast(_by_channel(scales[term], self.lanes, self.depth), self.dtype)

    def _scale_map(self, x, scale):
        by_lane = tf.reshape(x, [-1, self.lanes, self.windows.queries * self.windows.keys])
        return tf.reshape(by_lane * scale[:, None], [-1, self.windows.queries, self.windows.keys])


def _mix(chunk, chunk_sizes, recompute, inputs):
    """The outputs of all windows, computed chunk by chunk. The forward pass stores at most the map w of each chunk.

    Args:
        chunk: `_Chunk`.
        chunk_sizes: list of the number of windows in each chunk, which add up to A; None for one chunk.
        recompute: with 'softmax' no map is stored, and the backward pass recomputes w.
        inputs: tuple of dicts:
            cut: the windows 'q' [A, L, G*D], 'k' [A, M, G*D] and 'v' [A, M, G*E].
            maps: from some terms to their maps [A*G, L, M], which the statistics have computed already.
            rows: the table rows 'query' [L, M, D], 'key' [M, L, D] and 'value' [L, M, E].
            scales: from each term to its scales [G].

    Returns:
        list of [A, L, G*E]: the content output and, with a value table, the position output.
    """

    def split(x, unit=1):
        if not chunk_sizes:
            return [x]
        # The chunks are slices. Grappler would move later operations before a tf.split, so no chunk would run alone.
        ends = unit * np.cumsum(chunk_sizes)
        return [x[end - unit * n : end] for end, n in zip(ends, chunk_sizes)]

    def join(x):
        return tf.concat(x, 0) if chunk_sizes else x[0]

    def split_inputs(cut, maps):
        """list of [cut, maps] of each chunk."""
        cut = {name: split(x) for name, x in cut.items()}
        maps = {name: split(x, chunk.lanes) for name, x in maps.items()}
        return [[{name: x[i] for name, x in d.items()} for d in (cut, maps)] for i in range(len(chunk_sizes or [0]))]

    @tf.custom_gradient
    def run(*tensors):
        cut, maps, rows, scales = tf.nest.pack_sequence_as(inputs, tensors)
        weights, outputs = [], []
        for one in split_inputs(cut, maps):
            one_cut, one_maps = _in_turn(one, outputs[-2:-1])
            weights.append(chunk.weigh(one_cut, one_maps, rows, scales))
            outputs.append(chunk.mix(weights[-1], one_cut, rows))
        outputs = [join(x) for x in zip(*outputs)]

        def gradient(*d):
            # The scales depend on d here, so that grappler and XLA do not reuse the forward pass.
            zero = 0.0 * tf.reduce_sum(d[0][:1, 0, 0])
            after = {term: x + tf.cast(zero, x.dtype) for term, x in scales.items()}
            ys, ds = (list(zip(*map(split, x))) for x in (outputs, d))
            gradients = []
            for one in zip(split_inputs(cut, maps), weights, ys, ds):
                (one_cut, one_maps), w, y, one_d = _in_turn(one, gradients[-2:-1] or d)
                if recompute == "softmax":
                    w = chunk.weigh(one_cut, one_maps, rows, after)
                gradients.append(chunk.gradient(w, y, one_d, inputs=(one_cut, one_maps, rows, after)))
            merged = zip(zip(*gradients), (cut, maps, rows, scales), (join, join, tf.add_n, tf.add_n))
            return tf.nest.flatten([_merge(*arguments) for arguments in merged])

        return outputs, gradient

    return run(*tf.nest.flatten(inputs))


def _merge(gradients, inputs, merge):
    """dict of the gradients of `inputs`, merged over the chunks; zero where no chunk has a gradient."""
    zeros = {name: tf.zeros_like(x) for name, x in inputs.items() if name not in gradients[0]}
    return zeros | {name: merge([chunk[name] for chunk in gradients]) for name in gradients[0]}


def _chunk_sizes(count, windows, lanes):
    """list of the number of windows in each chunk, so that a chunk's map stays in the cache; None for one chunk.

    There is one chunk if the number of windows is not static.
    """
    if count is None:
        return None
    rows = count // windows.blocks  # the windows of a line stay together, because they share a mask
    size = 4 * count * lanes * windows.queries * windows.keys
    chunks = min(rows, MOST_CHUNKS, -(-size // CHUNK_BYTES))
    if chunks == 1:
        return None
    return [windows.blocks * (rows // chunks + (i < rows % chunks)) for i in range(chunks)]


def _in_turn(tensors, before):
    """The tensors, with a control dependency on `before`."""
    before = tf.nest.flatten(before)
    if not before:
        return tensors
    with tf.control_dependencies(before):
        return tf.nest.map_structure(tf.identity, tensors)


def _sum_lanes(x, lanes, depth):
    """[..., G*D] -> [G]: sums over all axes and the D channels of a lane."""
    channels = tf.reduce_sum(tf.reshape(x, [-1, lanes * depth]), 0)
    return tf.reduce_sum(tf.reshape(channels, [lanes, depth]), 1)


def _by_channel(x, lanes, depth):
    """[G] -> [G*D]: repeats each number. tf.repeat has ten times as many ops, so it is slower to trace."""
    return tf.gather(x, np.repeat(np.arange(lanes), depth))


def _sum_channels(a, b, depth):
    """a . b per lane: [A, L, G*E] -> float32 [A, L, G]."""
    return tf.reduce_sum(tf.reshape(widen(a) * widen(b), [-1, a.shape[1], a.shape[2] // depth, depth]), 3)
