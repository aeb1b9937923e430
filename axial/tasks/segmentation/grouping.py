"""Panoptic-DeepLab's post-processing: groups the network's output maps into a panoptic segmentation.

Each local maximum of the centre heat map is the centre of an instance. A thing pixel belongs to the centre that is
nearest to its position plus its offset. The class of an instance is the majority vote of its pixels (DeeperLab). The
functions work on batches and have static shapes, as XLA needs.
"""

import dataclasses
import functools
import math
import typing

import numpy as np
import tensorflow as tf

from axial.data.preprocess import IN_FILE, full_size
from axial.errors import InputError
from axial.io.check import Checked, Count, Fraction, Natural
from axial.layers import device
from axial.models.outputs import CENTER, CLASS, OFFSET, PROBABILITY

UNROLL = 8  # number of centres that one pass over the pixels compares


@dataclasses.dataclass(frozen=True)
class PostprocessConfig(Checked):
    """Options of the grouping. Lengths and areas are in pixels of the canvas.

    Attributes:
        center_threshold: threshold of the centre heat map. A centre's score is above this threshold.
        nms_kernel: odd kernel size of non-maximum suppression; 7 in Panoptic-DeepLab's paper.
        top_k: largest number of instances on a canvas; None for as many as the canvas and the spec's label_divisor
            allow. The centres with the highest scores are kept.
        stuff_area: a stuff class with fewer pixels becomes void.
        thing_area: an instance with fewer pixels becomes void.
        pieces: handling of instances that are not connected: 'largest' keeps the largest connected component, 'split'
            makes each component an instance, None leaves instances unchanged, as the papers do. See `apply_pieces`.

    Raises:
        InputError: an argument has the wrong type or is out of range, or `nms_kernel` is even.
    """

    center_threshold: Fraction = 0.1
    nms_kernel: Count = 7
    top_k: Count | None = 200
    stuff_area: Natural = 2048
    thing_area: Natural = 0
    pieces: typing.Literal["largest", "split"] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.nms_kernel % 2 == 0:
            raise InputError(f"PostprocessConfig.nms_kernel must be odd: got {self.nms_kernel}")


