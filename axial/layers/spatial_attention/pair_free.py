"""The attention types of generalised attention that need no map of (query, key) pairs.

Type '0010' has the same weights for every query, so it pools the values once, or once per window. Type '0001' has the
same weights for every image. These weights are products of row weights and column weights. `attention_terms.py`
explains the letters of the shapes.
"""

import tensorflow as tf

from axial.layers.masking import hide
from axial.layers.precision import widen
from axial.layers.spatial_attention.attention_terms import pad


def pool(saliency, x, real=None, training=False):
    """The output of type '0010' if every query sees every key, so that all queries have the same weights.

    Args:
        saliency: the logit of each key, float32 or float64 [N, M, Y, X].
        x: [N, Y, X, C], the tensor that is averaged over its pixels with the weights of each head.
        real: bool [N, Y, X], False for padded keys; None if no key is padded.
        training: see `hide`.

    Returns:
        [N, M, C].
    """
    _, heads, rows, columns = saliency.shape
    saliency = tf.reshape(saliency, [-1, heads, rows * columns])
    if real is not None:
        saliency = hide(saliency, tf.reshape(real, [-1, 1, rows * columns]), training)
    weights = tf.nn.softmax(saliency)
    return tf.matmul(tf.cast(weights, x.dtype), tf.reshape(x, [-1, rows * columns, x.shape[3]]))


def pool_near(saliency, value, grid, real=None):
    """The output of type '0010' if a query sees the keys near it: softmax and weighted sum over a sliding window.

    A triple (largest logit, sum of exponentials, weighted sum) describes a set of keys. The triples of two disjoint
    sets combine to the triple of their union. A window of n keys along an axis takes about 2 log2(n) combinations.

    Args:
        saliency: the logit of each key, float32 or float64 [N, M, Y, X].
        value: [N, M, Y, X, D].
        grid: `Grid` with as many queries as keys.
        real: bool [N, Y, X], False for padded keys; None if no key is padded. A window with only padded keys gives 0.

    Returns:
        [N, M, Y, X, D], in the dtype of the saliency.
    """
    saliency = tf.broadcast_to(saliency, tf.shape(value)[:4])
    largest = tf.stop_gradient(saliency)  # the output does not depend on it
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
    """For each position of an axis, the triple of the keys from `before` positions before it to `after` after it."""
    size = triple[0].shape[axis]
    # The padding has sums of 0. Its largest logit is the line's smallest logit, so the padding changes no maximum.
    least = tf.reduce_min(triple[0], axis, keepdims=True)
    largest = tf.concat([least] * before + [triple[0]] + [least] * after, axis)
    run = [largest, *(pad(x, axis, before, after) for x in triple[1:])]
    result, start, width = None, 0, 1  # entry i of `run` is the triple of `width` positions from i on
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
    """The triple of the union of two disjoint sets of keys."""
    largest = tf.maximum(first[0], second[0])
    on_first, on_second = tf.exp(first[0] - largest), tf.exp(second[0] - largest)
    total = first[1] * on_first + second[1] * on_second
    return largest, total, first[2] * on_first[..., None] + second[2] * on_second[..., None]


def separable(tables, value, grid, training=False):
    """The output of type '0001'. The weight of a key is the product of a row weight and a column weight.

    Args:
        tables: dict of 'rows' and 'columns', [M, R]; see `attend`.
        value: [N, M, Y, X, D].
        grid: `Grid`.
        training: see `hide`.

    Returns:
        [N, M, h, w, D].
    """
    weights = []
    for name, axis in (("rows", grid.rows), ("columns", grid.columns)):
        total = widen(tf.gather(tables[name], axis.rows(), axis=1))
        total = hide(total, axis.visible(), training) if grid.visible() else total
        weights.append(tf.cast(tf.nn.softmax(total), value.dtype))
    return tf.einsum("mhy,nmywd->nmhwd", weights[0], tf.einsum("mwx,nmyxd->nmywd", weights[1], value))
