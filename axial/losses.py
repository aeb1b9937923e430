"""The three losses of Panoptic-DeepLab (Cheng et al., CVPR 2020, Sec. 3.3).

Each is a mean over the pixels of an image, then over images, so that any split of a batch over
replicas gives the same gradient.
"""

import dataclasses

import tensorflow as tf

from axial.models.panoptic_deeplab import CENTER, OFFSET, SEMANTIC, upsample

CENTER_WEIGHT = 200.0
HARDEST = 0.15  # of the pixels, in the semantic loss


def bootstrapped_cross_entropy(logits, labels, weights, ignore, hardest=HARDEST):
    """Mean weighted cross-entropy over the `hardest` share of an image's pixels: [N].

    Args:
        logits: [N, H, W, C]; labels: int32 [N, H, W]; weights: [N, H, W].
        ignore: label of pixels that count as 0.
    """
    pixels = labels.shape[1] * labels.shape[2]
    valid = labels != ignore
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(valid, labels, 0), logits)
    loss = tf.reshape(tf.where(valid, loss * weights, 0.0), [-1, pixels])
    return tf.reduce_mean(tf.math.top_k(loss, max(int(hardest * pixels), 1), sorted=False)[0], 1)


def weighted_mean(values, weights):
    """sum(values * weights) / sum(weights) of each image, 0 without weight: [N, H, W] x 2 -> [N]."""
    return tf.math.divide_no_nan(tf.reduce_sum(values * weights, [1, 2]), tf.reduce_sum(weights, [1, 2]))


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Of the training losses.

    Attributes:
        stride: only every stride-th row and column of the crop counts; 1 as published.
        offset_weight: of the offset loss, whose unit is a pixel of the crop: 0.01 as published, for crops
            of 641 pixels and more.
    """

    stride: int = 1
    offset_weight: float = 0.01


def panoptic_losses(outputs, targets, spec, config=LossConfig()):
    """dict of scalars 'semantic', 'center', 'offset', weighted, and their sum 'total'.

    Of a model without instance branch, 'semantic' and 'total'.

    Args:
        outputs: the model's dict of maps.
        targets: batch of `panoptic_targets`.
        spec: `DatasetSpec`.
        config: `LossConfig`.
    """
    maps = upsample(outputs, targets["semantic"].shape[1:3], config.stride)
    targets = {name: x[:, :: config.stride, :: config.stride] for name, x in targets.items()}
    semantic = bootstrapped_cross_entropy(maps[SEMANTIC], targets["semantic"], targets["semantic_weight"], spec.ignore)
    losses = {"semantic": tf.reduce_mean(semantic)}
    if CENTER not in maps:
        return {**losses, "total": losses["semantic"]}
    center = weighted_mean((maps[CENTER][..., 0] - targets["center"]) ** 2, targets["center_weight"])
    distance = tf.reduce_sum(tf.abs(maps[OFFSET] - targets["offset"]), -1)
    offset = weighted_mean(distance, targets["offset_weight"])
    losses["center"] = CENTER_WEIGHT * tf.reduce_mean(center)
    losses["offset"] = config.offset_weight * tf.reduce_mean(offset)
    return {**losses, "total": tf.add_n(list(losses.values()))}
