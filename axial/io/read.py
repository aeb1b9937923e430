"""The door in: bytes, JSON, YAML and images of files become checked values, or one `InputError`."""

import io
import re
import struct
import typing

import msgspec
import tensorflow as tf
import yaml
from PIL import ExifTags, Image

from axial.errors import InputError, nearest

LARGEST_TEXT = 2**24  # bytes of a YAML, gin or manifest file
LARGEST_JSON = 2**32  # bytes; COCO's largest annotations have 0.5 GB
LARGEST_IMAGE = 2**29  # bytes of an encoded image
LARGEST_PIXELS = 2**28
# How an image is turned, of each value of EXIF's orientation but 1.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_file(path, largest=LARGEST_IMAGE):
    """The bytes of a file. Raises InputError if it is missing, a folder, unreadable or larger than `largest`."""
    try:
        if tf.io.gfile.isdir(path):
            raise InputError(f"{path}: a folder, a file is expected")
        with tf.io.gfile.GFile(path, "rb") as file:
            size = file.size()
            if size > largest:
                raise InputError(f"{path}: {size} bytes, at most {largest} are read")
            return file.read()
    except tf.errors.NotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (tf.errors.OpError, OSError, UnicodeError) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from None


def read_text(path):
    """The text of a small UTF-8 file. Raises InputError."""
    try:
        return read_file(path, LARGEST_TEXT).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path, schema, largest=LARGEST_JSON):
    """The bytes of a JSON file, and its content as a `schema`.

    Raises:
        InputError: the file cannot be read, is not JSON, or does not have the fields, types and ranges of the schema.
            The message names the field.
    """
    data = read_file(path, largest)
    try:
        return data, msgspec.json.decode(data, type=schema)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {_plain(error, schema)}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InputError(f"{path}: not JSON ({first_line(error)})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """Reads plain YAML. Aliases are refused: a few of them can describe more values than any memory holds."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)


def read_yaml(path, schema):
    """The content of a YAML file as a `schema`. Raises InputError; see `read_json`."""
    text = read_text(path)
    try:
        content = yaml.load(text, _Loader)  # noqa: S506, it is a SafeLoader
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None
    return convert(f"{path}: ", content, schema)


def convert(where, value, schema):
    """A value of plain Python types as a `schema`. Raises InputError, whose message starts with `where`."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}{_plain(error, schema)}") from None
    except RecursionError:
        raise InputError(f"{where}nested too deeply") from None


def check_unique(path, field, values):
    """Raises InputError if a value is there twice."""
    seen = set()
    for value in values:
        if value in seen:
            raise InputError(f"{path}: {field} {value!r} is there twice")
        seen.add(value)


def _plain(error, schema):
    """msgspec's message with the field first, and with the nearest name of an unknown field."""
    text, _, place = str(error).partition(" - at ")
    unknown = re.search(r"unknown field `(.*)`", text)
    hint = nearest(unknown[1], sorted(_fields(schema))) if unknown else ""
    text = text.replace("`", "")
    for json_word, word in (("object", "a mapping"), ("array", "a list")):
        text = re.sub(rf"\b(Expected |got ){json_word}\b", rf"\1{word}", text)
    text = re.sub(r"^Object (contains|missing)", lambda m: "has an" if m[1] == "contains" else "is missing the", text)
    field = place.strip("`").removeprefix("$").removeprefix(".")
    return f"{field + ': ' if field else ''}{text[:1].lower() + text[1:]}{hint}"


def _fields(schema):
    """Names of all fields of the structs that a schema is made of."""
    names, queue, seen = set(), [schema], set()
    while queue:
        kind = queue.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
            seen.add(kind)
            names.update(kind.__struct_encode_fields__)
            queue += typing.get_type_hints(kind).values()
        queue += typing.get_args(kind)
    return names


def open_image(path, data):
    """An image file decoded by Pillow.

    Args:
        path: for messages.
        data: bytes of the file.

    Raises:
        InputError: the file is cut short, not an image, or of more than `LARGEST_PIXELS` pixels.
    """
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > LARGEST_PIXELS:
            raise InputError(f"{path}: {image.width}x{image.height} pixels, at most {LARGEST_PIXELS} are read")
        image.load()
        return image
    except Image.UnidentifiedImageError:
        raise InputError(f"{path}: not an image, or not a whole one") from None
    except InputError:
        raise
    except (OSError, SyntaxError, ValueError, IndexError, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: not a whole image ({first_line(error)})") from None


def upright(image):
    """An image of `open_image`, mirrored and turned as its EXIF tag says.

    One whose EXIF block is damaged stays as it is stored, as in browsers and in an export's 'serving_default'.
    Pillow's `ImageOps.exif_transpose` writes the whole block again, and raises if any part of it is damaged.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except (SyntaxError, ValueError, TypeError, LookupError, OSError, struct.error):
        return image
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def first_line(error):
    """The first line of an exception's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
