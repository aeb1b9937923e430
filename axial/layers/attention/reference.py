"""Position-sensitive attention as its equation is written. Read this file first.

A query at pixel o sees the keys at the pixels p of its neighbourhood. For each head,

    y_o = sum_p softmax_p(q_o . k_p + q_o . r^q_{p-o} + k_p . r^k_{p-o}) (v_p + r^v_{p-o})

In Eq. 3 of Axial-DeepLab (Wang et al., ECCV 2020) the neighbourhood is a square around o; in Eq. 4 it is o's row or
column, whole or within a span. q, k and v are projections of the image. r^q, r^k and r^v are rows of learned tables,
which all heads share.

Each of the three logit terms has a batch norm, with one scale and shift for each head. Softmax ignores a shift that is
the same for all keys, so only the scale gamma / sqrt(variance + epsilon) is left: the forms of this folder take
`scales`.

This form makes every L x L map. It is plain, so it is slow and needs much memory. The tests and `axial-analyze
benchmark` compare the other forms with it.

Letters of the shapes: N images of h x w pixels, B lines that attend each on its own (rows, columns, or whole maps for
squares), L pixels of a line as queries, M the same pixels as keys, H heads, D query and key channels of a head,
E value channels of a head, R rows of a table.
"""

import tensorflow as tf

from axial.layers.attention.windows import table_rows
from axial.layers.masking import hide
from axial.layers.precision import widen

TERMS = ("content", "query", "key")  # of the logits, in the order of their scales


def attend(q, k, v, tables, *, windows, scales, heads, terms=TERMS, recompute="none", training=False):
    """The equation, with a scale on each logit term in place of its batch norm.

    Args:
        q, k: [N, h, w, H*D].
        v: [N, h, w, H*E].
        tables: dict of the tables in use: 'query', 'key' [R, D] and 'value' [R, E].
        windows: `Windows` or `SquareWindows` of the image.
        scales: dict from terms to [H]; a term that is missing has scale 1. Or, where the scales come from the batch, a
            function from the sums [terms, H, 2] of s and s^2 over all visible pairs to such a dict.
        heads: H.
        terms: the logit terms in use, of `TERMS`.
        recompute: not used here; in the other forms 'softmax' recomputes the softmax in the backward pass.
        training: see `hide`; not used here.

    Returns:
        sum_p w v_p and sum_p w r^v_{p-o}, both [N, h, w, H*E]. The second is None without a 'value' table.
    """
    del recompute, training
    q, k, v = (split_heads(x, windows, heads) for x in (q, k, v))
    offsets, visible = windows.all_pairs()
    rows = {name: tf.cast(table_rows(table, offsets), q.dtype) for name, table in tables.items()}  # [L, M, D]
    maps = logit_maps(q, k, rows, terms)
    if callable(scales):
        seen = tf.where(visible, maps, tf.zeros([], maps.dtype))
        scales = scales(tf.stack([tf.reduce_sum(s, [1, 3, 4]) for s in (seen, seen * seen)], 2))
    ones = tf.ones([heads], maps.dtype)
    scales = tf.stack([scales.get(term, ones) for term in terms])  # [terms, H]
    logits = tf.reduce_sum(maps * scales[:, None, :, None, None], 0)
    content, position = weigh(logits, visible, v, rows)
    return join_heads(content, windows), None if position is None else join_heads(position, windows)


def logit_maps(q, k, rows, terms):
    """q . k, q . r^q and k . r^k of every pair: [terms, B, H, L, M].

    Args:
        q, k: [B, L, H, D].
        rows: dict of table rows 'query', 'key' [L, M, D]: row l, m holds r_{m-l}.
        terms: of `TERMS`.
    """
    maps = {}
    for term in terms:
        if term == "content":
            maps[term] = tf.einsum("blhd,bmhd->bhlm", q, k)
        elif term == "query":
            maps[term] = tf.einsum("blhd,lmd->bhlm", q, rows["query"])
        else:
            maps[term] = tf.einsum("bmhd,lmd->bhlm", k, rows["key"])
    return widen(tf.stack([maps[term] for term in terms]))


def weigh(logits, visible, v, rows):
    """softmax over the visible keys, then the weighted sums of v and of r^v: [B, L, H, E] each.

    Args:
        logits: float32 [B, H, L, M].
        visible: bool [L, M].
        v: [B, M, H, E].
        rows: dict of table rows; the second sum is None without 'value' [L, M, E].
    """
    w = tf.cast(tf.nn.softmax(hide(logits, visible)), v.dtype)
    content = tf.einsum("bhlm,bmhe->blhe", w, v)
    position = tf.einsum("bhlm,lme->blhe", w, rows["value"]) if "value" in rows else None
    return content, position


def split_heads(x, windows, heads):
    """[N, h, w, H*D] -> [B, L, H, D]."""
    return tf.reshape(windows.split_rows(x), [-1, windows.length, heads, x.shape[3] // heads])


def join_heads(y, windows):
    """[B, L, H, E] -> [N, h, w, H*E]."""
    return windows.join_rows(tf.reshape(y, [-1, windows.length, 1, y.shape[2] * y.shape[3]]))
