"""The arithmetic of position-sensitive attention: statistics of logits, softmax, products.

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
processes on a noisy machine, seconds and GB (kept form 4.5-5.1 and 4.16, textbook 8.6-10.3 and 8.5):

- one part at a time: 6 % slower at 56x56 and 5 % at 65x129 (15 to 25 steps in turn), 4.12;
- parts of half the size (`PART_BYTES`), two at a time: 3 % faster than one whole at a time, 4.39; no parts at all:
  4.9-8.2 and 4.28;
- orders of q and k kept for the gradient, not made again: 4.1-6.8 and 5.24 in small parts;

and of products alone:

- small operands transposed beforehand, so that no product has a transposed one: nothing (520 rows of 129,
  D 32: 17-20 ms for every order), so only the gradient for the second operand is turned round (3584 rows of
  56, D 8: 12.5 against 5.7 ms);
- TensorFlow's BFC allocator, larger malloc thresholds and transparent huge pages: nothing; a step of the layers has
  less than a thousand page faults.

What is left of a step of both layers at 65x129 (profiled with one operation at a time, 0.96 s): the projections, which
the textbook's form has too, 0.32 s at 165 of 177-194 GFLOP/s; products of maps 0.26; orders 0.17; batch norms 0.07.
Of Axial-ResNet-L's step, 6.0 s: convolutions 2.6, products 1.0, orders 1.0, batch norms 0.5.

In inference of Axial-ResNet-L, batch 1, in turn in one process:

- XLA for this file's part alone, up to a length of 7, 14, 28, 56: 0.99, 1.04, 1.11, 1.27 times the time without;
- transposes of less than 0.5 MB by einsum, which starts sooner than oneDNN: nothing;
- q and k projected together: nothing; q, k and v together: 1.04 times;
- 1x1 convolutions as products: 10 to 20 % less on 7x7 maps, 2 % of all convolutions;
- malloc with one arena, or larger thresholds: nothing sure. In some processes forty transposes and products of 100 kB
  take 0.5 ms each and not 0.1, 20 of 180 ms, with no page fault to show for it; in others, of the same code, none do;
- weights frozen to constants: 1 to 8 % less, and 9 to 13 % less for ResNet-101, whose kernels oneDNN then
  keeps in order.

Convolutions alone take 1.5 times as long as all of ResNet-101.

On a TPU or GPU all of this is left to `attend_xla`.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from axial.layers import attend_xla, device
from axial.layers.windows import MASKED, rows_of_tables, table_rows

LARGEST_MAP = 2**27  # logits of one term at a time in inference: 0.5 GB
PART_BYTES, MOST_PARTS = 2**23, 16  # of a map; in training a processor is at two parts at a time

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
SOFTMAX = ("keep", "recompute", "kernel")


def attend(q, k, v, heads, tables, windows, scales, terms=TERMS, softmax="keep"):
    """Eq. 4 within windows: a scale on each logit term, the two output terms apart.

    Args:
        q, k: [N, h, w, H*D].
        v: [N, h, w, H*E].
        heads: H.
        tables: dict of 'query', 'key' [R, D] and 'value' [R, E], those in use; shared by the heads.
        windows: `Windows` of the image, or `SquareWindows`.
        scales: dict from terms to [H], one where a term is not in it; or, where scales come from the
            batch, a function that returns it from the sums [terms, H, 2] of s and s^2 over the visible pairs.
        terms: the logit terms in use.
        softmax: of `SOFTMAX`: whether the backward pass finds w as the forward pass left it, or makes it again, as it
            does where the layer's kernels (axial/layers/kernels/) cannot take the place of all this.

    Where an accelerator will run it, `attend_xla` is what computes it.

    Returns:
        sum_p w v_p and sum_p w r^v_{p-o}, both [N, h, w, H*E]; the second is None without a 'value'
        table. Logits and softmax are float32 under every policy.
    """
    depth, lanes = q.shape[3] // heads, windows.abreast * heads
    if softmax not in SOFTMAX:
        raise ValueError(f"softmax must be one of {SOFTMAX}: got {softmax!r}")
    if not device.on_processor():
        content, *position = attend_xla.attend(q, k, v, heads, tables, windows, scales, terms, softmax)
        return content, position[0] if position else None
    cut = {"q": windows.cut_queries(q), "k": windows.cut_keys(k), "v": windows.cut_keys(v)}
    rows = rows_of_tables(tables, windows, q.dtype)
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
    scales = {term: tf.tile(scales[term], [windows.abreast]) for term in terms if term in scales}  # [G] each
    parts = _parts(cut["q"].shape[0], windows, lanes) if training else None
    part = _Softmax(windows, terms, lanes, depth, v.shape[3] // heads, v.dtype)
    outputs = _mix(cut, maps, rows, scales, part, parts, softmax == "keep")
    content, *position = (windows.join_queries(x) for x in outputs)
    return content, position[0] if position else None


def attend_in_parts(q, k, v, heads, tables, windows, scales, terms=TERMS, softmax="keep"):
    """`attend`, where the logits would exceed `LARGEST_MAP` on some rows of the images after the others.

    Only where the scales are fixed, in inference, and the number of images is static.
    """
    if callable(scales) or q.shape[0] is None:
        return attend(q, k, v, heads, tables, windows, scales, terms, softmax)
    rows = q.shape[0] * windows.rows
    parts = -(-rows * heads * windows.blocks * windows.queries * windows.keys // LARGEST_MAP)
    if parts <= 1:
        return attend(q, k, v, heads, tables, windows, scales, terms, softmax)
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


@dataclasses.dataclass(frozen=True)
class _Softmax:
    """What of `_mix` is one part's alone.

    Arguments of its methods are of the part: `cut`, `maps`, `rows`, `scales` as of `_mix`, w [A*G, L, M].
    """

    windows: object
    terms: tuple
    lanes: int
    depth: int
    value_depth: int
    dtype: tf.DType

    def factors(self, term, cut, rows, scales):
        """A term's factors, the first scaled by lane."""
        name = _FIRST[term]
        return _factors(term, {**cut, name: self._scale(cut[name], term, scales)}, rows, self.depth)

    def weigh(self, cut, maps, rows, scales):
        """w."""
        logits = []
        for term in self.terms:
            if term in maps:
                logits.append(self._scale_map(maps[term], scales[term]))
            else:
                logits.append(_map(term, *self.factors(term, cut, rows, scales)))
        logits = tf.add_n(logits)
        if self.windows.visible is not None:
            bias = np.where(self.windows.visible, 0.0, MASKED).astype(np.float32)[:, None]
            logits = tf.reshape(_by_block(logits, self.windows, self.lanes) + bias, tf.shape(logits))
        return tf.cast(tf.nn.softmax(logits), self.dtype)

    def mix(self, w, cut, rows):
        """The part's outputs."""
        outputs = [_from_rows(tf.matmul(w, _by_row(cut["v"], self.value_depth)), self.lanes)]
        if "value" in rows:
            outputs.append(_from_positions(tf.matmul(_exchange(w), rows["value"]), self.lanes))
        return outputs

    def gradient(self, w, y, d, cut, maps, rows, scales):
        """Gradients of (cut, maps, rows, scales), dicts, from those of the outputs y; no entry is zero."""
        d_row, v = (_by_row(x, self.value_depth) for x in (d[0], cut["v"]))
        d_weights = [tf.matmul(d_row, v, transpose_b=True)]
        d_cut = {"v": [_from_rows(_swap(tf.matmul(d_row, w, transpose_a=True)), self.lanes)]}
        d_maps, d_rows, d_scales = {}, {}, {}
        if "value" in rows:
            d_position = _by_position(d[1], self.value_depth)
            d_weights.append(_exchange(tf.matmul(d_position, rows["value"], transpose_b=True)))
            d_rows["value"] = _swap(tf.matmul(d_position, _exchange(w), transpose_a=True))
        # sum_p w_p dw_p of softmax's gradient is d . y, smaller than any map.
        mean = tf.add_n([_sum_channels(a, b, self.value_depth) for a, b in zip(d, y)])  # [A, L, G]
        mean = tf.reshape(_swap(mean), [-1, self.windows.queries, 1])
        d_logits = tf.cast(w, tf.float32) * (tf.cast(tf.add_n(d_weights), tf.float32) - mean)
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
            if term in scales:
                product = tf.cast(d_first, tf.float32) * tf.cast(cut[name], tf.float32)
                d_scales[term] = _sum_lanes(product, self.lanes, self.depth)
        return {name: tf.add_n(x) for name, x in d_cut.items()}, d_maps, d_rows, d_scales

    def _scale(self, x, term, scales):
        return x * tf.cast(tf.repeat(scales[term], self.depth), self.dtype) if term in scales else x

    def _scale_map(self, x, scale):
        by_lane = tf.reshape(x, [-1, self.lanes, self.windows.queries * self.windows.keys])
        return tf.reshape(by_lane * scale[:, None], [-1, self.windows.queries, self.windows.keys])


