"""Training targets of Panoptic-DeepLab's three heads, from a segment map."""

import dataclasses

import tensorflow as tf

from axial.io.check import Checked, Natural, NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class TargetConfig(Checked):
    """How targets are made.

    Attributes:
        sigma: standard deviation of the Gaussian at each centre, in pixels of the crop.
        small_area: an instance with fewer pixels is small.
        small_weight: weight of a small instance's pixels in the semantic loss. All other pixels weigh 1.
        round_centers: whether offsets point at the pixel nearest to the centre, as in DeepLab2, or at the unrounded
            mean, as in Panoptic-DeepLab's PyTorch code. The Gaussian is at the nearest pixel in both cases.
    """

    sigma: Positive = 8.0
    small_area: Natural = 64 * 64
    small_weight: NonNegative = 3.0
    round_centers: bool = True


def panoptic_targets(segments, classes, crowd, spec, config=TargetConfig()):
    """Targets and loss weights of one crop.

    Args:
        segments: int32 [H, W]; 0 without a label, i + 1 for segment i.
        classes: int [S], class index of each segment.
        crowd: int [S], 1 where a segment is a crowd. Crowds are masked in every target.
        spec: `DatasetSpec`.
        config: `TargetConfig`.

    Returns:
        dict of 'semantic' int32 [H, W] (spec.ignore where masked), 'semantic_weight' [H, W], 'center' [H, W] with a
        Gaussian at the centre of each instance, 'center_weight' [H, W], 'offset' [H, W, 2] from a pixel to the centre
        of its instance in pixels (y, x), 'offset_weight' [H, W]. A centre is the mean position of an instance's pixels.
    """
    height, width = segments.shape
    count = tf.shape(classes)[0] + 1
    classes, crowd = tf.cast(classes, tf.int32), tf.cast(crowd, tf.bool)
    is_thing = tf.gather(tf.constant(spec.things), classes)

    def by_segment(unlabelled, of_segments):
        """A table with an entry for each segment number. The first entry is for pixels without a label."""
        return tf.concat([[unlabelled], of_segments], 0)

    semantic = tf.gather(by_segment(spec.ignore, tf.where(crowd, spec.ignore, classes)), segments)
    counted = by_segment(False, is_thing & ~crowd)
    offset_weight = tf.cast(tf.gather(counted, segments), tf.float32)
    center_weight = tf.cast(tf.gather(by_segment(False, ~crowd), segments), tf.float32)

    flat = tf.reshape(segments, [-1])
    y, x = tf.meshgrid(tf.range(height), tf.range(width), indexing="ij")
    position = tf.cast(tf.stack([y, x], -1), tf.float32)  # [H, W, 2]
    area = tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, count)
    means = tf.math.unsorted_segment_mean(tf.reshape(position, [-1, 2]), flat, count)
    small = counted & (area < config.small_area)
    semantic_weight = tf.where(tf.gather(small, segments), config.small_weight, 1.0)
    aims = tf.round(means) if config.round_centers else means
    offset = (tf.gather(aims, segments) - position) * offset_weight[..., None]
    centers = tf.boolean_mask(means, counted & (area > 0))
    return {
        "semantic": semantic,
        "semantic_weight": semantic_weight,
        "center": draw_centers(centers, height, width, config.sigma),
        "center_weight": center_weight,
        "offset": offset,
        "offset_weight": offset_weight,
    }


def semantic_targets(segments, classes, spec):
    """Targets without instances: 'semantic' int32 [H, W] and 'semantic_weight' [H, W] of ones.

    Crowds count as their class. The arguments are those of `panoptic_targets`.
    """
    table = tf.concat([[spec.ignore], tf.cast(classes, tf.int32)], 0)
    return {"semantic": tf.gather(table, segments), "semantic_weight": tf.ones(segments.shape)}


def draw_centers(centers, height, width, sigma):
    """float32 [height, width]: a Gaussian at the pixel nearest to each of the `centers`, float32 [S, 2].

    Where Gaussians overlap, the pixel has the highest value.
    """
    reach = int(3 * sigma)
    near = tf.range(-reach, reach + 1)
    bell = tf.exp(-tf.cast(near * near, tf.float32) / (2 * sigma**2))
    patch = bell[:, None] * bell[None, :]
    at = tf.cast(tf.round(centers), tf.int32)[:, None, None] + tf.stack(
        tf.meshgrid(near, near, indexing="ij"), -1
    )  # [S, P, P, 2], on a map that is larger by `reach` on every side
    canvas = tf.zeros([height + 2 * reach, width + 2 * reach])
    patches = tf.tile(patch[None], [tf.shape(centers)[0], 1, 1])
    canvas = tf.tensor_scatter_nd_max(canvas, at + reach, patches)
    return canvas[reach : reach + height, reach : reach + width]  # the reach of a small sigma is 0
