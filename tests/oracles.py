"""Float64 NumPy definitions: the papers' equations as plain loops. Tests compare the package with them."""

import numpy as np


def batch_norm(x, axes, gamma, beta, epsilon):
    """(normalised x, mean, biased variance) over `axes`; gamma and beta broadcast against x."""
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * gamma + beta, mean, variance


def axial_attention(x, w, heads, span, terms, epsilon, training):
    """Eq. 4 along the rows of x [B, L, C], with its batch norms.

    Args:
        w: dict 'kernel', 'query_table', 'key_table', 'value_table', 'qkv_gamma', 'qkv_beta',
            'qkv_mean', 'qkv_variance', 'logit_gamma', 'logit_mean', 'logit_variance' [terms, H] and
            'output_gamma', 'output_beta', 'output_mean', 'output_variance' [2, H*E].

    Returns:
        y [B, L, H*E] and the batch's statistics, (mean, variance) of 'qkv', 'logit', 'output'.
    """
    x = x.astype(np.float64)
    B, L, C = x.shape
    channels = w["kernel"].shape[1]
    value_channels = w["output_gamma"].shape[1]
    E, D = value_channels // heads, (channels - value_channels) // 2 // heads
    middle = {t: w[f"{t}_table"].shape[0] // 2 for t in ("query", "key", "value") if f"{t}_table" in w}
    statistics = {}

    def table(name, offset):
        rows = w[f"{name}_table"]
        return rows[min(max(offset + middle[name], 0), len(rows) - 1)]

    def visible(o, p):
        return span is None or abs(p - o) <= span // 2

    qkv = np.zeros([B, L, channels])
    for b in range(B):
        for o in range(L):
            for c in range(channels):
                qkv[b, o, c] = sum(x[b, o, i] * w["kernel"][i, c] for i in range(C))
    mean, variance = qkv.mean((0, 1)), qkv.var((0, 1))
    statistics["qkv"] = mean, variance
    if not training:
        mean, variance = w["qkv_mean"], w["qkv_variance"]
    qkv = (qkv - mean) / np.sqrt(variance + epsilon) * w["qkv_gamma"] + w["qkv_beta"]
    q = qkv[:, :, : heads * D].reshape(B, L, heads, D)
    k = qkv[:, :, heads * D : 2 * heads * D].reshape(B, L, heads, D)
    v = qkv[:, :, 2 * heads * D :].reshape(B, L, heads, E)

    logits = np.full([len(terms), B, heads, L, L], np.nan)
    for b in range(B):
        for h in range(heads):
            for o in range(L):
                for p in range(L):
                    if not visible(o, p):
                        continue
                    values = {
                        "content": lambda: q[b, o, h] @ k[b, p, h],
                        "query": lambda: q[b, o, h] @ table("query", p - o),
                        "key": lambda: k[b, p, h] @ table("key", p - o),
                    }
                    for i, term in enumerate(terms):
                        logits[i, b, h, o, p] = values[term]()
    mean, variance = np.nanmean(logits, (1, 3, 4)), np.nanvar(logits, (1, 3, 4))
    statistics["logit"] = mean, variance
    if not training:
        mean, variance = w["logit_mean"], w["logit_variance"]

    def by_head(s):
        return s[:, None, :, None, None]

    logits = (logits - by_head(mean)) / np.sqrt(by_head(variance) + epsilon) * by_head(w["logit_gamma"])
    total = np.where(np.isnan(logits[0]), -np.inf, logits.sum(0))

    content, position = np.zeros([B, L, heads, E]), np.zeros([B, L, heads, E])
    for b in range(B):
        for h in range(heads):
            for o in range(L):
                weights = np.exp(total[b, h, o] - total[b, h, o].max())
                weights /= weights.sum()
                for p in range(L):
                    if weights[p]:
                        content[b, o, h] += weights[p] * v[b, p, h]
                        if "value" in middle:
                            position[b, o, h] += weights[p] * table("value", p - o)
    outputs = np.stack([content, position]).reshape(2, B, L, heads * E)
    if "value" not in middle:
        outputs = outputs[:1]
    mean, variance = outputs.mean((1, 2)), outputs.var((1, 2))
    statistics["output"] = mean, variance
    if not training:
        mean, variance = w["output_mean"], w["output_variance"]
    y = 0
    for i, output in enumerate(outputs):
        y = y + (output - mean[i]) / np.sqrt(variance[i] + epsilon) * w["output_gamma"][i]
        y = y + w["output_beta"][i]
    return y, statistics


def local_attention(x, w, heads, span, terms, epsilon, training, batch_norm):
    """Eq. 2 and 3 on a map x [N, h, w, C], with the batch norms.

    Args:
        w: the dict of `axial_attention`, with tables for rows and columns: 'query_row_table' [span, D] and so on. The
            entries of 'qkv' and 'logit' are there only if `batch_norm`.

    Returns:
        y [N, h, w, H*E].
    """
    x = x.astype(np.float64)
    N, rows, columns, C = x.shape
    channels, value_channels = w["kernel"].shape[1], w["output_gamma"].shape[1]
    E, D = value_channels // heads, (channels - value_channels) // 2 // heads
    reach = span // 2
    pixels = [(i, j) for i in range(rows) for j in range(columns)]

    def table(name, o, p):
        return w[f"{name}_row_table"][p[0] - o[0] + reach] + w[f"{name}_column_table"][p[1] - o[1] + reach]

    def visible(o, p):
        return abs(p[0] - o[0]) <= reach and abs(p[1] - o[1]) <= reach

    def norm(values, axes, name, shape):
        mean, variance = np.nanmean(values, axes), np.nanvar(values, axes)
        if not training:
            mean, variance = w[f"{name}_mean"], w[f"{name}_variance"]
        mean, variance, gamma = (a.reshape(shape) for a in (mean, variance, w[f"{name}_gamma"]))
        return (values - mean) / np.sqrt(variance + epsilon) * gamma

    qkv = np.zeros([N, rows, columns, channels])
    for n in range(N):
        for i, j in pixels:
            for c in range(channels):
                qkv[n, i, j, c] = sum(x[n, i, j, k] * w["kernel"][k, c] for k in range(C))
    if batch_norm:
        qkv = norm(qkv, (0, 1, 2), "qkv", [-1]) + w["qkv_beta"]

    def part(a, d):
        return a.reshape(N, rows, columns, heads, d)

    q, k = part(qkv[..., : heads * D], D), part(qkv[..., heads * D : 2 * heads * D], D)
    v = part(qkv[..., 2 * heads * D :], E)

    logits = np.full([len(terms), N, heads, len(pixels), len(pixels)], np.nan)
    for n in range(N):
        for h in range(heads):
            for a, o in enumerate(pixels):
                for b, p in enumerate(pixels):
                    if visible(o, p):
                        for t, term in enumerate(terms):
                            if term == "content":
                                value = q[n, o[0], o[1], h] @ k[n, p[0], p[1], h]
                            elif term == "query":
                                value = q[n, o[0], o[1], h] @ table("query", o, p)
                            else:
                                value = k[n, p[0], p[1], h] @ table("key", o, p)
                            logits[t, n, h, a, b] = value
    if batch_norm:
        logits = norm(logits, (1, 3, 4), "logit", [len(terms), 1, heads, 1, 1])
    total = np.where(np.isnan(logits[0]), -np.inf, logits.sum(0))

    outputs = np.zeros([2, N, rows, columns, heads, E])
    for n in range(N):
        for h in range(heads):
            for a, o in enumerate(pixels):
                weights = np.exp(total[n, h, a] - total[n, h, a].max())
                weights /= weights.sum()
                for b, p in enumerate(pixels):
                    if visible(o, p):
                        outputs[0, n, o[0], o[1], h] += weights[b] * v[n, p[0], p[1], h]
                        if "value_row_table" in w:
                            outputs[1, n, o[0], o[1], h] += weights[b] * table("value", o, p)
    outputs = outputs.reshape(2, N, rows, columns, value_channels)[: len(w["output_gamma"])]
    outputs = norm(outputs, (1, 2, 3), "output", [-1, 1, 1, 1, value_channels])
    return (outputs + w["output_beta"][:, None, None, None]).sum(0)


def overlap(a, b):
    """Intersection over union of two boxes of corners (y, x, y, x)."""
    a, b = (np.asarray(box, np.float64) for box in (a, b))
    height, width = np.maximum(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return height * width / (areas - height * width)


def assigned(boxes, objects, least, background):
    """mmdetection's MaxIoUAssigner: for each box the index of its object, -1 for background, -2 for neither."""
    table = np.array([[overlap(box, one) for one in objects] for box in boxes]).reshape(len(boxes), len(objects))
    found = []
    for row in table:
        best = row.max(initial=0)
        found.append(int(row.argmax()) if best >= least else -1 if best < background else -2)
    for number, column in enumerate(table.T):
        if column.max(initial=0) >= background:
            for i in np.flatnonzero(column >= column.max() - 1e-4):  # the corners of anchors are rounded
                found[i] = number
    return np.array(found)


def box_code(box, anchor, weights=(1, 1, 1, 1)):
    """The code of a box (Ren et al., NIPS 2015, Sec. 3.1.2): shifts in units of the anchor, logarithms of ratios."""
    box, anchor = (np.asarray(x, np.float64) for x in (box, anchor))
    side, own = anchor[2:] - anchor[:2], box[2:] - box[:2]
    shift = (box[:2] + box[2:] - anchor[:2] - anchor[2:]) / 2 / side
    return np.concatenate([shift, np.log(own / side)]) * weights


def smooth_l1(error, turn):
    """mmdetection's SmoothL1Loss of a number."""
    return 0.5 * error**2 / turn if abs(error) < turn else abs(error) - 0.5 * turn


def detector_losses(outputs, batch):
    """dict of mmdetection's losses of Faster and Mask R-CNN, of the outputs of a detector for a batch."""
    sums, anchors, boxes, pixels = dict.fromkeys(("anchor_score", "anchor_box", "class", "box", "mask"), 0.0), 0, 0, 0
    for level, logits in outputs["anchor_scores"].items():
        errors = np.float64(outputs["anchor_codes"][level]) - np.float64(batch[f"anchor_boxes/{level}"])
        for place, label in np.ndenumerate(batch[f"anchor_scores/{level}"]):
            if label >= 0:
                anchors += 1
                sums["anchor_score"] += np.logaddexp(0, np.float64(logits[place])) - label * logits[place]
            if label == 1:
                *where, number = place
                for error in errors[tuple(where)][4 * number : 4 * number + 4]:
                    sums["anchor_box"] += smooth_l1(error, 1 / 9)
    for place, kind in np.ndenumerate(outputs["classes"]):
        if kind >= 0:
            boxes += 1
            logits = np.float64(outputs["logits"][place])
            sums["class"] += np.logaddexp.reduce(logits) - logits[kind]
        for k in range(4 if kind > 0 else 0):
            error = np.float64(outputs["codes"][place][4 * kind + k]) - outputs["code_targets"][place][k]
            sums["box"] += smooth_l1(error, 1.0)
    for place, kind in np.ndenumerate(outputs["mask_classes"]):
        logits = np.float64(outputs["mask_logits"][place])
        for pixel, wanted in np.ndenumerate(outputs["mask_targets"][place]) if kind > 0 else ():
            pixels += 1
            sums["mask"] += np.logaddexp(0, logits[pixel]) - wanted * logits[pixel]
    counts = {"anchor_score": anchors, "anchor_box": anchors, "class": boxes, "box": boxes, "mask": pixels}
    return {name: value / max(counts[name], 1) for name, value in sums.items()}


def numeric_gradient(function, array, step=1e-5, entries=None):
    """Central differences of a scalar function at (some flat entries of) an array, changed in place."""
    entries = range(array.size) if entries is None else entries
    flat, gradient = array.reshape(-1), {}
    for i in entries:
        kept = flat[i]
        flat[i] = kept + step
        above = function()
        flat[i] = kept - step
        below = function()
        flat[i] = kept
        gradient[i] = (above - below) / (2 * step)
    return gradient
