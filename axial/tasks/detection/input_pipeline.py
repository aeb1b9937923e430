"""Input pipeline of detection: photos on a padded canvas, with boxes, masks and anchor targets for training."""

import dataclasses

import tensorflow as tf

from axial.data import tfrecord
from axial.data.preprocess import place_image
from axial.data.streams import decode_mask, decode_photo, is_mask
from axial.errors import InputError
from axial.io.check import Checked, Count, Name, Natural, Size
from axial.models.faster_rcnn.anchors import RATIOS, anchors, choose, match
from axial.tasks.segmentation.input_pipeline import segment_map

MASK_SIDE = 112  # side in pixels of a training mask, which covers its box, as in tf-models-official
# IoU thresholds of `match`, and the number of sampled anchors. At most half of the anchors are positive (Ren et al.,
# NIPS 2015, Sec. 3.1; the spatial-attention study's configs in mmdetection).
OBJECT, BACKGROUND, SAMPLED_ANCHORS = 0.7, 0.3, 256


@dataclasses.dataclass(frozen=True)
class DetectionData(Checked):
    """Splits, sizes and augmentation of a detector's input pipeline.

    Attributes:
        train_split, eval_split: names of the training and the evaluation split.
        sides: (limit of the shorter side, limit of the longer side) of the scaled photo, in pixels.
        canvas: (height, width) of the network's input, multiples of 64. The scaled photo fits into this size.
        flip: whether training flips photos horizontally with a probability of 1/2.
        boxes: largest number of objects in a training example; further objects are dropped.
        shuffle: size of the shuffle buffer, in records; 0 keeps the order of the files.
    """

    train_split: Name
    eval_split: Name
    sides: Size = (800, 1333)
    canvas: Size = (1344, 1344)
    flip: bool = True
    boxes: Count = 100
    shuffle: Natural = 1024

    def __post_init__(self):
        super().__post_init__()
        if any(side % 64 for side in self.canvas):
            raise InputError(f"DetectionData.canvas = {self.canvas}: expected multiples of 64, the largest stride")
        if self.sides[0] > self.sides[1]:
            raise InputError(f"DetectionData.sides = {self.sides}: expected (shorter, longer)")

    def resized(self, canvas):
        """A copy with another size of the network's input."""
        return dataclasses.replace(self, canvas=canvas)


def photo_size(size, sides, canvas):
    """(height, width) of a photo of `size` on the `canvas`, int32 [2], within the limits `sides` of `DetectionData`."""
    size = tf.cast(size, tf.float32)
    sides, canvas = tf.constant(sides, tf.float32), tf.constant(canvas, tf.float32)
    scales = [sides[0] / tf.reduce_min(size), sides[1] / tf.reduce_max(size), *tf.unstack(canvas / size)]
    return tf.cast(tf.clip_by_value(tf.round(size * tf.reduce_min(tf.stack(scales))), 1, canvas), tf.int32)


def place_photo(photo, sides, canvas):
    """Places a photo, uint8 [h, w, 3], on a canvas: float32 [*canvas, 3], and int32 [2], the valid size."""
    valid_size = photo_size(tf.shape(photo)[:2], sides, canvas)
    return place_image(photo, valid_size, canvas), valid_size


# === Objects of a record ===


def record_objects(record, spec):
    """The objects of a record: its boxes or, in a record without boxes, its segments that are things.

    Returns:
        dict of 'class' int64 [n], 'crowd' int64 [n], 'box' float64 [n, 4] of (x, y, width, height) in pixels, and
        'area' float64 [n].
    """

    def boxes():
        numbers = tf.reshape(tf.io.decode_raw(record["box/numbers"], tf.float64), [-1, 5])
        return record["box/class"], record["box/crowd"], numbers[:, :4], numbers[:, 4]

    def segments():
        classes, crowd = record["segment/class"], record["segment/crowd"]
        boxes, area = _segment_boxes(segment_map(record), tf.size(classes))
        kept = tf.gather(tf.constant(spec.things), classes)
        return tuple(tf.boolean_mask(x, kept) for x in (classes, crowd, boxes, area))

    return dict(zip(("class", "crowd", "box", "area"), _from_boxes_or_segments(record, boxes, segments)))


def _from_boxes_or_segments(record, boxes, segments):
    """Returns boxes() if the record has boxes, otherwise segments()."""
    return tf.cond(record["box/known"] == 1, boxes, segments) if "segment/class" in record else boxes()


