"""The settings of generalised attention whose weights need no map of pairs of a query and a key.

Setting 0010 has the same weights at every query, so it pools the values once, or once for each window. Setting 0001 has
the same weights for every image, and they are a product of weights of rows and of columns. Letters of the shapes are
those of `attention_terms.py`.
"""

import tensorflow as tf

from axial.layers.masking import hide
from axial.layers.precision import widen
from axial.layers.spatial_attention.attention_terms import pad


def pool(saliency, x, real=None, training=False):
    """Setting 0010 where every query sees every key: the same weights for all queries, no map of pairs.

    Args:
        saliency: float32 or float64 [B, M, Y, X].
        x: [B, Y, X, C], what the weights pool.
        real: bool [B, Y, X], which keys are no padding; None if all are.
        training: see `hide`.

    Returns:
        [B, M, C].
    """
    _, heads, rows, columns = saliency.shape
    saliency = tf.reshape(saliency, [-1, heads, rows * columns])
    if real is not None:
        saliency = hide(saliency, tf.reshape(real, [-1, 1, rows * columns]), training)
    weights = tf.nn.softmax(saliency)
    return tf.matmul(tf.cast(weights, x.dtype), tf.reshape(x, [-1, rows * columns, x.shape[3]]))


def pool_near(saliency, value, grid, real=None):
    """Setting 0010 where a query sees the keys near it: softmax and pool over a sliding window, no map of pairs.

    Each key is a triple (largest logit, sum of exponentials, weighted sum). Two triples join to that of both keys. A
    window of n keys takes about 2 log2(n) joins of whole maps, along one axis and then along the other.

    Args:
        saliency: float32 or float64 [B, M, Y, X].
        value: [B, M, Y, X, D].
        grid: `Grid` of as many queries as keys.
        real: bool [B, Y, X], which keys are no padding; None if all are. A window of padding alone gives 0.

    Returns:
        [B, M, Y, X, D], in the saliency's type.
    """
    saliency = tf.broadcast_to(saliency, tf.shape(value)[:4])
    largest = tf.stop_gradient(saliency)  # the result does not depend on it
    weight = tf.exp(saliency - largest)
    if real is not None:
        real = real[:, None]
        largest = tf.where(real, largest, tf.reduce_min(largest, [2, 3], keepdims=True))
        weight = tf.where(real, weight, 0.0)
    triple = largest, weight, weight[..., None] * widen(value)
    for axis, map_axis in ((grid.rows, 2), (grid.columns, 3)):
        most = axis.queries - 1
        before = most if axis.before is None else min(axis.before, most)
        after = most if axis.after is None else min(axis.after, most)
        triple = _slide(triple, map_axis, before, after)
    _, total, weighted = triple
    return weighted / total[..., None] if real is None else tf.math.divide_no_nan(weighted, total[..., None])


def _slide(triple, axis, before, after):
    """The joined triple of the entries from `before` entries before to `after` entries after each entry of an axis."""
    size = triple[0].shape[axis]
    # Outside the map both sums are 0, and the logit is the least of the line, which changes no largest one.
    least = tf.reduce_min(triple[0], axis, keepdims=True)
    largest = tf.concat([least] * before + [triple[0]] + [least] * after, axis)
    run = [largest, *(pad(x, axis, before, after) for x in triple[1:])]
    result, start, width = None, 0, 1  # `run` holds the joins of `width` entries
    left = before + after + 1
    while left:
        if left & 1:
            piece = [_from(x, axis, start, size) for x in run]
            result = piece if result is None else _combine(result, piece)
            start += width
        left >>= 1
        if left:
            length = run[0].shape[axis] - width
            run = _combine([_from(x, axis, 0, length) for x in run], [_from(x, axis, width, length) for x in run])
            width *= 2
    return result


def _from(x, axis, start, size):
    index = [slice(None)] * axis + [slice(start, start + size)]
    return x[tuple(index)]


def _combine(first, second):
    """The triple of two disjoint sets of keys."""
    largest = tf.maximum(first[0], second[0])
    on_first, on_second = tf.exp(first[0] - largest), tf.exp(second[0] - largest)
    total = first[1] * on_first + second[1] * on_second
    return largest, total, first[2] * on_first[..., None] + second[2] * on_second[..., None]


def separable(tables, value, grid, training=False):
    """Setting 0001: the weights are a product of weights of rows and weights of columns, so no map of pairs is made.

    Args:
        tables: dict of 'rows' and 'columns', [M, R]; see `attend`.
        value: [B, M, Y, X, D].
        grid: `Grid`.
        training: see `hide`.

    Returns:
        [B, M, H, W, D].
    """
    weights = []
    for name, axis in (("rows", grid.rows), ("columns", grid.columns)):
        total = widen(tf.gather(tables[name], axis.rows(), axis=1))
        total = hide(total, axis.visible(), training) if grid.visible() else total
        weights.append(tf.cast(tf.nn.softmax(total), value.dtype))
    y = tf.einsum("mwx,bmyxd->bmywd", weights[1], value)
    return tf.einsum("mhy,bmywd->bmhwd", weights[0], y)
