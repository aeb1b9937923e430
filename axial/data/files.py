"""Lists of folders, photos as TensorFlow decodes them for converters, and photos to predict."""

import contextlib
import functools
import io
import os
import re
import typing

import numpy as np

from axial.data.levels import LEVELS, PERCENTILES, rgb
from axial.errors import NOT_UTF8, InputError, nearest
from axial.io import gfile
from axial.io.images import open_photo, orientation, upright
from axial.io.paths import inside
from axial.io.read import check_unique, first_line, read_file, read_json
from axial.io.show import say

PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # of `io.images.FORMATS`


def names_in(path):
    """Sorted names in a folder, without trailing slashes. Raises InputError for a name that is not UTF-8."""
    try:
        names = sorted(name.rstrip("/") for name in gfile.listdir(path))
        for name in names:
            name.encode()
        return names
    except UnicodeError as error:
        name = os.path.join(path, os.fsdecode(error.object))
        raise InputError(f"{name}: the name is {NOT_UTF8}; rename the file") from None


def names_below(folder, names):
    """The set of names in a folder and, as 'b/a.png', in those of its folders that `names` have.

    Args:
        folder: path.
        names: of files that are looked for; `io.paths.inside` has checked them.

    Raises:
        InputError: no such folder.
    """
    if not gfile.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    found = set(names_in(folder))
    for below in sorted({os.path.dirname(name) for name in names} - {""}):
        path = os.path.join(folder, below)
        if gfile.isdir(path):
            found.update(f"{below}/{name}" for name in names_in(path))
    return found


def find_manifest(data_dir, split):
    """Path of the manifest of a converted split. Raises InputError, which names the nearest split."""
    if not gfile.isdir(data_dir):
        raise InputError(f"{data_dir}: no such folder; --data_dir takes what axial-convert wrote")
    path = inside(data_dir, f"{split}.json", f"{data_dir}: split")
    if not gfile.exists(path):
        found = [name.removesuffix(".json") for name in names_in(data_dir) if name.endswith(".json")]
        has = f"has {', '.join(found)}{nearest(split, found)}" if found else "has no converted split"
        raise InputError(f"{data_dir}: no split {split!r}, the folder {has}")
    return path


def tell_left_out(where, what, names):
    """Says on standard error how many things of a kind are left out, and the first of their names. None is no word."""
    if names:
        say(f"{where}: left out: {what} ({len(names)}, first {names[0]})", error=True)


def check_ids(path, images):
    """Raises InputError if images of a JSON share an id, or if some ids are texts and others are numbers.

    A photo whose id is a text is numbered by its place, which may be the number of another one.
    """
    check_unique(path, "images: id", (image.id for image in images))
    first = {type(image.id): image for image in reversed(images)}
    if len(first) > 1:
        text, number = first[str], first[int]
        raise InputError(
            f"{path}: images: id {text.id!r} of {text.file_name} is a text, id {number.id} of {number.file_name} a "
            "number; expected one of the two for all"
        )


def list_folder(path):
    """Names in a folder, of `names_in` without hidden ones. Raises InputError if it is missing."""
    if not gfile.isdir(path):
        raise InputError(f"{path}: no such folder")
    return [name for name in names_in(path) if not name.startswith(".")]


def folders_in(path, others):
    """Names of the folders in a folder. It says how many files are left out, which are `others`."""
    names = list_folder(path)
    folders = [name for name in names if gfile.isdir(os.path.join(path, name))]
    tell_left_out(path, others, [name for name in names if name not in folders])
    return folders


def split_folder(folder, split):
    """Path of the folder of a split. Raises InputError, which names the nearest split, if there is none."""
    if split not in (found := list_folder(folder)):
        has = f"the splits here are {', '.join(found)}{nearest(split, found)}" if found else "the folder is empty"
        raise InputError(f"{os.path.join(folder, split)}: no such folder; {has}")
    return os.path.join(folder, split)


