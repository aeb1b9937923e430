"""Reference implementations, as float64 NumPy loops, of the spatial attention mechanisms of Zhu et al., ICCV 2019."""

import itertools

import numpy as np


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def position_code(difference, channels, wavelength):
    """Sinusoidal encoding [channels] of an offset: sines, then cosines, each of channels / 2 wavelengths."""
    angles = [difference / wavelength ** (2 * i / channels) for i in range(channels // 2)]
    return np.array([np.sin(a) for a in angles] + [np.cos(a) for a in angles])


def generalized_attention(x, *, layer, keys=None, key_mask=None, **w):
    """Eq. 8 of Zhu et al. on maps [B, H, W, C]. Treats a sequence [B, L, C] as a map with one column.

    Args:
        layer: a layer with the settings.
        keys: the map or sequence of the keys, before subsampling with the key stride. None means x.
        key_mask: bool [B, H, W] or [B, L], True for valid keys.
        w: the layer's weights by name.
    """
    if layer.axes == 1:
        x, keys, key_mask = (None if a is None else a[:, :, None] for a in (x, keys, key_mask))
    keys = x if keys is None else keys
    B, H, W, C = x.shape
    D = C // layer.heads
    content, query_position, key_content, key_position = (bit == "1" for bit in layer.setting)

    def code(dy, dx, channels):
        """The position encoding of the offset (dy, dx), projected to the given channels."""
        if layer.axes == 1:
            return position_code(dy, C, layer.wavelength) @ w["row_position_kernel"][:, channels]
        both = zip((dy, dx), ("row_position_kernel", "column_position_kernel"))
        return sum(position_code(d, C // 2, layer.wavelength) @ w[name][:, channels] for d, name in both) / np.sqrt(2)

    def logit(query, key, difference, h):
        channels = slice(h * D, (h + 1) * D)
        q = query @ w["query_kernel"][:, channels] if content or query_position else None
        k = key @ w["key_kernel"][:, channels] if content or key_content else None
        r = code(*difference, channels) if query_position or key_position else None
        total = (q @ k if content else 0) + (q @ r if query_position else 0)
        total += w["key_vector"][h] @ k if key_content else 0
        return total + (w["position_vector"][h] @ r if key_position else 0)

    def sees(difference):
        before, after = layer.reach
        return (before is None or difference <= before) and (after is None or -difference <= after)

    mixed, step = np.zeros_like(x), layer.key_stride
    places = list(itertools.product(range(0, keys.shape[1], step), range(0, keys.shape[2], step)))
    for b, h, i, j in itertools.product(range(B), range(layer.heads), range(H), range(W)):
        visible = [(r, c) for r, c in places if sees(i - r) and (layer.axes == 1 or sees(j - c))]
        visible = [(r, c) for r, c in visible if key_mask is None or key_mask[b, r, c]]
        logits = np.array([logit(x[b, i, j], keys[b, r, c], (i - r, j - c), h) for r, c in visible])
        channels = slice(h * D, (h + 1) * D)
        for a, (r, c) in zip(softmax(logits * (D**-0.5 if layer.scaled else 1.0)), visible):
            mixed[b, i, j, channels] += a * (keys[b, r, c] @ w["value_kernel"][:, channels])
    y = mixed @ w["output_kernel"] + w["output_bias"]
    return y[:, :, 0] if layer.axes == 1 else y


def hat_weights(position, size, last=None):
    """dict from pixels to weights of linear interpolation at a position. Pixels outside the axis are left out.

    Args:
        size: number of pixels along the axis.
        last: the largest position; larger ones are clipped to it. None clips no position.
    """
    position = position if last is None else min(position, last)
    low = int(np.floor(position))
    near = {low: 1 - (position - low), low + 1: position - low}
    return {pixel: weight for pixel, weight in near.items() if 0 <= pixel < size}


def deformable_conv(x, kernel, offsets, masks=None, *, strides=1, dilation=1, padding=(1, 1), last=None):
    """Deformable convolution with given offsets and masks.

    Args:
        x: [B, H, W, C].
        kernel: [rows, columns, C / groups, filters].
        offsets: (y, x) offsets [B, h, w, O, K, 2] of O offset groups at K kernel positions.
        masks: modulation [B, h, w, O, K], or None for ones.
        strides, dilation: integers, equal for rows and columns.
        padding: (rows, columns) of zeros on each side.
        last: function from an output row to the largest row position of its samples, or None for no limit.
    """
    _, columns, depth, filters = kernel.shape
    B, h, w, shared, K, _ = offsets.shape
    groups = x.shape[3] // depth
    y = np.zeros([B, h, w, filters])
    for b, i, j, k, c in itertools.product(range(B), range(h), range(w), range(K), range(x.shape[3])):
        r, s = divmod(k, columns)
        o, g = c * shared // x.shape[3], c // depth
        row = i * strides - padding[0] + r * dilation + offsets[b, i, j, o, k, 0]
        column = j * strides - padding[1] + s * dilation + offsets[b, i, j, o, k, 1]
        rows, near = hat_weights(row, x.shape[1], last and last(i)), hat_weights(column, x.shape[2])
        sample = sum(rows[m] * near[n] * x[b, m, n, c] for m, n in itertools.product(rows, near))
        channels = slice(g * filters // groups, (g + 1) * filters // groups)
        mask = 1.0 if masks is None else masks[b, i, j, o, k]
        y[b, i, j, channels] += mask * sample * kernel[r, s, c % depth, channels]
    return y


def dynamic_conv(x, *, layer, key_mask=None, **w):
    """Dynamic convolution of maps [B, H, W, C]. Treats a sequence [B, L, C] as a map with one column.

    Args:
        layer: a layer with the settings.
        key_mask: bool [B, H, W] or [B, L], True for valid pixels.
        w: the layer's weights by name.
    """
    side, before = [layer.side] * 2, [layer.before] * 2
    if layer.axes == 1:
        x, key_mask = x[:, :, None], None if key_mask is None else key_mask[:, :, None]
        side, before = (layer.side, 1), (layer.before, 0)
    B, H, W, C = x.shape
    both = x @ w["input_kernel"] + w["input_bias"]
    h = both[..., :C] / (1 + np.exp(-both[..., C:]))
    real = np.ones([B, H, W]) if key_mask is None else key_mask.astype(np.float64)
    mixed, taps, groups = np.zeros_like(h), list(itertools.product(*map(range, side))), layer.groups
    for b, i, j, g in itertools.product(range(B), range(H), range(W), range(groups)):
        channels = slice(g * C // groups, (g + 1) * C // groups)
        weights = softmax(h[b, i, j] @ w["tap_kernel"][:, g * len(taps) : (g + 1) * len(taps)])
        for weight, (r, s) in zip(weights, taps):
            m, k = i + r - before[0], j + s - before[1]
            if 0 <= m < H and 0 <= k < W:
                mixed[b, i, j, channels] += weight * real[b, m, k] * h[b, m, k, channels]
    y = mixed @ w["output_kernel"] + w["output_bias"]
    return y[:, :, 0] if layer.axes == 1 else y
