"""Converts label images of every layout to one form: a panoptic PNG and a list of its segments."""

import typing

import numpy as np
from PIL import Image

from axial.errors import InputError
from axial.io.check import shortened
from axial.io.images import open_image, open_photo
from axial.io.read import read_file
from axial.io.write import bytes_of

LARGEST_ID = (1 << 24) - 1  # largest segment id in a panoptic PNG
DEEP = ("I", "I;16", "I;16B", "I;16L")  # Pillow's modes of 16-bit PNGs
_TRANSPARENT = ("LA", "La", "PA")  # modes of one channel with transparency


class Labels(typing.NamedTuple):
    """The labels of one photo.

    Attributes:
        png: bytes of an RGB PNG: segment id = R + 256 G + 65536 B, 0 for unlabelled pixels.
        size: (width, height).
        segments: (id, class index, crowd) of each segment, in the JSON's order, or by id if there is no JSON.
        remarks: (text, counts) of each remark on the annotations. The text has a replacement field for each count.
    """

    png: bytes
    size: tuple
    segments: list
    remarks: tuple = ()


def blank(size):
    """`Labels` of an unlabelled photo."""
    return Labels(encode_rgb(np.zeros([*size[::-1], 3], np.uint8)), size, [])


def encode_rgb(rgb):
    """Bytes of a PNG of `rgb`, uint8 [h, w, 3]."""
    return bytes_of(lambda file: Image.fromarray(rgb).save(file, "PNG"))


def colors_of(ids):
    """uint8 [..., 3]: R, G, B of segment ids below 2^24."""
    return np.stack([ids & 255, ids >> 8 & 255, ids >> 16], -1).astype(np.uint8)


def decode_rgb(label):
    """int32 [h, w] of segment ids from an RGB image."""
    rgb = np.asarray(label).astype(np.int32)
    return rgb[..., 0] + 256 * rgb[..., 1] + 65536 * rgb[..., 2]


def numbered(ids, segment_ids):
    """int [h, w]: i + 1 where `ids` equals segment_ids[i], 0 elsewhere.

    Args:
        ids: int [h, w], at least 0.
        segment_ids: list of distinct positive ids, in any order.
    """
    order = np.argsort(np.array(segment_ids, np.int64))
    ranked = np.concatenate([[0], np.array(segment_ids, np.int64)[order]])
    index = np.minimum(np.searchsorted(ranked, ids), len(segment_ids))
    return np.where(ranked[index] == ids, np.concatenate([[0], order + 1])[index], 0)


def nth_of_class(classes):
    """int [S]: for each segment, the number of earlier segments with its class. `classes`: class indices, int [S]."""
    order, nth = np.argsort(classes, kind="stable"), np.empty(len(classes), int)
    nth[order] = np.arange(len(classes)) - np.searchsorted(classes[order], classes[order])
    return nth


def open_label(path, data):
    """Decodes a label image. Raises InputError if it is damaged, or if its format is lossy."""
    return _lossless(path, data, open_image(path, data))


def _lossless(path, data, image):
    if image.format in ("JPEG", "MPO") or (image.format == "WEBP" and b"VP8L" not in data):
        raise InputError(f"{path}: its content is {image.format}, which changes the numbers of labels; expected PNG")
    return image


def _depth(image, data):
    """Bits per channel in the file. Pillow converts most PNGs of 2, 4 and 16 bits to 8."""
    return data[24] if image.format == "PNG" else 8


def read_panoptic(path):
    """int32 [h, w] of the ids in a panoptic PNG. Raises InputError unless it is 8-bit RGB."""
    data = read_file(path)
    image = open_label(path, data)
    if image.mode != "RGB" or _depth(image, data) != 8:
        kind = f"{image.mode} of {_depth(image, data)} bits"
        raise InputError(f"{path}: a panoptic PNG is RGB of 8 bits, id = R + 256 G + 65536 B; this one is {kind}")
    return decode_rgb(image)


def read_ids(path, deep=False):
    """int64 [h, w] of the ids in a label image of one channel: a PNG, or a TIFF of one page.

    Args:
        path: path of the image.
        deep: whether the ids need 16 bits.

    Raises:
        InputError: the image has colour, transparency, fractions, several pages or a lossy format, or 8 bits where the
            ids need 16.
    """
    data = read_file(path)
    photo = open_photo(path, data)
    image = _lossless(path, data, photo.image)
    whole = image.mode == "F" and bool((np.nan_to_num(photo.deep) % 1 == 0).all())  # Fiji's images of 32 bits
    if image.mode not in ("1", "L", "P", *DEEP) and not whole:
        what = {"F": "with fractions", **dict.fromkeys(_TRANSPARENT, "with transparency")}.get(image.mode, "in colour")
        raise InputError(f"{path}: {what} ({image.mode}), where one channel of ids is expected")
    if photo.left_out:
        raise InputError(f"{path}: {photo.left_out[0]}, where a label image of one page and one channel is expected")
    bits = _depth(image, data)
    if deep and image.mode not in DEEP:
        raise InputError(f"{path}: {bits} bits a pixel, where ids of instances need 16; was it saved anew?")
    ids = np.nan_to_num(image if photo.deep is None else photo.deep).astype(np.int64)  # NaN is GDAL's missing value
    if image.mode == "L" and bits < 8:  # Pillow scales these grey levels to 0 to 255
        ids //= 255 // (2**bits - 1)
    if ids.min(initial=0) < 0:
        raise InputError(f"{path}: a pixel is {ids.min()}, ids are at least 0")
    return ids


def same_size(path, ids, other_path, other):
    if ids.shape != other.shape:
        sizes = [f"{x.shape[1]}x{x.shape[0]} pixels" for x in (ids, other)]
        raise InputError(f"{path}: {sizes[0]}, but {other_path} has {sizes[1]}")


def labels_of(keys, describe):
    """`Labels` from an image of keys. Keys are any numbers that tell segments apart.

    Args:
        keys: int [h, w], at least 0.
        describe: function from a key to the result of `segment`. Keys with the same segment id become one segment.
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
    """(id, class index, crowd) of the pixels with one category and instance. The id is 0 for an ignored category.

    Args:
        spec: `DatasetSpec`.
        path: path of the label image, for messages.
        category: id of the class in the data set.
        instance: instance number from 1; 0 for a crowd, that is, things that are not told apart. Ignored for stuff,
            which has no instances.
        identity: segment id; by default (class index + 1) x label_divisor + instance.
        pixel: pixel value in the image, for messages; by default the category.

    Raises:
        InputError: the spec lacks the category, or the instance number is not below the label_divisor.
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
        limit = f"the label_divisor {spec.label_divisor} of the spec {spec.name!r}"
        raise InputError(f"{path}: instance {instance} of {spec.class_names[index]!r}: expected less than {limit}")
    crowd = int(spec.things[index] and instance == 0)
    identity = (index + 1) * spec.label_divisor + instance if identity is None else identity
    return identity, index, crowd