def _segment_boxes(segments, count):
    """Boxes float64 [count, 4] and areas float64 [count] of the segments of a segment map, int32 [h, w]."""
    flat = tf.reshape(segments, [-1])
    rows, columns = tf.meshgrid(tf.range(tf.shape(segments)[0]), tf.range(tf.shape(segments)[1]), indexing="ij")

    def edges(coordinates):
        coordinates = tf.reshape(coordinates, [-1])
        first = tf.math.unsorted_segment_min(coordinates, flat, count + 1)[1:]
        return first, tf.math.unsorted_segment_max(coordinates, flat, count + 1)[1:] - first + 1

    (x, width), (y, height) = edges(columns), edges(rows)
    area = tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, count + 1)[1:]
    return tf.cast(tf.stack([x, y, width, height], 1), tf.float64), tf.cast(area, tf.float64)


def record_masks(record, spec):
    """The masks of a record's objects, in the order of `record_objects`.

    Returns:
        uint8 [n, h, w], 1 inside the object and all 0 for an object without a mask; and bool [n], whether the object
        has a mask. Objects from segments always have one.
    """
    shape = tf.cast(tf.stack([record["image/height"], record["image/width"]]), tf.int32)

    @tf.autograph.experimental.do_not_convert
    def decoded(png):
        mask = decode_mask(png)
        has_mask = is_mask(mask, shape)
        return tf.cond(has_mask, lambda: mask, lambda: tf.zeros(shape, tf.uint8)), has_mask

    def boxes():
        count = tf.size(record["box/class"])
        kinds = tf.TensorSpec([None, None], tf.uint8), tf.TensorSpec([], tf.bool)
        return tf.cond(
            tf.size(record["box/mask"]) > 0,
            lambda: tf.map_fn(decoded, record["box/mask"], fn_output_signature=kinds),
            lambda: (tf.zeros([count, *tf.unstack(shape)], tf.uint8), tf.zeros([count], tf.bool)),
        )

    def segments():
        things = tf.where(tf.gather(tf.constant(spec.things), record["segment/class"]))[:, 0]
        numbers = tf.cast(things, tf.int32) + 1
        return tf.cast(segment_map(record) == numbers[:, None, None], tf.uint8), numbers > 0

    masks, has_mask = _from_boxes_or_segments(record, boxes, segments)
    return tf.reshape(masks, tf.concat([[-1], shape], 0)), has_mask


def has_masks(record):
    """bool []: whether a record's objects are segments or boxes with masks. True for a record without objects.

    A photo without masks, as in tensorflow-datasets' coco/2017, does not count in mask AP.
    """
    return tf.size(record["box/mask"]) == tf.size(record["box/class"])


def check_masks(data_dir, split):
    """Raises InputError if a split has boxes and no masks, like tensorflow-datasets' coco/2017."""
    manifest = tfrecord.read_manifest(data_dir, split)
    first = tf.data.TFRecordDataset(tfrecord.shard_paths(data_dir, manifest)).take(64)
    records = [tfrecord.parse_example(record, manifest["labels"]) for record in first]
    boxed = [record for record in records if len(record["box/class"])]
    if boxed and not any(map(has_masks, boxed)):
        raise InputError(f"{data_dir}: {split!r} has boxes without masks: for Faster R-CNN, not for Mask R-CNN")


# === Training ===


def training_example(record, seed, spec, data, masks=False):
    """dict of the network's input and targets, from one record.

    Crowds and boxes without an area are dropped. Only thing classes are numbered, from 1. Padding rows are -1. The
    mask of an object without a mask is -1 too.

    Args:
        record: a record from `tfrecord.parse_example`.
        seed: int [2], the seed of the flip and of the sampled anchors.
        spec: `DatasetSpec`.
        data: `DetectionData`.
        masks: whether to make mask targets.

    Returns:
        dict of 'image' float32 [*canvas, 3], 'valid_size' int32 [2], 'boxes' float32 [boxes, 4] of corners (y, x, y, x)
        on the canvas, 'classes' int32 [boxes], the 'anchor_scores/L' and 'anchor_boxes/L' of `anchor_targets` for each
        level L, and with `masks` 'masks' float32 [boxes, MASK_SIDE, MASK_SIDE], each cropped to its box.
    """
    seeds = tf.random.experimental.stateless_split(seed, 2)
    photo, objects = decode_photo(record), record_objects(record, spec)
    size = tf.cast(tf.shape(photo)[:2], tf.float32)
    corners = clipped_corners(objects["box"], size)
    kept = (objects["crowd"] == 0) & tf.reduce_all(corners[:, 2:] > corners[:, :2], 1)
    kept = tf.where(kept)[: data.boxes, 0]
    corners, classes = tf.gather(corners, kept), tf.gather(objects["class"], kept)
    labels = {}
    if masks:
        pixels, has_mask = (tf.gather(x, kept) for x in record_masks(record, spec))
        crops = _box_masks(pixels, corners / tf.tile(size, [2]))
        labels["masks"] = tf.where(has_mask[:, None, None], crops, -1.0)
    if data.flip:
        mirror = tf.random.stateless_uniform([], seeds[0]) < 0.5
        photo = tf.cond(mirror, lambda: tf.reverse(photo, [1]), lambda: photo)
        corners = tf.where(mirror, mirrored(corners, size[1]), corners)
        labels = {name: tf.cond(mirror, lambda x=x: tf.reverse(x, [2]), lambda x=x: x) for name, x in labels.items()}
    image, valid_size = place_photo(photo, data.sides, data.canvas)
    corners = corners * tf.tile(tf.cast(valid_size, tf.float32) / size, [2])
    labels |= {"boxes": corners, "classes": tf.gather(tf.cumsum(tf.cast(spec.things, tf.int32)), classes)}  # from 1 on
    targets = anchor_targets(corners, valid_size, data.canvas, seeds[1])
    labels = {name: _padded(x, data.boxes) for name, x in labels.items()}
    return {"image": image, "valid_size": valid_size, **targets, **labels}


