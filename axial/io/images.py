"""Reads photos and label images into pixels, or raises one `InputError`."""

import contextlib
import dataclasses
import io
import struct
import sys
import warnings

import numpy as np
from PIL import Image
from PIL.ExifTags import Base as Tag

from axial.errors import InputError
from axial.io.read import first_line

LARGEST_PIXELS = 2**28
# Pillow's names of the accepted formats. An MPO is a JPEG with further pictures. Pillow reads forty more formats, and
# starts Ghostscript for one of them.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
FORMAT_NAMES = "JPEG, MPO, PNG, WebP, BMP, GIF or TIFF"
TIFF_FORMS = "expected colours of 8 bits, or grey of 8, 16 or 32"
# Pillow warns above MAX_IMAGE_PIXELS, and raises above twice that number, which is `LARGEST_PIXELS`.
Image.MAX_IMAGE_PIXELS = LARGEST_PIXELS // 2
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Pillow's transpositions for EXIF's orientations 2 to 8.
_TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90".split()
# Limits for files that Pillow decodes much more slowly, or with much more memory, than other files of the same size.
MOST_STRIPS = 2**20  # strips of a TIFF; Pillow makes an object per strip
LARGEST_TILE = 2**24  # pixels of a TIFF's tile, unless the image has more
LARGEST_RUNS = 2**24  # pixels of a run-length encoded BMP, which Pillow decodes in Python
MOST_PAGES = 2**16  # pages of a TIFF; later pages are not counted
MOST_SCANNED = 2**34  # a JPEG's number of scans times its pixels: even a scan of a few bytes passes over all pixels
# The only tag in use that `Tag` does not name. The other tags are those in Adobe's TIFF Revision 6.0.
_NO_DATA = 42113  # GDAL (https://gdal.org/en/stable/drivers/raster/gtiff.html)
_COPY, _MASK = 1, 4  # bits of NewSubfileType: a smaller copy of another page, a transparency mask
# Bytes per value of the TIFF types that Pillow reads.
_TIFF_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_TIFF_TEXTS = (1, 2, 7)  # types whose values Pillow keeps as bytes
TIFF_STARTS = (b"II*\0", b"II\0*", b"II+\0", b"MM\0*", b"MM*\0", b"MM\0+")


def open_image(path, data):
    """Decodes the first picture of an image file with Pillow.

    Args:
        path: the file's path, for messages.
        data: bytes of the file.

    Raises:
        InputError: the format is not in `FORMATS`, the file is truncated or damaged, it has more than `LARGEST_PIXELS`
            pixels, or decoding takes far more time or memory than its pixels need.
    """
    with _named(path, data):
        if data[:4] in TIFF_STARTS:
            _check_tags(path, data)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_work(path, data, image)
        image.load()
        return image


@dataclasses.dataclass(frozen=True)
class Photo:
    """The first picture of a photo's file, with facts that Pillow does not report.

    Attributes:
        image: result of `open_image`.
        deep: array [h, w] or [h, w, 3] of signed values or values of more than 8 bits; None for other photos. Pillow
            keeps only the upper bytes of such colours and ignores some TIFF tags. The smallest value is the darkest;
            NaN marks GDAL's missing values.
        left_out: texts that say which part of the file is read, like 'page 1 of 4 is read'; empty for a whole file.
    """

    image: Image.Image
    deep: np.ndarray | None = None
    left_out: tuple = ()


def open_photo(path, data):
    """Reads the `Photo` of an image file. Takes the arguments of `open_image`.

    Raises:
        InputError: see `open_image`; also for a TIFF whose first page is a smaller copy of another page, or whose
            compressed 16-bit planes have a largest value between 256 and 4095.
    """
    image = open_image(path, data)
    with _named(path, data):
        return Photo(image, _deep(path, data, image), _left_out(path, data, image))


