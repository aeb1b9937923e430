"""TensorFlow decodes and rotates photos exactly like Pillow, which axial-predict uses."""

import functools
import pathlib
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.data import decode
from axial.data.converters.coco import SAMPLE_DIR
from axial.data.levels import DEPTH, PERCENTILES, rgb
from axial.io import images
from tests.io.image_fixture import deep_png, encoded, many_scans_jpeg, picture, png, png_chunk, samples

BYTES = [tf.TensorSpec([], tf.string)]
pixels, by_percentiles = (
    tf.function(functools.partial(decode.decode, levels=levels), autograph=False, input_signature=BYTES)
    for levels in (DEPTH, PERCENTILES)
)
orientation = tf.function(decode.orientation, autograph=False, input_signature=BYTES)


def expected(data, levels=DEPTH):
    return np.asarray(rgb(images.open_photo("photo", data), levels))


def png_with(chunks, before=b"IDAT"):
    """Returns a PNG with additional chunks before its chunk `before`, or at its end."""
    data = encoded(picture("RGB"), "PNG")
    start = data.index(before) - 4
    return data[:start] + b"".join(png_chunk(*chunk) for chunk in chunks) + data[start:]


def jpeg_with(*segments):
    """Returns a JPEG with additional segments (marker code, content) before the original segments."""
    data = encoded(picture("RGB"), "JPEG")
    added = (bytes([0xFF, code]) + struct.pack(">H", len(body) + 2) + body for code, body in segments)
    return data[:2] + b"".join(added) + data[2:]


def webp_with(*chunks):
    """Returns a WebP with additional chunks at its end."""
    exif = encoded(picture("RGB"), "WEBP", exif=block(1))  # EXIF makes it an extended WebP
    body = exif[12 : exif.index(b"EXIF")]
    body = body[:8] + bytes([0x0C]) + body[9:]  # flags: it has EXIF and XMP
    body += b"".join(name + struct.pack("<I", len(text)) + text + b"\0" * (len(text) % 2) for name, text in chunks)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def more_photos():
    """Returns a dict from descriptions to the bytes of image files of kinds that `samples` lacks."""
    colours, size = picture("RGB", (61, 40)), (61, 40)
    alpha = colours.copy()
    alpha.putalpha(Image.linear_gradient("L").resize(size))
    low = Image.fromarray(np.arange(61 * 40, dtype=np.uint16).reshape(40, 61) % 256)
    transparent = encoded(colours.quantize(16), "GIF", transparency=3)
    assert b"\x21\xf9" in transparent
    photos = {
        "JPEG, progressive": encoded(colours, "JPEG", progressive=True),
        "JPEG, RGB": encoded(colours, "JPEG", keep_rgb=True),
        "JPEG, CMYK": encoded(colours.convert("CMYK"), "JPEG"),
        "PNG, grey of 16 low bits": encoded(low, "PNG"),
        "PNG, grey of 12 bits": encoded(Image.fromarray(np.asarray(low) * 16), "PNG"),
        "PNG, transparent palette": encoded(colours.quantize(16), "PNG", transparency=3),
        "WebP, transparent": encoded(alpha, "WEBP"),
        "WebP, lossless": encoded(alpha, "WEBP", lossless=True),
        "GIF, transparent": transparent,
        "GIF, grey": encoded(picture("L", size), "GIF"),
        "GIF, moving": encoded(colours, "GIF", save_all=True, append_images=[picture("L", size)], comment=b"x" * 700),
        "BMP, palette": encoded(colours.quantize(256), "BMP"),
        "BMP, small palette": encoded(colours.quantize(7), "BMP"),
        "BMP, grey": encoded(picture("L", size), "BMP"),
    }
    for subsampling, quality in (("4:4:4", 95), ("4:2:2", 75), ("4:2:0", 30), ("4:2:0", 95)):
        data = encoded(colours, "JPEG", subsampling=subsampling, quality=quality)
        photos[f"JPEG, {subsampling}, {quality}"] = data
    for bits in (8, 10, 12, 15, 16):
        for channels in range(1, 5):
            levels = np.random.default_rng(bits).integers(0, 2**bits, [*size[::-1], channels])
            photos[f"PNG, {channels} channels of {bits} bits in 16"] = deep_png(levels)
    return photos | {str(path): path.read_bytes() for path in list(pathlib.Path(SAMPLE_DIR).glob("*/*.jpg"))[:4]}


@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO")  # a CMYK MPO that Pillow wrote
def test_each_value_equals_pillows():
    """All formats, modes, chroma subsamplings and depths are tested. TensorFlow's default for JPEGs would fail."""
    refused = []
    for name, data in {**samples(), **more_photos()}.items():
        try:
            actual = pixels(data)
        except tf.errors.InvalidArgumentError as error:
            assert "save the photo as a PNG or RGB JPEG" in str(error), name
            refused.append(name)
        else:
            np.testing.assert_array_equal(actual, expected(data), str(name))
            np.testing.assert_array_equal(by_percentiles(data), expected(data, PERCENTILES), str(name))
    assert {name for name in refused if name[0] != "TIFF"} == {("BMP", "1", "")}  # one bit
    assert all(name in refused for name in samples() if name[0] == "TIFF")