def clipped_corners(boxes, size):
    """Corners (y, x, y, x), float32 [n, 4], from boxes (x, y, width, height), clipped to (height, width)."""
    from official.vision.ops import box_ops

    x, y, width, height = tf.unstack(tf.cast(boxes, tf.float32), axis=1)
    return box_ops.clip_boxes(tf.stack([y, x, y + height, x + width], 1), size)


def mirrored(corners, width):
    """Corners (y, x, y, x) after a horizontal flip of a photo with the given width."""
    top, left, bottom, right = tf.unstack(corners, axis=1)
    return tf.stack([top, width - right, bottom, width - left], 1)


def _box_masks(masks, boxes):
    """Crops each mask to its box: float32 [n, MASK_SIDE, MASK_SIDE]. Boxes are corners as fractions of the photo."""
    numbers, pixels = tf.range(tf.shape(masks)[0]), tf.cast(masks[..., None], tf.float32)
    crops = tf.image.crop_and_resize(pixels, boxes, numbers, [MASK_SIDE, MASK_SIDE])
    return tf.ensure_shape(crops[..., 0], [None, MASK_SIDE, MASK_SIDE])


def _padded(x, count):
    """x, padded with rows of -1 to `count` rows."""
    rest = [[0, count - tf.shape(x)[0]], *([[0, 0]] * (x.shape.rank - 1))]
    return tf.ensure_shape(tf.pad(x, rest, constant_values=-1), [count, *x.shape[1:]])


# === Anchors ===


def anchor_targets(corners, valid_size, canvas, seed):
    """Training targets of the region proposal network for each level L.

    Anchors that extend beyond the valid region are never sampled. The study's configs in mmdetection have
    allowed_border=0, and mmdetection's anchor_inside_flags compares anchors with the photo, not with the canvas.

    Args:
        corners: float32 [n, 4], the objects' corners (y, x, y, x) on the canvas.
        valid_size: int32 [2], the photo's size on the canvas.
        canvas: (height, width).
        seed: int [2], the seed for sampling anchors.

    Returns:
        dict of 'anchor_scores/L' int32 [rows, columns, anchors]: 1 for positive, 0 for negative and -1 for unsampled
        anchors; and 'anchor_boxes/L' float32 [rows, columns, 4 x anchors], the box codes of sampled positive
        anchors, and 0 for all other anchors.
    """
    from official.vision.ops import box_ops, iou_similarity

    anchor_maps = anchors(canvas)
    flat = tf.concat([tf.reshape(x, [-1, 4]) for x in anchor_maps.values()], 0)  # [anchors, 4]
    inside = tf.reduce_all((flat[:, :2] >= 0) & (flat[:, 2:] <= tf.cast(valid_size, tf.float32)), 1)
    corners = tf.pad(corners, [[0, 1], [0, 0]])  # an empty box, as a photo may have no object
    overlaps = iou_similarity.IouSimilarity()(flat, corners, ~inside[:, None])
    matched, positive, negative = match(overlaps, OBJECT, BACKGROUND)
    draw = tf.random.stateless_uniform(positive.shape, seed)
    chosen = choose(positive, negative, SAMPLED_ANCHORS, draw, positive_fraction=0.5)
    scores = tf.where(chosen, tf.cast(positive, tf.int32), -1)
    codes = box_ops.encode_boxes(tf.gather(corners, matched), flat)
    codes = tf.where((scores > 0)[:, None], codes, 0.0)
    counts, targets = [x.shape.num_elements() // 4 for x in anchor_maps.values()], {}
    for (level, x), score, code in zip(anchor_maps.items(), tf.split(scores, counts), tf.split(codes, counts)):
        targets[f"anchor_scores/{level}"] = tf.reshape(score, [*x.shape[:2], len(RATIOS)])
        targets[f"anchor_boxes/{level}"] = tf.reshape(code, x.shape)
    return targets
