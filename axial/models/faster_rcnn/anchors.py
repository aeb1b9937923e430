"""Anchors of detectors: where they lie, which boxes are an object's, and which examples a step draws."""

import tensorflow as tf

LEVELS = range(2, 7)  # of the pyramid: strides 4 to 64 (Lin et al., CVPR 2017)
ANCHOR_SIZE = 8.0  # strides; with the ratios those of mmdetection's Faster R-CNN, the study's code
RATIOS = (0.5, 1.0, 2.0)  # width by height
SAME = 1e-4  # overlaps that differ by no more are equal but for rounding


def match(overlaps, least, background):
    """Which boxes are an object's, by the rule of mmdetection's MaxIoUAssigner.

    A box belongs to the object that it overlaps most if their overlap is at least `least`. The boxes that overlap an
    object most, by `background` or more, belong to it too, whatever else they overlap; of several such objects it is
    the last one. A box that is no object's is background if all its overlaps are below `background`.

    Args:
        overlaps: float32 [..., boxes, objects] of intersection over union, at least one object; -1 for boxes that are
            neither.
        least, background: from 0 to 1.

    Returns:
        int32 [..., boxes], the index of an object; bool [..., boxes], whether a box is that object's; and bool
        [..., boxes], whether it is background.
    """
    best, most = tf.reduce_max(overlaps, -1), tf.reduce_max(overlaps, -2, keepdims=True)
    nearest = (overlaps >= most - SAME) & (most >= background)
    forced = tf.reduce_max(tf.where(nearest, tf.range(tf.shape(overlaps)[-1]), -1), -1)
    positive = (best >= least) | (forced >= 0)
    matched = tf.where(forced >= 0, forced, tf.argmax(overlaps, -1, tf.int32))
    return matched, positive, (best >= 0) & (best < background) & ~positive


def choose(positive, negative, count, draw, *, positive_fraction):
    """Marks `count` examples at random, positive ones up to a share of them, the rest negative ones.

    Every tensor has a static shape. If too few are positive or negative, fewer are marked.

    Args:
        positive, negative: bool [..., n].
        count: how many are wanted.
        draw: float32 [..., n], random numbers from 0 to 1.
        positive_fraction: largest share of positive ones.

    Returns:
        bool [..., n].
    """
    n = positive.shape[-1]
    limit = min(int(count * positive_fraction), n)

    def ranked(mask):
        """Places [..., n] in a random order of the examples that are masked; n for the others."""
        order = tf.argsort(tf.where(mask, draw, 2.0), axis=-1)
        rank = tf.argsort(order, axis=-1)
        return tf.where(mask, rank, n)

    chosen = ranked(positive) < limit
    room = count - tf.reduce_sum(tf.cast(chosen, tf.int32), -1, keepdims=True)
    return chosen | (ranked(negative) < room)


def anchors(canvas):
    """dict from a level's name to the corners of its anchors, float32 [rows, columns, 4 x anchors of a place]."""
    from official.vision.ops import anchor

    made = anchor.build_anchor_generator(
        LEVELS[0], LEVELS[-1], num_scales=1, aspect_ratios=list(RATIOS), anchor_size=ANCHOR_SIZE
    )
    return made(image_size=tuple(canvas))
