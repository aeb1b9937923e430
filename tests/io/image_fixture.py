"""Images of every accepted format and mode, and small files that would cost a decoder much time or memory."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I", "F")


def picture(mode, size=(30, 20)):
    """Returns an image of noise."""
    noise = np.random.default_rng(0).integers(0, 256, [size[1], size[0], 3], np.uint8)
    image = Image.fromarray(noise)
    return image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)


def encoded(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def samples():
    """Returns a dict from (format, mode, compression) to a 30x20 image file with EXIF, for all that Pillow writes."""
    images, exif = {}, Image.Exif()
    exif[0x0112], exif[0x0131] = 6, "some software"
    for format in FORMATS:
        for mode in MODES:
            kinds = ({"compression": name} for name in ("raw", "tiff_lzw", "tiff_deflate", "packbits", "jpeg"))
            for options in kinds if format == "TIFF" else ({},):
                if format not in ("BMP", "GIF", "MPO"):
                    options |= {"exif": exif}
                if format == "MPO":
                    options |= {"save_all": True, "append_images": [picture("L")]}
                try:
                    data = encoded(picture(mode), format, **options)
                    Image.open(io.BytesIO(data)).load()  # old versions of Pillow cannot read all files that they write
                except (OSError, KeyError, ValueError):  # the format has no such mode
                    continue
                images[format, mode, options.get("compression", "")] = data
    images["PNG", "1", "transparent"] = encoded(picture("1"), "PNG", transparency=0)
    return images


# === Small files that decode to much data ===


TEXT, SHORT, LONG, DATA = 2, 3, 4, b"DATA"  # three types of TIFF tags, and a placeholder for the pixels' offset


def tiff(size, changes, data=b""):
    """Returns a TIFF with 8 bits per pixel and one strip.

    Args:
        size: (width, height).
        changes: dict from tags to (type, bytes of the values), or to None to omit a tag. `DATA` in the bytes is
            replaced by the offset of `data`.
        data: bytes of the pixels, at the end of the file.
    """
    width, height = (struct.pack("<L", side) for side in size)
    one = struct.pack("<H", 1)
    tags = {256: (LONG, width), 257: (LONG, height), 258: (SHORT, b"\x08\0"), 259: (SHORT, one), 262: (SHORT, one)}
    tags |= {273: (LONG, DATA), 277: (SHORT, one), 278: (LONG, height), **changes}
    tags = {tag: value for tag, value in sorted(tags.items()) if value}
    offset = 14 + 12 * len(tags)
    far = [packed for _, packed in tags.values() if len(packed) > 4]
    end, entries = offset + sum(map(len, far)), b""
    for tag, (kind, packed) in tags.items():
        count = len(packed) // {TEXT: 1, SHORT: 2, LONG: 4}[kind]
        if len(packed) > 4:
            packed, offset = struct.pack("<L", offset), offset + len(packed)
        entries += struct.pack("<HHL", tag, kind, count) + packed.replace(DATA, struct.pack("<L", end)).ljust(4, b"\0")
    return b"II*\0" + struct.pack("<LH", 8, len(tags)) + entries + bytes(4) + b"".join(far) + data


def few_rows_tiff():
    """A TIFF of 4,000,000 rows with one strip of 20 rows. Pillow would leave the other rows black."""
    return tiff((30, 4_000_000), {278: (LONG, struct.pack("<L", 20))}, bytes(600))


def many_strips_tiff(count=2_000_000):
    """A TIFF with a strip per row, all at the same offset."""
    return tiff((1, count), {273: (SHORT, b"\x08\0" * count), 278: (LONG, struct.pack("<L", 1))})


def large_tile_tiff(side=2**15):
    """A TIFF of 100x100 pixels in a tile of 2^30 pixels."""
    sides, deflate = (LONG, struct.pack("<L", side)), (SHORT, struct.pack("<H", 8))
    changes = {259: deflate, 273: None, 278: None, 322: sides, 323: sides, 324: (LONG, DATA)}
    return tiff((100, 100), changes, zlib.compress(bytes(2**20)))


def shared_tags_tiff(count=40_000):
    """A TIFF with many tags. All of them have the same bytes as their value, which are most of the file."""
    ours = tiff((1, 1), {})
    number, size = struct.unpack_from("<H", ours, 8)[0], 12 * count
    shared = b"".join(struct.pack("<HHLL", 1000 + i, 7, size, 8) for i in range(count))
    return ours[:8] + struct.pack("<H", number + count) + ours[10 : 10 + 12 * number] + shared + bytes(4)


def many_scans_jpeg(scans=500, size=(16_383, 10_000)):
    """A progressive JPEG. Each of its scans skips the whole image in a few bytes."""
    width, height = size

    def segment(marker, body):
        return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body

    blocks = -(-width // 8) * -(-height // 8)
    tables = segment(0xDB, bytes([0] + [1] * 64))
    frame = segment(0xC2, struct.pack(">BHHB3B", 8, height, width, 1, 1, 0x11, 0))
    one_code = bytes([1] + [0] * 15)
    codes = segment(0xC4, b"\x00" + one_code + b"\x00") + segment(0xC4, b"\x10" + one_code + b"\xe0")
    first = segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(blocks // 8 + 1)
    # The symbol 0xe0 skips the band in 2^14 + n blocks. n is the number in the next 14 bits.
    rest = "".join(f"0{2**14 - 1:014b}" for _ in range(blocks // (2**15 - 1)))
    packed = int(rest.ljust(-(-len(rest) // 8) * 8, "0"), 2).to_bytes(-(-len(rest) // 8), "big")
    scan = segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + packed.replace(b"\xff", b"\xff\0")
    return b"\xff\xd8" + tables + frame + codes + first + scans * scan + b"\xff\xd9"


def run_length_bmp(size=(60_000, 2_000)):
    """A run-length encoded BMP whose rows have one pixel and an end mark."""
    width, height = size
    data = b"\x01\x07\x00\x00" * height + b"\x00\x01"
    palette = b"".join(bytes([i, 255 - i, i, 0]) for i in range(256))
    head = struct.pack("<LllHHLLllLL", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<LHHL", 1078 + len(data), 0, 0, 1078) + head + palette + data


def png_chunk(kind, data):
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png(width, height, *chunks, pixels=b"", depth=8, color=2):
    """Returns a PNG whose header has this size. `pixels` need not fit the size."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    parts = (header, *chunks, png_chunk(b"IDAT", zlib.compress(pixels)), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def deep_png(levels):
    """Returns a 16-bit PNG of int [h, w, n]: grey, grey and alpha, colours, colours and alpha, for n from 1 to 4."""
    height, width, channels = levels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in levels.astype(">u2"))
    return png(width, height, pixels=rows, depth=16, color=(0, 4, 2, 6)[channels - 1])


