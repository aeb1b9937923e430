"""Turns the network's maps into a panoptic segmentation. It works on batches and has static shapes, as XLA needs.

This is Panoptic-DeepLab's grouping. Each local maximum of the centre heat map is the centre of an instance. A thing
pixel belongs to the centre nearest to where its offset points. An instance takes the class of most of its pixels
(DeeperLab's majority vote).
"""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from axial.errors import InputError
from axial.io.check import Count, Fraction, Natural, checked
from axial.layers import device
from axial.models.outputs import CENTER, CLASS, OFFSET, PROBABILITY

TOGETHER = 8  # centres that a pixel is compared with in one pass


@checked
@dataclasses.dataclass(frozen=True)
class PostprocessConfig:
    """Knobs of the grouping. Lengths and areas are in pixels of the canvas.

    Attributes:
        center_threshold: a centre is hotter than this.
        nms_kernel: odd side of the window in which a centre is the hottest pixel; 7 in Panoptic-DeepLab's paper.
        top_k: largest number of instances in an image.
        stuff_area: a stuff class with fewer pixels becomes void.
        thing_area: an instance with fewer pixels becomes void.

    Raises:
        InputError: an argument of another type, or out of range; an even nms_kernel.
    """

    center_threshold: Fraction = 0.1
    nms_kernel: Count = 7
    top_k: Count = 200
    stuff_area: Natural = 2048
    thing_area: Natural = 0

    def __post_init__(self):
        if self.nms_kernel % 2 == 0:
            raise InputError(f"PostprocessConfig.nms_kernel must be odd: got {self.nms_kernel}")


def check_room(spec, config):
    """Raises InputError unless panoptic labels have room for as many instances as the grouping can find."""
    if any(spec.things) and config.top_k >= spec.label_divisor:
        raise InputError(
            f"PostprocessConfig.top_k must be below the label_divisor {spec.label_divisor} of the spec {spec.name!r}: "
            f"got {config.top_k}"
        )


def most_centers(canvas, config):
    """The length of an image's list of centres: top_k, or the pixels of a canvas that has fewer."""
    return min(config.top_k, canvas[0] * canvas[1])


