"""Images are read as Pillow reads them, or refused by one line that names the file."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image, ImageOps, TiffImagePlugin

from axial.data.levels import rgb
from axial.errors import InputError
from axial.io.images import LARGEST_PIXELS, open_image, open_photo, orientation, upright
from tests.io import image_fixture as small
from tests.io.image_fixture import FORMATS, LONG, MODES, SHORT, TEXT, deep_png, encoded, picture, png, tiff_of

RUNS = settings(deadline=None, derandomize=True)  # derandomized, so that each run tests the same examples


@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO")  # a CMYK MPO that Pillow wrote
def test_every_listed_format_is_read_as_pillow_reads_it():
    images, formats = small.samples(), set()
    assert {mode for _, mode, _ in images} == set(MODES)
    for data in images.values():
        image, expected = open_image("photo", data), Image.open(io.BytesIO(data))
        formats.add(image.format)
        assert image.format == expected.format and image.tobytes() == expected.tobytes()
        assert image.mode != "P" or image.convert("RGB").tobytes() == expected.convert("RGB").tobytes()
    assert formats == set(FORMATS)


def test_images_of_other_formats_are_refused(monkeypatch):
    """The decoders of other formats are not called, above all not Ghostscript."""

    def started(*_, **__):
        raise AssertionError("Ghostscript")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    others = {"EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\n(%pipe%id) (w) file\n%%EOF\n"}
    others |= {format: encoded(picture("RGB"), format) for format in ("ICO", "ICNS", "PCX", "PPM", "SGI", "TGA")}
    for format, data in others.items():
        with pytest.raises(InputError) as caught:
            open_image("photo.jpg", data)
        text = "photo.jpg: not an image, or not a whole one; expected JPEG, MPO, PNG, WebP, BMP, GIF or TIFF"
        assert str(caught.value) == text, format


_NOISE = np.random.default_rng(0).integers(0, 2**12, [20, 30, 3])


NO_TIFF = "not a whole TIFF, or one of pixels, planes or a compression that Pillow does not read; expected colours of 8"
NONE = {
    "empty": (b"", "not an image"),
    "text": (b"no image", "not an image"),
    "large": (png(100_000, 100_000), f"too many pixels, at most {LARGEST_PIXELS} are read"),
    "no pixels": (png(10, 10), "not a whole image"),
    "colours of floats": (tiff_of(_NOISE.astype(np.float32)), NO_TIFF),
    "cut": (tiff_of(_NOISE.astype(np.uint8))[:100], "not a whole (TIFF|image)"),
    "planes of floats": (tiff_of(_NOISE.astype(np.float32), t284=(3, b"\2\0")), NO_TIFF),
}


@pytest.mark.parametrize("name", NONE)
def test_files_that_are_not_readable_images_are_named(name):
    data, words = NONE[name]
    with pytest.raises(InputError, match=f"^photo.tif: {words}") as caught:
        open_image("photo.tif", data)
    assert "BytesIO" not in str(caught.value)


def in_planes(levels, packed):
    """Returns a TIFF of colours [h, w, 3], with one strip per colour plane."""
    planes = [zlib.compress(plane) if packed else bytes(plane) for plane in np.moveaxis(levels, -1, 0).copy()]
    sizes = np.array([len(plane) for plane in planes], "<u4")
    tags = {"t259": (SHORT, bytes([8 if packed else 1, 0])), "t279": (LONG, sizes.tobytes()), "t284": (SHORT, b"\2\0")}
    offset = len(tiff_of(levels, **tags, t273=(LONG, bytes(12)))) - levels.nbytes
    offsets = (offset + np.cumsum(sizes) - sizes).astype("<u4")
    return tiff_of(levels, **tags, t273=(LONG, offsets.tobytes()))[:offset] + b"".join(planes)


def test_colours_in_planes():
    """libtiff gives Pillow only the upper bytes of compressed planes. 12-bit colours raise InputError."""
    levels = _NOISE.astype(np.uint16)
    np.testing.assert_array_equal(open_photo("photo.tif", in_planes(levels, packed=False)).deep, levels)
    actual = open_photo("photo.tif", in_planes(levels * 16, packed=True)).deep
    np.testing.assert_array_equal(actual, levels // 16 * 257)
    with pytest.raises(InputError, match="^photo.tif: 12-bit colours in a 16-bit TIFF, .*; save it as a PNG"):
        open_photo("photo.tif", in_planes(levels, packed=True))


WHITE, PREMULTIPLIED = (SHORT, b"\0\0"), (SHORT, b"\1\0")
# dict from names to (stored values, tags, values that are read). The smallest value that is read is the darkest.
GREY, SIGNED = _NOISE[..., :1], _NOISE[..., :1] - 2000
NUMBERS = {
    "16 bits": (GREY.astype(np.uint16), {}, GREY),
    "signed": (SIGNED.astype(np.int16), {}, SIGNED),
    "32 bits, signed": (SIGNED.astype(np.int32), {}, SIGNED),
    "32 bits": (GREY.astype(np.uint32) << 20, {}, GREY.astype(np.uint32) << 20),
    "8 bits, signed": ((SIGNED // 17).astype(np.int8), {}, SIGNED // 17),
    "white first": (GREY.astype(np.uint16), {"t262": WHITE}, 65535 - GREY),
    "floats, white first": (GREY.astype(np.float32), {"t262": WHITE}, 1.0 - GREY),
    "no data": (SIGNED.astype(np.float32), {"t42113": (TEXT, b"-77\0")}, np.where(SIGNED == -77, np.nan, SIGNED)),
    "colours": (_NOISE.astype(np.uint16), {}, _NOISE),
    "premultiplied": (np.dstack([_NOISE, GREY]).astype(np.uint16), {"t338": PREMULTIPLIED}, _NOISE),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_tags_of_a_tiff_decide_its_values(name):
    """Pillow itself does not invert deep grey, and reads signed 8-bit and unsigned 32-bit values wrongly."""
    stored, tags, expected = NUMBERS[name]
    actual = open_photo("photo.tif", tiff_of(stored, **tags)).deep
    np.testing.assert_array_equal(actual, expected.squeeze())


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_the_values_of_a_deep_png_are_read(channels):
    levels = np.dstack([_NOISE, GREY])[..., :channels] * 16
    actual = open_photo("photo.png", deep_png(levels)).deep
    np.testing.assert_array_equal(actual, levels[..., : 3 if channels > 2 else 1].squeeze())


def test_a_palette_of_8_bits_is_not_black():
    """A TIFF's palette has 16-bit values, but some programs write 8-bit values, which would be nearly black."""
    colours = np.random.default_rng(0).integers(0, 256, [3, 256])
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    for scale in (1, 256):
        tags = {"t262": (SHORT, b"\3\0"), "t320": (SHORT, (colours * scale).astype("<u2").tobytes())}
        actual = np.asarray(rgb(open_photo("photo.tif", tiff_of(grey, **tags))))
        np.testing.assert_array_equal(actual.reshape(256, 3), colours.T)