@contextlib.contextmanager
def _named(path, data):
    """Converts every exception to InputError: for damaged bytes, decoders raise exceptions of any class."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        why = f"not a whole image ({first_line(error)})"
        if isinstance(error, Image.DecompressionBombError):
            why = f"too many pixels, at most {LARGEST_PIXELS} are read"
        elif data[:4] in TIFF_STARTS:
            why = f"not a whole TIFF, or one of pixels, planes or a compression that Pillow does not read; {TIFF_FORMS}"
        elif isinstance(error, Image.UnidentifiedImageError):
            why = f"not an image, or not a whole one; expected {FORMAT_NAMES}"
        raise InputError(f"{path}: {why}") from None


def _check_tags(path, data):
    """Raises InputError if the tags of a TIFF take much more memory than the file. Runs before Pillow reads them.

    Many tags may share one part of the file. Pillow before version 13 copies that part once for each tag.
    """
    order, offset, count, entry = _directory(data)
    (tags,) = struct.unpack_from(order + count, data, offset)
    if tags >= 2**16:  # possible in a BigTIFF only
        raise InputError(f"{path}: {tags} tags, at most {2**16 - 1} are read")
    offset, copied = offset + struct.calcsize(order + count), 0
    for start in range(offset, min(offset + tags * entry.size, len(data) - entry.size + 1), entry.size):
        tag, kind, values, offset = entry.unpack_from(data, start)
        size = values * _TIFF_BYTES.get(kind, 0)
        if offset + size > len(data):  # Pillow does not read such a tag
            continue
        copied += size
        if values > MOST_STRIPS and (kind not in _TIFF_TEXTS or tag in (Tag.StripOffsets, Tag.TileOffsets)):
            raise InputError(f"{path}: tag {tag} has {values} values, at most {MOST_STRIPS} are read")
    if copied > 4 * len(data):
        raise InputError(f"{path}: tags of {copied} bytes in a file of {len(data)}")


def _directory(data):
    """(byte order, offset of the first page, struct format of the tag count, struct of a tag) of a TIFF."""
    order, big = "<" if data[:2] == b"II" else ">", data[2] == 43  # the byte by which Pillow recognises a BigTIFF
    (offset,) = struct.unpack_from(order + "Q" if big else order + "L", data, 8 if big else 4)
    return (order, offset, *(("Q", struct.Struct(order + "HHQQ")) if big else ("H", struct.Struct(order + "HHLL"))))


def _check_work(path, data, image):
    """Raises InputError if decoding an opened image takes far more time or memory than its pixels need."""
    pixels, form = image.width * image.height, image.tile[0][0] if image.tile else ""
    if form == "jpeg" and (scans := data.count(b"\xff\xda")) * pixels > MOST_SCANNED:
        raise InputError(f"{path}: {scans} scans of {pixels} pixels, at most {MOST_SCANNED // pixels} are read")
    if form == "bmp_rle" and (pixels > LARGEST_RUNS or len(data) > 4 * pixels + 2**16):
        raise InputError(f"{path}: run lengths of {pixels} pixels in {len(data)} bytes, at most {LARGEST_RUNS} allowed")
    if image.format == "TIFF":
        tags = image.tag_v2
        sides = tags.get(Tag.TileWidth, 1), tags.get(Tag.TileLength, 1)
        if sides[0] * sides[1] > max(LARGEST_TILE, pixels):
            raise InputError(f"{path}: tiles of {sides[0]}x{sides[1]} pixels for an image of {pixels}")
        covered = sum((right - left) * (lower - upper) for _, (left, upper, right, lower), *_ in image.tile)
        planes = len(image.getbands()) if tags.get(Tag.PlanarConfiguration) == 2 else 1
        if form == "raw" and covered < pixels * planes:
            raise InputError(f"{path}: not a whole image (strips or tiles are missing)")  # Pillow leaves them black


def _deep(path, data, image):
    """The value of `Photo.deep` for a loaded image."""
    tags = image.tag_v2 if image.format == "TIFF" else {}
    kind = tags.get(Tag.SampleFormat, (1,))[0]
    bits = data[24] if image.format == "PNG" else tags.get(Tag.BitsPerSample, (8,))[0]
    if image.palette and max(colours := tags.get(Tag.ColorMap, (256,))) < 256:  # the tag has 8-bit values in 16 bits
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
    if tags.get(Tag.PhotometricInterpretation, 1) == 0:  # the smallest number is white
        values = (1 if image.mode == "F" else 2**16 - 1) - values
    return values


def _deep_colours(path, data, image):
    """uint16 [h, w] or [h, w, 3]: 16-bit colours without their alpha channel."""
    if image.format == "PNG":
        import tensorflow as tf

        values = tf.io.decode_png(data, channels=3, dtype=tf.uint16).numpy()
        return values if data[25] & 2 else values[..., 0]
    halves, raw = [np.asarray(image.convert("RGB"))] * 2, image.info["compression"] == "raw"
    if image.tag_v2.get(Tag.PlanarConfiguration) != 2 or raw:
        big = data[:2] == b"MM" if raw else sys.byteorder == "big"
        halves = [_bytes_of_colours(data, order) for order in ("BL" if big else "LB")]
    elif 0 < halves[0].max() < 2**4:  # libtiff decodes the planes, and Pillow keeps the upper bytes
        raise InputError(f"{path}: 12-bit colours in a 16-bit TIFF, of which only 8 bits are read; save it as a PNG")
    return halves[0].astype(np.uint16) * 256 + halves[1]


def _bytes_of_colours(data, order):
    """uint8 [h, w, 3]: one byte of each 16-bit colour of a TIFF; the upper byte if `order` is the file's byte order."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    image._mode, tiles = "RGB", []
    for tile in image.tile:
        form, *more = tile[3]
        form = form.partition(";")[0]
        if form in ("R", "G", "B") or len(form) > 1:  # skips the plane of a fourth channel
            form = form if len(form) == 1 else "RGB" + "X" * (len(form) - 3)
            tiles.append(getattr(type(tile), "_make", tuple)((*tile[:3], (f"{form};16{order}", *more))))
    image.tile = tiles
    return np.asarray(image)


