"""Position-sensitive attention for GPUs and TPUs: einsums, whose layouts XLA chooses.

Letters of the shapes: B lines; H heads; L queries and M keys of a window; D query and key channels per head; E value
channels per head; * the windows of all lines, times the heads. The first window of every line comes first.

A TPU pads the minor axis to 128 lanes, and XLA makes * the minor axis of the relative terms. So * is one axis, unless
the number of lines is a multiple of 128: then lines and heads are two axes. `NOTES.md` has the cycles of the
alternatives.
"""

import dataclasses

import tensorflow as tf

from axial.layers import device
from axial.layers.attention.windows import join_heads, rows_of_tables, split_heads, visible_rows
from axial.layers.batch_norm import BatchScales
from axial.layers.masking import hide
from axial.layers.precision import widen

LANES = 128  # lanes of a TPU's vector register
LONGEST_SUM = 16  # a TPU computes maps of at most this many channels as sums of products, which it adds to other maps
FACTORS = {  # the two factors of each logit term: their names, and their axes in an einsum
    "content": ("q", "*ld", "k", "*md"),
    "query": ("q", "*ld", "query", "lmd"),
    "key": ("k", "*md", "key", "mld"),
}


def attend(q, k, v, tables, *, windows, options, scales, training=False):
    """Computes the equation; see `layer.attend`. With recompute='softmax' the backward pass recomputes the weights w.

    Logits and softmax are float32 under every policy except float64.
    """
    heads, terms, one = options.heads, options.terms, windows.one_line()
    lines = q.shape[0] and q.shape[0] * windows.lines * windows.blocks
    lead = [-1, heads] if lines and lines % LANES == 0 else [-1]

    def open_(x, cut):
        """[B, H, length, D] -> [*, L, D]."""
        x = cut(tf.reshape(x, [-1, one.height, one.width, x.shape[3]]))
        x = tf.transpose(tf.reshape(x, [-1, windows.blocks, *x.shape[1:]]), [1, 0, 2, 3])
        return tf.reshape(x, [*lead, *x.shape[2:]])

    def close(x):
        """[*, L, E] -> [N, h, w, H*E]."""
        x = tf.transpose(tf.reshape(x, [windows.blocks, -1, *x.shape[-2:]]), [1, 0, 2, 3])
        x = one.join_queries(tf.reshape(x, [-1, *x.shape[2:]]))
        x = tf.reshape(x, [-1, heads, windows.length, x.shape[3]])
        return join_heads(tf.transpose(x, [0, 2, 1, 3]), windows)

    # [B, H, length, D or E]
    q, k, v = (tf.transpose(split_heads(x, windows, heads), [0, 2, 1, 3]) for x in (q, k, v))
    inputs = {"q": open_(q, one.cut_queries), "k": open_(k, one.cut_keys), "v": open_(v, one.cut_keys)}
    inputs |= rows_of_tables(tables, windows, q.dtype)
    if isinstance(scales, BatchScales):
        sums = []
        for term in terms:
            if term != "content":
                sums.append(_position_sums(k if term == "key" else q, tables[term], windows, key_term=term == "key"))
            elif windows.visible is None:
                sums.append(_content_sums(q, k))
            else:
                by_block = (tf.reshape(inputs[x], [windows.blocks, -1, heads, *inputs[x].shape[-2:]]) for x in "qk")
                sums.append(_visible_sums(*by_block, windows.visible))
        scales = scales.from_sums(tf.stack(sums))
    outputs = _Mixing(windows, options, v.dtype, training).mix(inputs, dict(zip(terms, tf.unstack(scales))))
    content, *position = map(close, outputs)
    return content, position[0] if position else None


def _einsum(indices, a, b):
    if indices in ("*ld,*md->*lm", "*le,*me->*lm") and a.shape[-1] <= LONGEST_SUM and device.on_tpu():
        return tf.add_n([widen(a[..., :, None, d]) * widen(b[..., None, :, d]) for d in range(a.shape[-1])])
    return tf.einsum(indices.replace("*", "ph" if a.shape.rank == 4 else "p"), a, b)


# === Statistics: sums [H, 2] of the logits and of their squares over the visible pairs ===
#
# TensorFlow derives the gradients, which need no map. q and k are lines [B, H, length, D], except in `_visible_sums`.


def _content_sums(q, k):
    """sum s = (sum_l q_l) . (sum_m k_m) and sum s^2 = <sum_l q_l q_l^T, sum_m k_m k_m^T>."""
    q, k = widen(q), widen(k)
    first = tf.einsum("bhd,bhd->h", tf.reduce_sum(q, 2), tf.reduce_sum(k, 2))
    grams = [tf.einsum("bhld,bhle->bhde", x, x) for x in (q, k)]
    return tf.stack([first, tf.einsum("bhde,bhde->h", *grams)], 1)