def pages(*kinds):
    """Returns a TIFF with a page for each of `kinds`, the values of the tag NewSubfileType (TIFF Revision 6.0)."""
    file = io.BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(file, new=True) as writer:
        for kind in kinds:
            picture("L").save(writer, "TIFF", tiffinfo={254: kind})
            writer.newFrame()
    return file.getvalue()


def moving(format, mode="RGB"):
    others = [picture("1").convert(mode), picture("L").convert(mode)]
    return encoded(picture(mode), format, save_all=True, append_images=others)


def extra_channels(count, extra):
    """Returns a 4x5 TIFF with `count` channels. `extra` is the value of ExtraSamples (TIFF Revision 6.0)."""
    color = 2 if count > 2 else 1
    tags = {"t262": (SHORT, bytes([color, 0])), "t338": (SHORT, bytes([extra, 0]) * (count - 2 * color + 1))}
    return tiff_of(np.random.default_rng(0).integers(0, 256, [5, 4, count], np.uint8), **tags)


LEFT_OUT = {
    "page 1 of 3 is read": [pages(0, 0, 0), moving("TIFF"), pages(0, 1, 0, 4, 0)],
    "": [pages(0), pages(0, 1), pages(0, 4), pages(1), *(encoded(picture("RGB"), format) for format in FORMATS)],
    "frame 1 of 3 is read": [moving("GIF"), moving("WEBP"), moving("PNG")],
    "channel 1 of 2 is read": [extra_channels(2, 0), extra_channels(2, 2), deep_png(_NOISE[..., :2] * 16)],
    "channels 1 to 3 of 4 are read": [extra_channels(4, 0), extra_channels(4, 1), extra_channels(4, 2)],
    "channels 1 to 3 of 5 are read": [extra_channels(5, 0)],
}


@pytest.mark.parametrize("text", LEFT_OUT)
def test_contents_that_are_not_read_are_named(text):
    for data in LEFT_OUT[text]:
        assert open_photo("photo", data).left_out == ([text] if text else [])


@pytest.mark.parametrize("kinds", [(1, 0), (1, 4, 0)])
def test_a_smaller_copy_of_the_picture_is_not_read_for_it(kinds):
    with pytest.raises(InputError, match="^photo: its first page is a smaller copy of another one; save that as"):
        open_photo("photo", pages(*kinds))