def find_centers(heatmap, config):
    """The hottest local maxima in raster order: positions int32 [N, K, 2] and scores [N, K].

    A score is 0 where there is no maximum. Of several equal pixels in a window, only the first in raster order can be a
    maximum.

    Args:
        heatmap: float32 [N, H, W].
        config: `PostprocessConfig`.
    """
    height, width = heatmap.shape[1:]
    hot = tf.where(heatmap > config.center_threshold, heatmap, 0.0)[..., None]
    peaks = tf.reshape(tf.where(_is_peak(hot, config.nms_kernel), hot, 0.0), [-1, height * width])
    scores, index = tf.math.top_k(peaks, most_centers([height, width], config), sorted=False)
    order = tf.argsort(tf.where(scores > 0, index, height * width), axis=1)
    scores, index = (tf.gather(t, order, batch_dims=1) for t in (scores, index))
    return tf.stack([index // width, index % width], -1), scores


def _is_peak(hot, kernel):
    """Whether a pixel is the hottest of its window. If several are equally hot, only the first in raster order is it.

    Args:
        hot: [N, H, W, 1], at least 0.
        kernel: odd side of the window.
    """
    reach = kernel // 2
    of_row = tf.nn.max_pool2d(hot, [1, kernel], 1, "SAME")
    is_peak = hot == tf.nn.max_pool2d(of_row, [kernel, 1], 1, "SAME")
    if reach:
        above = tf.pad(of_row[:, :-1], [[0, 0], [reach, 0], [0, 0], [0, 0]])
        left = tf.pad(hot[:, :, :-1], [[0, 0], [0, 0], [reach, 0], [0, 0]])
        is_peak &= hot > tf.nn.max_pool2d(above, [reach, 1], 1, "VALID")
        is_peak &= hot > tf.nn.max_pool2d(left, [1, reach], 1, "VALID")
    return is_peak


@functools.cache
def _compiled():
    """`group_pixels` by XLA, where it is there: it compares several centres in one pass over the pixels."""
    return tf.function(group_pixels, autograph=False, jit_compile=device.has_xla())


def group_pixels(offsets, centers, count):
    """int32 [H, W]: for each pixel, the index of the centre nearest to where its offset points.

    Args:
        offsets: float32 [H, W, 2], (y, x).
        centers: int32 [K, 2]; the first `count` are real.
    """
    height, width = offsets.shape[:2]
    y, x = tf.meshgrid(tf.range(height), tf.range(width), indexing="ij")
    y = tf.cast(y, tf.float32) + offsets[..., 0]
    x = tf.cast(x, tf.float32) + offsets[..., 1]
    centers = tf.where(tf.range(centers.shape[0])[:, None] < count, tf.cast(centers, tf.float32), np.inf)
    centers = tf.pad(centers, [[0, -centers.shape[0] % TOGETHER], [0, 0]], constant_values=np.inf)

    def closer(i, best, nearest):
        for _ in range(TOGETHER):
            distance = tf.math.squared_difference(y, centers[i, 0])
            distance += tf.math.squared_difference(x, centers[i, 1])
            nearest = tf.where(distance < best, i, nearest)
            best = tf.minimum(best, distance)
            i += 1
        return i, best, nearest

    start = (0, tf.fill([height, width], np.inf), tf.zeros([height, width], tf.int32))
    return tf.while_loop(lambda i, *_: i < count, closer, start)[2]


def postprocess(maps, spec, config):
    """Panoptic segmentation of a batch. Without a 'center_heatmap', every class is one segment.

    Args:
        maps: dict of maps on the canvas: int32 'semantic' [N, H, W], the class; and float32 'probability' [N, H, W, C]
            of all classes, 'center_heatmap' [N, H, W, 1], 'offset_map' [N, H, W, 2] in pixels (y, x).
        spec: `DatasetSpec`.
        config: `PostprocessConfig`.

    Returns:
        dict of int32 maps [N, H, W]:
            'semantic': class.
            'instance': 0 for none, i + 1 for the i-th centre.
            'panoptic': class x label_divisor + number of the instance within its class; spec.void for void. Stuff has
                number 0. Instances are numbered from 1, in the raster order of their first pixels.
        and of float32 [N, K]:
            'center_score': heat of each centre.
            'score': that heat times the mean probability of the instance's class over its pixels (Panoptic-DeepLab,
                Sec. 3.4).
    """
    semantic = maps[CLASS]
    if CENTER not in maps:
        return _without_instances(semantic, spec, config)
    centers, scores = find_centers(maps[CENTER][..., 0], config)

    def one(inputs):
        semantic, offsets, centers, scores = inputs
        count = tf.reduce_sum(tf.cast(scores > 0, tf.int32))
        thing = tf.gather(tf.constant(spec.things), semantic) & (count > 0)
        instance = tf.where(thing, _compiled()(offsets, centers, count) + 1, 0)
        return instance, *merge(semantic, instance, scores.shape[0], spec=spec, config=config)

    of_map = tf.TensorSpec(semantic.shape[1:], tf.int32)
    instance, panoptic, classes = tf.map_fn(
        one,
        (semantic, maps[OFFSET], centers, scores),
        fn_output_signature=(of_map, of_map, tf.TensorSpec([scores.shape[1] + 1], tf.int32)),
    )
    probability = tf.gather(maps[PROBABILITY], tf.gather(classes, instance, batch_dims=1), batch_dims=3)
    return {
        "semantic": semantic,
        "instance": instance,
        "panoptic": panoptic,
        "center_score": scores,
        "score": scores * instance_means(probability, instance, scores.shape[1]),
    }


def instance_means(values, instance, count):
    """float32 [N, count]: the mean of a map [N, H, W] over the pixels of each instance, 0 if it has no pixels."""
    images = tf.shape(values)[0]
    rows = tf.range(images)[:, None, None] * (count + 1)
    segments, total = tf.reshape(instance + rows, [-1]), images * (count + 1)
    mean = tf.math.divide_no_nan(
        tf.math.unsorted_segment_sum(tf.reshape(values, [-1]), segments, total),
        tf.math.unsorted_segment_sum(tf.ones_like(segments, tf.float32), segments, total),
    )
    return tf.reshape(mean, [-1, count + 1])[:, 1:]


def _without_instances(semantic, spec, config):
    """`postprocess` without instances: every class is one segment, like stuff."""
    stuff = dataclasses.replace(spec, things=(False,) * spec.num_classes)

    def one(classes):
        return merge(classes, tf.zeros_like(classes), 1, spec=stuff, config=config)[0]

    panoptic = tf.map_fn(one, semantic, fn_output_signature=tf.TensorSpec(semantic.shape[1:], tf.int32))
    scores = tf.zeros([tf.shape(semantic)[0], most_centers(semantic.shape[1:], config)])
    maps = {"semantic": semantic, "instance": tf.zeros_like(semantic), "panoptic": panoptic}
    return {**maps, "center_score": scores, "score": scores}


def merge(semantic, instance, top_k, *, spec, config):
    """Panoptic labels of one image, and the class of each instance by the majority vote of its pixels.

    Args:
        semantic: int32 [H, W], class.
        instance: int32 [H, W], 0 for none, else 1 to top_k.
        top_k: largest number of instances.
        spec, config: see `postprocess`.

    Returns:
        int32 [H, W] and int32 [top_k + 1].
    """
    pixels, classes = semantic.shape.num_elements(), spec.num_classes
    flat = tf.reshape(instance, [-1])
    votes = tf.raw_ops.DenseBincount(  # tf.math.bincount's size is not static under XLA
        input=flat * classes + tf.reshape(semantic, [-1]),
        size=(top_k + 1) * classes,
        weights=tf.constant([], tf.int32),
    )
    votes = tf.reshape(votes, [top_k + 1, classes])  # [instance, class], in pixels
    winner = tf.argmax(votes, 1, tf.int32)
    area = tf.reduce_sum(votes, 1)
    first = tf.math.unsorted_segment_min(tf.range(pixels), flat, top_k + 1)
    earlier = (first[None, :] < first[:, None]) & (winner[None, :] == winner[:, None])
    earlier &= ((area > 0) & (tf.range(top_k + 1) > 0))[None, :]
    number = tf.reduce_sum(tf.cast(earlier, tf.int32), 1) + 1
    of_instance = tf.where(area >= max(config.thing_area, 1), winner * spec.label_divisor + number, spec.void)
    stuff = ~tf.constant(spec.things) & (votes[0] >= max(config.stuff_area, 1))
    of_class = tf.where(stuff, tf.range(classes) * spec.label_divisor, spec.void)
    panoptic = tf.where(instance > 0, tf.gather(of_instance, instance), tf.gather(of_class, semantic))
    return panoptic, winner