def tiff_of(levels, **changes):
    """Returns an uncompressed TIFF of a numeric array [h, w, n]. `changes` are tags, like t259=(type, bytes)."""
    height, width, channels = levels.shape
    kind = {"u": 1, "i": 2, "f": 3}[levels.dtype.kind]
    kind, bits, color = (struct.pack("<H", value) for value in (kind, 8 * levels.itemsize, 2 if channels > 2 else 1))
    tags = {258: (SHORT, channels * bits), 262: (SHORT, color), 277: (SHORT, struct.pack("<H", channels))}
    tags |= {339: (SHORT, channels * kind), **{int(name[1:]): value for name, value in changes.items()}}
    return tiff((width, height), tags, levels.tobytes())


def long_text_png():
    """A PNG with 200 MB of compressed text."""
    text = png_chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(2**20 - 1), 9))
    return png(1, 1, *(200 * [text]), pixels=bytes(4))


REFUSED = {
    "a pixel more than the largest": (lambda: png(2**28 + 1, 1), ".*at most 268435456 are read"),
    "few rows of many": (few_rows_tiff, "not a whole image .strips or tiles are missing"),
    "many strips": (many_strips_tiff, "tag 273 has 2000000 values, at most 1048576 are read"),
    "a large tile": (large_tile_tiff, "tiles of 32768x32768 pixels for an image of 10000"),
    "shared tags": (shared_tags_tiff, "tags of 19200000[0-9]* bytes in a file of 480"),
    "many scans": (many_scans_jpeg, "501 scans of 163830000 pixels, at most 104 are read"),
    "run lengths": (run_length_bmp, "run lengths of 120000000 pixels in 9[0-9]* bytes"),
    "much text": (long_text_png, "not a whole image"),
}
