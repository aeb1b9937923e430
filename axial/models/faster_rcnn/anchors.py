"""Anchors of detectors, the assignment of boxes to objects, and the sampling of positives and negatives."""

import tensorflow as tf

LEVELS = range(2, 7)  # pyramid levels, strides 4 to 64 (Lin et al., CVPR 2017)
ANCHOR_SIZE = 8.0  # in strides of the level; mmdetection, the study's code, has the same size and ratios
RATIOS = (0.5, 1.0, 2.0)  # width / height
SAME = 1e-4  # overlaps that differ by less are equal up to rounding


def match(overlaps, least, background):
    """Assigns boxes to objects by the rule of mmdetection's MaxIoUAssigner.

    A box is assigned to the object that it overlaps most if their overlap is at least `least`. An object also gets the
    boxes that overlap it most, if this overlap is at least `background`. The second rule takes precedence; if it
    gives a box to several objects, the last object gets it. An unassigned box is background if all of its overlaps are
    below `background`.

    Args:
        overlaps: float32 [..., boxes, objects], intersections over union, with at least one object. Boxes with
            overlaps of -1 are ignored.
        least, background: IoU thresholds.

    Returns:
        int32 [..., boxes], the index of an object; bool [..., boxes], whether the box is assigned to this object; and
        bool [..., boxes], whether the box is background.
    """
    best, most = tf.reduce_max(overlaps, -1), tf.reduce_max(overlaps, -2, keepdims=True)
    nearest = (overlaps >= most - SAME) & (most >= background)
    forced = tf.reduce_max(tf.where(nearest, tf.range(tf.shape(overlaps)[-1]), -1), -1)
    positive = (best >= least) | (forced >= 0)
    matched = tf.where(forced >= 0, forced, tf.argmax(overlaps, -1, tf.int32))
    return matched, positive, (best >= 0) & (best < background) & ~positive


def choose(positive, negative, count, draw, *, positive_fraction):
    """Marks `count` random examples: at most a fraction `positive_fraction` are positives, the others are negatives.

    All shapes are static. Where positives or negatives are too few, fewer examples are marked.

    Args:
        positive, negative: bool [..., n].
        count: number of examples to mark.
        draw: float32 [..., n], random numbers from 0 to 1.
        positive_fraction: largest fraction of `count` that is positive.

    Returns:
        bool [..., n].
    """
    n = positive.shape[-1]
    limit = min(int(count * positive_fraction), n)

    def ranked(mask):
        """Ranks [..., n] of the examples in `mask`, in a random order; n for the other examples."""
        order = tf.argsort(tf.where(mask, draw, 2.0), axis=-1)
        return tf.where(mask, tf.argsort(order, axis=-1), n)

    chosen = ranked(positive) < limit
    room = count - tf.reduce_sum(tf.cast(chosen, tf.int32), -1, keepdims=True)
    return chosen | (ranked(negative) < room)


def anchors(canvas):
    """dict from a level's name to its anchors' corners, float32 [rows, columns, 4 x anchors of a position]."""
    from official.vision.ops import anchor

    made = anchor.build_anchor_generator(
        LEVELS[0], LEVELS[-1], num_scales=1, aspect_ratios=list(RATIOS), anchor_size=ANCHOR_SIZE
    )
    return made(image_size=tuple(canvas))