def by_name(folder, suffixes, beside=()):
    """Dict from names without suffix to paths, sorted. It says how many names with other suffixes are left out.

    Args:
        folder: path.
        suffixes: of the files.
        beside: suffixes of files that may lie beside them, with the same names.

    Raises:
        InputError: two files have the same name without suffix.
    """
    found, others = {}, []
    for name in list_folder(folder):
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in suffixes:
            if stem in found:
                raise InputError(f"{os.path.join(folder, name)}: {found[stem]} has the same name")
            found[stem] = os.path.join(folder, name)
        else:
            others.append(name)
    others = [name for name in others if not (name.lower().endswith(beside) and os.path.splitext(name)[0] in found)]
    tell_left_out(folder, f"what does not end in {', '.join(suffixes)}", others)
    return found


def check_paired(photos, labels, photo_folder, label_folder, *, ending=".png"):
    """Raises InputError for a photo without labels, or for labels without a photo.

    Args:
        photos, labels: dicts from names to paths.
        photo_folder, label_folder: of all photos, and of all labels.
        ending: of the names of label files.
    """
    for odd in sorted(set(photos) ^ set(labels)):
        if odd in photos:
            path = os.path.join(label_folder, odd + ending)
            raise InputError(f"{path}: missing, though {photos[odd]} is there{nearest(odd, labels)}")
        raise InputError(f"{labels[odd]}: has no photo in {photo_folder}{nearest(odd, photos)}")


def labelled_items(photos, labels, read):
    """Items of photos (see `axial.data.convert`), numbered in the order of the dict.

    Args:
        photos: dict from names to paths.
        labels: dict from names to lists of the paths of label files; {} for a split without labels.
        read: function of the photo's path and of those of its label files that returns its `Labels`.
    """
    return [
        {
            "photo": path,
            "id": number,
            "labels": functools.partial(read, path, *labels[name]) if labels else None,
            "label_files": labels.get(name, []),
        }
        for number, (name, path) in enumerate(photos.items())
    ]


def photo_fields(path, data, size=None, stored=False):
    """The fields of a record that hold a photo (see `tfrecord`), so that `streams.decode_photo` has its pixels.

    Most files are only checked and kept. Of one with further pictures (MPO), the first is kept. CMYK, palette and
    transparent photos, those of more than 8 bits, and other formats than JPEG and PNG, are encoded again as RGB of 8
    bits. What the record gets is decoded once; see `check_decodes`.

    Args:
        path: of the photo, for messages.
        data: its bytes.
        size: (width, height) of its labels; None without labels of pixels.
        stored: whether they are of the pixels as they are stored, and not of the photo turned upright. Where their
            `size` fits only the other, they are of that.

    Returns:
        The fields, and texts on what of the file is left out, and on how its values become 8 bits.

    Raises:
        InputError: a photo that is cut short, damaged, of another size, or that TensorFlow does not decode.
    """
    photo = open_photo(path, data)
    stored_size = photo.image.size
    ways = sorted({1, orientation(photo.image)}, reverse=not stored)
    sizes = {way: stored_size[::-1] if way > 4 else stored_size for way in ways}
    way = next((way for way in ways if size in (None, sizes[way])), None)
    if way is None:
        width, height = sizes[ways[0]]
        turned = f" ({width}x{height} upright)" if (width, height) != stored_size else ""
        has = f"{stored_size[0]}x{stored_size[1]} pixels{turned}"
        raise InputError(f"{path}: {has}, its labels say {size[0]}x{size[1]}")
    fields = {"image/encoded": _encoded(data, photo)}
    fields |= {"image/width": sizes[way][0], "image/height": sizes[way][1]}
    check_decodes(path, fields["image/encoded"])
    remarks = [*photo.left_out]
    remarks += [] if photo.deep is None else [f"has more than 8 bits; {LEVELS[PERCENTILES]}"]
    return fields | ({"image/orientation": way} if way > 1 else {}), remarks