@pytest.fixture(scope="module")
def whole_images():
    deep = [deep_png(np.arange(0, 4096, 8).reshape(16, 8, 4)[..., :channels]) for channels in (1, 2, 3, 4)]
    return [*small.samples().values(), *deep]


@settings(RUNS, max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:::PIL")
def test_damaged_images_are_refused_or_read(whole_images, data):
    """The test replaces, removes and inserts bytes. The only error is InputError, within 20 seconds."""
    damaged = bytearray(data.draw(st.sampled_from(whole_images)))
    for _ in range(data.draw(st.sampled_from((1, 1, 2, 4, 10)))):
        start = data.draw(st.integers(0, min(len(damaged), data.draw(st.sampled_from((64, 400, 10**9))))))
        damaged[start : start + data.draw(st.sampled_from((0, 1, 1, 8, 10**9)))] = data.draw(st.binary(max_size=8))
    started = time.process_time()
    try:
        photo = open_photo("photo", bytes(damaged))
        assert upright(rgb(photo), orientation(photo.image)).mode == "RGB"
    except InputError as error:
        assert str(error).startswith("photo: ") and "\n" not in str(error) and "BytesIO" not in str(error)
    assert time.process_time() - started < 20


@pytest.mark.parametrize("name", small.REFUSED)
def test_a_small_file_that_takes_long_or_much_memory_is_refused(name):
    make, words = small.REFUSED[name]
    data = make()
    assert len(data) < 2**23
    started = time.process_time()
    with pytest.raises(InputError, match=f"^photo: {words}"):
        open_image("photo", data)
    assert time.process_time() - started < 2


def test_only_the_first_picture_of_a_file_is_decoded():
    """A GIF of 20,000 frames of 1000x1000 pixels is read in less than 4 seconds."""
    frame = encoded(Image.new("L", (1000, 1000)), "GIF")
    start = frame.index(b",", 13 + 3 * 2 ** ((frame[10] & 7) + 1) if frame[10] & 128 else 13)
    started = time.process_time()
    image = rgb(open_photo("photo", frame[:start] + 20_000 * frame[start:-1] + b";"))
    assert time.process_time() - started < 4 and np.asarray(image).max() == 0


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_upright_as_pillow_turns_them(format):
    def with_exif(block):
        return open_image("photo", encoded(picture("RGB", (8, 6)), format, exif=block))

    exif = Image.Exif()
    exif[0x010F], exif[0x011A] = "maker", 72.0
    for exif[0x0112] in range(1, 9):
        image = with_exif(exif.tobytes())
        assert upright(image).tobytes() == ImageOps.exif_transpose(image).tobytes()
    image = with_exif(b"Exif\0\0garbagegarbage")
    assert upright(image).tobytes() == image.tobytes()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_limit_of_pixels_is_ours_and_not_pillows():
    """Pillow by default warns above 89 million pixels, and raises above 179 million."""
    size = 15_000, 13_000
    assert open_image("photo", encoded(Image.new("1", size), "PNG")).size == size
    with pytest.raises(InputError, match=f"^photo: too many pixels, at most {LARGEST_PIXELS} are read$"):
        open_image("photo", png(20_000, 15_000))


def test_a_bigtiff_is_read_like_a_tiff():
    """A BigTIFF has offsets of 64 bits."""
    pixels, file = np.arange(2 * 30 * 40, dtype=np.uint16).reshape(2, 30, 40), io.BytesIO()
    tifffile.imwrite(file, pixels, bigtiff=True, photometric="minisblack")
    data = file.getvalue()
    photo = open_photo("big.tif", data)
    np.testing.assert_array_equal(photo.deep, pixels[0])
    assert [*photo.left_out] == ["page 1 of 2 is read"]
    (page,) = struct.unpack_from("<Q", data, 8)
    many = data[:page] + struct.pack("<Q", 2**16) + data[page + 8 :]
    with pytest.raises(InputError, match="big.tif: 65536 tags, at most 65535 are read"):
        open_photo("big.tif", many)


def test_pages_of_a_tiff_whose_numbers_begin_with_the_upper_byte():
    pixels, file = np.arange(3 * 5 * 7, dtype=np.uint16).reshape(3, 5, 7), io.BytesIO()
    tifffile.imwrite(file, pixels, byteorder=">", photometric="minisblack")
    photo = open_photo("a.tif", file.getvalue())
    np.testing.assert_array_equal(photo.deep, pixels[0])
    assert [*photo.left_out] == ["page 1 of 3 is read"]