def test_what_would_be_other_pixels_than_pillows_is_refused():
    gif, cmyk = encoded(picture("RGB").quantize(16), "GIF"), encoded(picture("CMYK"), "JPEG")
    adobe = cmyk.index(b"\xff\xee")
    photos = {
        "a CMYK JPEG without the marker of Adobe": cmyk[:adobe] + cmyk[adobe + 16 :],
        "a GIF whose first picture does not fill it": gif[:6] + struct.pack("<HH", 70, 50) + gif[10:],
        "a BMP of other colours than 8, 24 or 32 plain bits": encoded(picture("1"), "BMP"),
        "a moving WebP": encoded(picture("RGB"), "WEBP", save_all=True, append_images=[picture("1").convert("RGB")]),
        "encoded: a TIFF, which only axial-predict reads; save the photo as a PNG": encoded(picture("RGB"), "TIFF"),
    }
    for text, data in photos.items():
        expected(data)  # Pillow reads this file
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            pixels(data)
    with pytest.raises(tf.errors.InvalidArgumentError, match="encoded: not a JPEG, PNG, WebP, GIF or BMP; save"):
        pixels(b"no photo")
    for data in (b"", b"BM", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF0000WEBP"):
        with pytest.raises(tf.errors.InvalidArgumentError):
            pixels(data)
        assert orientation(data) == 1


def test_what_takes_a_decoder_long_is_refused(monkeypatch):
    for data, text in (
        (many_scans_jpeg(200), "too many scans"),
        (png(2**15, 2**14), "too many pixels, at most 268435456"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            pixels(data)
    monkeypatch.setattr(decode, "_MOST_PARTS", 9)
    comments = [png_with(9 * [(b"tEXt", b"a\0b")]), jpeg_with(*9 * [(0xFE, b"a")]), webp_with(*9 * [(b"NOTE", b"a")])]
    for data in comments:
        assert int(orientation(data)) == 1
        with pytest.raises(tf.errors.InvalidArgumentError, match="a file of more than 9 parts"):
            decode.orientation(data)


# === Orientation ===


# dict from TIFF type to the format letter of struct.
KINDS = {1: "B", 3: "H", 4: "L", 5: "LL", 6: "b", 7: "B", 8: "h", 9: "l", 10: "ll", 11: "f", 12: "d", 13: "L", 16: "Q"}


def block(way, order="<", kind=3):
    """Returns an EXIF block with the orientation `way`. `kind` is the tag's TIFF type in `KINDS`, by default SHORT."""
    value = struct.pack(order + KINDS[kind], *[way, 1][: len(KINDS[kind])]).ljust(4, b"\0")
    far = value[4:] and value
    head = b"II*\0" if order == "<" else b"MM\0*"
    entries = [(0x010F, 2, 1, bytes(4)), (0x0112, kind, 1, struct.pack(order + "L", 38) if far else value)]
    body = b"".join(struct.pack(order + "HHL", *entry[:3]) + entry[3] for entry in entries)
    return b"Exif\0\0" + head + struct.pack(order + "LH", 8, len(entries)) + body + bytes(4) + far


def placed(way):
    """Returns a dict from descriptions to image files. Each file stores the orientation in a different block."""
    return {
        "JPEG": encoded(picture("RGB"), "JPEG", exif=block(way)),
        "JPEG, in two segments": jpeg_with((0xE1, block(way)[:30]), (0xE1, b"Exif\0\0" + block(way)[30:])),
        "JPEG, in the second picture": encoded(picture("RGB"), "JPEG") + jpeg_with((0xE1, block(way))),
        "PNG, behind many chunks": png_with(200 * [(b"tEXt", b"a\0b")] + [(b"eXIf", block(way)[6:])], before=b"IEND"),
        "WebP": encoded(picture("RGB"), "WEBP", exif=block(way)),
        "WebP, odd": webp_with((b"NOTE", b"123"), (b"EXIF", block(way, ">"))),
    }


@pytest.mark.parametrize("way", [0, 6, 9])
def test_the_orientation_is_the_one_that_pillow_finds(way):
    for name, data in placed(way).items():
        actual = int(orientation(data))
        assert actual == images.orientation(images.open_image("photo", data)), name
        assert actual == (way if 1 <= way <= 8 and name != "JPEG, in the second picture" else 1), name


def test_the_tag_may_have_other_types():
    for kind, order in [*((kind, "<") for kind in KINDS), (3, ">"), (9, ">")]:
        photo = jpeg_with((0xE1, block(6, order, kind)))
        by_pillow = images.orientation(images.open_image("photo", photo))
        assert int(orientation(photo)) == by_pillow == (1 if KINDS[kind] in ("B", "LL", "ll", "f", "d") else 6), kind


def test_a_block_that_ends_early_is_no_error():
    for text in (b"", b"\0", b"Exif\0\0", b"MM\0*" + b"\xff" * 40, b"II*\0\x08\0\0\0\xff\xff"):
        for photo in (png_with([(b"eXIf", text)]), jpeg_with((0xE1, b"Exif\0\0" + text)), webp_with((b"EXIF", text))):
            assert orientation(photo) == 1
