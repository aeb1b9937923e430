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


def hat_weights(place, size, last=None):
    """{pixel: (weight, derivative)} of linear interpolation at a place; pixels outside the axis have none.

    Args:
        place: the position.
        size: pixels of the axis.
        last: the largest position, or None. The derivative there is that to the left, and zero beyond.
    """
    beyond = last is not None and place > last
    place = min(place, last) if last is not None else place
    low = int(np.floor(place))
    if last is not None:
        low = min(low, last - 1)
    slope = 0.0 if beyond else 1.0
    near = {low: (1 - (place - low), -slope), low + 1: (place - low, slope)}
    return {pixel: value for pixel, value in near.items() if 0 <= pixel < size}


def deformable_conv(x, kernel, offsets, masks, upstream, *, strides=1, dilation=1, padding=0, last=None):
    """Deformable convolution with given offsets and masks: (y, gradients of 'x', 'kernel', 'offsets', 'masks').

    Args:
        x: [B, H, W, C].
        kernel: [rows, columns, C / groups, filters].
        offsets: [B, h, w, O, K, 2].
        masks: [B, h, w, O, K].
        upstream: [B, h, w, filters].
        strides, dilation, padding: (rows, columns) of each, or a number for both.
        last: function from an output row to the largest position of its samples, or None.
    """

    def pair(n):
        return (n, n) if isinstance(n, int) else n

    strides, dilation, padding = pair(strides), pair(dilation), pair(padding)
    _, columns, depth, filters = kernel.shape
    B, h, w, shared, K, _ = offsets.shape
    groups = x.shape[3] // depth
    y = np.zeros([B, h, w, filters])
    d = {"x": np.zeros(x.shape), "kernel": np.zeros(kernel.shape)}
    d |= {"offsets": np.zeros(offsets.shape), "masks": np.zeros(masks.shape)}
    for b, i, j, k, c in itertools.product(range(B), range(h), range(w), range(K), range(x.shape[3])):
        r, s = divmod(k, columns)
        o, g = c * shared // x.shape[3], c // depth
        part = slice(g * filters // groups, (g + 1) * filters // groups)
        row = i * strides[0] - padding[0] + r * dilation[0] + offsets[b, i, j, o, k, 0]
        column = j * strides[1] - padding[1] + s * dilation[1] + offsets[b, i, j, o, k, 1]
        near_y = hat_weights(row, x.shape[1], None if last is None else last(i))
        near_x = hat_weights(column, x.shape[2])
        sample = dy = dx = 0.0
        of_sample = masks[b, i, j, o, k] * (kernel[r, s, c % depth, part] @ upstream[b, i, j, part])
        for (m, (a, da)), (n, (e, de)) in itertools.product(near_y.items(), near_x.items()):
            sample += a * e * x[b, m, n, c]
            dy, dx = dy + da * e * x[b, m, n, c], dx + a * de * x[b, m, n, c]
            d["x"][b, m, n, c] += a * e * of_sample
        y[b, i, j, part] += masks[b, i, j, o, k] * sample * kernel[r, s, c % depth, part]
        d["kernel"][r, s, c % depth, part] += masks[b, i, j, o, k] * sample * upstream[b, i, j, part]
        d["masks"][b, i, j, o, k] += sample * (kernel[r, s, c % depth, part] @ upstream[b, i, j, part])
        d["offsets"][b, i, j, o, k] += of_sample * np.array([dy, dx])
    return y, d


def dynamic_conv(x, w, upstream, *, side, groups, before, key_mask=None):
    """Dynamic convolution of maps [B, H, W, C]; a sequence is a map with one column and a kernel of one column.

    Args:
        w: dict 'input_kernel', 'input_bias', 'tap_kernel', 'output_kernel', 'output_bias'.
        upstream: the gradient of y.
        side: (rows, columns) of the kernel.
        before: (rows, columns) of taps before the query.
        key_mask: bool [B, H, W], which pixels are real.

    Returns:
        y and the gradients by name, 'x' included.
    """
    B, H, W, C = x.shape
    taps = list(itertools.product(range(side[0]), range(side[1])))
    d = {name: np.zeros(value.shape) for name, value in w.items()} | {"x": np.zeros(x.shape)}
    both = x @ w["input_kernel"] + w["input_bias"]
    value, gate = both[..., :C], 1 / (1 + np.exp(-both[..., C:]))
    h = value * gate
    real = np.ones([B, H, W]) if key_mask is None else key_mask.astype(np.float64)
    of_h, y = np.zeros_like(h), np.zeros_like(h)
    for b, i, j in itertools.product(range(B), range(H), range(W)):
        mixed, of_mixed = np.zeros(C), w["output_kernel"] @ upstream[b, i, j]
        for g in range(groups):
            part = slice(g * C // groups, (g + 1) * C // groups)
            columns = slice(g * len(taps), (g + 1) * len(taps))
            logits = h[b, i, j] @ w["tap_kernel"][:, columns]
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            of_weights = np.zeros(len(taps))
            for n, (r, s) in enumerate(taps):
                m, k = i + r - before[0], j + s - before[1]
                if 0 <= m < H and 0 <= k < W:
                    mixed[part] += weights[n] * real[b, m, k] * h[b, m, k, part]
                    of_weights[n] = real[b, m, k] * (h[b, m, k, part] @ of_mixed[part])
                    of_h[b, m, k, part] += weights[n] * real[b, m, k] * of_mixed[part]
            of_logits = weights * (of_weights - weights @ of_weights)
            of_h[b, i, j] += w["tap_kernel"][:, columns] @ of_logits
            d["tap_kernel"][:, columns] += np.outer(h[b, i, j], of_logits)
        y[b, i, j] = mixed @ w["output_kernel"] + w["output_bias"]
        d["output_kernel"] += np.outer(mixed, upstream[b, i, j])
        d["output_bias"] += upstream[b, i, j]
    of_both = np.concatenate([of_h * gate, of_h * value * gate * (1 - gate)], 3)
    d["x"] = of_both @ w["input_kernel"].T
    d["input_kernel"] = np.einsum("bhwi,bhwo->io", x, of_both)
    d["input_bias"] = of_both.sum((0, 1, 2))
    return y, d