def _encoded(data, photo):
    """The bytes of a JPEG or PNG of a `Photo`, which TensorFlow decodes to the same pixels."""
    image = photo.image
    if image.mode in ("RGB", "L") and photo.deep is None:
        if image.format in ("JPEG", "PNG"):
            return data
        if image.format == "MPO":
            first = data[: image.mpinfo[0xB002][0]["Size"]]  # of its index of pictures, which may be wrong
            return first if first.endswith(b"\xff\xd9") else data
    encoded = io.BytesIO()
    format = "JPEG" if image.format in ("JPEG", "MPO") else "PNG"
    # Pillow keeps a transparency that may be of another mode.
    rgb(photo).save(encoded, format, quality=95, subsampling=0, transparency=None)
    return encoded.getvalue()


def reason_of(error):
    """The first line of what TensorFlow says of a record, without the names of operations."""
    return re.sub(r"\{\{.*?\}\} ?|\[Op:.*", "", first_line(error)).strip()


def check_decodes(path, encoded):
    """Raises InputError unless TensorFlow decodes a JPEG or PNG of a record, whose kernel `decode` and labels use.

    Pillow also reads some damaged files, and more pixels.
    """
    import tensorflow as tf

    try:
        tf.io.decode_image(encoded, channels=3, expand_animations=False)
    except tf.errors.OpError as error:
        why = f"TensorFlow, which trains, does not decode it: {reason_of(error)}"
        raise InputError(f"{path}: damaged, or more than 178 million pixels ({why}); save it anew as a PNG") from None


def missing_files(folder, names, what):
    """Sorted list of the names for which there is no file in a folder. Raises InputError; see `inside`.

    Args:
        folder: path of the folder.
        names: of files in it, or in folders below it.
        what: what gives the names, for the message.
    """
    for name in names:
        inside(folder, name, what)
    return sorted(set(names) - names_below(folder, names))


# === Photos to predict ===


def load_photo(path, levels=PERCENTILES):
    """Reads a photo of any format as uint8 [h, w, 3], turned as its EXIF tag says; see `levels.rgb`.

    It says on standard error which pages and channels of the file are left out.

    Raises:
        InputError: the file is missing, cut short or not an image.
    """
    photo = open_photo(path, read_file(path))
    for text in photo.left_out:
        say(f"{path}: {text}", error=True)
    return np.asarray(upright(rgb(photo, levels), orientation(photo.image)))


def find_photos(arguments):
    """The photos that the arguments name, each path once. An argument is a photo or a folder of photos.

    Hidden files of a folder are no photos, nor are the pictures that axial-predict has written there.

    Raises:
        InputError: there is no argument, a photo is missing, or a folder has no photos.
    """
    if not arguments:
        raise InputError("name at least one photo, or a folder of photos")
    photos = []
    for argument in arguments:
        if not gfile.isdir(argument):
            if not gfile.exists(argument):
                raise InputError(f"{argument}: no such photo{nearest(argument, ())}")
            photos.append(argument)
            continue
        names = list_folder(argument)
        found = [name for name in names if name.lower().endswith(PHOTOS) and not _is_predicted(argument, name)]
        rest = [name for name in names if name not in set(found)]
        tell_left_out(argument, f"what does not end in {', '.join(PHOTOS)}, or what axial-predict has written", rest)
        if not found:
            raise InputError(f"{argument}: no photo in this folder; their names end in {', '.join(PHOTOS)}")
        photos += [os.path.join(argument, name) for name in found]
    return list({os.path.abspath(photo): photo for photo in photos}.values())


def _is_predicted(folder, name):
    """Whether a JSON of axial-predict in a folder says that this picture was written with it."""
    stem = name.rsplit(".", 2)[0]
    path = os.path.join(folder, f"{stem}.json")
    if stem == name or not gfile.exists(path):
        return False
    with contextlib.suppress(InputError):  # another JSON
        content = read_json(path, dict[str, typing.Any])[1]
        return "photo" in content and name in content.values()
    return False