def most_centers(canvas, config, spec):
    """Largest number of instances on a canvas (height, width): `top_k`, or fewer if fewer local maxima have room.

    Each maximum lies outside the NMS windows of the others, so a square with half a window's side has at most one
    maximum. Panoptic labels limit the number too, as instance numbers are below the spec's label_divisor.
    """
    room = min(math.prod(-(-side // _half(config)) for side in canvas), max(spec.label_divisor - 1, 1))
    return min(config.top_k or room, room)


def _half(config):
    """Side of a square that has at most one local maximum."""
    return config.nms_kernel // 2 + 1


def find_centers(heatmap, config, most):
    """The local maxima with the highest scores, in raster order.

    If several pixels in a window are equal, only the first in raster order can be a maximum.

    Args:
        heatmap: float32 [N, H, W].
        config: `PostprocessConfig`.
        most: K, the largest number of maxima.

    Returns:
        positions (y, x), int32 [N, K, 2]; scores [N, K], 0 for unused slots; number of dropped maxima, int32 [N].
    """
    height, width = heatmap.shape[1:]
    pixels, side = height * width, _half(config)
    hot = tf.where(heatmap > config.center_threshold, heatmap, 0.0)
    is_peak = _is_peak(hot[..., None], config.nms_kernel)[..., 0] & (hot > 0)
    index = tf.where(is_peak, tf.reshape(tf.range(pixels), [height, width]), pixels)
    index = tf.pad(index, [[0, 0], [0, -height % side], [0, -width % side]], constant_values=pixels)
    squares = [-1, index.shape[1] // side, side, index.shape[2] // side, side]
    index = tf.reduce_min(tf.reshape(index, squares), [2, 4])
    index = tf.sort(tf.reshape(index, [-1, math.prod(index.shape[1:])]))
    count = tf.reduce_sum(tf.cast(index < pixels, tf.int32), 1)
    hot = tf.pad(tf.reshape(hot, [-1, pixels]), [[0, 0], [0, 1]])
    scores = tf.gather(hot, index, batch_dims=1)
    if most < index.shape[1]:
        kept = tf.sort(tf.math.top_k(scores, most)[1])
        scores, index = (tf.gather(x, kept, batch_dims=1) for x in (scores, index))
    return tf.stack([index // width, index % width], -1), scores, tf.maximum(count - most, 0)


def _is_peak(hot, kernel):
    """bool [N, H, W, 1]: whether a pixel is the first maximum of its window, in raster order.

    Args:
        hot: [N, H, W, 1], at least 0.
        kernel: odd side of the window.
    """
    reach = kernel // 2
    row_max = tf.nn.max_pool2d(hot, [1, kernel], 1, "SAME")
    is_peak = hot == tf.nn.max_pool2d(row_max, [kernel, 1], 1, "SAME")
    if reach:
        above = tf.pad(row_max[:, :-1], [[0, 0], [reach, 0], [0, 0], [0, 0]])
        left = tf.pad(hot[:, :, :-1], [[0, 0], [0, 0], [reach, 0], [0, 0]])
        is_peak &= hot > tf.nn.max_pool2d(above, [reach, 1], 1, "VALID")
        is_peak &= hot > tf.nn.max_pool2d(left, [1, reach], 1, "VALID")
    return is_peak


@functools.cache
def _compiled():
    """`group_pixels`, compiled by XLA if possible. XLA compares several centres in one pass over the pixels."""
    return device.compiled(group_pixels, device.has_xla())


def _each(function, maps, signature):
    """`tf.map_fn` over a batch. A file has a batch of one image and no loop."""
    if IN_FILE.get():
        return tf.nest.map_structure(lambda x: x[None], function(tuple(x[0] for x in maps)))
    return tf.map_fn(function, maps, fn_output_signature=signature)


def group_pixels(offsets, centers, count):
    """int32 [H, W]: for each pixel, the index of the centre nearest to its position plus its offset.

    Args:
        offsets: float32 [H, W, 2], (y, x).
        centers: int32 [K, 2].
        count: number of real centres, which come first; the others are padding.
    """
    height, width = offsets.shape[:2]
    y, x = tf.meshgrid(tf.range(height), tf.range(width), indexing="ij")
    y = tf.cast(y, tf.float32) + offsets[..., 0]
    x = tf.cast(x, tf.float32) + offsets[..., 1]
    centers = tf.where(tf.range(centers.shape[0])[:, None] < count, tf.cast(centers, tf.float32), np.inf)
    centers = tf.pad(centers, [[0, -centers.shape[0] % UNROLL], [0, 0]], constant_values=np.inf)

    def closer(i, best, nearest):
        for _ in range(UNROLL):
            distance = tf.math.squared_difference(y, centers[i, 0])
            distance += tf.math.squared_difference(x, centers[i, 1])
            nearest = tf.where(distance < best, i, nearest)
            best = tf.minimum(best, distance)
            i += 1
        return i, best, nearest

    start = (0, tf.fill([height, width], np.inf), tf.zeros([height, width], tf.int32))
    return tf.while_loop(lambda i, *_: i < count, closer, start)[2]


def postprocess(maps, spec, config):
    """Panoptic segmentation of a batch. Without a 'center_heatmap', the pixels of each class are one segment.

    Args:
        maps: dict of maps on the canvas: int32 'semantic' [N, H, W], the class; float32 'probability' [N, H, W, C],
            'center_heatmap' [N, H, W, 1] and 'offset_map' [N, H, W, 2] in pixels (y, x).
        spec: `DatasetSpec`.
        config: `PostprocessConfig`.

    Returns:
        dict of int32 maps [N, H, W]:
            'semantic': class.
            'instance': 0 for no instance, i + 1 for the i-th centre.
            'panoptic': class x label_divisor + number of the instance within its class; spec.void for void. Stuff has
                number 0. Instances are numbered from 1, in the raster order of their first pixels.
        and float32 arrays [N, K]:
            'center_score': value of the heat map at each centre.
            'score': the centre's score times the mean probability of the instance's class over its pixels
                (Panoptic-DeepLab, Sec. 3.4).
        and an int32 array [N]:
            'dropped': number of centres beyond `most_centers`.
    """
    semantic = maps[CLASS]
    if CENTER not in maps:
        return _without_instances(semantic, spec, config)
    most = most_centers(semantic.shape[1:], config, spec)
    centers, scores, dropped = find_centers(maps[CENTER][..., 0], config, most)

    def one(inputs):
        semantic, offsets, centers, scores = inputs
        count = tf.reduce_sum(tf.cast(scores > 0, tf.int32))
        thing = tf.gather(tf.constant(spec.things), semantic) & (count > 0)
        group = group_pixels if IN_FILE.get() else _compiled()
        instance = tf.where(thing, group(offsets, centers, count) + 1, 0)
        return instance, *merge_semantic_and_instance(semantic, instance, most, spec=spec, config=config)

    map_spec = tf.TensorSpec(semantic.shape[1:], tf.int32)
    instance, panoptic, classes = _each(
        one, (semantic, maps[OFFSET], centers, scores), (map_spec, map_spec, tf.TensorSpec([most + 1], tf.int32))
    )
    probability = tf.gather(maps[PROBABILITY], tf.gather(classes, instance, batch_dims=1), batch_dims=3)
    return {
        "semantic": semantic,
        "instance": instance,
        "panoptic": panoptic,
        "center_score": scores,
        "score": scores * instance_means(probability, instance, most),
        "dropped": dropped,
    }


def instance_means(values, instance, count):
    """float32 [N, count]: mean of a map [N, H, W] over the pixels of each instance; 0 for instances without pixels."""
    images = tf.shape(values)[0]
    rows = tf.range(images)[:, None, None] * (count + 1)
    segments, total = tf.reshape(instance + rows, [-1]), images * (count + 1)
    mean = tf.math.divide_no_nan(
        tf.math.unsorted_segment_sum(tf.reshape(values, [-1]), segments, total),
        tf.math.unsorted_segment_sum(tf.ones_like(segments, tf.float32), segments, total),
    )
    return tf.reshape(mean, [-1, count + 1])[:, 1:]


def stuff_only(spec):
    """The spec for a network without instances: all classes are stuff."""
    return dataclasses.replace(spec, things=(False,) * spec.num_classes)


def _without_instances(semantic, spec, config):
    """`postprocess` without instances: every class is stuff."""
    none = tf.zeros_like(semantic)
    one = functools.partial(merge_semantic_and_instance, most=1, spec=stuff_only(spec), config=config)
    map_spec = tf.TensorSpec(semantic.shape[1:], tf.int32)
    panoptic = _each(lambda maps: one(*maps)[0], (semantic, none), map_spec)
    scores = tf.zeros([tf.shape(semantic)[0], most_centers(semantic.shape[1:], config, spec)])
    maps = {"semantic": semantic, "instance": none, "panoptic": panoptic}
    return {**maps, "center_score": scores, "score": scores, "dropped": none[:, 0, 0]}


def merge_semantic_and_instance(semantic, instance, most, *, spec, config):
    """Panoptic labels of one image, and the class of each instance by the majority vote of its pixels.

    Args:
        semantic: class of each pixel, int32 [H, W].
        instance: number of the instance from 1 to `most`, 0 for none, int32 [H, W].
        most: largest number of instances.
        spec, config: see `postprocess`.

    Returns:
        panoptic labels, int32 [H, W]; class of each instance, int32 [most + 1].
    """
    pixels, classes = tf.size(semantic), spec.num_classes
    flat = tf.reshape(instance, [-1])
    votes = _counts(flat * classes + tf.reshape(semantic, [-1]), (most + 1) * classes)
    votes = tf.reshape(votes, [most + 1, classes])  # [instance, class], in pixels
    winner = tf.argmax(votes, 1, tf.int32)
    area = tf.reduce_sum(votes, 1)
    first = tf.math.unsorted_segment_min(tf.range(pixels), flat, most + 1)
    order = tf.argsort(tf.where(tf.range(most + 1) > 0, first, pixels))  # instance 0 means none
    order = tf.gather(order, tf.argsort(tf.gather(winner, order), stable=True))  # by class, then by first pixel
    begin = tf.math.unsorted_segment_min(tf.range(most + 1), tf.gather(winner, order), classes)
    number = tf.argsort(order) - tf.gather(begin, winner) + 1
    instance_labels = tf.where(area >= max(config.thing_area, 1), winner * spec.label_divisor + number, spec.void)
    stuff = ~tf.constant(spec.things) & (votes[0] >= max(config.stuff_area, 1))
    class_labels = tf.where(stuff, tf.range(classes) * spec.label_divisor, spec.void)
    panoptic = tf.where(instance > 0, tf.gather(instance_labels, instance), tf.gather(class_labels, semantic))
    return panoptic, winner


def _counts(values, size):
    """int32 [size]: how often each number from 0 to size - 1 is among `values`."""
    if IN_FILE.get():
        return tf.math.unsorted_segment_sum(tf.ones_like(values), values, size)
    # under XLA the size of tf.math.bincount is not static
    return tf.raw_ops.DenseBincount(input=values, size=size, weights=tf.constant([], tf.int32))


def segment_rows(prediction, spec):
    """The segments of one photo, sorted by their labels, without void.

    Args:
        prediction: result of `photo_prediction`.
        spec: `DatasetSpec`.

    Returns:
        dict of 'segment' int32 [S], the labels in 'panoptic'; 'segment_class' int32 [S], class indices; 'segment_score'
        float32 [S], 1 for stuff; and 'segment_box' int32 [S, 4] of (x, y, width, height).
    """
    width = tf.shape(prediction["panoptic"])[1]
    labels, segment = tf.unique(tf.reshape(prediction["panoptic"], [-1]))
    count, pixels = tf.size(labels), tf.range(tf.size(segment))
    least, most = tf.math.unsorted_segment_min, tf.math.unsorted_segment_max
    places = pixels % width, pixels // width
    left, top, right, bottom = (reduce(at, segment, count) for reduce in (least, most) for at in places)
    first = least(pixels, segment, count)
    owner = tf.gather(tf.reshape(prediction["instance"], [-1]), first)  # 0 for stuff
    rows = {
        "segment": labels,
        "segment_class": labels // spec.label_divisor,
        "segment_score": tf.gather(tf.concat([[1.0], prediction["score"]], 0), owner),
        "segment_box": tf.stack([left, top, right - left + 1, bottom - top + 1], 1),
    }
    order = tf.argsort(labels)
    order = tf.boolean_mask(order, tf.gather(rows["segment_class"], order) != spec.ignore)
    return {name: tf.gather(values, order) for name, values in rows.items()}


# === Pieces ===


def photo_prediction(result, valid_size, size, *, spec, config):
    """Resizes a prediction from the canvas to the photo's own size, by `full_size`, and applies `apply_pieces`."""
    maps = full_size(result, valid_size, size)
    scale = tf.cast(valid_size[0], tf.float32) / tf.cast(size[0], tf.float32)
    return {**maps, "panoptic": apply_pieces(maps["panoptic"], spec, config, scale)}


def apply_pieces(panoptic, spec, config, scale):
    """Applies `PostprocessConfig.pieces` to the instances of one photo. Returns panoptic labels, int32 [h, w].

    A piece is a connected component of an instance (4-connectivity). With 'largest', all pieces but the largest become
    void. With 'split', these pieces become instances, numbered from the photo's largest instance number + 1. Pieces
    whose number would reach the label_divisor stay in their instance. Pieces with fewer pixels than `thing_area`
    become void.

    Args:
        panoptic: panoptic labels at the photo's own size, int32 [h, w].
        spec: `DatasetSpec`.
        config: `PostprocessConfig`. Its areas are in pixels of the canvas.
        scale: side of the photo on the canvas / side of the photo.
    """
    return panoptic if config.pieces is None else _piece_graph(spec, config)(panoptic, scale)


@functools.cache
def _piece_graph(spec, config):
    """`apply_pieces` as a single graph for photos of any size."""

    def run_pieces(panoptic, scale):
        run, label, root = _components(panoptic)
        runs = tf.range(tf.size(root))
        pixels = tf.reshape(tf.gather(root, run), [-1])
        area = _counts(pixels, tf.size(root))  # of each piece, at its first run
        segment = tf.unique(label)[1]
        largest = tf.gather(tf.math.unsorted_segment_max(area, segment, tf.size(root)), segment)
        largest = tf.where(area == largest, runs, tf.size(root))
        is_main = tf.gather(tf.math.unsorted_segment_min(largest, segment, tf.size(root)), segment) == runs
        number = label % spec.label_divisor
        if config.pieces == "split":
            other = (root == runs) & (number > 0) & ~is_main
            new = tf.reduce_max(number) + tf.cumsum(tf.cast(other, tf.int32))
            labels = tf.where(other & (new < spec.label_divisor), label - number + new, label)
        else:
            labels = tf.where(is_main, label, spec.void)
        labels = tf.where((number > 0) & (tf.cast(area, tf.float32) * scale**2 < config.thing_area), spec.void, labels)
        return tf.gather(tf.where(number > 0, tf.gather(labels, root), label), run)

    signature = [tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.float32)]
    return tf.function(run_pieces, autograph=False, input_signature=signature)


def _components(labels):
    """Connected components of a label map, from the R runs of equal labels in its rows.

    Args:
        labels: int32 [h, w].

    Returns:
        run of each pixel, int32 [h, w], in raster order; label of each run, int32 [R]; first run of each run's
        component, int32 [R].
    """
    begins = tf.concat([tf.fill([tf.shape(labels)[0], 1], True), labels[:, 1:] != labels[:, :-1]], 1)
    run = tf.reshape(tf.cumsum(tf.cast(tf.reshape(begins, [-1]), tf.int32)) - 1, tf.shape(labels))
    touch = (labels[1:] == labels[:-1]) & (begins[1:] | begins[:-1])  # one pixel for each pair of touching runs
    pairs = tf.concat([tf.boolean_mask(run[:-1], touch), tf.boolean_mask(run[1:], touch)], 0)
    label = tf.boolean_mask(labels, begins)
    return run, label, connected(tf.size(label), pairs)


def connected(count, pairs):
    """int32 [count]: the smallest number in the connected component of each number.

    Args:
        count: the numbers are 0 to count - 1.
        pairs: int32 [2 x L], the first ends of L edges, and then their second ends.
    """

    def hook(root, _):
        ends = tf.gather(root, pairs)
        first = tf.tile(tf.reduce_min(tf.reshape(ends, [2, -1]), 0), [2])
        new = tf.minimum(root, tf.math.unsorted_segment_min(first, ends, tf.size(root)))
        new = tf.gather(new, new)
        return new, tf.reduce_any(new != root)

    return tf.while_loop(lambda _, changed: changed, hook, (tf.range(count), True))[0]