def _visible_sums(q, k, visible):
    """The same over the visible pairs. q: [blocks, B, H, L, D], k: [blocks, B, H, M, D], visible: [blocks, L, M].

    sum s^2 = sum_l q_l . u_l = sum_m k_m . t_m with u_l = sum_m s k_m and t_m = sum_l s q_l, half of its gradients. For
    these, einsum computes a map of s or, if q and k are short, Gram matrices of each pixel.
    """
    visible = tf.constant(visible, q.dtype)
    u = tf.stop_gradient(tf.einsum("alm,abhle,abhme,abhmd->abhld", *(visible, q, k, k)))
    t = tf.stop_gradient(tf.einsum("alm,abhle,abhme,abhld->abhmd", *(visible, q, k, q)))
    pairs = (q, tf.einsum("alm,abhmd->abhld", visible, k)), (q, u), (k, t)
    first, q_u, k_t = (tf.einsum("abhld,abhld->h", widen(x), widen(y)) for x, y in pairs)
    return tf.stack([first, 2 * (q_u + k_t) - tf.stop_gradient(q_u + 2 * k_t)], 1)


def _position_sums(x, table, windows, key_term):
    """sum_l q_l . t_l and sum_l <q_l q_l^T, G_l>.

    t_l is the sum of the table rows that query l sees, and G_l is their Gram matrix.
    """
    visible, rows = visible_rows(table, windows, key_term)
    grams = tf.einsum("lr,rd,re->lde", visible, rows, rows)
    x = widen(x)
    first = tf.einsum("hld,ld->h", tf.reduce_sum(x, 0), tf.matmul(visible, rows))
    second = tf.einsum("hlde,lde->h", tf.einsum("bhld,bhle->hlde", x, x), grams)
    return tf.stack([first, second], 1)


# === Attention ===


def _product(term, inputs):
    """q . k, q . r^q or k . r^k: float32 [*, L, M]."""
    a, axes_a, b, axes_b = FACTORS[term]
    return widen(_einsum(f"{axes_a},{axes_b}->*lm", inputs[a], inputs[b]))


@dataclasses.dataclass(frozen=True)
class _Mixing:
    """The softmax, the outputs and the gradients.

    The methods take `inputs`, a dict of 'q' [*, L, D], 'k' [*, M, D], 'v' [*, M, E] and the table rows; `scales`, a
    dict of [H] by term; and w [*, L, M], the weights before their division by their total.
    """

    windows: object
    options: object
    dtype: tf.DType
    training: bool

    def mix(self, inputs, scales):
        """sum_p w_p v_p / total and, with a value table, sum_p w_p r^v_{p-o} / total, both [*, L, E]."""

        @tf.custom_gradient
        def run(*tensors):
            inputs_, scales_ = tf.nest.pack_sequence_as((inputs, scales), tensors)
            w, total = self.weigh(inputs_, scales_)
            outputs = [_einsum("*lm,*me->*le", w, inputs_["v"])]
            if "value" in inputs_:
                outputs.append(_einsum("*lm,lme->*le", w, inputs_["value"]))
            outputs = [tf.cast(widen(y) / total, self.dtype) for y in outputs]

            def gradient(*d):
                weights, d = w, [tf.cast(widen(x) / total, self.dtype) for x in d]
                if self.options.recompute == "softmax":
                    # k depends on d here, so that XLA does not reuse the forward pass.
                    zero = 0.0 * widen(tf.reduce_sum(tf.reshape(d[0], [-1])[:1]))
                    weights, _ = self.weigh({**inputs_, "k": inputs_["k"] + tf.cast(zero, self.dtype)}, scales_)
                return tf.nest.flatten(self.gradient(weights, outputs, d, inputs_, scales_))

            return outputs, gradient

        return run(*tf.nest.flatten((inputs, scales)))

    def weigh(self, inputs, scales):
        """w = exp(s - largest s) for the sum s of the scaled logit terms, and the total of w, float32 [*, L, 1].

        The outputs and their gradients are divided by the total, which saves a map of normalised weights.
        """
        windows = self.windows
        logits = tf.add_n([_product(term, self.scaled(term, inputs, scales)) for term in self.options.terms])
        if windows.visible is not None:
            # The masks of offsets and of keys outside the axis are small, and XLA adds them where it adds the terms.
            near, inside = windows.visible.any(0), windows.visible.any(1)  # [L, M], [blocks, M]
            shape = [-1, *[1] * (logits.shape.rank - 2), windows.keys]
            inside = tf.reshape(tf.tile(inside[:, None], [1, tf.shape(logits)[0] // windows.blocks, 1]), shape)
            logits = hide(logits, near & inside, self.training)
        w = tf.exp(logits - tf.reduce_max(logits, -1, keepdims=True))
        return tf.cast(w, self.dtype), tf.reduce_sum(w, -1, keepdims=True)

    def gradient(self, w, outputs, d, inputs, scales):
        """Gradients of (inputs, scales), as dicts, from the gradients d of the outputs, divided by the total of w."""
        gradients = dict.fromkeys(inputs, 0.0)
        gradients["v"] = _einsum("*lm,*le->*me", w, d[0])
        d_weights = widen(_einsum("*le,*me->*lm", d[0], inputs["v"]))
        if "value" in inputs:
            gradients["value"] = _einsum("*lm,*le->lme", w, d[1])
            d_weights += widen(_einsum("*le,lme->*lm", d[1], inputs["value"]))
        # The gradient of softmax needs sum_p w_p dw_p, which equals d . y and needs no map.
        mean = tf.reduce_sum(tf.add_n([widen(a) * widen(b) for a, b in zip(d, outputs)]), -1, keepdims=True)
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
