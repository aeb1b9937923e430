"""Panoptic-DeepLab's training targets and losses (Cheng et al., CVPR 2020, Sec. 3.3), and the loss of auxiliary heads.

Each loss is a mean over the pixels of an image and then over images. So the gradient does not depend on how the batch
is divided over replicas and micro-batches. Losses of other tasks divide sums by counts, such as the number of tokens;
these losses get the counts of the global batch from `whole_batch`.
"""

import dataclasses
import math

import tensorflow as tf

from axial.errors import InputError
from axial.io.check import Checked, Count, Natural, NonNegative, Positive, Share
from axial.layers import device
from axial.layers.conv import step_of
from axial.layers.device import choose, import_kernels
from axial.models.outputs import AUXILIARY, CENTER, OFFSET, SEMANTIC
from axial.tasks.segmentation.canvas_maps import upsample


@dataclasses.dataclass(frozen=True)
class TargetConfig(Checked):
    """Options of the training targets.

    Attributes:
        sigma: standard deviation of the Gaussian at each centre, in pixels of the crop.
        small_area: area below which an instance is small, in pixels of the crop; see `small_weight`.
        small_weight: weight of the pixels of small instances in the semantic loss. Other pixels have weight 1.
        round_centers: whether offsets point to the pixel nearest to the centre, as in DeepLab2, or to the exact mean,
            as in Panoptic-DeepLab's PyTorch code. The Gaussian is always at the nearest pixel.
    """

    sigma: Positive = 8.0
    small_area: Natural = 64 * 64
    small_weight: NonNegative = 3.0
    round_centers: bool = True


def panoptic_targets(segments, classes, crowd, spec, config=TargetConfig()):
    """Targets and loss weights of one crop.

    Args:
        segments: segment map, int32 [H, W]: 0 for pixels without a label, i + 1 for segment i.
        classes: class index of each segment, int [S].
        crowd: 1 for crowds, int [S]. All targets mask crowds.
        spec: `DatasetSpec`.
        config: `TargetConfig`.

    Returns:
        dict of 'semantic' int32 [H, W] (spec.ignore where masked), 'semantic_weight' [H, W], 'center' [H, W] with a
        Gaussian at the centre of each instance, 'center_weight' [H, W], 'offset' [H, W, 2] from each pixel to the
        centre of its instance in pixels (y, x), 'offset_weight' [H, W]. An instance's centre is the mean position of
        its pixels.
    """
    height, width = segments.shape
    count = tf.shape(classes)[0] + 1
    classes, crowd = tf.cast(classes, tf.int32), tf.cast(crowd, tf.bool)
    is_thing = tf.gather(tf.constant(spec.things), classes)

    def by_segment(unlabelled, values):
        """A lookup table for `segments`. Its first entry is for pixels without a label."""
        return tf.concat([[unlabelled], values], 0)

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
    """Targets without instances: dict of 'semantic' int32 [H, W] and 'semantic_weight' [H, W], which is all 1.

    Crowds keep their class. See `panoptic_targets` for the arguments.
    """
    table = tf.concat([[spec.ignore], tf.cast(classes, tf.int32)], 0)
    return {"semantic": tf.gather(table, segments), "semantic_weight": tf.ones(segments.shape)}


def draw_centers(centers, height, width, sigma):
    """Centre heat map, float32 [height, width]: a Gaussian at the pixel nearest to each of the `centers`, [S, 2].

    Where Gaussians overlap, the map has their maximum.
    """
    reach = int(3 * sigma)
    near = tf.range(-reach, reach + 1)
    bell = tf.exp(-tf.cast(near * near, tf.float32) / (2 * sigma**2))
    patch = bell[:, None] * bell[None, :]
    around = tf.stack(tf.meshgrid(near, near, indexing="ij"), -1)
    at = tf.cast(tf.round(centers), tf.int32)[:, None, None] + around  # [S, P, P, 2]
    canvas = tf.zeros([height + 2 * reach, width + 2 * reach])  # larger by `reach` on every side
    canvas = tf.tensor_scatter_nd_max(canvas, at + reach, tf.tile(patch[None], [tf.shape(centers)[0], 1, 1]))
    return canvas[reach : reach + height, reach : reach + width]  # `reach` may be 0, for a small sigma


@dataclasses.dataclass(frozen=True)
class LossConfig(Checked):
    """Weights of the losses, and the pixels that they use.

    Attributes:
        stride: step between the rows and columns of the crop that the losses use; 1 as published. These pixels, the
            crop's pixels and the pixels of the output maps must lie on a common grid.
        top_k: fraction of pixels, with the largest losses, that the semantic loss averages over. DeepLab2 and
            Panoptic-DeepLab's code have 0.2 on COCO and Cityscapes; DeeperLab, which Panoptic-DeepLab cites, has 0.15.
        auxiliary_weight: weight of the auxiliary loss, for networks with an auxiliary head; 0.4 in CCNet's code.
        center_weight: weight of the centre heat map loss.
        offset_weight: weight of the offset loss. Offsets are in pixels of the crop. The published weight of 0.01 is for
            crops of 641 pixels and more.

    Raises:
        InputError: an argument has the wrong type or is out of range.
    """

    stride: Count = 1
    top_k: Share = 0.2
    auxiliary_weight: NonNegative = 0.4
    center_weight: NonNegative = 200.0
    offset_weight: NonNegative = 0.01


