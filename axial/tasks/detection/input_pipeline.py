"""What detectors see: photos on a padded canvas with boxes and anchor targets, and photos to evaluate."""

import dataclasses

import tensorflow as tf

from axial.data import tfrecord
from axial.data.preprocess import place_image
from axial.data.streams import decode_mask, decode_photo, is_mask
from axial.errors import InputError
from axial.io.check import Checked, Count, Name, Natural, Size
from axial.models.faster_rcnn.anchors import RATIOS, anchors, choose, match
from axial.tasks.segmentation.input_pipeline import segment_map

MASK_SIDE = 112  # pixels of a training mask on its box, as in tf-models-official
# Overlaps of `match`. At most half of 256 sampled anchors are objects' (Ren et al., NIPS 2015, Sec. 3.1; the study's
# configs in mmdetection).
OBJECT, BACKGROUND, SAMPLED_ANCHORS = 0.7, 0.3, 256


@dataclasses.dataclass(frozen=True)
class DetectionData(Checked):
    """Which photos a detector sees, and how.

    Attributes:
        train_split, eval_split: splits of a converted data set.
        sides: a photo is scaled so that its shorter side is at most the first and its longer side at most the second.
        canvas: (height, width) of the network's input, multiples of 64. It also bounds the scaled photo.
        flip: whether training mirrors photos, with a probability of 1/2.
        boxes: most objects of a training photo; further ones are left out.
        shuffle: records in the buffer that training draws from; 0 keeps the order of the files.
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
        """The same with another size of the network's input."""
        return dataclasses.replace(self, canvas=canvas)

    @property
    def crop(self):
        """(height, width) of the network's input in training."""
        return self.canvas


def photo_size(size, sides, canvas):
    """int32 [2]: the size of a photo of `size` (h, w), scaled to `sides` and to fit `canvas`; see `DetectionData`."""
    size = tf.cast(size, tf.float32)
    sides, canvas = tf.constant(sides, tf.float32), tf.constant(canvas, tf.float32)
    scale = tf.reduce_min(
        tf.stack([sides[0] / tf.reduce_min(size), sides[1] / tf.reduce_max(size), *tf.unstack(canvas / size)])
    )
    return tf.cast(tf.clip_by_value(tf.round(size * scale), 1, canvas), tf.int32)


def place_photo(photo, sides, canvas):
    """The network's input: uint8 [h, w, 3] -> float32 [*canvas, 3], and int32 [2], the photo's size on it."""
    valid_size = photo_size(tf.shape(photo)[:2], sides, canvas)
    return place_image(photo, valid_size, canvas), valid_size


# === Objects of a record ===


def record_objects(record, spec):
    """The objects of a record: its own boxes or, where it has none, those of its segments that are things.

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
    """What a function of a record's boxes returns or, where it has none of its own, one of its segments."""
    return tf.cond(record["box/known"] == 1, boxes, segments) if "segment/class" in record else boxes()


def _segment_boxes(segments, count):
    """Boxes float64 [count, 4] and areas float64 [count] of the segments of a map, int32 [h, w]."""
    flat = tf.reshape(segments, [-1])
    rows, columns = tf.meshgrid(tf.range(tf.shape(segments)[0]), tf.range(tf.shape(segments)[1]), indexing="ij")

    def edges(coordinates):
        coordinates = tf.reshape(coordinates, [-1])
        first = tf.math.unsorted_segment_min(coordinates, flat, count + 1)[1:]
        last = tf.math.unsorted_segment_max(coordinates, flat, count + 1)[1:]
        return first, last - first + 1

    (x, width), (y, height) = edges(columns), edges(rows)
    area = tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, count + 1)[1:]
    return tf.cast(tf.stack([x, y, width, height], 1), tf.float64), tf.cast(area, tf.float64)


def record_masks(record, spec):
    """The masks of a record's objects, in the order of `record_objects`.

    Returns:
        uint8 [n, h, w], 1 inside and empty for an object without a mask, and bool [n], whether it has one. Objects that
        are segments have one.
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
    """Whether masks of a record's objects are known, bool []: there is no object, or they are segments, or one has one.

    Without any, as in tensorflow-datasets' coco/2017, the photo has no part in scores of masks.
    """
    return tf.size(record["box/mask"]) == tf.size(record["box/class"])


def check_masks(data_dir, split):
    """Raises InputError if a split has boxes without masks, as tensorflow-datasets' coco/2017 has."""
    manifest = tfrecord.read_manifest(data_dir, split)
    first = tf.data.TFRecordDataset(tfrecord.shard_paths(data_dir, manifest)).take(64)
    records = [tfrecord.parse_example(record, manifest["labels"]) for record in first]
    boxed = [record for record in records if len(record["box/class"])]
    if boxed and not any(map(has_masks, boxed)):
        raise InputError(f"{data_dir}: {split!r} has boxes without masks: for Faster R-CNN, not for Mask R-CNN")


