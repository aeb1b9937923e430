"""The door in: bytes, JSON, YAML and images of files become checked values, or one `InputError`."""

import codecs
import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import re
import stat
import struct
import sys
import typing
import warnings

import msgspec
import numpy as np
import yaml
from PIL import ExifTags, Image

from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.check import is_remote

LARGEST_TEXT = 2**24  # bytes of a YAML, gin or manifest file
LARGEST_JSON = 2**32  # bytes; COCO's largest annotations have 0.5 GB
LARGEST_SEARCHED = 2**22  # bytes of JSON in which a key that is there twice is looked for: longer than reading takes
LARGEST_IMAGE = 2**29  # bytes of an encoded image
LARGEST_PIXELS = 2**28
# Pillow's names of the formats of photos and label images. An MPO is a JPEG with further pictures. Pillow knows forty
# more formats, and starts Ghostscript for one of them.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
FORMAT_NAMES = "JPEG, MPO, PNG, WebP, BMP, GIF or TIFF"
TIFF_FORMS = "colours of 8 bits, or grey of 8, 16 or 32"
# How values of more than 8 bits become 8; see `eight_bits`.
PERCENTILES, DEPTH = "percentiles", "depth"
LEVELS = {
    PERCENTILES: "of its n values the sqrt(n) / 4 darkest become 0 and the sqrt(n) / 4 brightest 255, or less in noise",
    DEPTH: "its values are divided by 1, 4, 16, 64 or 256, as its largest value tells",
}
NOISE, NOISE_VALUES = 20, 2**22  # see `eight_bits`
DEEP_DIVISORS = (1, 4, 16, 64, 256)  # see `deep_divisor`
# Pillow warns from its own limit on and raises at twice of it. Ours, which `open_image` checks, is above the default.
# Its message takes the place of Pillow's warning.
Image.MAX_IMAGE_PIXELS = 2 * LARGEST_PIXELS
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
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


def check_regular(path):
    """Raises InputError for a named pipe, a device or a socket: reading one may wait forever, or never end."""
    path = os.fspath(path)
    local = path.removeprefix("file://")
    if is_remote(local):
        return
    try:
        mode = os.stat(local).st_mode
    except (OSError, ValueError):  # who opens the file says why it cannot be read
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path}: a pipe, device or socket, a file is expected")


