"""Input pipeline of segmentation: augmentation, canvases, and training examples with targets."""

import dataclasses
import math

import tensorflow as tf

from axial.data import tfrecord
from axial.data.preprocess import ScaledCanvas, fitted_size, place_image, place_labels, scaled_size, tile_size
from axial.data.streams import decode_photo, unless
from axial.errors import InputError
from axial.io.check import Checked, Name, Natural, NonNegative, Scale, Size, check_range
from axial.io.images import LARGEST_PIXELS
from axial.tasks.segmentation.losses import TargetConfig, panoptic_targets, semantic_targets


@dataclasses.dataclass(frozen=True)
class Augmentation(Checked):
    """Random augmentation of training photos. By default the augmentation changes no colours.

    Attributes:
        scales: range of the random scale, relative to the photo after it is fitted to the canvas or scaled by
            `DataConfig.photo_scale`.
        scale_step: step between the scales that can be drawn; 0 for a uniform distribution.
        flip: whether to flip photos horizontally with a probability of 1/2.
        shift: whether the position of the crop in the photo (or of a smaller photo in the crop) is random. Otherwise
            the upper left corners of crop and photo coincide, as in evaluation.
        crop: (height, width) that photos are cropped or padded to; None for the size of the canvas.
        quarter_turns: whether to rotate photos by 0, 90, 180 or 270 degrees, each with a probability of 1/4.
        brightness: range of a random factor for pixel values. Values above 255 are clipped.
        gamma: range of a random exponent for pixel values / 255. The exponent is applied before the brightness.
    """

    scales: tuple[Scale, Scale] = (0.5, 2.0)
    scale_step: NonNegative = 0.0
    flip: bool = True
    shift: bool = True
    crop: Size | None = None
    quarter_turns: bool = False
    brightness: tuple[Scale, Scale] = (1.0, 1.0)
    gamma: tuple[Scale, Scale] = (1.0, 1.0)

    def __post_init__(self):
        super().__post_init__()
        check_range("Augmentation.scales", self.scales)
        check_range("Augmentation.brightness", self.brightness)
        check_range("Augmentation.gamma", self.gamma)


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """Splits, canvas, augmentation and targets of segmentation's input pipeline.

    Attributes:
        train_split, eval_split: names of the training and the evaluation split.
        canvas: (height, width) of the network's input in evaluation; photos are fitted to it. With a `photo_scale` it
            is the largest canvas (see `ScaledCanvas`).
        augmentation: `Augmentation` of training photos.
        targets: `TargetConfig`.
        shuffle: size of the shuffle buffer, in records; 0 keeps the order of the files.
        photo_scale: factor that all photos are scaled by, in training, evaluation and prediction, for data whose
            objects have one physical size; None to fit photos to the canvas.
        tile_overlap: smallest overlap of neighbouring tiles, in pixels of the photo; None for a quarter of a tile. With
            a `photo_scale`, photos that are larger than the canvas are predicted in tiles. The overlap should exceed
            the length of the largest objects, so that each object is whole in some tile.

    Raises:
        InputError: an argument has the wrong type, or `tile_overlap` has no scale or is above half of a tile's side.
    """

    train_split: Name
    eval_split: Name
    canvas: Size = (641, 641)
    augmentation: Augmentation = Augmentation()
    targets: TargetConfig = TargetConfig()
    shuffle: Natural = 1024
    photo_scale: Scale | None = None
    tile_overlap: Natural | None = None

    def __post_init__(self):
        super().__post_init__()
        tile = min(tile_size(self.canvas, self.photo_scale)) if self.photo_scale else 0
        if self.tile_overlap and self.tile_overlap > tile // 2:
            limit = f"at most half of a tile's side, DataConfig.canvas / DataConfig.photo_scale = {tile}"
            raise InputError(f"DataConfig.tile_overlap = {self.tile_overlap}: expected {limit}")

    @property
    def crop(self):
        """(height, width) of the network's input in training."""
        return tuple(self.augmentation.crop or self.canvas)

    def canvases(self, one=False):
        """The canvas argument of `preprocess`: (height, width), or a `ScaledCanvas` if there is a `photo_scale`.

        With `one`, the `ScaledCanvas` has only its largest canvas.
        """
        if self.photo_scale is None:
            return tuple(self.canvas)
        scaled = ScaledCanvas.within(self.canvas, self.photo_scale, self.tile_overlap)
        return scaled.alone if one else scaled

    def resized(self, canvas, fitted=True):
        """A copy with another canvas in evaluation. With `fitted`, raises InputError if photos are not fitted to it."""
        if fitted and self.photo_scale is not None:
            scale = f"photos are scaled by DataConfig.photo_scale = {self.photo_scale:g}"
            raise InputError(f"--image_size, stress: {scale}, not fitted to a size; --gin_binding sets another scale")
        augmentation = dataclasses.replace(self.augmentation, crop=self.crop)
        return dataclasses.replace(self, canvas=canvas, augmentation=augmentation)