# === Training ===


def training_example(record, seed, spec, data, masks=False):
    """The network's input and targets of one record, as a dict.

    Crowds and boxes without an area are left out. Classes count things from 1. Rows without an object are -1. So are
    masks of objects that have none.

    Args:
        record: of `tfrecord.parse_example`.
        seed: int [2]; decides the mirror image and the sampled anchors.
        spec: `DatasetSpec`.
        data: `DetectionData`.
        masks: whether there are targets of masks.

    Returns:
        dict of 'image' float32 [*canvas, 3], 'valid_size' int32 [2], 'boxes' float32 [boxes, 4] of corners (y, x, y, x)
        on the canvas, 'classes' int32 [boxes], for each level the 'anchor_scores/L' and 'anchor_boxes/L' of
        `anchor_targets`, and with `masks` 'masks' float32 [boxes, MASK_SIDE, MASK_SIDE], each on its box.
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
    return {
        "image": image,
        "valid_size": valid_size,
        **targets,
        **{k: _padded(x, data.boxes) for k, x in labels.items()},
    }


def clipped_corners(boxes, size):
    """float32 [n, 4] of corners (y, x, y, x) inside a photo of (height, width), from float64 (x, y, width, height)."""
    from official.vision.ops import box_ops

    x, y, width, height = tf.unstack(tf.cast(boxes, tf.float32), axis=1)
    return box_ops.clip_boxes(tf.stack([y, x, y + height, x + width], 1), size)


def mirrored(corners, width):
    """Corners (y, x, y, x) of the mirror image of a photo of a width."""
    top, left, bottom, right = tf.unstack(corners, axis=1)
    return tf.stack([top, width - right, bottom, width - left], 1)


def _box_masks(masks, boxes):
    """float32 [n, MASK_SIDE, MASK_SIDE]: the part of each mask in its box, in shares of the photo."""
    crops = tf.image.crop_and_resize(
        tf.cast(masks[..., None], tf.float32), boxes, tf.range(tf.shape(masks)[0]), [MASK_SIDE, MASK_SIDE]
    )
    return tf.ensure_shape(crops[..., 0], [None, MASK_SIDE, MASK_SIDE])


def _padded(x, count):
    """The rows of x and rows of -1, `count` together."""
    rest = [[0, count - tf.shape(x)[0]], *([[0, 0]] * (x.shape.rank - 1))]
    return tf.ensure_shape(tf.pad(x, rest, constant_values=-1), [count, *x.shape[1:]])


# === Anchors ===


def anchor_targets(corners, valid_size, canvas, seed):
    """What the proposal network learns of boxes, float32 [n, 4], of a photo of (height, width) int32 [2] on a canvas.

    Anchors that reach beyond the photo are neither objects nor background. The study's configs in mmdetection have
    allowed_border=0, and its anchor_inside_flags compares anchors with the photo (img_shape), not with the canvas.

    Returns:
        dict of 'anchor_scores/L' int32 [rows, columns, anchors]: 1 for an object, 0 for background, -1 for anchors that
        are not sampled; and 'anchor_boxes/L' float32 [rows, columns, 4 x anchors], 0 but for sampled objects.
    """
    from official.vision.ops import box_ops, iou_similarity

    anchor_maps = anchors(canvas)
    flat = tf.concat([tf.reshape(x, [-1, 4]) for x in anchor_maps.values()], 0)  # [anchors, 4]
    inside = tf.reduce_all((flat[:, :2] >= 0) & (flat[:, 2:] <= tf.cast(valid_size, tf.float32)), 1)
    corners = tf.pad(corners, [[0, 1], [0, 0]])  # a box that no anchor overlaps, as a photo may have no object
    overlaps = iou_similarity.IouSimilarity()(flat, corners, ~inside[:, None])
    matched, positive, negative = match(overlaps, OBJECT, BACKGROUND)
    draw = tf.random.stateless_uniform(positive.shape, seed)
    chosen = choose(positive, negative, SAMPLED_ANCHORS, draw, share=0.5)
    scores = tf.where(chosen, tf.cast(positive, tf.int32), -1)
    codes = box_ops.encode_boxes(tf.gather(corners, matched), flat)
    codes = tf.where((scores > 0)[:, None], codes, 0.0)
    counts, targets = [x.shape.num_elements() // 4 for x in anchor_maps.values()], {}
    for (level, x), score, code in zip(anchor_maps.items(), tf.split(scores, counts), tf.split(codes, counts)):
        targets[f"anchor_scores/{level}"] = tf.reshape(score, [*x.shape[:2], len(RATIOS)])
        targets[f"anchor_boxes/{level}"] = tf.reshape(code, x.shape)
    return targets
