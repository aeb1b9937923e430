"""Lists files in folders, encodes photos for converters, and finds the photos to predict."""

import contextlib
import functools
import os
import re
import typing

import numpy as np

from axial.data.levels import LEVELS, PERCENTILES, rgb
from axial.errors import NOT_UTF8, InputError, nearest
from axial.io import gfile
from axial.io.images import open_photo, orientation, turned, upright
from axial.io.paths import inside
from axial.io.read import check_unique, first_line, read_file, read_json
from axial.io.show import say
from axial.io.write import bytes_of

PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # suffixes of `io.images.FORMATS`


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
    """Set of the names in a folder, and of names such as 'b/a.png' in the subfolders that occur in `names`.

    Args:
        folder: path.
        names: names of the files to look for, which `io.paths.inside` has checked.

    Raises:
        InputError: no such folder.
    """
    if not gfile.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    present = set(names_in(folder))
    for below in sorted({os.path.dirname(name) for name in names} - {""}):
        path = os.path.join(folder, below)
        if gfile.isdir(path):
            present.update(f"{below}/{name}" for name in names_in(path))
    return present


def find_manifest(data_dir, split):
    """Path of a converted split's manifest. Raises InputError, which names the nearest split."""
    if not gfile.isdir(data_dir):
        raise InputError(f"{data_dir}: no such folder; expected a folder that axial-convert wrote")
    path = inside(data_dir, f"{split}.json", f"{data_dir}: split")
    if not gfile.exists(path):
        splits = [name.removesuffix(".json") for name in names_in(data_dir) if name.endswith(".json")]
        has = f"has {', '.join(splits)}{nearest(split, splits)}" if splits else "has no converted split"
        raise InputError(f"{data_dir}: no split {split!r}, the folder {has}")
    return path


def tell_left_out(where, what, names):
    """Prints on standard error how many files are left out, and the first name. Prints nothing for no names."""
    if names:
        say(f"{where}: left out: {what} ({len(names)}, first {names[0]})", error=True)


def check_ids(path, images):
    """Raises InputError if two images of a JSON share an id, or if some ids are text and others numbers.

    A photo with a text id is numbered by its position, which could equal the id of another photo.
    """
    check_unique(path, "images: id", (image.id for image in images))
    first = {type(image.id): image for image in reversed(images)}
    if len(first) > 1:
        text, number = first[str], first[int]
        kinds = f"{text.id!r} of {text.file_name} is a text, id {number.id} of {number.file_name} a number"
        raise InputError(f"{path}: images: id {kinds}; expected one of the two for all")


def listed_paths(path, field, folder, entries):
    """dict from file names of a JSON's entries to paths in a folder, and a list of the folder's other names.

    Raises:
        InputError: a file is missing.
    """
    paths = {entry.file_name: inside(folder, entry.file_name, f"{path}: {field}: file_name") for entry in entries}
    have = names_below(folder, paths)
    for name, where in paths.items():
        if name not in have:
            raise InputError(f"{where}: missing, though {path} names it{nearest(name, have)}")
    return paths, sorted(have - set(paths))


def list_folder(path):
    """Names in a folder, without hidden ones; see `names_in`. Raises InputError if the folder is missing."""
    if not gfile.isdir(path):
        raise InputError(f"{path}: no such folder")
    return [name for name in names_in(path) if not name.startswith(".")]


def folders_in(path, others):
    """Names of the subfolders. Prints how many files are left out, described by `others`."""
    names = list_folder(path)
    folders = [name for name in names if gfile.isdir(os.path.join(path, name))]
    tell_left_out(path, others, [name for name in names if name not in folders])
    return folders


def split_folder(folder, split):
    """Path of a split's folder. Raises InputError, which names the nearest split, if it is missing."""
    if split not in (splits := list_folder(folder)):
        has = f"the splits here are {', '.join(splits)}{nearest(split, splits)}" if splits else "the folder is empty"
        raise InputError(f"{os.path.join(folder, split)}: no such folder; {has}")
    return os.path.join(folder, split)


def by_name(folder, suffixes, beside=()):
    """Sorted dict from file names without suffix to paths. Prints how many names with other suffixes are left out.

    Args:
        folder: path.
        suffixes: suffixes of the files.
        beside: suffixes of other files that may have the same names.

    Raises:
        InputError: two files have the same name without suffix.
    """
    paths, others = {}, []
    for name in list_folder(folder):
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in suffixes:
            if stem in paths:
                raise InputError(f"{os.path.join(folder, name)}: {paths[stem]} has the same name")
            paths[stem] = os.path.join(folder, name)
        else:
            others.append(name)
    others = [name for name in others if not (name.lower().endswith(beside) and os.path.splitext(name)[0] in paths)]
    tell_left_out(folder, f"names that do not end in {', '.join(suffixes)}", others)
    return paths


def check_paired(photos, labels, photo_folder, label_folder, *, ending=".png"):
    """Raises InputError for a photo without labels, or for labels without a photo.

    Args:
        photos, labels: dicts from names to paths.
        photo_folder, label_folder: folders of all photos and of all labels.
        ending: ending of label files' names.
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
        labels: dict from names to lists of label files' paths; {} for a split without labels.
        read: function that returns `Labels` from the path of the photo and the paths of its label files.
    """
    items = []
    for number, (name, path) in enumerate(photos.items()):
        read_labels = functools.partial(read, path, *labels[name]) if labels else None
        items.append({"photo": path, "id": number, "labels": read_labels, "label_files": labels.get(name, [])})
    return items


