"""Reference implementations in float64 NumPy: the papers' equations as plain loops. Tests compare axial with them."""

import itertools

import numpy as np


def batch_norm(x, axes, gamma, beta, epsilon):
    """Returns (normalised x, mean over `axes`, biased variance over `axes`). gamma and beta broadcast against x."""
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * gamma + beta, mean, variance


def attention(x, w, heads, *, visible, table, terms, epsilon, training, batch_norm=True):
    """Position-sensitive attention between the pixels of x [N, P, C], including the layer's batch norms.

    Args:
        w: dict of weights. It has 'kernel'. It has 'output_gamma', 'output_beta', 'output_mean' and 'output_variance',
            [2, H*E], or [1, H*E] without a position table of the value. If `batch_norm`, it also has 'qkv_gamma',
            'qkv_beta', 'qkv_mean', 'qkv_variance', and 'logit_gamma', 'logit_mean', 'logit_variance' [terms, H].
        visible: function of two pixel indices. It returns whether the first pixel attends to the second.
        table: function of 'query', 'key' or 'value' and two pixel indices. It returns the position table's vector for
            the offset from the first pixel to the second.

    Returns:
        y [N, P, H*E], and a dict from 'qkv', 'logit' and 'output' to the batch's (mean, variance).
    """
    x = x.astype(np.float64)
    N, P, _ = x.shape
    E = w["output_gamma"].shape[1] // heads
    D = (w["kernel"].shape[1] // heads - E) // 2
    statistics = {}

    def norm(values, axes, name):
        mean, variance = np.nanmean(values, axes, keepdims=True), np.nanvar(values, axes, keepdims=True)
        statistics[name] = [moment.reshape(w[f"{name}_mean"].shape) for moment in (mean, variance)]
        if not training:
            mean, variance = (w[f"{name}_{moment}"].reshape(mean.shape) for moment in ("mean", "variance"))
        return (values - mean) / np.sqrt(variance + epsilon) * w[f"{name}_gamma"].reshape(mean.shape)

    qkv = x @ w["kernel"]
    if batch_norm:
        qkv = norm(qkv, (0, 1), "qkv") + w["qkv_beta"]
    q, k, v = (a.reshape(N, P, heads, -1) for a in np.split(qkv, [heads * D, 2 * heads * D], -1))

    def logit(term, n, h, o, p):
        if term == "content":
            return q[n, o, h] @ k[n, p, h]
        return (q[n, o, h] if term == "query" else k[n, p, h]) @ table(term, o, p)

    pairs = [pair for pair in itertools.product(range(N), range(heads), range(P), range(P)) if visible(*pair[2:])]
    logits = np.full([len(terms), N, heads, P, P], np.nan)
    for pair in pairs:
        logits[(slice(None), *pair)] = [logit(term, *pair) for term in terms]
    if batch_norm:
        logits = norm(logits, (1, 3, 4), "logit")
    total = np.where(np.isnan(logits[0]), -np.inf, logits.sum(0))
    weights = np.exp(total - total.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    outputs = np.zeros([len(w["output_gamma"]), N, P, heads, E])
    for n, h, o, p in pairs:
        outputs[0, n, o, h] += weights[n, h, o, p] * v[n, p, h]
        if len(outputs) == 2:
            outputs[1, n, o, h] += weights[n, h, o, p] * table("value", o, p)
    outputs = norm(outputs.reshape(-1, N, P, heads * E), (1, 2), "output")
    return (outputs + w["output_beta"][:, None, None]).sum(0), statistics


def axial_attention(x, w, heads, span, **options):
    """Eq. 4 of Axial-DeepLab along axis L of x [B, L, C]. An offset beyond a table [rows, D] uses its nearest row."""

    def visible(o, p):
        return span is None or abs(p - o) <= span // 2

    def table(name, o, p):
        rows = w[f"{name}_table"]
        return rows[np.clip(p - o + len(rows) // 2, 0, len(rows) - 1)]

    return attention(x, w, heads, visible=visible, table=table, **options)


def local_attention(x, w, heads, span, **options):
    """Eq. 2 and 3 of Axial-DeepLab on x [N, h, w, C], with row and column tables: 'query_row_table' [span, D] etc."""
    N, rows, columns, C = x.shape

    def difference(o, p):
        return np.subtract(divmod(p, columns), divmod(o, columns))

    def visible(o, p):
        return abs(difference(o, p)).max() <= span // 2

    def table(name, o, p):
        row, column = difference(o, p) + span // 2
        return w[f"{name}_row_table"][row] + w[f"{name}_column_table"][column]

    y, _ = attention(x.reshape(N, -1, C), w, heads, visible=visible, table=table, **options)
    return y.reshape(N, rows, columns, -1)


def overlap(a, b):
    """Intersection over union of two boxes, given as corners (y, x, y, x)."""
    a, b = (np.asarray(box, np.float64) for box in (a, b))
    height, width = np.maximum(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return height * width / (areas - height * width)


def assigned(boxes, objects, least, background):
    """mmdetection's MaxIoUAssigner. Returns each box's object index; -1 is background, and -2 an ignored box."""
    table = np.array([[overlap(box, one) for one in objects] for box in boxes]).reshape(len(boxes), len(objects))
    indices = []
    for row in table:
        best = row.max(initial=0)
        indices.append(int(row.argmax()) if best >= least else -1 if best < background else -2)
    for number, column in enumerate(table.T):
        if column.max(initial=0) >= background:
            for i in np.flatnonzero(column >= column.max() - 1e-4):  # tolerance, as anchors' corners are rounded
                indices[i] = number
    return np.array(indices)


def box_code(box, anchor, weights=(1, 1, 1, 1)):
    """Box code (Ren et al., NIPS 2015, Sec. 3.1.2): centre shift over anchor size, and log of the ratio of sizes."""
    box, anchor = (np.asarray(x, np.float64) for x in (box, anchor))
    side, size = anchor[2:] - anchor[:2], box[2:] - box[:2]
    shift = (box[:2] + box[2:] - anchor[:2] - anchor[2:]) / 2 / side
    return np.concatenate([shift, np.log(size / side)]) * weights


def smooth_l1(error, turn):
    """mmdetection's SmoothL1Loss of a scalar error. `turn` is its `beta`."""
    return 0.5 * error**2 / turn if abs(error) < turn else abs(error) - 0.5 * turn


def detector_losses(outputs, batch):
    """mmdetection's losses of Faster and Mask R-CNN, as a dict, for a detector's outputs and a batch's targets."""
    sums, anchors, boxes, pixels = dict.fromkeys(("anchor_score", "anchor_box", "class", "box", "mask"), 0.0), 0, 0, 0
    for level, logits in outputs["anchor_scores"].items():
        errors = np.float64(outputs["anchor_codes"][level]) - np.float64(batch[f"anchor_boxes/{level}"])
        for index, label in np.ndenumerate(batch[f"anchor_scores/{level}"]):
            if label >= 0:
                anchors += 1
                sums["anchor_score"] += np.logaddexp(0, np.float64(logits[index])) - label * logits[index]
            if label == 1:
                *where, number = index
                for error in errors[tuple(where)][4 * number : 4 * number + 4]:
                    sums["anchor_box"] += smooth_l1(error, 1 / 9)
    for index, kind in np.ndenumerate(outputs["classes"]):
        if kind >= 0:
            boxes += 1
            logits = np.float64(outputs["logits"][index])
            sums["class"] += np.logaddexp.reduce(logits) - logits[kind]
        for k in range(4 if kind > 0 else 0):
            error = np.float64(outputs["codes"][index][4 * kind + k]) - outputs["code_targets"][index][k]
            sums["box"] += smooth_l1(error, 1.0)
    for index, kind in np.ndenumerate(outputs["mask_classes"]):
        logits = np.float64(outputs["mask_logits"][index])
        for pixel, target in np.ndenumerate(outputs["mask_targets"][index]) if kind > 0 else ():
            pixels += 1
            sums["mask"] += np.logaddexp(0, logits[pixel]) - target * logits[pixel]
    counts = {"anchor_score": anchors, "anchor_box": anchors, "class": boxes, "box": boxes, "mask": pixels}
    return {name: value / max(counts[name], 1) for name, value in sums.items()}
