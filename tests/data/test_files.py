"""Photos of data sets, as TensorFlow decodes them."""

import io

import pytest
from PIL import Image

from axial.data.files import photo_bytes
from axial.errors import InputError


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_photo_whose_exif_block_is_damaged_is_converted_as_it_is_stored(format):
    encoded = io.BytesIO()
    Image.new("RGB", (8, 6)).save(encoded, format, exif=b"Exif\0\0garbagegarbage")
    assert photo_bytes("photo", encoded.getvalue(), (8, 6)) == encoded.getvalue()
    with pytest.raises(InputError, match="^photo: 8x6 pixels, its labels say 6x8$"):
        photo_bytes("photo", encoded.getvalue(), (6, 8))
