"""Float64 NumPy definitions of the mechanisms of Zhu et al., ICCV 2019: loops, with their gradients by hand."""

import itertools

import numpy as np


def position_code(difference, channels, wavelength):
    """Sines and cosines of a difference at channels / 2 wavelengths."""
    angles = [difference / wavelength ** (2 * i / channels) for i in range(channels // 2)]
    return np.array([np.sin(a) for a in angles] + [np.cos(a) for a in angles])


class GeneralizedAttention:
    """Eq. 8 on maps, or on sequences as maps with one column.

    Args:
        setting: four bits.
        heads: number of heads.
        axes: 2 for maps, 1 for sequences.
        stride: of the keys.
        reach: how far a query sees before and after itself, None for any distance.
        scaled: whether the terms are divided by the root of a head's channels.
        wavelength: of `position_code`.
    """

    def __init__(self, setting, heads, axes=2, *, stride=1, reach=(None, None), scaled=False, wavelength=1000.0):
        self.bits = [bit == "1" for bit in setting]
        self.heads, self.axes, self.stride, self.reach = heads, axes, stride, reach
        self.scaled, self.wavelength = scaled, wavelength

    def sees(self, difference):
        before, after = self.reach
        return (before is None or difference <= before) and (after is None or -difference <= after)

    def codes(self, dy, dx, channels):
        """The codes of a pair: by name of the projection that they meet."""
        if self.axes == 1:
            return {"row_position_kernel": position_code(dy, channels, self.wavelength)}
        root = np.sqrt(2)
        return {
            "row_position_kernel": position_code(dy, channels // 2, self.wavelength) / root,
            "column_position_kernel": position_code(dx, channels // 2, self.wavelength) / root,
        }

    def run(self, x, w, upstream, keys=None, key_mask=None):
        """(y, gradients) for x [B, H, W, C] and the weights w by name. `gradients` has 'x', 'keys' and the names of w.

        Args:
            upstream: the gradient of y.
            keys: [B, Y, X, C] before the stride; x if None.
            key_mask: bool [B, Y, X], which keys are real.
        """
        x, own = x.astype(np.float64), keys is None
        keys = x if own else keys.astype(np.float64)
        B, H, W, C = x.shape
        D = C // self.heads
        scale = D**-0.5 if self.scaled else 1.0
        y, mixed = np.zeros_like(x), np.zeros_like(x)
        d = {name: np.zeros(value.shape) for name, value in w.items()} | {"x": np.zeros_like(x)}
        d["keys"] = np.zeros_like(keys)
        strides = self.stride, self.stride if self.axes == 2 else 1
        places = list(itertools.product(range(0, keys.shape[1], strides[0]), range(0, keys.shape[2], strides[1])))
        for b, h, i, j in itertools.product(range(B), range(self.heads), range(H), range(W)):
            part = slice(h * D, (h + 1) * D)
            seen = [
                (r, c)
                for r, c in places
                if self.sees(i - r) and (self.axes == 1 or self.sees(j - c)) and (key_mask is None or key_mask[b, r, c])
            ]
            pairs = [
                Pair(self.bits, x[b, i, j], keys[b, r, c], w, self.codes(i - r, j - c, C), h, part) for r, c in seen
            ]
            logits = np.array([pair.logit() for pair in pairs]) * scale
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            values = [keys[b, r, c] @ w["value_kernel"][:, part] for r, c in seen]
            mixed[b, i, j, part] = sum(a * v for a, v in zip(weights, values))
            # Backward: first to the mixed values of this head.
            g = w["output_kernel"][part] @ upstream[b, i, j]
            d["output_kernel"][part] += np.outer(mixed[b, i, j, part], upstream[b, i, j])
            of_weights = np.array([g @ v for v in values])
            of_logits = weights * (of_weights - weights @ of_weights) * scale
            for (r, c), pair, a, s in zip(seen, pairs, weights, of_logits):
                d["value_kernel"][:, part] += np.outer(keys[b, r, c], a * g)
                d["keys"][b, r, c] += w["value_kernel"][:, part] @ (a * g)
                pair.add_gradients(s, d, (b, i, j), (b, r, c))
        for b, i, j in itertools.product(range(B), range(H), range(W)):
            y[b, i, j] = mixed[b, i, j] @ w["output_kernel"] + w["output_bias"]
            d["output_bias"] += upstream[b, i, j]
        if own:
            d["x"] += d.pop("keys")
        return y, d


class Pair:
    """The terms of one query, one key and one head."""

    def __init__(self, bits, x, key, w, codes, head, part):
        self.bits, self.x, self.key, self.w, self.codes = bits, x, key, w, codes
        self.head, self.part = head, part

    def parts(self):
        """q, k, R, u and v; None for what the setting does not need."""
        (e1, e2, e3, e4), w = self.bits, self.w
        q = self.x @ w["query_kernel"][:, self.part] if e1 or e2 else None
        k = self.key @ w["key_kernel"][:, self.part] if e1 or e3 else None
        r = sum(code @ w[name][:, self.part] for name, code in self.codes.items()) if e2 or e4 else None
        return q, k, r, w["key_vector"][self.head] if e3 else None, w["position_vector"][self.head] if e4 else None

    def logit(self):
        (e1, e2, e3, e4), (q, k, r, u, v) = self.bits, self.parts()
        return (q @ k if e1 else 0) + (q @ r if e2 else 0) + (u @ k if e3 else 0) + (v @ r if e4 else 0)

    def add_gradients(self, s, d, query, key):
        """Adds the gradients of s times the logit."""
        (e1, e2, e3, e4), (q, k, r, u, v) = self.bits, self.parts()
        if e1 or e2:
            of_q = s * ((k if e1 else 0) + (r if e2 else 0))
            d["query_kernel"][:, self.part] += np.outer(self.x, of_q)
            d["x"][query] += self.w["query_kernel"][:, self.part] @ of_q
        if e1 or e3:
            of_k = s * ((q if e1 else 0) + (u if e3 else 0))
            d["key_kernel"][:, self.part] += np.outer(self.key, of_k)
            d["keys"][key] += self.w["key_kernel"][:, self.part] @ of_k
        if e3:
            d["key_vector"][self.head] += s * k
        if e2 or e4:
            of_r = s * ((q if e2 else 0) + (v if e4 else 0))
            for name, code in self.codes.items():
                d[name][:, self.part] += np.outer(code, of_r)
        if e4:
            d["position_vector"][self.head] += s * r
