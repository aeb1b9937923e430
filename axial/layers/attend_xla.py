"""`attend` as XLA likes it, for a TPU or a GPU: einsums, whose orders of axes the compiler chooses.

Letters of the shapes: A windows, in each of which `abreast` pixels attend side by side, H heads, L queries and
M keys of a window, D query and key channels of a head, E value channels of a head.

In the indices of einsums * stands for pixels and heads. XLA pads the minor axis to 128, and makes * that
axis in the relative terms: so pixels and heads are one axis, unless the pixels alone fill it.

Estimated cycles, in millions, of a training step (`axial-analyze tpu --layer=258x65`: v5e, bfloat16, all
optimisations) and what was tried:

| rows x length | 258 x 65 | 130 x 129 | 128 x 128 |
|---|---|---|---|
| textbook | 16.7 | 33.1 | 13.2 |
| this form | 10.6 | 15.6 | 6.0 |
| products as for a processor | 15.0 | 20.7 | 11.2 |
| heads always apart, TensorFlow's own gradient | 12.4 | 23.3 | 7.4 |
| heads always apart | 12.0 | 22.5 | 6.0 |
| heads never apart | 10.7 | 14.9 | 8.6 |
| heads never apart, and major | 11.5 | 15.0 | 9.7 |

Scales, statistics and the mean of the softmax's gradient in the order of the projection: 16.3, 21.6, 8.7. What
else a step returns moves all of these by up to 0.6.
Relative terms without a table of L x M rows, by the discrete Fourier transform of the table (q . r_{m-l} is then a
product with cosines and sines of m, after a rotation of each pair of channels by l; equal to 1e-6): 128 x 128 13.5,
130 x 129 43.6, as every map of logits is preceded by one of twice its size.
Barriers of XLA's, so that outputs and what comes back are copied in bfloat16: 130 x 129 16.4 to 16.8.
What is left is mostly copies of maps from one order of axes to another, 0.24 each at 128 x 128. In training
the kernels of axial/layers/kernels/, which make no such maps, may take the place of this.
"""

import numpy as np
import tensorflow as tf

from axial.layers.windows import MASKED, rows_of_tables, table_rows

LANES = 128  # of a TPU's vector registers
FACTORS = {  # of a logit term: names and indices
    "content": ("q", "*ld", "k", "*md"),
    "query": ("q", "*ld", "query", "lmd"),
    "key": ("k", "*md", "key", "mld"),
}


