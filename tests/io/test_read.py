"""The door in: whatever a file holds comes out as a checked value, or as one line that names the file and the field."""

import copy
import io
import json
import struct
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from axial.errors import InputError
from axial.io import read, schemas
from axial.io.read import open_image, read_file, read_json, read_text, read_yaml, upright

RUNS = settings(deadline=None, derandomize=True)  # derandomized, so that each run tests the same
PANOPTIC = {
    "categories": [{"id": 1}],
    "images": [{"id": 7, "file_name": "7.jpg", "width": 20, "height": 10}],
    "annotations": [
        {"image_id": 7, "file_name": "7.png", "segments_info": [{"id": 1, "category_id": 1, "iscrowd": 0}]}
    ],
}
SPEC = {"name": "mine", "class_names": ["a"], "category_ids": [1], "things": [True], "label_divisor": 1000}
CONTENTS = {
    schemas.Panoptic: PANOPTIC,
    schemas.Results: {"annotations": PANOPTIC["annotations"]},
    schemas.Spec: SPEC,
    schemas.Manifest: {
        "format": 1,
        "spec": SPEC,
        "split": "val",
        "examples": 3,
        "source": "x",
        "shards": [["val-00000-of-00001.tfrecord", 3, 100]],
    },
    schemas.SpecFile: {"name": "mine", "classes": [{"id": 1, "name": "a", "thing": True, "color": [1, 2, 3]}]},
    schemas.Scores: {"pq": {"all": {"pq": 0.5}}, "miou": {"miou": None}},
}
WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


def places(value, path=()):
    """Paths to every field and item."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    if isinstance(value, list):
        for i in range(len(value)):
            yield from places(value[i], (*path, i))


def put(value, path, new):
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if new is put:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return value


@pytest.mark.parametrize("schema", CONTENTS, ids=lambda s: s.__name__)
@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_wrong_field_is_refused_or_has_its_type(tmp_path, schema, data):
    """Of each field and item: deleted, of another type, out of range."""
    content = CONTENTS[schema]
    place = data.draw(st.sampled_from(list(places(content))))
    path = tmp_path / "file.json"
    path.write_text(json.dumps(put(content, place, data.draw(st.just(put) | WRONG))))
    try:
        value = read_json(str(path), schema)[1]
    except InputError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:
        read.convert("again: ", json.loads(read.msgspec.json.encode(value)), schema)


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read(tmp_path, data):
    """Bit flips, and cuts."""
    schema = data.draw(st.sampled_from(list(CONTENTS)))
    whole = bytearray(json.dumps(CONTENTS[schema]).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "file.json"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for reader in (read_json, read_yaml):
        try:
            reader(str(path), schema)
        except InputError as error:
            assert str(path) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    "text,words",
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "expected a mapping, got a list"),
        (b'{"images": ' + b"[" * 100_000, r"images\[0\]: expected a mapping"),
        (b'{"x": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"images": NaN}', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (json.dumps(put(PANOPTIC, ("annotations", 0, "segments_info", 0, "category_id"), True)).encode(), "got bool"),
        (
            json.dumps(put(PANOPTIC, ("images", 0, "file_name"), "../x.jpg")).encode(),
            "file_name: expected str matching",
        ),
        (json.dumps(put(PANOPTIC, ("images", 0, "width"), 10**9)).encode(), "width: expected int <= 65536"),
    ],
)
def test_wrong_json_is_named(tmp_path, text, words):
    path = tmp_path / "file.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=words):
        read_json(str(path), schemas.Panoptic)


@pytest.mark.parametrize(
    "text,words",
    [
        ("a: &a [x]\nb: *a", "aliases are not read"),
        ("[" * 50_000, "nested too deeply"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("name: [a]", "is missing the required field classes|name: expected str"),
        ("name: ''\nclasses: [{id: 1, name: a}]", "name: expected str of length >= 1"),
        ("name: a\nclasses: [{id: 1, name: a}]\nlabel_divisor: 1000.5", "label_divisor: expected int, got float"),
        ("name: a\nclasses: [{id: 1, name: a}]\nlabel_divisor: .nan", "label_divisor: expected int, got float"),
        ("name: a\nclasses: [{id: 1, name: a}]\nlabel_divisor: 0", "label_divisor: expected int >= 1"),
        ("name: a\nclasses: [{id: 1, name: a}]\nignore: 255.5", "ignore: expected int, got float"),
        ("name: a\nclasses: [{id: 1, name: a}]\nignore: 99999999", "ignore: expected int <= 32768"),
        ("name: a\nclasses: [{id: 1, name: a}]\nignored_ids: {a: 1}", "ignored_ids: expected a list, got a mapping"),
    ],
)
def test_wrong_yaml_is_named(tmp_path, text, words):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_yaml(str(path), schemas.SpecFile)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_file(str(tmp_path / "none"))
    with pytest.raises(InputError, match="a folder, a file is expected"):
        read_file(str(tmp_path))
    (tmp_path / "large").write_bytes(bytes(100))
    with pytest.raises(InputError, match="100 bytes, at most 99 are read"):
        read_file(str(tmp_path / "large"), 99)
    (tmp_path / "latin").write_bytes(b"a\xe9b")
    with pytest.raises(InputError, match="not UTF-8 .*at byte 1"):
        read_text(str(tmp_path / "latin"))


def png(width, height):
    """A PNG that says it has this size, in a few bytes."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data,words",
    [
        (b"", "not an image"),
        (b"no image", "not an image"),
        (png(100_000, 100_000), "at most 268435456 are read|exceeds limit"),
        (png(10, 10), "not a whole image"),
    ],
)
def test_images_that_are_none_are_named(data, words):
    with pytest.raises(InputError, match=f"photo.png: .*({words})") as caught:
        open_image("photo.png", data)
    assert "BytesIO" not in str(caught.value)


@settings(RUNS, max_examples=200)
@given(data=st.data())
def test_damaged_images_are_refused_or_read(data):
    encoded = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").resize((40, 30)).save(
        encoded, data.draw(st.sampled_from(["PNG", "JPEG"]))
    )
    whole = bytearray(encoded.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        open_image("photo", bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    except InputError as error:
        assert str(error).startswith("photo: ") and "\n" not in str(error)


def with_exif(format, block):
    """An image of 8 x 6 pixels with an EXIF block, opened."""
    encoded, image = io.BytesIO(), Image.linear_gradient("L").convert("RGB").resize((8, 6))
    image.save(encoded, format, exif=block)
    return open_image("photo", encoded.getvalue())


def block_of(orientation):
    exif = Image.Exif()
    exif[0x010F], exif[0x0112], exif[0x011A] = "maker", orientation, 72.0
    return exif.tobytes()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright_as_pillow_turns_them(format, orientation):
    image = with_exif(format, block_of(orientation))
    assert upright(image).tobytes() == ImageOps.exif_transpose(image).tobytes()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_an_image_whose_exif_block_is_damaged_stays_as_it_is_stored(format):
    image = with_exif(format, b"Exif\0\0garbagegarbage")
    assert upright(image).tobytes() == image.tobytes()


@settings(RUNS, max_examples=300)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_a_damaged_exif_block_is_never_an_error(data):
    block = bytearray(block_of(6))
    for _ in range(data.draw(st.integers(1, 4))):
        block[data.draw(st.integers(6, len(block) - 1))] = data.draw(st.integers(0, 255))
    image = with_exif(data.draw(st.sampled_from(["PNG", "WEBP"])), bytes(block))
    assert upright(image).size in ((8, 6), (6, 8))