def _left_out(path, data, image):
    """The value of `Photo.left_out` for a loaded image."""
    texts, tags, kind, count = [], {}, "frame", 1
    if image.format in ("GIF", "PNG", "WEBP"):
        with contextlib.suppress(Exception):  # a later frame is damaged
            count = Image.open(io.BytesIO(data), formats=FORMATS).n_frames  # reads all frames of a GIF
    elif image.format == "TIFF":
        tags, pages = image.tag_v2, _pages(data)
        full = sum(not page & (_COPY | _MASK) for page in pages)
        if pages[0] & _COPY and (full or Tag.SubIFDs in tags):
            raise InputError(f"{path}: its first page is a smaller copy of another one; save that as a file of its own")
        kind, count = "page", full
    if count > 1:
        texts.append(f"{kind} 1 of {count} is read")
    bands, alpha = len(image.getbands()), image.mode in ("LA", "La", "PA", "RGBA")
    bands = 2 if image.format == "PNG" and data[25] == 4 else bands  # Pillow opens 16-bit grey with alpha as RGBA
    samples = max(tags.get(Tag.SamplesPerPixel, 1), bands)
    if samples > bands or (alpha and np.ptp(image.getextrema()[-1])):
        which = "channel 1" if (colours := bands - alpha) == 1 else f"channels 1 to {colours}"
        texts.append(f"{which} of {samples} {'is' if colours == 1 else 'are'} read")
    return texts


def _pages(data):
    """NewSubfileType of the first `MOST_PAGES` pages of a TIFF, in order. Pillow has read the TIFF before."""
    order, offset, count, entry = _directory(data)
    kinds = {}
    with contextlib.suppress(struct.error, OverflowError):  # a later page is damaged
        while offset and offset not in kinds and len(kinds) < MOST_PAGES:
            (tags,), first = struct.unpack_from(order + count, data, offset), offset + struct.calcsize(order + count)
            tag, kind = struct.unpack_from(order + "HH", data, first)
            (value,) = struct.unpack_from(order + "HL"[kind == 4], data, first + entry.size // 2 + 2)
            kinds[offset] = value if tag == Tag.NewSubfileType else 0  # tags are sorted: it can only be first
            (offset,) = struct.unpack_from(order + entry.format[-1], data, first + tags * entry.size)
    return list(kinds.values())


def orientation(image):
    """EXIF orientation, 1 to 8, of a result of `open_image`; see `decode.orientation`.

    The result is 1 if the EXIF block is damaged, as in browsers. It is also 1 for a TIFF, which Pillow has turned
    already.
    """
    try:
        exif = Image.Exif()
        exif.load(image.info.get("exif", b""))  # Pillow's `getexif` reads XMP too
        value = exif.get(Tag.Orientation)
        return value if type(value) is int and 1 < value < 9 else 1
    except Exception:  # a damaged block raises exceptions of any class
        return 1


def upright(image, way=None):
    """Mirrors and turns a result of `open_image` by the orientation `way`, by default its `orientation`.

    Pillow's `ImageOps.exif_transpose` would rewrite the whole EXIF block, and raise if any part of it is damaged.
    """
    way = orientation(image) if way is None else way
    return image if way == 1 else image.transpose(Image.Transpose[_TURNS[way - 2]])


def turned(values, way):
    """An array [h, w, C], mirrored and turned like an image by `upright`."""
    mirrored, quarters = way in (2, 4, 5, 7), (0, 0, 2, 2, 1, 3, 3, 1)[way - 1]
    return np.rot90(values[:, ::-1] if mirrored else values, quarters)