def attend(q, k, v, heads, tables, windows, scales, terms, softmax):
    """`axial.layers.attend.attend`: arguments and what it returns, but a list, of one without a 'value' table."""
    cut = {"q": windows.cut_queries(q), "k": windows.cut_keys(k), "v": windows.cut_keys(v)}
    pixels = cut["q"].shape[0] and cut["q"].shape[0] * windows.abreast
    lead = [-1, heads] if pixels and pixels % LANES == 0 else [-1]

    def open_(x):
        """[A, L, abreast * H*D] -> [*, L, D]."""
        x = tf.reshape(x, [-1, x.shape[1], windows.abreast, heads, x.shape[2] // windows.abreast // heads])
        return tf.reshape(tf.transpose(x, [0, 2, 3, 1, 4]), [*lead, x.shape[1], x.shape[4]])

    def close(x):
        x = tf.reshape(x, [-1, windows.abreast, heads, *x.shape[-2:]])
        return tf.reshape(tf.transpose(x, [0, 3, 1, 2, 4]), [-1, x.shape[3], windows.abreast * heads * x.shape[4]])

    inputs = {**{name: open_(x) for name, x in cut.items()}, **rows_of_tables(tables, windows, q.dtype)}
    training = callable(scales)
    if training:
        sums = []
        for term in terms:
            if term == "content" and windows.visible is not None:  # Gram matrices would see too much
                sums.append(_seen_sums(_product(term, inputs), windows, heads))
            elif term == "content":
                sums.append(_content_sums(cut["q"], cut["k"], windows, heads))
            else:
                x = windows.whole(k if term == "key" else q)
                sums.append(_position_sums(x, tables[term], windows, heads, of_keys=term == "key"))
        scales = scales(tf.stack(sums))
    scales = {term: scales[term] for term in terms if term in scales}
    outputs = _mix(inputs, scales, windows, heads, terms, softmax == "keep")
    return [windows.join_queries(close(x)) for x in outputs]


def _einsum(indices, a, b):
    return tf.einsum(indices.replace("*", "ph" if a.shape.rank == 4 else "p"), a, b)


def _float(x):
    return tf.cast(x, tf.float32)


# === Statistics: sums [H, 2] of the logits and of their squares over the visible pairs ===
#
# But for `_seen_sums`, what their gradients need is little: TensorFlow finds them.


def _by_head(x, windows, heads):
    """float32 [A, L, abreast, H, D] of [A, L, abreast * H*D]."""
    return tf.reshape(_float(x), [-1, x.shape[1], windows.abreast, heads, x.shape[2] // windows.abreast // heads])


def _content_sums(q, k, windows, heads):
    """sum s = (sum_l q_l) . (sum_m k_m) and sum s^2 = <sum_l q_l q_l^T, sum_m k_m k_m^T>."""
    q, k = _by_head(q, windows, heads), _by_head(k, windows, heads)
    first = tf.einsum("aphd,aphd->h", tf.reduce_sum(q, 1), tf.reduce_sum(k, 1))
    grams = [tf.einsum("alphd,alphe->aphde", x, x) for x in (q, k)]
    return tf.stack([first, tf.einsum("aphde,aphde->h", *grams)], 1)


def _position_sums(x, table, windows, heads, of_keys):
    """sum_l q_l . t_l and sum_l <q_l q_l^T, G_l>, for the sum t_l and the Gram matrix G_l of the rows that l sees."""
    seen = windows.seen_offsets()[:, ::-1] if of_keys else windows.seen_offsets()
    rows = _float(table_rows(table, np.arange(-windows.reach, windows.reach + 1)))
    grams = tf.einsum("lr,rd,re->lde", seen, rows, rows)
    x = _by_head(x, windows, heads)
    first = tf.einsum("lhd,ld->h", tf.reduce_sum(x, [0, 2]), tf.matmul(seen, rows))
    second = tf.einsum("lhde,lde->h", tf.einsum("alphd,alphe->lhde", x, x), grams)
    return tf.stack([first, second], 1)


def _seen_sums(logits, windows, heads):
    shape = [-1, windows.blocks, windows.abreast, heads, windows.queries, windows.keys]
    logits = tf.reshape(logits, shape) * windows.visible[:, None, None].astype(np.float32)
    return tf.stack([tf.reduce_sum(x, [0, 1, 2, 4, 5]) for x in (logits, logits * logits)], 1)


# === Attention ===


def _product(term, inputs):
    """q . k, q . r^q or k . r^k: float32 [*, L, M]."""
    a, of_a, b, of_b = FACTORS[term]
    return _float(_einsum(f"{of_a},{of_b}->*lm", inputs[a], inputs[b]))


def _mix(inputs, scales, windows, heads, terms, keep_softmax):
    """sum_p w v_p and, with a table, sum_p w r^v_{p-o}, [*, L, E], w = softmax(sum of scaled products).

    Args:
        inputs: dict of 'q' [*, L, D], 'k' [*, M, D], 'v' [*, M, E] and the tables' rows.
        scales: dict of [H], of the terms that have one.
    """
    dtype = inputs["v"].dtype

    def per_head(scale, x):
        """[H] as it multiplies x."""
        scale = tf.cast(scale, dtype)
        scale = scale if x.shape.rank == 4 else tf.tile(scale, [tf.shape(x)[0] // heads])
        return scale[:, None, None]

    def scaled(term, inputs, scales):
        name = FACTORS[term][0]
        return {**inputs, name: inputs[name] * per_head(scales[term], inputs[name])} if term in scales else inputs

    def weigh(inputs, scales):
        logits = tf.add_n([_product(term, scaled(term, inputs, scales)) for term in terms])
        if windows.visible is not None:
            bias = np.where(windows.visible, 0.0, MASKED).astype(np.float32)[:, None]
            by_block = [-1, windows.blocks, windows.abreast * heads, windows.queries, windows.keys]
            logits = tf.reshape(tf.reshape(logits, by_block) + bias, tf.shape(logits))
        return tf.cast(tf.nn.softmax(logits), dtype)

    @tf.custom_gradient
    def run(*tensors):
        inputs_, scales_ = tf.nest.pack_sequence_as((inputs, scales), tensors)
        w = weigh(inputs_, scales_)
        outputs = [_einsum("*lm,*me->*le", w, inputs_["v"])]
        if "value" in inputs_:
            outputs.append(_einsum("*lm,lme->*le", w, inputs_["value"]))

        def gradient(*d):
            weights = w
            if not keep_softmax:
                # What depends on d cannot be what the forward pass computed.
                zero = 0.0 * _float(tf.reshape(d[0], [-1])[0])
                weights = weigh({**inputs_, "k": inputs_["k"] + tf.cast(zero, dtype)}, scales_)
            found = {"v": _einsum("*lm,*le->*me", weights, d[0])}
            d_weights = _float(_einsum("*le,*me->*lm", d[0], inputs_["v"]))
            if "value" in inputs_:
                found["value"] = _einsum("*lm,*le->lme", weights, d[1])
                d_weights += _float(_einsum("*le,lme->*lm", d[1], inputs_["value"]))
            # sum_p w_p dw_p of softmax's gradient is d . y, smaller than any map.
            mean = tf.add_n([tf.reduce_sum(_float(a) * _float(b), -1, keepdims=True) for a, b in zip(d, outputs)])
            d_logits = tf.cast(_float(weights) * (d_weights - mean), dtype)
            d_scales = {}
            for term in terms:
                a, of_a, b, of_b = FACTORS[term]
                d_a = _einsum(f"*lm,{of_b}->{of_a}", d_logits, inputs_[b])
                d_b = _einsum(f"*lm,{of_a}->{of_b}", d_logits, scaled(term, inputs_, scales_)[a])
                if term in scales_:
                    by_pixel = tf.reduce_sum(_float(d_a) * _float(inputs_[a]), [-2, -1])
                    d_scales[term] = tf.reduce_sum(tf.reshape(by_pixel, [-1, heads]), 0)
                    d_a *= per_head(scales_[term], d_a)
                for name, x in ((a, d_a), (b, d_b)):
                    found[name] = found[name] + x if name in found else x
            for name in inputs_:
                found.setdefault(name, tf.zeros_like(inputs_[name]))
            return tf.nest.flatten((found, d_scales))

        return outputs, gradient

    return run(*tf.nest.flatten((inputs, scales)))