def segment_map(record, ids=None):
    """Segment map of a record, int32 [h, w]: 0 for pixels without a label, i + 1 for segment i.

    Args:
        record: a record from `tfrecord.parse_example`.
        ids: segment ids, int32 [h, w], 0 for pixels without a label; by default from the record's PNG.
    """
    ids = tfrecord.segment_ids(record["panoptic/encoded"]) if ids is None else ids
    segment_ids = tf.cast(record["segment/id"], tf.int32)
    order = tf.argsort(segment_ids)
    ranked = tf.concat([[0], tf.gather(segment_ids, order)], 0)
    numbers = tf.concat([[0], order + 1], 0)
    flat = tf.reshape(ids, [-1])
    position = tf.minimum(tf.searchsorted(ranked, flat), tf.shape(ranked)[0] - 1)
    index = tf.where(tf.gather(ranked, position) == flat, tf.gather(numbers, position), 0)
    return tf.reshape(index, tf.shape(ids))


def training_example(record, seed, spec, data, instances=True):
    """dict of the network's input, 'image', and the targets, from one record.

    Args:
        record: a record from `tfrecord.parse_example`.
        seed: int [2], the seed of the augmentation.
        spec: `DatasetSpec`.
        data: `DataConfig`.
        instances: whether the targets are `panoptic_targets`; otherwise they are `semantic_targets`.
    """
    crop, augmentation = data.crop, data.augmentation
    draw = tf.random.stateless_uniform([4], seed)
    image, ids = decode_photo(record), tfrecord.segment_ids(record["panoptic/encoded"])
    same = tf.reduce_all(tf.shape(image)[:2] == tf.shape(ids))
    with tf.control_dependencies([tf.debugging.Assert(same, ["photo and labels are not of one size"])]):
        image = tf.identity(image)
    if augmentation.flip:
        maps = image, ids
        image, ids = tf.cond(draw[0] < 0.5, lambda: tuple(tf.reverse(x, [1]) for x in maps), lambda: maps)
    image, ids = _augmented(image, ids, seed, augmentation)
    scale = _random_scale(draw[1], augmentation)
    valid_size = _training_size(record, tf.shape(image)[:2], scale, data)
    corner = tf.zeros([2], tf.int32)
    if augmentation.shift:
        room = valid_size - tf.stack(crop)  # negative where the photo is smaller than the crop
        corner = tf.sign(room) * tf.cast(tf.floor(draw[2:] * tf.cast(tf.abs(room) + 1, tf.float32)), tf.int32)
    segments = segment_map(record, place_labels(ids, valid_size, crop, corner))
    if instances:
        labels = record["segment/class"], record["segment/crowd"]
        targets = panoptic_targets(segments, *labels, spec=spec, config=data.targets)
    else:
        targets = semantic_targets(segments, record["segment/class"], spec)
    return {"image": place_image(image, valid_size, crop, corner), **targets}


def _augmented(image, segments, seed, augmentation):
    """Applies random quarter turns, gamma and brightness to a photo and its segment ids, if they are configured."""
    seed = tf.random.experimental.stateless_fold_in(seed, 1)
    turn, bright, power = tf.unstack(tf.random.stateless_uniform([3], seed))
    if augmentation.quarter_turns:
        turns = tf.cast(4 * turn, tf.int32)
        image, segments = tf.image.rot90(image, turns), tf.image.rot90(segments[..., None], turns)[..., 0]
    ranges = augmentation.gamma, augmentation.brightness
    if any(bounds != (1, 1) for bounds in ranges):
        gamma, factor = (low + x * (high - low) for x, (low, high) in zip((power, bright), ranges))
        values = 255 * (tf.range(256.0) / 255) ** gamma * factor
        image = tf.gather(tf.minimum(values, 255.0), tf.cast(image, tf.int32))
    return image, segments


def _training_size(record, size, scale, data):
    """int32 [2]: the size of a training photo after scaling, before it is cropped.

    If the scaled photo has no pixel or too many, TensorFlow raises InvalidArgumentError; see
    `streams.name_damaged_records`.
    """
    if data.photo_scale is None:
        return fitted_size(size, data.canvas, scale)
    valid_size = scaled_size(size, data.photo_scale * scale)
    pixels = tf.reduce_prod(tf.cast(valid_size, tf.float32))
    limits = f"times an Augmentation.scales; expected at least 1x1 and at most {LARGEST_PIXELS} pixels"
    text = f": {{}}x{{}} pixels become {{}}x{{}} by DataConfig.photo_scale = {data.photo_scale:g}, {limits}"
    text = tf.strings.format(text, (size[1], size[0], valid_size[1], valid_size[0]))
    text = record.get("image/file_name", "a photo") + text
    with unless((pixels > 0) & (pixels <= LARGEST_PIXELS), text):
        return tf.identity(valid_size)


def _random_scale(draw, augmentation):
    """Maps a random number from 0 to 1 to a scale."""
    (low, high), step = augmentation.scales, augmentation.scale_step
    if not step:
        return low + draw * (high - low)
    return low + step * tf.floor(draw * (math.floor((high - low) / step + 1e-6) + 1))