def bootstrapped_cross_entropy(logits, labels, weights, *, ignore, top_k):
    """Mean weighted cross-entropy over the hardest pixels of each image: [N]. Pixels without a label do not count.

    Args:
        logits: float32 [N, h, w, C]. If (h, w) is not the labels' size, Pallas kernels for TPUs resize the logits.
        labels: int32 [N, H, W].
        weights: [N, H, W].
        ignore: label of the pixels that do not count.
        top_k: number of hardest pixels, as a fraction of all H x W pixels.
    """
    most = max(round(top_k * labels.shape[1] * labels.shape[2]), 1)
    valid = labels != ignore
    classes = tf.where(valid, labels, 0)
    if logits.shape[1:3] != labels.shape[1:3]:
        loss = import_kernels("axial.layers.tpu.cross_entropy").resized_cross_entropy(logits, classes)
    else:
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
    with tf.name_scope("hardest_pixels"):
        return mean_of_largest(loss * weights, valid, most)


def mean_of_largest(values, valid, most):
    """Mean of the `most` largest valid values of each image: [N]; 0 for an image without valid values.

    A radix selection finds the smallest value that counts, from its highest bits to its lowest. A sort would take a
    CPU four times as long for a map of 1025x1025. All values equal to this smallest one have one fractional weight, so
    that the weights sum to `most`. So these values have equal gradients; a sort would select only some of them.

    Args:
        values: float32 [N, H, W], not negative; a valid NaN makes the image's mean NaN.
        valid: bool [N, H, W].
        most: number of values that count; all valid values if there are fewer.
    """

    def number(x):
        return tf.reduce_sum(tf.cast(x, tf.int32), [1, 2], keepdims=True)

    # Non-negative floats are ordered like their bits. NaN comes last; values that are not valid come first.
    bits = tf.where(valid, tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), 0x7FFFFFFF), -1)
    count = tf.minimum(most, number(valid))
    least = tf.zeros_like(count)
    if most < values.shape[1] * values.shape[2]:  # otherwise all valid values count
        # A TPU reads the map once for all comparisons of a pass; 3 bits a pass are fastest.
        width = 1 if device.on_cpu() else 3
        for low in reversed(range(0, 31, width)):
            digits = range(1, 2 ** min(width, 31 - low))
            enough = [number(bits >= least + (digit << low)) >= count for digit in digits]
            least += tf.add_n([tf.cast(x, tf.int32) for x in enough]) * 2**low
    above, equal = bits > least, bits == least
    fraction = tf.math.divide_no_nan(tf.cast(count - number(above), tf.float32), tf.cast(number(equal), tf.float32))
    chosen = tf.where(valid, values, 0.0) * tf.where(above, 1.0, fraction * tf.cast(equal, tf.float32))
    return tf.math.divide_no_nan(tf.reduce_sum(chosen, [1, 2]), tf.cast(count[:, 0, 0], tf.float32))


def weighted_mean(values, weights):
    """Weighted mean of each image, [N], from values and weights [N, H, W]; 0 if the weights sum to 0."""
    return tf.math.divide_no_nan(tf.reduce_sum(values * weights, [1, 2]), tf.reduce_sum(weights, [1, 2]))


def _check_stride(stride, crop, outputs):
    """Raises InputError if maps, upsampled to every `stride`-th pixel, are not aligned with the crop."""
    size = [-(-side // stride) for side in crop]
    for x in outputs.values():
        for old, new, side in zip(x.shape[1:3], size, crop):
            if stride > 1 and not math.isclose(step_of(old, new) * stride, step_of(old, side)):
                raise InputError(f"LossConfig.stride = {stride}: does not suit a crop of {side} pixels; use 1")


def panoptic_losses(outputs, targets, spec, config=LossConfig(), backend="auto"):
    """dict of the weighted losses 'semantic', 'auxiliary', 'center' and 'offset', scalars, and their sum 'total'.

    A loss is left out if the model does not return its map.

    Args:
        outputs: the model's dict of output maps.
        targets: batch of `panoptic_targets` or of `semantic_targets`.
        spec: `DatasetSpec`.
        config: `LossConfig`.
        backend: `ModelConfig.backend`. 'kernel' uses the Pallas kernels of `layers/tpu/cross_entropy.py` on a TPU.

    Raises:
        InputError: the backend is unknown, or the stride does not suit the crop.
    """
    fixed = all(x.shape.is_fully_defined() for x in outputs.values())
    _check_stride(config.stride, targets["semantic"].shape[1:3], outputs)
    later = (SEMANTIC, AUXILIARY) if choose(backend, lambda: fixed) == "kernel" else ()
    resized = {name: x for name, x in outputs.items() if name not in later}
    maps = {**outputs, **upsample(resized, targets["semantic"].shape[1:3], config.stride)}
    targets = {name: x[:, :: config.stride, :: config.stride] for name, x in targets.items()}

    def cross_entropy(name):
        labels = targets["semantic"], targets["semantic_weight"]
        loss = bootstrapped_cross_entropy(maps[name], *labels, ignore=spec.ignore, top_k=config.top_k)
        return tf.reduce_mean(loss)

    with tf.name_scope("semantic_loss"):
        losses = {"semantic": cross_entropy(SEMANTIC)}
    if AUXILIARY in maps:
        with tf.name_scope("auxiliary_loss"):
            losses["auxiliary"] = config.auxiliary_weight * cross_entropy(AUXILIARY)
    if CENTER in maps:
        with tf.name_scope("center_loss"):
            squares = (maps[CENTER][..., 0] - targets["center"]) ** 2
            center = tf.reduce_mean(weighted_mean(squares, targets["center_weight"]))
        with tf.name_scope("offset_loss"):
            # The mean over y and x, as in DeepLab2 and in Panoptic-DeepLab's code.
            distance = tf.reduce_mean(tf.abs(maps[OFFSET] - targets["offset"]), -1)
            offset = tf.reduce_mean(weighted_mean(distance, targets["offset_weight"]))
        losses |= {"center": config.center_weight * center, "offset": config.offset_weight * offset}
    return {**losses, "total": tf.add_n(list(losses.values()))}
