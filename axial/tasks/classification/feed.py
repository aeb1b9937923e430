"""What classifiers see: random crops with their class, and central crops to evaluate."""

import dataclasses
import typing

import tensorflow as tf

from axial.data.streams import decode_photo
from axial.io.check import Fraction, Name, Natural, NonNegative, Scale, Share, Size, check_ranges, checked

POLICIES = ("none", "autoaugment", "randaugment")


@checked
@dataclasses.dataclass(frozen=True)
class ClassificationData:
    """Which photos a classifier sees, and how.

    The crop and the mirror image follow from the seed, so a resumed training sees the same ones. The policy, mixup,
    cutmix and erasing are tf-models-official's. They draw from TensorFlow's own generators: with them a resumed
    training sees other ones.

    Attributes:
        train_split, eval_split: splits of a converted data set.
        image: (height, width) of the network's input.
        area: range of a random crop's share of the photo (Szegedy et al., CVPR 2015).
        aspect: range of a random crop's width over its height, before it is resized to `image`.
        flip: whether crops are mirrored, with a probability of 1/2.
        central: share of the photo's shorter side that evaluation crops.
        shuffle: records in the buffer that training draws from; 0 keeps the order of the files.
        policy: random changes of colour and shape: 'none', 'autoaugment' or 'randaugment'.
        mixup, cutmix: alpha of their Beta distributions; 0 for none. With both, each batch draws one of them.
        erase: probability of erasing a random rectangle.
    """

    train_split: Name
    eval_split: Name
    image: Size = (224, 224)
    area: tuple[Share, Share] = (0.08, 1.0)
    aspect: tuple[Scale, Scale] = (3 / 4, 4 / 3)
    flip: bool = True
    central: Share = 0.875
    shuffle: Natural = 16384
    policy: typing.Literal[POLICIES] = "none"
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    erase: Fraction = 0.0

    def __post_init__(self):
        check_ranges(self, "area", "aspect")

    def resized(self, image):
        """The same with another size of the network's input."""
        return dataclasses.replace(self, image=image)

    @property
    def crop(self):
        """(height, width) of the network's input in training."""
        return self.image


def training_crop(record, seed, data):
    """A random crop, float32 [*data.image, 3] from -1 to 1, and its class 'label', int32 []."""
    from official.vision.ops import augment

    photo = decode_photo(record)
    seeds = tf.random.experimental.stateless_split(seed, 2)
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(photo),
        tf.zeros([1, 0, 4]),
        seeds[0],
        min_object_covered=0,
        aspect_ratio_range=data.aspect,
        area_range=data.area,
        use_image_if_no_bounding_boxes=True,
    )
    image = _resized(tf.slice(photo, begin, size), data.image)
    if data.flip:
        image = tf.image.stateless_random_flip_left_right(image, seeds[1])
    if data.policy != "none":
        policy = augment.AutoAugment() if data.policy == "autoaugment" else augment.RandAugment()
        image = tf.cast(policy.distort(tf.cast(tf.round(image), tf.uint8)), tf.float32)
    image = image / 127.5 - 1
    if data.erase:
        image = augment.RandomErasing(data.erase).distort(image)
    return {"image": tf.ensure_shape(image, [*data.image, 3]), "label": tf.cast(record["image/class"], tf.int32)}


def central_crop(photo, image, central):
    """The middle of a photo as an evaluation sees it: uint8 [h, w, 3] -> float32 [*image, 3] from -1 to 1.

    Args:
        image: (height, width) of the network's input.
        central: share of the photo that is cropped, of the largest part of it that has the shape of `image`.
    """
    size = tf.cast(tf.shape(photo)[:2], tf.float32)
    wanted = tf.cast(tf.stack(image), tf.float32)
    crop = tf.cast(tf.maximum(tf.round(wanted * tf.reduce_min(size / wanted) * central), 1), tf.int32)
    first = (tf.shape(photo)[:2] - crop) // 2
    photo = tf.slice(photo, tf.concat([first, [0]], 0), tf.concat([crop, [3]], 0))
    return tf.ensure_shape(_resized(photo, image) / 127.5 - 1, [*image, 3])


def _resized(photo, size):
    """Cubic resampling; the values stay from 0 to 255."""
    resized = tf.image.resize(photo, size, "bicubic", antialias=True)
    return tf.clip_by_value(resized, 0.0, 255.0)


def soft_labels(batch, data, num_classes):
    """The batch with 'label' as probabilities, float32 [N, num_classes], after mixup or cutmix."""
    if data.mixup or data.cutmix:
        from official.vision.ops import augment

        mix = augment.MixupAndCutmix(num_classes, data.mixup, data.cutmix, label_smoothing=0.0)
        image, label = mix(batch["image"], batch["label"])
        return {"image": tf.ensure_shape(image, batch["image"].shape), "label": label}
    return {**batch, "label": tf.one_hot(batch["label"], num_classes)}
