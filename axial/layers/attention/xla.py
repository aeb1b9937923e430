"""Position-sensitive attention for GPUs and TPUs: einsums, whose layouts XLA chooses.

Letters of the shapes: A windows, each with `abreast` lines side by side; H heads; L queries and M keys of a window;
D query and key channels per head; E value channels per head; * the lines of all windows times the heads.

A TPU pads the minor axis to 128 lanes, and XLA makes * the minor axis of the relative terms. So * is one axis, unless
the number of lines is a multiple of 128: then lines and heads are two axes. `NOTES.md` has the cycles of the
alternatives.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from axial.layers.attention.windows import rows_of_tables, visible_rows
from axial.layers.batch_norm import BatchScales
from axial.layers.masking import hide
from axial.layers.precision import widen

LANES = 128  # lanes of a TPU's vector register
FACTORS = {  # the two factors of each logit term: their names, and their axes in an einsum
    "content": ("q", "*ld", "k", "*md"),
    "query": ("q", "*ld", "query", "lmd"),
    "key": ("k", "*md", "key", "mld"),
}


def attend(q, k, v, tables, *, windows, options, scales, training=False):
    """Computes the equation; see `layer.attend`. With recompute='softmax' the backward pass recomputes the weights w.

    Logits and softmax are float32 under every policy except float64.
    """
    heads, terms = options.heads, options.terms
    cut = {"q": windows.cut_queries(q), "k": windows.cut_keys(k), "v": windows.cut_keys(v)}
    lines = cut["q"].shape[0] and cut["q"].shape[0] * windows.abreast
    lead = [-1, heads] if lines and lines % LANES == 0 else [-1]

    def open_(x):
        """[A, L, abreast * H*D] -> [*, L, D]."""
        x = tf.reshape(x, [-1, x.shape[1], windows.abreast, heads, x.shape[2] // windows.abreast // heads])
        return tf.reshape(tf.transpose(x, [0, 2, 3, 1, 4]), [*lead, x.shape[1], x.shape[4]])

    def close(x):
        """[*, L, E] -> [A, L, abreast * H*E]."""
        x = tf.reshape(x, [-1, windows.abreast, heads, *x.shape[-2:]])
        return tf.reshape(tf.transpose(x, [0, 3, 1, 2, 4]), [-1, x.shape[3], windows.abreast * heads * x.shape[4]])

    inputs = {**{name: open_(x) for name, x in cut.items()}, **rows_of_tables(tables, windows, q.dtype)}
    if isinstance(scales, BatchScales):
        sums = []
        for term in terms:
            if term == "content" and windows.visible is not None:  # Gram matrices would count invisible pairs too
                sums.append(_map_sums(_product(term, inputs), windows, heads))
            elif term == "content":
                sums.append(_content_sums(cut["q"], cut["k"], windows, heads))
            else:
                x = windows.whole(k if term == "key" else q)
                sums.append(_position_sums(x, tables[term], windows, heads, key_term=term == "key"))
        scales = scales.from_sums(tf.stack(sums))
    outputs = _Mixing(windows, options, v.dtype, training).mix(inputs, dict(zip(terms, tf.unstack(scales))))
    content, *position = (windows.join_queries(close(x)) for x in outputs)
    return content, position[0] if position else None


def _einsum(indices, a, b):
    return tf.einsum(indices.replace("*", "ph" if a.shape.rank == 4 else "p"), a, b)


# === Statistics: sums [H, 2] of the logits and of their squares over the visible pairs ===
#
# TensorFlow derives the gradients. Only `_map_sums` stores a map for them.


def _by_head(x, windows, heads):
    """[A, L, abreast * H*D] -> float32 [A, L, abreast, H, D]."""
    return tf.reshape(widen(x), [-1, x.shape[1], windows.abreast, heads, x.shape[2] // windows.abreast // heads])


def _content_sums(q, k, windows, heads):
    """sum s = (sum_l q_l) . (sum_m k_m) and sum s^2 = <sum_l q_l q_l^T, sum_m k_m k_m^T>."""
    q, k = _by_head(q, windows, heads), _by_head(k, windows, heads)
    first = tf.einsum("aphd,aphd->h", tf.reduce_sum(q, 1), tf.reduce_sum(k, 1))
    grams = [tf.einsum("alphd,alphe->aphde", x, x) for x in (q, k)]
    return tf.stack([first, tf.einsum("aphde,aphde->h", *grams)], 1)


def _position_sums(x, table, windows, heads, key_term):
    """sum_l q_l . t_l and sum_l <q_l q_l^T, G_l>.

    t_l is the sum of the table rows that query l sees, and G_l is their Gram matrix.
    """
    visible, rows = visible_rows(table, windows, key_term)
    grams = tf.einsum("lr,rd,re->lde", visible, rows, rows)
    x = _by_head(x, windows, heads)
    first = tf.einsum("lhd,ld->h", tf.reduce_sum(x, [0, 2]), tf.matmul(visible, rows))
    second = tf.einsum("lhde,lde->h", tf.einsum("alphd,alphe->lhde", x, x), grams)
    return tf.stack([first, second], 1)


def _map_sums(logits, windows, heads):
    """Sums of the visible logits of a map [*, L, M] and of their squares."""
    shape = [-1, windows.blocks, windows.abreast, heads, windows.queries, windows.keys]
    logits = tf.reshape(logits, shape) * windows.visible[:, None, None].astype(np.float32)
    return tf.stack([tf.reduce_sum(x, [0, 1, 2, 4, 5]) for x in (logits, logits * logits)], 1)


# === Attention ===


def _product(term, inputs):
    """q . k, q . r^q or k . r^k: float32 [*, L, M]."""
    a, axes_a, b, axes_b = FACTORS[term]
    return widen(_einsum(f"{axes_a},{axes_b}->*lm", inputs[a], inputs[b]))


@dataclasses.dataclass(frozen=True)
class _Mixing:
    """The softmax, the outputs and the gradients.

    The methods take `inputs`, a dict of 'q' [*, L, D], 'k' [*, M, D], 'v' [*, M, E] and the table rows; `scales`, a
    dict of [H] by term; and the weights w [*, L, M].
    """

    windows: object
    options: object
    dtype: tf.DType
    training: bool

    def mix(self, inputs, scales):
        """sum_p w_p v_p and, with a value table, sum_p w_p r^v_{p-o}, both [*, L, E]."""

        @tf.custom_gradient
        def run(*tensors):
            inputs_, scales_ = tf.nest.pack_sequence_as((inputs, scales), tensors)
            w = self.weigh(inputs_, scales_)
            outputs = [_einsum("*lm,*me->*le", w, inputs_["v"])]
            if "value" in inputs_:
                outputs.append(_einsum("*lm,lme->*le", w, inputs_["value"]))

            def gradient(*d):
                weights = w
                if self.options.recompute == "softmax":
                    # k depends on d here, so that XLA does not reuse the forward pass.
                    zero = 0.0 * widen(tf.reduce_sum(tf.reshape(d[0], [-1])[:1]))
                    weights = self.weigh({**inputs_, "k": inputs_["k"] + tf.cast(zero, self.dtype)}, scales_)
                return tf.nest.flatten(self.gradient(weights, outputs, d, inputs_, scales_))

            return outputs, gradient

        return run(*tf.nest.flatten((inputs, scales)))

    def weigh(self, inputs, scales):
        """w = softmax of the sum of the scaled logit terms."""
        windows, heads = self.windows, self.options.heads
        logits = tf.add_n([_product(term, self.scaled(term, inputs, scales)) for term in self.options.terms])
        if windows.visible is not None:
            by_block = [-1, windows.blocks, windows.abreast * heads, windows.queries, windows.keys]
            hidden = hide(tf.reshape(logits, by_block), windows.visible[:, None], self.training)
            logits = tf.reshape(hidden, tf.shape(logits))
        return tf.cast(tf.nn.softmax(logits), self.dtype)

    def gradient(self, w, outputs, d, inputs, scales):
        """Gradients of (inputs, scales), as dicts, from the gradients d of the outputs."""
        gradients = dict.fromkeys(inputs, 0.0)
        gradients["v"] = _einsum("*lm,*le->*me", w, d[0])
        d_weights = widen(_einsum("*le,*me->*lm", d[0], inputs["v"]))
        if "value" in inputs:
            gradients["value"] = _einsum("*lm,*le->lme", w, d[1])
            d_weights += widen(_einsum("*le,lme->*lm", d[1], inputs["value"]))
        # The gradient of softmax needs sum_p w_p dw_p, which equals d . y and needs no map.
        mean = tf.add_n([tf.reduce_sum(widen(a) * widen(b), -1, keepdims=True) for a, b in zip(d, outputs)])
        d_logits, d_scales = tf.cast(widen(w) * (d_weights - mean), self.dtype), {}
        for term in self.options.terms:
            a, axes_a, b, axes_b = FACTORS[term]
            d_a = _einsum(f"*lm,{axes_b}->{axes_a}", d_logits, inputs[b])
            d_b = _einsum(f"*lm,{axes_a}->{axes_b}", d_logits, self.scaled(term, inputs, scales)[a])
            by_pixel = tf.reduce_sum(widen(d_a) * widen(inputs[a]), [-2, -1])
            d_scales[term] = tf.reduce_sum(tf.reshape(by_pixel, [-1, self.options.heads]), 0)
            gradients[a] += d_a * self.per_head(scales[term], d_a)
            gradients[b] += d_b
        return {name: x if tf.is_tensor(x) else tf.zeros_like(inputs[name]) for name, x in gradients.items()}, d_scales

    def per_head(self, scale, x):
        """A scale [H], reshaped to multiply x."""
        scale = tf.cast(scale, self.dtype)
        scale = scale if x.shape.rank == 4 else tf.tile(scale, [tf.shape(x)[0] // self.options.heads])
        return scale[:, None, None]

    def scaled(self, term, inputs, scales):
        """The inputs, with the first factor of a term multiplied by its scale."""
        name = FACTORS[term][0]
        return {**inputs, name: inputs[name] * self.per_head(scales[term], inputs[name])}
