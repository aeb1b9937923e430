"""Anchors of detectors: where they lie, and which examples a step draws."""

import tensorflow as tf

LEVELS = range(2, 7)  # of the pyramid: strides 4 to 64 (Lin et al., CVPR 2017)
ANCHOR_SIZE = 8.0  # strides; with the ratios those of mmdetection's Faster R-CNN, the study's code
RATIOS = (0.5, 1.0, 2.0)  # width by height


def choose(positive, negative, count, draw, *, share):
    """Marks `count` examples at random, positive ones up to a share of them, the rest negative ones.

    Every tensor has a static shape. If too few are positive or negative, fewer are marked.

    Args:
        positive, negative: bool [..., n].
        count: how many are wanted.
        draw: float32 [..., n], random numbers from 0 to 1.
        share: largest share of positive ones.

    Returns:
        bool [..., n].
    """
    n = positive.shape[-1]
    limit = min(int(count * share), n)

    def ranked(mask):
        """Places [..., n] in a random order of the examples that are masked; n for the others."""
        order = tf.argsort(tf.where(mask, draw, 2.0), axis=-1)
        place = tf.argsort(order, axis=-1)
        return tf.where(mask, place, n)

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