def read_file(path, largest=LARGEST_IMAGE):
    """The bytes of a file.

    Raises:
        InputError: the file is missing, a folder, a pipe, a device or a socket, unreadable or larger than `largest`.
    """
    check_regular(path)
    try:
        if gfile.isdir(path):
            raise InputError(f"{path}: a folder, a file is expected")
        size = gfile.size(path)
        if size > largest:
            raise InputError(f"{path}: {size} bytes, at most {largest} are read")
        with gfile.open_binary(path, "rb") as file:
            return file.read()
    except gfile.missing_errors():
        raise InputError(f"{path}: no such file") from None
    except (*gfile.file_errors(), UnicodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{path}: cannot be read ({reason})") from None


def read_text(path):
    """The text of a small UTF-8 file, without a byte order mark. Raises InputError."""
    try:
        return _unmarked(path, read_file(path, LARGEST_TEXT)).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _unmarked(path, data):
    """The bytes of a UTF-8 file without a byte order mark. Raises InputError for the mark of UTF-16."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{path}: not UTF-8 but UTF-16; save it anew")
    return data.removeprefix(codecs.BOM_UTF8)


def read_json(path, schema, largest=LARGEST_JSON):
    """The bytes of a JSON file without a byte order mark, and its content as a `schema`.

    Raises:
        InputError: the file cannot be read, is not JSON, or does not have the fields, types and ranges of the schema.
            The message names the field.
    """
    data = _unmarked(path, read_file(path, largest))
    return data, decode_json(path, data, schema)


def decode_json(path, data, schema):
    """The content of JSON as a `schema`; see `read_json`."""

    def search(pairs):
        check_unique(path, "the key", (key for key, _ in pairs))

    try:
        content = msgspec.json.decode(data, type=schema)
        if len(data) <= LARGEST_SEARCHED:  # parse_int takes numbers of any length
            json.loads(data.decode(errors="surrogateescape"), object_pairs_hook=search, strict=False, parse_int=bool)
        return content
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {_plain(error, schema)}") from None
    except (msgspec.DecodeError, json.JSONDecodeError, UnicodeError) as error:
        raise InputError(f"{path}: not JSON ({first_line(error)})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None


# === YAML ===

# PyYAML's own loader also makes dates, sets, binary data and sexagesimal numbers. Some of these raise exceptions of
# every class, and the last take quadratic time. So only the parser is PyYAML's.
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML can be built without the first, which is fast
_TAG = "tag:yaml.org,2002:"
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {
    form: value
    for words, value in ((("yes", "true", "on"), True), (("no", "false", "off"), False))
    for word in words
    for form in (word, word.capitalize(), word.upper())
}
# YAML 1.1's numbers (https://yaml.org/type/int.html and float.html), but for sexagesimal ones.
_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER = 100  # characters
_DEEPEST = 100  # collections in each other


def read_yaml(path, schema):
    """The content of a YAML file as a `schema`. Raises InputError; see `read_json`.

    Numbers, booleans and null are those of YAML 1.1; all other plain scalars are text. Aliases are refused: a few of
    them can describe more values than any memory holds. So are all tags but those of these types.
    """
    try:
        content = _plain_yaml(read_text(path))
    except (yaml.YAMLError, UnicodeError) as error:
        raise InputError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    return convert(f"{path}: ", content, schema)


def _plain_yaml(text):
    """The value of a YAML document: None, bool, int, float, str, list or dict. Raises yaml.YAMLError."""
    stack, starts = [[]], []  # the items of each open collection, of a mapping its keys and values in turn; its line
    for event in yaml.parse(text, _PARSER):
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"{where}: aliases are not read")
        if isinstance(event, yaml.CollectionStartEvent):
            kind = "map" if isinstance(event, yaml.MappingStartEvent) else "seq"
            if event.tag not in (None, "!", _TAG + kind):
                raise yaml.YAMLError(f"{where}: the tag {_short(event.tag)} is not read")
            if len(stack) > _DEEPEST:
                raise yaml.YAMLError(f"{where}: nested too deeply")
            stack.append([])
            starts.append(where)
        elif isinstance(event, yaml.CollectionEndEvent):
            items, where = stack.pop(), starts.pop()
            stack[-1].append(_mapping(where, items) if isinstance(event, yaml.MappingEndEvent) else items)
        elif isinstance(event, yaml.ScalarEvent):
            stack[-1].append(_scalar(where, event))
    (documents,) = stack
    if len(documents) > 1:
        raise yaml.YAMLError("several documents, one is expected")
    return documents[0] if documents else None


def _mapping(where, items):
    """A dict of keys and values in turn. Raises yaml.YAMLError for a key that is there twice, or no key."""
    try:
        check_unique(where, "the key", items[::2])
    except TypeError:
        raise yaml.YAMLError(f"{where}: a list or a mapping as a key") from None
    except InputError as error:
        raise yaml.YAMLError(error) from None
    return dict(zip(items[::2], items[1::2]))


def _scalar(where, event):
    """The value of a scalar: of a plain one as YAML 1.1 resolves it, of another one its text or what its tag says."""
    event.value.encode()  # raises UnicodeEncodeError for half a surrogate pair, which no file can hold
    tag = "" if event.implicit[0] else (event.tag or "!").removeprefix(_TAG)
    if tag in ("!", "str"):
        return event.value
    value = _resolved(where, event.value)
    if tag == "float" and type(value) is int:
        return float(value)
    kinds = {"null": type(None), "bool": bool, "int": int, "float": float}
    if tag and (tag not in kinds or type(value) is not kinds[tag]):
        raise yaml.YAMLError(f"{where}: {_short(event.tag)} {event.value[:50]!r} is not read")
    return value


def _short(tag):
    return tag.replace(_TAG, "!!")[:50]


def _resolved(where, text):
    """The value of a plain scalar."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    whole = _INT.fullmatch(text)
    if not whole and not _FLOAT.fullmatch(text):
        return text
    if len(text) > _LONGEST_NUMBER:
        raise yaml.YAMLError(f"{where}: a number of {len(text)} characters, at most {_LONGEST_NUMBER} are read")
    digits = text.replace("_", "")
    if not whole:
        return float(digits)
    base = {"0b": 2, "0x": 16}.get(whole[1][:2], 8 if whole[1][0] == "0" else 10)
    try:
        return int(digits, base)
    except ValueError:  # 0x_ has no digit
        raise yaml.YAMLError(f"{where}: {text!r} has no digits") from None


# === Checked values ===


def read_rows(path, schema):
    """Yields (place, row) of each line of a CSV file: 'PATH:LINE: ' for messages, and a `schema` or a dataclass.

    Raises:
        InputError: a missing or unknown column, or a value out of form.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)))
    check_unique(path, "the column", reader.fieldnames or ())
    for number, fields in enumerate(reader, 2):
        where = f"{path}:{number}: "
        if dataclasses.is_dataclass(schema) and (unknown := fields.keys() - typing.get_type_hints(schema).keys()):
            raise InputError(f"{where}has an unknown column {min(map(str, unknown))}")
        yield where, convert(where, {str(name): value for name, value in fields.items()}, schema, strict=False)


def convert(where, value, schema, strict=True):
    """A value of plain Python types as a `schema`, also from the text of a number unless it is `strict`.

    Raises:
        InputError: its message starts with `where`.
    """
    try:
        return msgspec.convert(value, schema, strict=strict)
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


# === Images ===

# A TIFF's tag that says that each channel is a plane of its own.
_IN_PLANES = [struct.pack(order + kind, *(284, 3, 1, 2)) for order in "<>" for kind in ("HHLH", "HHQH")]
# What Pillow decodes much more slowly than the rest, or with much more memory, has limits of its own.
MOST_STRIPS = 2**20  # of a TIFF; Pillow makes an object for each
LARGEST_TILE = 2**24  # pixels of a TIFF's tile, in an image of fewer
LARGEST_RUNS = 2**24  # pixels of a BMP in run lengths, which are decoded in Python
MOST_PAGES = 2**16  # of a TIFF that are counted
MOST_SCANNED = 2**34  # scans of a JPEG, times its pixels: a few bytes make a scan, which passes over all pixels
# TIFF's tags (Adobe, TIFF Revision 6.0), and the bytes of a value of each type that Pillow reads.
_BITS, _PLANES, _STRIPS, _TILE_WIDTH, _TILE_HEIGHT, _TILES = 258, 284, 273, 322, 323, 324
_PAGE, _WHITE, _DESCRIPTION, _SAMPLES, _COLOURS, _SUB_PAGES, _NUMBERS = 254, 262, 270, 277, 320, 330, 339
_NO_DATA = 42113  # of GDAL (https://gdal.org/en/stable/drivers/raster/gtiff.html)
_COPY, _MASK = 1, 4  # bits of a page's tag: a smaller copy of another page, and where one is transparent
_TIFF_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_TIFF_TEXTS = (1, 2, 7)  # types whose values stay bytes
_TIFF_STARTS = (b"II*\0", b"II\0*", b"II+\0", b"MM\0*", b"MM*\0", b"MM\0+")


def open_image(path, data):
    """The first picture of an image file, decoded by Pillow.

    Two attributes of the image say what Pillow does not. `deep` is an array, [h, w] or [h, w, 3], of what has more than
    8 bits or a sign, or None: Pillow keeps the upper bytes of colours, and reads some tags of a TIFF not at all. In it,
    the smallest number is the darkest, and NaN stands for GDAL's missing values. `left_out` lists texts on what of the
    file is not read, as 'page 1 of 4 is read'.

    Args:
        path: for messages.
        data: bytes of the file.

    Raises:
        InputError: the file is none of `FORMATS`, cut short or damaged, has more than `LARGEST_PIXELS` pixels, or
            would take much more time or memory than these; a TIFF whose first page is a smaller copy of another;
            compressed planes of 16 bits that end between 256 and 4095.
    """
    try:
        if data[:4] in _TIFF_STARTS:
            _check_tags(path, data)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if not 0 < image.width * image.height <= LARGEST_PIXELS:
            raise InputError(f"{path}: {image.width}x{image.height} pixels, at most {LARGEST_PIXELS} are read")
        _check_work(path, data, image)
        image.load()
        image.deep, image.left_out = _deep(path, data, image), _left_out(path, data, image)
        return image
    except InputError:
        raise
    except Exception as error:  # what decoders raise for damaged bytes is of every class
        raise InputError(f"{path}: {_why_not_read(data, error)}") from None


def _why_not_read(data, error):
    """What is wrong with an image for which Pillow raises an error."""
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {2 * Image.MAX_IMAGE_PIXELS} pixels, at most {LARGEST_PIXELS} are read"
    unknown, planes = isinstance(error, Image.UnidentifiedImageError), any(tag in data for tag in _IN_PLANES)
    if data[:4] in _TIFF_STARTS and (unknown or planes):
        kind = "in planes" if planes else "of a compression"
        return f"not a whole TIFF, or one of pixels or {kind} that Pillow does not read; expected {TIFF_FORMS}"
    if unknown:
        return f"not an image, or not a whole one; expected {FORMAT_NAMES}"
    return f"not a whole image ({first_line(error)})"


def _check_tags(path, data):
    """Raises InputError if the tags of a TIFF take much more memory than the file: before Pillow reads them.

    Many tags may share one part of the file, and Pillow before version 13 copies it once for each.
    """
    order, place, count, entry = _directory(data)
    (tags,) = struct.unpack_from(order + count, data, place)
    if tags >= 2**16:  # which only a BigTIFF can say
        raise InputError(f"{path}: {tags} tags, at most {2**16 - 1} are read")
    place, copied = place + struct.calcsize(order + count), 0
    for start in range(place, min(place + tags * entry.size, len(data) - entry.size + 1), entry.size):
        tag, kind, values, offset = entry.unpack_from(data, start)
        size = values * _TIFF_BYTES.get(kind, 0)
        if offset + size > len(data):  # Pillow does not read it
            continue
        copied += size
        if values > MOST_STRIPS and (kind not in _TIFF_TEXTS or tag in (_STRIPS, _TILES)):
            raise InputError(f"{path}: tag {tag} has {values} values, at most {MOST_STRIPS} are read")
    if copied > 4 * len(data):
        raise InputError(f"{path}: tags of {copied} bytes in a file of {len(data)}")


def _directory(data):
    """Of a TIFF: the order of its bytes, the place of its first page, the form of a number of tags, a tag's struct."""
    order, big = "<" if data[:2] == b"II" else ">", data[2] == 43  # BigTIFF, as Pillow tells it
    (place,) = struct.unpack_from(order + "Q" if big else order + "L", data, 8 if big else 4)
    return (order, place, *(("Q", struct.Struct(order + "HHQQ")) if big else ("H", struct.Struct(order + "HHLL"))))


def _check_work(path, data, image):
    """Raises InputError if an opened image takes much more time or memory than its pixels."""
    pixels, form = image.width * image.height, image.tile[0][0] if image.tile else ""
    if form == "jpeg" and (scans := data.count(b"\xff\xda")) * pixels > MOST_SCANNED:
        raise InputError(f"{path}: {scans} scans of {pixels} pixels, at most {MOST_SCANNED // pixels} are read")
    if form == "bmp_rle" and (pixels > LARGEST_RUNS or len(data) > 4 * pixels + 2**16):
        raise InputError(
            f"{path}: run lengths of {pixels} pixels in {len(data)} bytes, at most {LARGEST_RUNS} are read"
        )
    if image.format == "TIFF":
        tags = image.tag_v2
        sides = tags.get(_TILE_WIDTH, 1), tags.get(_TILE_HEIGHT, 1)
        if sides[0] * sides[1] > max(LARGEST_TILE, pixels):
            raise InputError(f"{path}: tiles of {sides[0]}x{sides[1]} pixels for an image of {pixels}")
        covered = sum((right - left) * (lower - upper) for _, (left, upper, right, lower), *_ in image.tile)
        if form == "raw" and covered < pixels * (len(image.getbands()) if tags.get(_PLANES) == 2 else 1):
            raise InputError(f"{path}: not a whole image (strips or tiles are missing)")  # Pillow leaves them black


def deep_divisor(largest):
    """What the values of a deep image are divided by, to be 8 bits: 1, 4, 16, 64 or 256.

    Cameras have 8, 10, 12, 14 or 16 bits, and files of 16 bits seldom say which. An image's depth is the least of these
    that its largest value fits. Then a photo of 12 bits in a file of 16 is not nearly black, and one whose values fill
    16 bits gives its upper bytes.
    """
    return next((divisor for divisor in DEEP_DIVISORS if largest < 256 * divisor), DEEP_DIVISORS[-1])


def eight_bits(values, levels, band=2**20):
    """Numbers of more than 8 bits as levels from 0 to 255: uint8, of the shape of `values`. NaN becomes 0.

    Args:
        values: integers or floats of a photo, [h, w] or [h, w, 3].
        levels: of `LEVELS`. With 'percentiles', a linear function takes a low percentile of the n finite values to 0
            and a high one to 255: those that sqrt(n) / 4 values lie beyond. This is 0.1 % of 256x256 pixels, as in
            QuPath's automatic contrast (its preference autoBrightnessContrastSaturationPercentage), and 0.012 % of
            2048x2048, where a nucleus has no more pixels. ImageJ saturates 0.35 %, StarDist takes the 1st and the
            99.8th, Cellpose the 1st and the 99th, which leave few nuclei of a large photo among the noise. One hot
            pixel has no say in a photo of any size. Where both percentiles are one number, as on a constant ground, the
            extremes take their places. A constant photo becomes black. Noise alone is not stretched to bright and dark
            spots, of which the model `nuclei` counts dozens: the range is at least `NOISE` times the median difference
            of neighbours in a row, in as many rows as have about `NOISE_VALUES` values. With 'depth', which older
            versions of axial have, integers are divided by the `deep_divisor` of the largest, and floats up to 1 are
            shares of 255.
        band: how many numbers are converted at a time, as they take more memory in float64.
    """
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)]
    low, high, half = 0.0, 255.0 * deep_divisor(largest := np.max(finite, initial=0)), 0.0
    if flat.dtype.kind == "f" and largest <= 1:
        high, half = 1.0, 0.5
    span = high
    if levels == PERCENTILES:
        (low, high), half = _percentiles(finite), 0.5
        span = max(high - low, NOISE * _difference(values[:: max(1, values.size // NOISE_VALUES)])) or 1
    found = np.empty(flat.shape, np.uint8)
    for start in range(0, flat.size, band):
        part = np.nan_to_num(flat[start : start + band].astype(np.float64), nan=low).clip(low, high)
        found[start : start + band] = (part - low) * 255 / span + half
    return found.reshape(values.shape)


def _percentiles(values):
    """The low and the high percentile of numbers, or their extremes where these are the same; see `eight_bits`.

    The numbers change their order.
    """
    if not values.size:
        return 0.0, 0.0
    last = values.size - 1
    rank = min(math.isqrt(values.size) // 4 + 1, last // 2)
    places = [0, rank, last - rank, last]
    values.partition(places)
    first, low, high, final = map(float, values[places])
    return (low, high) if low < high else (first, final)


def _difference(rows):
    """The median difference of neighbouring values in rows, 0 where there are none."""
    with np.errstate(invalid="ignore"):
        found = np.abs(np.diff(rows.astype(np.float64), axis=1))
    found = found[np.isfinite(found)]
    return np.partition(found, found.size // 2)[found.size // 2] if found.size else 0.0


def _deep(path, data, image):
    """The attribute `deep` of a loaded image; see `open_image`."""
    tags = image.tag_v2 if image.format == "TIFF" else {}
    (kind, *_), bits = tags.get(_NUMBERS, (1,)), data[24] if image.format == "PNG" else tags.get(_BITS, (8,))[0]
    if image.palette and max(colours := tags.get(_COLOURS, (256,))) < 256:  # of 8 bits, though the tag has 16
        image.putpalette(bytes(colours), "RGB;L")
    if bits == 16 and image.mode in ("RGB", "RGBA"):
        return _deep_colours(path, data, image)
    if not (image.mode[0] in "IF" or (image.mode == "L" and kind == 2)):
        return None
    values = np.asarray(image)
    if image.mode in ("L", "I"):
        values = values.view({"L": np.int8, "I": np.uint32 if kind == 1 else np.int32}[image.mode])
    with contextlib.suppress(ValueError):
        missing = values == float(str(tags.get(_NO_DATA, "nan")).strip("\0 "))
        values = np.where(missing, np.nan, values) if missing.any() else values
    if tags.get(_WHITE, 1) == 0:  # the smallest number is white
        values = (1 if image.mode == "F" else 2**16 - 1) - values
    return values


def _deep_colours(path, data, image):
    """uint16 [h, w] or [h, w, 3]: colours of 16 bits. Their transparency is left out."""
    if image.format == "PNG":
        import tensorflow as tf

        values = tf.io.decode_png(data, channels=3, dtype=tf.uint16).numpy()
        return values if data[25] & 2 else values[..., 0]
    halves, raw = [np.asarray(image.convert("RGB"))] * 2, image.info["compression"] == "raw"
    if image.tag_v2.get(_PLANES) != 2 or raw:
        big = data[:2] == b"MM" if raw else sys.byteorder == "big"
        halves = [_bytes_of_colours(data, order) for order in ("BL" if big else "LB")]
    elif 0 < halves[0].max() < DEEP_DIVISORS[2]:  # libtiff gives Pillow the planes
        raise InputError(
            f"{path}: colours of at most 12 bits in a TIFF of 16, of which Pillow reads the upper 8; save it as a PNG"
        )
    return halves[0].astype(np.uint16) * 256 + halves[1]


def _bytes_of_colours(data, order):
    """uint8 [h, w, 3] of a TIFF of 16 bits: the upper bytes of its colours, or those that are the upper ones in another
    order of bytes."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    image._mode, tiles = "RGB", []
    for tile in image.tile:
        form, *more = tile[3]
        form = form.partition(";")[0]
        if form in ("R", "G", "B") or len(form) > 1:  # not the plane of a fourth channel
            form = form if len(form) == 1 else "RGB" + "X" * (len(form) - 3)
            tiles.append(getattr(type(tile), "_make", tuple)((*tile[:3], (f"{form};16{order}", *more))))
    image.tile = tiles
    return np.asarray(image)


def _left_out(path, data, image):
    """The attribute `left_out` of a loaded image; see `open_image`."""
    found, tags, kind, count = [], {}, "frame", 1
    if image.format in ("GIF", "PNG", "WEBP"):
        with contextlib.suppress(Exception):  # of a damaged frame behind the first
            count = Image.open(io.BytesIO(data), formats=FORMATS).n_frames  # of a GIF it reads all
    elif image.format == "TIFF":
        tags, pages = image.tag_v2, _pages(data)
        full = sum(not page & (_COPY | _MASK) for page in pages)
        if pages[0] & _COPY and (full or _SUB_PAGES in tags):
            raise InputError(f"{path}: its first page is a smaller copy of another one; save that as a file of its own")
        text = re.match(r"ImageJ=.*^images=(\d{1,9})$", str(tags.get(_DESCRIPTION)), re.DOTALL | re.MULTILINE)
        kind, count = "page", max(full, int(text[1]) if text else 1)
    if count > 1:
        found.append(f"{kind} 1 of {count} is read")
    bands, alpha = len(image.getbands()), image.mode in ("LA", "La", "PA", "RGBA")
    bands = 2 if image.format == "PNG" and data[25] == 4 else bands  # grey of 16 bits with transparency is RGBA
    samples = max(tags.get(_SAMPLES, 1), bands)
    if samples > bands or (alpha and np.ptp(image.getextrema()[-1])):
        which = "channel 1" if (colours := bands - alpha) == 1 else f"channels 1 to {colours}"
        found.append(f"{which} of {samples} {'is' if colours == 1 else 'are'} read")
    return found


def _pages(data):
    """The page tags of the pages of a TIFF that Pillow has read, in their order, of at most `MOST_PAGES`."""
    order, place, count, entry = _directory(data)
    found = {}
    with contextlib.suppress(struct.error, OverflowError):  # of a damaged page behind the first
        while place and place not in found and len(found) < MOST_PAGES:
            (tags,), first = struct.unpack_from(order + count, data, place), place + struct.calcsize(order + count)
            tag, kind = struct.unpack_from(order + "HH", data, first)
            (value,) = struct.unpack_from(order + "HL"[kind == 4], data, first + entry.size // 2 + 2)
            found[place] = value if tag == _PAGE else 0  # the first tag, as they are in order
            (place,) = struct.unpack_from(order + entry.format[-1], data, first + tags * entry.size)
    return list(found.values())


def orientation(image):
    """The EXIF orientation of an image of `open_image`, 1 to 8; see `decode.orientation`.

    One whose EXIF block is damaged stays as it is stored, as in browsers. So does a TIFF: Pillow turns it itself.
    """
    try:
        value = image.getexif().get(ExifTags.Base.Orientation)
        return value if type(value) is int and value in _TURNS else 1
    except Exception:  # what a damaged block raises is of every class
        return 1


def upright(image, way=None):
    """An image of `open_image`, mirrored and turned as its EXIF tag says, or as an `orientation` says.

    Pillow's `ImageOps.exif_transpose` writes the whole EXIF block again, and raises if any part of it is damaged.
    """
    turn = _TURNS.get(orientation(image) if way is None else way)
    return image if turn is None else image.transpose(turn)


def first_line(error):
    """The first line of an exception's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