def photo_fields(path, data, size=None, stored=False):
    """The record fields of a photo (see `tfrecord`). `streams.decode_photo` decodes them to the photo's pixels.

    Most files are checked and stored unchanged. If a file has several pictures (MPO), only the first is stored. CMYK,
    palette, transparent and deep photos (more than 8 bits), and formats other than JPEG and PNG, are re-encoded as
    8-bit RGB. The encoded photo is decoded once to check it; see `check_decodes`.

    Args:
        path: path of the photo, for messages.
        data: bytes of the photo.
        size: (width, height) of its labels; None without label images.
        stored: True if the labels match the stored pixels, False if they match the upright photo. If `size` fits only
            one of the two, `size` decides.

    Returns:
        A dict of the fields, and a list of remarks. They say which parts of the file are left out, and how values of
        more than 8 bits are scaled to 8 bits.

    Raises:
        InputError: the photo is cut short, damaged or has another size, or TensorFlow cannot decode it.
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
    encoded = _encoded(data, photo)
    check_decodes(path, encoded)
    fields = {"image/encoded": encoded, "image/width": sizes[way][0], "image/height": sizes[way][1]}
    deep = [] if photo.deep is None else [f"has more than 8 bits; {LEVELS[PERCENTILES]}"]
    return fields | ({"image/orientation": way} if way > 1 else {}), [*photo.left_out, *deep]


def _encoded(data, photo):
    """Bytes of a `Photo` as JPEG or PNG, which TensorFlow decodes to the same pixels."""
    image = photo.image
    if image.mode in ("RGB", "L") and photo.deep is None:
        if image.format in ("JPEG", "PNG"):
            return data
        if image.format == "MPO":
            first = data[: image.mpinfo[0xB002][0]["Size"]]  # the size in the MPO index may be wrong
            return first if first.endswith(b"\xff\xd9") else data
    format = "JPEG" if image.format in ("JPEG", "MPO") else "PNG"
    # By default, Pillow saves the original's transparency, which may not fit the new mode.
    return bytes_of(lambda file: rgb(photo).save(file, format, quality=95, subsampling=0, transparency=None))


def reason_of(error):
    """The first line of TensorFlow's message about a record, without the names of ops."""
    return re.sub(r"\{\{.*?\}\} ?|\[Op:.*", "", first_line(error)).strip()


def check_decodes(path, encoded):
    """Raises InputError unless TensorFlow decodes a record's JPEG or PNG.

    The kernel is the one that decodes photos and labels in training. It refuses some damaged or very large files that
    Pillow accepts.
    """
    import tensorflow as tf

    try:
        tf.io.decode_image(encoded, channels=3, expand_animations=False)
    except tf.errors.OpError as error:
        why = f"TensorFlow, which trains, does not decode it: {reason_of(error)}"
        raise InputError(f"{path}: damaged, or more than 178 million pixels ({why}); save it anew as a PNG") from None


def missing_files(folder, names, what):
    """Sorted list of the names that a folder lacks. Raises InputError; see `inside`.

    Args:
        folder: path of the folder.
        names: names of files in it, or in its subfolders.
        what: source of the names, for the message.
    """
    for name in names:
        inside(folder, name, what)
    return sorted(set(names) - names_below(folder, names))


# === Photos to predict ===


def read_photo(path, levels=PERCENTILES):
    """Reads a photo of any format, turned by its EXIF tag.

    Prints on standard error which pages and channels of the file are left out.

    Returns:
        uint8 [h, w, 3], the photo; see `levels.rgb`.
        [h, w, C], its values as stored, without transparency: C is 1 for grey, else 3. They are the photo's own for
        colours of a palette and for inks.

    Raises:
        InputError: the file is missing, cut short or not an image.
    """
    photo = open_photo(path, read_file(path))
    for text in photo.left_out:
        say(f"{path}: {text}", error=True)
    way = orientation(photo.image)
    pixels = np.asarray(upright(rgb(photo, levels), way))
    if photo.deep is not None:
        return pixels, turned(photo.deep.reshape(*photo.deep.shape[:2], -1), way)
    return pixels, pixels[..., :1] if photo.image.mode in ("1", "L", "LA", "La") else pixels


def load_photo(path, levels=PERCENTILES):
    """The photo of `read_photo`, uint8 [h, w, 3]."""
    return read_photo(path, levels)[0]


def find_photos(arguments):
    """Paths of the photos that the arguments name, without repeats. An argument is a photo or a folder of photos.

    Hidden files of a folder are left out, and so are pictures that axial-predict has written there.

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
        photo_names = [name for name in names if name.lower().endswith(PHOTOS) and not _is_predicted(argument, name)]
        rest = [name for name in names if name not in set(photo_names)]
        tell_left_out(argument, f"names not ending in {', '.join(PHOTOS)}, or files of axial-predict", rest)
        if not photo_names:
            raise InputError(f"{argument}: no photo in this folder; their names end in {', '.join(PHOTOS)}")
        photos += [os.path.join(argument, name) for name in photo_names]
    return list({os.path.abspath(photo): photo for photo in photos}.values())


def _is_predicted(folder, name):
    """Whether axial-predict wrote this picture, according to a JSON of the same stem in the folder."""
    stem = name.rsplit(".", 2)[0]
    path = os.path.join(folder, f"{stem}.json")
    if stem == name or not gfile.exists(path):
        return False
    with contextlib.suppress(InputError):  # the JSON is another program's
        content = read_json(path, dict[str, typing.Any])[1]
        return "photo" in content and name in content.values()
    return False