def _mix(cut, maps, rows, scales, softmax, parts, keep_softmax):
    """The two sums of `attend` for w = softmax(sum of scaled maps), part after part.

    Of all maps only w is kept for the gradient, or none.

    Args:
        cut: dict of windows 'q' [A, L, G*D], 'k' [A, M, G*D], 'v' [A, M, G*E].
        maps: dict of those terms' maps [A*G, L, M] that are there already.
        rows: dict of the rows of each table: 'query', 'value' [L, M, .], 'key' [M, L, .].
        scales: dict of [G], of the terms that have one: of all where there are maps.
        softmax: `_Softmax`.
        parts: how many of the A windows are taken at a time, a list, or None: all.

    Returns:
        list of [A, L, G*E]: content and, with a value table, position.
    """
    packed = cut, maps, rows, scales

    def split(x, unit=1):
        # Not tf.split: grappler moves what follows it before it, and so ties parts that wait for each other in a knot.
        ends = unit * np.cumsum(parts or [0])
        return [x[end - unit * n : end] for end, n in zip(ends, parts)] if parts else [x]

    def join(x):
        return tf.concat(x, 0) if parts else x[0]

    def split_inputs(cut, maps):
        """(cut, maps) of each part."""
        cut = {name: split(x) for name, x in cut.items()}
        maps = {name: split(x, softmax.lanes) for name, x in maps.items()}
        return [[{name: x[i] for name, x in d.items()} for d in (cut, maps)] for i in range(len(parts or [0]))]

    @tf.custom_gradient
    def run(*tensors):
        cut, maps, rows, scales = tf.nest.pack_sequence_as(packed, tensors)
        weights, outputs = [], []
        for part in split_inputs(cut, maps):
            part_cut, part_maps = _in_turn(part, outputs[-2:-1])
            weights.append(softmax.weigh(part_cut, part_maps, rows, scales))
            outputs.append(softmax.mix(weights[-1], part_cut, rows))
        outputs = [join(x) for x in zip(*outputs)]

        def gradient(*d):
            # What depends on d cannot be what the forward pass computed, for grappler as for XLA.
            after = {term: x + 0.0 * tf.cast(d[0][0, 0, 0], tf.float32) for term, x in scales.items()}
            ys, ds = (list(zip(*map(split, x))) for x in (outputs, d))
            found = []
            for part in zip(split_inputs(cut, maps), weights, ys, ds):
                (part_cut, part_maps), w, y, part_d = _in_turn(part, found[-2:-1] or d)
                if not keep_softmax:
                    w = softmax.weigh(part_cut, part_maps, rows, after)
                found.append(softmax.gradient(w, y, part_d, part_cut, part_maps, rows, after))
            gradients = []
            for inputs, many, together in zip((cut, maps, rows, scales), zip(*found), (join, join, tf.add_n, tf.add_n)):

                def of(name):
                    return together([x[name] for x in many]) if name in many[0] else tf.zeros_like(inputs[name])

                gradients.append({name: of(name) for name in inputs})
            return tf.nest.flatten(gradients)

        return outputs, gradient

    return run(*tf.nest.flatten(packed))


def _parts(count, windows, lanes):
    """Numbers of windows of the parts of a map that stay in a processor's cache, or None: all at once.

    Only where the number of windows is static.
    """
    if count is None:
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
