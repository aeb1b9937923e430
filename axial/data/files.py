"""What converters need: lists of folders, and photos as TensorFlow decodes them."""

import io
import os

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.errors import InputError, nearest
from axial.io.read import check_unique, open_image, upright
from axial.io.show import say

PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # of `io.read.FORMATS`


def names_in(path):
    """Sorted names in a folder, without trailing slashes. Raises InputError for a name that is not UTF-8."""
    try:
        return sorted(name.rstrip("/") for name in tf.io.gfile.listdir(path))
    except UnicodeDecodeError as error:
        name = os.path.join(path, os.fsdecode(error.object))
        raise InputError(f"{name}: the name is not UTF-8; rename the file") from None


def names_below(folder, names):
    """The set of names in a folder and, as 'b/a.png', in those of its folders that `names` have.

    Args:
        folder: path.
        names: of files that are looked for; `io.paths.inside` has checked them.

    Raises:
        InputError: no such folder.
    """
    if not tf.io.gfile.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    found = set(names_in(folder))
    for below in sorted({os.path.dirname(name) for name in names} - {""}):
        path = os.path.join(folder, below)
        if tf.io.gfile.isdir(path):
            found.update(f"{below}/{name}" for name in names_in(path))
    return found


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


def other_kind(image_id, known):
    """' (...)' if an image id is not `known` but would be as a text or as a number, or ''."""
    other = str(image_id) if isinstance(image_id, int) else int(image_id) if image_id.isdecimal() else None
    return f" ({other!r} is there, which is another id)" if other in known else ""


def list_folder(path):
    """Names in a folder, of `names_in` without hidden ones. Raises InputError if it is missing."""
    if not tf.io.gfile.isdir(path):
        raise InputError(f"{path}: no such folder")
    return [name for name in names_in(path) if not name.startswith(".")]


def split_folder(folder, split):
    """Path of the folder of a split. Raises InputError, which names the nearest split, if there is none."""
    if split not in (found := list_folder(folder)):
        has = f"the splits here are {', '.join(found)}{nearest(split, found)}" if found else "the folder is empty"
        raise InputError(f"{os.path.join(folder, split)}: no such folder; {has}")
    return os.path.join(folder, split)


def by_name(folder, suffixes):
    """Dict from names without suffix to paths, sorted. It says how many names with other suffixes are left out.

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
    tell_left_out(folder, f"what does not end in {', '.join(suffixes)}", others)
    return found


def photo_bytes(path, data, size):
    """A photo of `size` (width, height), as a JPEG or PNG that TensorFlow decodes to the same pixels.

    Most files are only checked and returned unchanged. CMYK, 16-bit, palette and transparent photos are encoded again
    as RGB. So are photos that have `size` only after a turn by their EXIF tag.

    Raises:
        InputError: a photo that is cut short, damaged or of another size.
    """
    image = open_image(path, data)
    turned = image if image.size == size else upright(image)
    if turned.size != size:
        raise InputError(f"{path}: {image.size[0]}x{image.size[1]} pixels, its labels say {size[0]}x{size[1]}")
    if turned is image and image.format in ("JPEG", "PNG") and image.mode in ("RGB", "L"):
        return data
    encoded = io.BytesIO()
    lossy = dict(format="JPEG", quality=95, subsampling=0)
    to_rgb(turned).save(encoded, **(lossy if image.format in ("JPEG", "MPO") else dict(format="PNG")))
    return encoded.getvalue()


def photo_size(path, data):
    """(width, height) of a photo as TensorFlow decodes it."""
    return open_image(path, data).size


def to_rgb(image):
    """Converts grey, 16-bit, palette, CMYK and transparent images to 8-bit RGB. Transparency is dropped."""
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits a pixel
        image = _eight_bits(image)
    if image.mode == "La":  # Pillow has no other way from it to RGB
        image = image.convert("LA")
    return image.convert("RGB")


def _eight_bits(image, band=2**20):
    """An image of one deep channel as grey: its values, divided by 256 if one of them is above 255.

    It is converted in bands of so many pixels, as the numbers take more memory than the image.
    """
    rows = max(1, band // image.width)
    boxes = [(0, top, image.width, min(top + rows, image.height)) for top in range(0, image.height, rows)]
    deep = any(np.asarray(image.crop(box)).max() > 255 for box in boxes)
    grey = Image.new("L", image.size)
    for box in boxes:
        levels = np.nan_to_num(np.asarray(image.crop(box)).astype(np.float64))
        levels = np.clip(levels / 256 if deep else levels, 0, 255)
        grey.paste(Image.fromarray(levels.astype(np.uint8)), box)
    return grey
