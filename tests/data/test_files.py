"""The photos that TensorFlow decodes from records."""

import io
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.data.convert import encode_item
from axial.data.converters.coco import checked_labels
from axial.data.decode import decode
from axial.data.files import load_photo, photo_fields, read_photo
from axial.data.levels import DEPTH, eight_bits, rgb
from axial.data.specs import COCO
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.io.images import open_image, open_photo, upright
from tests.io.image_fixture import deep_png, encoded, picture, samples


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_photo_whose_exif_block_is_damaged_is_converted_as_it_is_stored(format):
    encoded = io.BytesIO()
    Image.new("RGB", (8, 6)).save(encoded, format, exif=b"Exif\0\0garbagegarbage")
    fields, remarks = photo_fields("photo", encoded.getvalue(), (8, 6))
    assert not remarks and fields == {"image/encoded": encoded.getvalue(), "image/height": 6, "image/width": 8}
    with pytest.raises(InputError, match="^photo: 8x6 pixels, its labels say 6x8$"):
        photo_fields("photo", encoded.getvalue(), (6, 8))


def turned_photo(way, format, sides):
    """Returns an encoded photo with the EXIF orientation `way`. An MPO also has a second picture."""
    exif = Image.Exif()
    exif[0x0112] = way
    options = dict(save_all=True, append_images=[picture("RGB")]) if format == "MPO" else {}
    return encoded(picture("RGB", sides), format, exif=exif, **options)


@pytest.mark.parametrize("way,format", [(1, "JPEG"), (3, "PNG"), (6, "WEBP"), (6, "JPEG"), (8, "MPO")])
def test_labels_are_of_the_upright_photo_unless_their_size_or_a_flag_says_otherwise(way, format):
    """The record keeps the photo's bytes, and stores the orientation."""
    sides, turned = (30, 20), (20, 30) if way > 4 else (30, 20)
    data = turned_photo(way, format, sides)
    pixels = np.asarray(upright(open_image("photo", data)))
    for size, stored, expected in (
        (None, False, way),
        (turned, False, way),
        (sides, True, 1),
        (None, True, 1),
        (sides, False, way if way < 5 else 1),  # this is the size before rotation
        (turned, True, way if way > 4 else 1),
    ):
        fields, _ = photo_fields("photo", data, size, stored)
        assert fields.get("image/orientation", 1) == expected
        assert data.startswith(fields["image/encoded"]) == (format != "WEBP")
        photo = decode_photo({key: tf.constant(value) for key, value in fields.items()}).numpy()
        assert photo.shape[:2] == (fields["image/height"], fields["image/width"])
        np.testing.assert_array_equal(photo, pixels if expected == way else rgb(open_photo("photo", data)))
    square = turned_photo(way, "JPEG", (20, 20))
    assert photo_fields("photo", square, (20, 20))[0].get("image/orientation", 1) == way
    with pytest.raises(InputError, match="^photo: 30x20 pixels.*, its labels say 7x9$"):
        photo_fields("photo", data, (7, 9))


def test_photos_of_every_format_and_mode_become_ones_that_tensorflow_decodes():
    for (format, mode, _), data in samples().items():
        image = rgb(open_photo("photo", data))
        stored = photo_fields("photo", data, image.size, stored=True)[0]["image/encoded"]
        actual = decode(stored).numpy()
        assert actual.shape == (*image.size[::-1], 3)
        if format not in ("JPEG", "MPO"):
            assert (actual == np.asarray(image)).all(), (format, mode)


def test_what_pillow_reads_but_training_does_not_is_broken():
    data = encoded(picture("RGB"), "PNG")[:-16] + bytes(8) + b"IEND\xaeB`\x82"  # ends in a wrong checksum
    open_image("photo.png", data)
    for read_it in (photo_fields, lambda path, png: checked_labels(path, None, [], spec=COCO, png=png)):
        with pytest.raises(InputError, match=r"^photo.png: damaged, .* does not decode it: Invalid PNG data.*PNG$"):
            read_it("photo.png", data)


