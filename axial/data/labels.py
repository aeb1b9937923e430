"""Brings label images of any layout to one form: a panoptic PNG and its segments."""

import io
import typing

import numpy as np
from PIL import Image

from axial.errors import InputError
from axial.io.check import shortened
from axial.io.images import open_image
from axial.io.read import read_file

LARGEST_ID = (1 << 24) - 1  # of a segment in a panoptic PNG
DEEP = ("I", "I;16", "I;16B", "I;16L")  # Pillow's modes of 16-bit PNGs
_TRANSPARENT = ("LA", "La", "PA")  # and of one channel with transparency


class Labels(typing.NamedTuple):
    """The labels of one photo.

    Attributes:
        png: bytes of an RGB PNG. Segment id = R + 256 G + 65536 B, 0 for pixels without a label.
        size: (width, height).
        segments: (id, class index, crowd) of each segment, in the order of the JSON, or of their ids if there is none.
    """

    png: bytes
    size: tuple
    segments: list


def blank(size):
    """`Labels` of a photo that has none."""
    return Labels(encode_rgb(np.zeros([*size[::-1], 3], np.uint8)), size, [])


def encode_rgb(rgb):
    """PNG of uint8 [h, w, 3]."""
    encoded = io.BytesIO()
    Image.fromarray(rgb).save(encoded, format="PNG")
    return encoded.getvalue()


def colors_of(ids):
    """uint8 [..., 3]: R, G, B of segment ids below 2^24."""
    return np.stack([ids & 255, ids >> 8 & 255, ids >> 16], -1).astype(np.uint8)


def decode_rgb(label):
    """int32 [h, w] of segment ids from an RGB image."""
    rgb = np.asarray(label).astype(np.int32)
    return rgb[..., 0] + 256 * rgb[..., 1] + 65536 * rgb[..., 2]


def numbered(ids, segment_ids):
    """int [h, w]: i + 1 where `ids` is known[i], 0 where it is none of the known ones.

    Args:
        ids: int [h, w], at least 0.
        known: list of different numbers from 1, in any order.
    """
    order = np.argsort(np.array(segment_ids, np.int64))
    ranked = np.concatenate([[0], np.array(segment_ids, np.int64)[order]])
    index = np.minimum(np.searchsorted(ranked, ids), len(segment_ids))
    return np.where(ranked[index] == ids, np.concatenate([[0], order + 1])[index], 0)


def nth_of_class(classes):
    """int [S]: how many earlier segments have the same class, from the class index of each segment, int [S]."""
    order, nth = np.argsort(classes, kind="stable"), np.empty(len(classes), int)
    nth[order] = np.arange(len(classes)) - np.searchsorted(classes[order], classes[order])
    return nth


def open_label(path, data):
    """A label image, decoded. Raises InputError for one that is not whole, or whose format keeps no exact numbers."""
    image = open_image(path, data)
    if image.format in ("JPEG", "MPO") or (image.format == "WEBP" and b"VP8L" not in data):
        raise InputError(f"{path}: its content is {image.format}, which changes the numbers of labels; expected PNG")
    return image


def _depth(image, data):
    """Bits of a channel in the file: Pillow's images of 2, 4 and 16-bit PNGs have 8, but for one deep channel."""
    return data[24] if image.format == "PNG" else 8


def read_panoptic(path):
    """int32 [h, w] of the ids in a panoptic PNG. Raises InputError if it is not RGB of 8 bits."""
    data = read_file(path)
    image = open_label(path, data)
    if image.mode != "RGB" or _depth(image, data) != 8:
        kind = f"{image.mode} of {_depth(image, data)} bits"
        raise InputError(f"{path}: a panoptic PNG is RGB of 8 bits, id = R + 256 G + 65536 B; this one is {kind}")
    return decode_rgb(image)


def read_ids(path, deep=False):
    """int32 [h, w] of the ids in a label PNG of one channel.

    Args:
        path: of the PNG.
        deep: whether its ids need 16 bits.

    Raises:
        InputError: a picture in colour or with transparency; 8 bits where 16 are needed; a lossy format.
    """
    data = read_file(path)
    image = open_label(path, data)
    if image.mode not in ("1", "L", "P", *DEEP):
        what = "with transparency" if image.mode in _TRANSPARENT else "in colour"
        raise InputError(f"{path}: {what} ({image.mode}), where one channel of ids is expected")
    bits = _depth(image, data)
    if deep and image.mode not in DEEP:
        raise InputError(f"{path}: {bits} bits a pixel, where ids of instances need 16; was it saved anew?")
    ids = np.asarray(image).astype(np.int32)
    if image.mode == "L" and bits < 8:  # Pillow spreads the levels of grey over 0 to 255
        ids //= 255 // (2**bits - 1)
    if ids.min(initial=0) < 0:
        raise InputError(f"{path}: a pixel is {ids.min()}, ids are at least 0")
    return ids


def same_size(path, ids, other_path, other):
    if ids.shape != other.shape:
        sizes = [f"{x.shape[1]}x{x.shape[0]} pixels" for x in (ids, other)]
        raise InputError(f"{path}: {sizes[0]}, but {other_path} has {sizes[1]}")


def labels_of(keys, describe):
    """`Labels` from a map of keys.

    Args:
        keys: int [h, w], at least 0.
        describe: function of a key that returns its `segment`. Keys with the same id become one segment.
    """
    if keys.max(initial=0) >= 1 << 22:  # a table of all keys would be too large
        present, dense = np.unique(keys, return_inverse=True)
        return labels_of(dense.reshape(keys.shape), lambda index: describe(int(present[index])))
    present = np.flatnonzero(np.bincount(keys.ravel()))
    segments = [describe(int(key)) for key in present]
    table = np.zeros([keys.max(initial=0) + 1, 3], np.uint8)
    table[present] = colors_of(np.array([identity for identity, *_ in segments], np.int32))
    rows = sorted({row for row in segments if row[0]})
    return Labels(encode_rgb(np.take(table, keys, 0)), keys.shape[::-1], rows)


def segment(spec, path, category, instance, *, identity=None, pixel=None):
    """(id, class index, crowd) of the pixels of one category and instance. The id is 0 if the category is ignored.

    Args:
        spec: `DatasetSpec`.
        path: of the label image, for messages.
        category: the data set's number of the class.
        instance: number of the instance, from 1. 0 is a crowd: things that are not told apart. Stuff has no instances,
            so the number is ignored there.
        identity: segment id; by default (class index + 1) x label_divisor + instance.
        pixel: the number in the image, for messages; by default the category.

    Raises:
        InputError: a category that the spec lacks; an instance number that is not below the label_divisor.
    """
    index = spec.class_index(category)
    if index is None:
        where = "" if pixel in (None, category) else f" (of pixels that are {pixel})"
        classes = f"its classes are {shortened(spec.category_ids)}, ignored are {shortened(spec.ignored_ids)}"
        raise InputError(f"{path}: label {category}{where}, which the spec {spec.name!r} does not have; {classes}")
    if index == spec.ignore:
        return 0, index, 0
    instance = instance if spec.things[index] else 0
    if identity is None and instance >= spec.label_divisor:
        raise InputError(
            f"{path}: instance {instance} of {spec.class_names[index]!r}, the spec {spec.name!r} has "
            f"room below its label_divisor {spec.label_divisor}"
        )
    crowd = int(spec.things[index] and instance == 0)
    identity = (index + 1) * spec.label_divisor + instance if identity is None else identity
    return identity, index, crowd
