"""What the three heads of Panoptic-DeepLab are trained towards, computed from a segment map."""

import tensorflow as tf

SIGMA = 8.0  # of the Gaussian at each centre, in pixels of the crop
SMALL_AREA = 64 * 64  # instances below it weigh more in the semantic loss
SMALL_WEIGHT = 3.0


def panoptic_targets(segments, classes, crowd, spec):
    """Targets and loss weights of one crop.

    Args:
        segments: int32 [H, W]; 0 without a label, i + 1 for segment i.
        classes: int [S], class index of each segment.
        crowd: int [S], 1 where a segment is a crowd: masked in every target.
        spec: `DatasetSpec`.

    Returns:
        dict of 'semantic' int32 [H, W] (spec.ignore where masked), 'semantic_weight' [H, W],
        'center' [H, W] with a Gaussian at the mean position of each instance, 'center_weight' [H, W],
        'offset' [H, W, 2] in pixels (y, x) from a pixel to that mean, 'offset_weight' [H, W].
    """
    height, width = segments.shape
    count = tf.shape(classes)[0] + 1
    classes, crowd = tf.cast(classes, tf.int32), tf.cast(crowd, tf.bool)
    is_thing = tf.gather(tf.constant(spec.things), classes)

    def first(value, rest):
        return tf.concat([[value], rest], 0)  # the entry of unlabelled pixels

    semantic = tf.gather(first(spec.ignore, tf.where(crowd, spec.ignore, classes)), segments)
    counted = first(False, is_thing & ~crowd)
    offset_weight = tf.cast(tf.gather(counted, segments), tf.float32)
    center_weight = tf.cast(tf.gather(first(False, ~crowd), segments), tf.float32)

    flat = tf.reshape(segments, [-1])
    y, x = tf.meshgrid(tf.range(height), tf.range(width), indexing="ij")
    position = tf.cast(tf.stack([y, x], -1), tf.float32)  # [H, W, 2]
    area = tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, count)
    means = tf.math.unsorted_segment_mean(tf.reshape(position, [-1, 2]), flat, count)
    small = counted & (area < SMALL_AREA)
    semantic_weight = tf.where(tf.gather(small, segments), SMALL_WEIGHT, 1.0)
    offset = (tf.gather(means, segments) - position) * offset_weight[..., None]
    centers = tf.boolean_mask(means, counted & (area > 0))
    return {
        "semantic": semantic,
        "semantic_weight": semantic_weight,
        "center": draw_centers(centers, height, width),
        "center_weight": center_weight,
        "offset": offset,
        "offset_weight": offset_weight,
    }


def semantic_targets(segments, classes, spec):
    """Targets without instances: 'semantic' int32 [H, W] and 'semantic_weight' [H, W] of ones.

    Crowds count as their class. Arguments as of `panoptic_targets`.
    """
    table = tf.concat([[spec.ignore], tf.cast(classes, tf.int32)], 0)
    return {"semantic": tf.gather(table, segments), "semantic_weight": tf.ones(segments.shape)}


def draw_centers(centers, height, width):
    """float32 [height, width]: the highest of the Gaussians at the nearest pixels to `centers` [S, 2]."""
    reach = int(3 * SIGMA)
    near = tf.range(-reach, reach + 1)
    bell = tf.exp(-tf.cast(near * near, tf.float32) / (2 * SIGMA**2))
    patch = bell[:, None] * bell[None, :]
    at = tf.cast(tf.round(centers), tf.int32)[:, None, None] + tf.stack(
        tf.meshgrid(near, near, indexing="ij"), -1
    )  # [S, P, P, 2], on a map that is `reach` larger on every side
    canvas = tf.zeros([height + 2 * reach, width + 2 * reach])
    patches = tf.tile(patch[None], [tf.shape(centers)[0], 1, 1])
    canvas = tf.tensor_scatter_nd_max(canvas, at + reach, patches)
    return canvas[reach:-reach, reach:-reach]