def test_a_phones_jpeg_with_a_second_picture_stays_a_jpeg():
    image = picture("RGB", (300, 200))
    plain = encoded(image, "JPEG", quality=90)
    data = encoded(image, "MPO", quality=90, save_all=True, append_images=[picture("RGB", (300, 200))])
    assert open_image("photo", data).format == "MPO"
    stored = photo_fields("photo", data, (300, 200))[0]["image/encoded"]
    assert data.startswith(stored) and len(plain) <= len(stored) < 1.05 * len(plain)
    wrong = data.replace(struct.pack("<L", len(stored)), struct.pack("<L", 1000))  # a wrong size in the MPO's index
    assert wrong != data and photo_fields("photo", wrong, (300, 200))[0]["image/encoded"] == wrong


@pytest.mark.parametrize("channels,bits", [(1, 9), (1, 12), (2, 16), (3, 1), (3, 10), (4, 14)])
def test_a_deep_photo_has_the_same_8_bits_wherever_it_is_read(tmp_path, channels, bits):
    """For both rules, Pillow's path, the TensorFlow graph and the records give the same values. Alpha is ignored."""
    levels = np.random.default_rng(bits).integers(0, 2**bits, [9, 70, channels])
    levels[0, 0, 0] = 2**bits - 1
    colours = levels if channels % 2 else levels[..., :-1]
    if channels % 2 == 0:
        levels[..., -1] = 65535
    (tmp_path / "a.png").write_bytes(deep_png(levels))
    expected = {
        "depth": colours // 4 ** max(0, -(-(bits - 8) // 2)),  # depth is the smallest of 8, 10, 12, 14, 16 that fits
        "percentiles": eight_bits(colours, "percentiles"),
    }
    for rule, values in expected.items():
        values = np.broadcast_to(values, [9, 70, 3])
        np.testing.assert_array_equal(load_photo(tmp_path / "a.png", rule), values)
        np.testing.assert_array_equal(decode(deep_png(levels), rule), values)
    record, *_ = encode_item({"photo": tmp_path / "a.png", "id": 0})
    np.testing.assert_array_equal(decode(record["image/encoded"]), values)


def test_floats_are_shares_of_white_or_clipped():
    shares = np.linspace(0, 1, 256, dtype=np.float32)[None].repeat(3, 0)
    assert (eight_bits(shares, DEPTH) == np.arange(256)).all()
    assert eight_bits(np.float32([-1, np.nan, 2 / 255]), DEPTH).tolist() == [0, 0, 2]
    odd = np.float32([np.nan, -np.inf, np.inf, -5, 2.0**24])
    assert eight_bits(odd, DEPTH).tolist() == [0, 0, 255, 0, 255]


@pytest.mark.parametrize("way", range(1, 9))
def test_stored_values_are_turned_upright(tmp_path, way):
    """Values of 16 bits are turned like a photo of 8 bits."""
    numbers, exif = np.arange(12, dtype=np.uint8).reshape(3, 4), Image.Exif()
    exif[0x0112] = way
    Image.fromarray(numbers).save(tmp_path / "a.png", exif=exif)
    Image.fromarray(numbers * np.uint16(5000)).save(tmp_path / "b.png", exif=exif)
    image, numbers = read_photo(str(tmp_path / "a.png"))
    _, stored = read_photo(str(tmp_path / "b.png"))
    assert stored.dtype == np.uint16 and stored.shape == (*image.shape[:2], 1)
    np.testing.assert_array_equal(stored, numbers * np.uint16(5000))


def test_stored_values_have_the_channels_of_the_file(tmp_path):
    """Grey has one channel, with or without alpha. Colours and palettes have three, floats keep their values."""
    shapes = {"1": 1, "L": 1, "LA": 1, "RGB": 3, "RGBA": 3, "P": 3}
    for mode, channels in shapes.items():
        Image.new("RGB", (4, 3), (200, 200, 200)).convert(mode).save(tmp_path / "a.png")
        image, stored = read_photo(str(tmp_path / "a.png"))
        np.testing.assert_array_equal(stored, image[..., :channels])
    values = np.linspace(-3, 1e6, 12, dtype=np.float32).reshape(3, 4)
    Image.fromarray(values).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(read_photo(str(tmp_path / "a.tif"))[1][..., 0], values)
