"""The door in: whatever a file holds comes out as a checked value, or as one line that names the file and the field."""

import ast
import codecs
import contextlib
import copy
import gc
import io
import json
import math
import os
import pathlib
import re
import socket
import time
import zlib

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image, ImageOps

import axial
from axial.data.files import to_rgb
from axial.errors import InputError
from axial.io import read, schemas
from axial.io.read import LARGEST_PIXELS, open_image, read_file, read_json, read_text, read_yaml, upright
from axial.io.write import file_digest
from image_fixture import FORMATS, MODES, READ, REFUSED, deep_png, encoded, picture, png, samples, tiff_of

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
        ("{}".encode("utf-16"), "not UTF-8 but UTF-16"),
        (json.dumps(put(PANOPTIC, ("annotations", 0, "segments_info", 0, "category_id"), True)).encode(), "got bool"),
        (json.dumps(put(PANOPTIC, ("images", 0, "file_name"), "")).encode(), "file_name: expected str of length >= 1"),
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
        ("[" * 50_000, "nested too deeply|nesting depth"),
        ("[" * 101 + "]" * 101, "line 1: nested too deeply"),
        ("!!python/object/apply:os.system ['true']", "the tag tag:yaml.org,2002:python.* is not read|the tag !!python"),
        ("name: !!timestamp abc", r"line 1: !!timestamp 'abc' is not read"),
        ("name: !!binary '@@@'", "line 1: !!binary '@@@' is not read"),
        ("name: !!bool maybe", "line 1: !!bool 'maybe' is not read"),
        ("name: !!int x", "line 1: !!int 'x' is not read"),
        ("name: !mine x", "line 1: !mine 'x' is not read"),
        ("name: x\nclasses: !!set {a}", "line 2: the tag !!set is not read"),
        ("!!omap [a: b]", "line 1: the tag !!omap is not read"),
        ("!!merge <<: {a: 1}", "line 1: !!merge '<<' is not read"),
        ("<<: 1\nname: x\nclasses: []", "unknown field <<"),
        ("name: 0x_", "line 1: '0x_' has no digits"),
        ("name: 0x" + 5000 * "f", "line 1: a number of 5002 characters, at most 100 are read"),
        ("name: " + 5000 * "9", "line 1: a number of 5000 characters, at most 100 are read"),
        ("name: x\nclasses: 2024-13-45", "classes: expected a list, got str"),
        ("name: x\nclasses: 1:30", "classes: expected a list, got str"),
        ("? [a]\n: b", "line 1: a list or a mapping as a key"),
        ("name: a\n---\nname: b", "several documents"),
        ('name: "\\uD800"', "not YAML"),
        ("name: \x00", "not YAML"),
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


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=20,
)


def same(a, b):
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, (list, dict)) and type(a) is type(b) and len(a) == len(b):
        pairs = zip(a, b) if isinstance(a, list) else ((a[key], b.get(key)) for key in a)
        return all(same(*pair) for pair in pairs)
    return type(a) is type(b) and a == b


@settings(RUNS, max_examples=200, suppress_health_check=list(HealthCheck))
@given(PLAIN, st.booleans())
def test_yaml_is_read_as_pyyaml_reads_it(value, flow):
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert same(read._plain_yaml(text), yaml.safe_load(text))


@settings(RUNS, max_examples=2000)
@given(
    st.text("0123456789_.-+xbeE", max_size=8)
    | st.sampled_from("y n Y yes No TRUE on Off null NULL ~ .inf -.INF .NaN 0o7 = << '5' \"no\"".split())
    | st.sampled_from("!!str 5,!!int '5',!!bool yes,!!null '',! 5,!!str yes".split(","))
)
def test_scalars_are_those_of_pyyaml(text):
    """But for dates, sexagesimal numbers and keys of merges, which are text here."""
    try:
        wanted = yaml.safe_load(f"a: {text}\n")["a"]
    except (yaml.YAMLError, ValueError):  # '=' or 0x_
        wanted = text
    if not isinstance(wanted, (type(None), bool, int, float, str, list)):
        wanted = text
    try:
        assert same(read._plain_yaml(f"a: {text}\n")["a"], wanted)
    except yaml.YAMLError:
        assert wanted == text or isinstance(wanted, list)


@pytest.mark.parametrize(
    "item", ["1:", "1, ", "a: {b: c}, ", "'a', ", "!!str a, ", "&a b, ", "# x\n", "\n", "[], ", "a\n ", "? a\n"]
)
def test_the_time_of_yaml_is_linear(item):
    """Ten times as much takes at most thirty times as long."""

    def seconds(count):
        text = f"classes: [{count * item}]" if "? " not in item else count * item
        gc.disable()  # a collection takes as long as all other tests have left objects
        started = time.thread_time()
        try:
            with contextlib.suppress(yaml.YAMLError):
                read._plain_yaml(text)
            return time.thread_time() - started
        finally:
            gc.enable()

    assert seconds(100_000) < 30 * max(seconds(10_000), 0.01)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "marked").write_bytes(codecs.BOM_UTF8 + b'{"images": []}\r\n')
    assert read_text(str(tmp_path / "marked")) == '{"images": []}\r\n'
    data, content = read_json(str(tmp_path / "marked"), schemas.ImageInfo)
    assert data.startswith(b"{") and content.images == []
    (tmp_path / "wide").write_text("a", "utf-16")
    with pytest.raises(InputError, match="wide: not UTF-8 but UTF-16"):
        read_text(str(tmp_path / "wide"))


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


@pytest.fixture(params=["pipe", "socket", "device", "pipe as a URL"])
def special(request, tmp_path):
    """The path of something that is no file. Whoever opens the pipe does not wait: there is a writer."""
    path = tmp_path / "photo.jpg"
    if request.param == "device":
        yield "/dev/zero"
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            yield str(path)
    else:
        os.mkfifo(path)
        end = os.open(path, os.O_RDWR)
        os.write(end, b"{}")
        yield f"file://{path}" if "URL" in request.param else str(path)
        os.close(end)


def test_pipes_devices_and_sockets_are_refused_at_once(special):
    readers = (
        read_file,
        read_text,
        file_digest,
        lambda path: read_json(path, schemas.Scores),
        lambda path: read_yaml(path, schemas.SpecFile),
    )
    for reader in readers:
        with pytest.raises(InputError, match=f"^{special}: a pipe, device or socket, a file is expected$"):
            reader(special)


@pytest.mark.parametrize(
    "data,words",
    [
        (b"", "not an image"),
        (b"no image", "not an image"),
        (png(100_000, 100_000), f"at most {LARGEST_PIXELS} are read"),
        (png(10, 10), "not a whole image"),
    ],
)
def test_images_that_are_none_are_named(data, words):
    with pytest.raises(InputError, match=f"photo.png: .*({words})") as caught:
        open_image("photo.png", data)
    assert "BytesIO" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO")  # Pillow's own, of CMYK
def test_every_listed_format_is_read_as_pillow_reads_it():
    found, formats = samples(), set()
    assert {mode for _, mode, _ in found} == set(MODES)
    for data in found.values():
        image, wanted = open_image("photo", data), Image.open(io.BytesIO(data))
        formats.add(image.format)
        assert image.format == wanted.format and image.tobytes() == wanted.tobytes()
        assert to_rgb(upright(image)).size in ((30, 20), (20, 30))
    assert formats == set(FORMATS)


def other_formats():
    """dict from formats that Pillow knows and that are not read to an image."""
    Image.init()
    found = {"EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\n(%pipe%id) (w) file\n%%EOF\n"}
    for format in sorted({*Image.SAVE, *Image.SAVE_ALL} - {*FORMATS, "DIB", "PDF"}):
        for mode in ("RGB", "L", "1", "P", "F"):
            try:
                found[format] = encoded(picture(mode, (32, 32)), format)
                Image.open(io.BytesIO(found[format]))
                break
            except (OSError, KeyError, ValueError, TypeError, AttributeError):  # no such mode, or written only
                found.pop(format, None)
    return found


def test_images_of_other_formats_are_refused(monkeypatch):
    """No decoder of theirs is called, above all not Ghostscript."""

    def started(*_, **__):
        raise AssertionError("Ghostscript")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    others = other_formats()
    assert len(others) > 10
    for format, data in others.items():
        with pytest.raises(InputError) as caught:
            open_image("photo.jpg", data)
        text = "photo.jpg: not an image, or not a whole one; expected JPEG, MPO, PNG, WebP, BMP, GIF or TIFF"
        assert str(caught.value) == text, format


def test_only_one_module_opens_images():
    """Pillow opens them in `open_image`. TensorFlow decodes records, whose photos come from there, and in exports."""
    root, found = pathlib.Path(axial.__file__).parent, set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.search(r"Image\.open$|imread$|\.decode_(image|jpeg|png|gif|bmp|webp|and_crop_jpeg)$", name):
                found.add((str(path.relative_to(root)), name))
    assert found == {
        ("io/read.py", "Image.open"),
        ("io/read.py", "tf.io.decode_png"),
        *(("data/decode.py", f"tf.io.decode_{name}") for name in ("jpeg", "png", "image", "webp")),
        ("data/streams.py", "tf.io.decode_png"),
        ("data/tfrecord.py", "tf.io.decode_png"),
    }


_NOISE = np.random.default_rng(0).integers(0, 2**12, [20, 30, 3])


@pytest.mark.parametrize(
    "data,words",
    [
        (tiff_of(_NOISE.astype(np.uint16)), "colours of at most 12 bits in a TIFF of 16.*; save it as a PNG"),
        (tiff_of(_NOISE.astype(np.float32)), "not a whole TIFF, or one of pixels or of a compression"),
        (tiff_of(_NOISE[..., :1].astype(np.float16)), "not a whole TIFF, or one of pixels or of a compression"),
        (tiff_of(_NOISE[..., :1].astype(np.float64)), "not a whole TIFF, .*expected colours of 8 bits, or grey of 8"),
        (tiff_of(_NOISE[..., :2].astype(np.uint8)), "not a whole TIFF, or one of pixels or of a compression"),
        (tiff_of(_NOISE[..., :1].astype(np.uint8), t259=(3, b"\x98\x87")), "not a whole TIFF, .* of a compression"),
        (tiff_of(_NOISE.astype(np.uint8))[:100], "not a whole (TIFF|image)"),
    ],
    ids=["12 bits", "colours of floats", "float16", "float64", "two channels", "JPEG 2000", "cut"],
)
def test_a_tiff_that_pillow_would_read_wrong_or_not_at_all_is_named(data, words):
    with pytest.raises(InputError, match=f"^photo.tif: {words}"):
        open_image("photo.tif", data)


@pytest.mark.parametrize("kind,bits", [(np.uint8, 8), (np.uint16, 16), (np.int16, 15), (np.uint32, 16)])
def test_a_tiff_of_one_channel_is_read_in_any_depth(kind, bits):
    levels = np.arange(600).reshape(20, 30, 1) * 2**bits // 600
    found = np.asarray(to_rgb(open_image("photo.tif", tiff_of(levels.astype(kind)))))
    np.testing.assert_array_equal(found, np.repeat(levels // 2 ** (2 * -(-bits // 2) - 8), 3, -1))


def test_colours_of_16_bits_in_a_tiff_give_their_upper_bytes():
    levels = _NOISE.astype(np.uint16) * 16
    np.testing.assert_array_equal(open_image("photo.tif", tiff_of(levels)), levels // 256)
    assert not np.any(open_image("photo.tif", tiff_of(0 * levels)))  # black is a photo


@pytest.fixture(scope="module")
def whole_images():
    deep = [deep_png(np.arange(0, 4096, 8).reshape(16, 8, 4)[..., :channels]) for channels in (1, 2, 3, 4)]
    return [*samples().values(), *deep]


@settings(RUNS, max_examples=400, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:::PIL")
def test_damaged_images_are_refused_or_read(whole_images, data):
    """Bits, bytes, cuts and insertions, most of them in the header. Nothing but InputError leaves, and soon."""
    damaged = bytearray(data.draw(st.sampled_from(whole_images)))
    for _ in range(data.draw(st.sampled_from((1, 1, 2, 4, 10)))):
        place = data.draw(st.integers(0, min(len(damaged), data.draw(st.sampled_from((64, 400, 10**9)))) - 1))
        what = data.draw(st.sampled_from(("byte", "byte", "bit", "delete", "insert", "cut")))
        if what == "byte":
            damaged[place] = data.draw(st.sampled_from((0, 1, 127, 128, 255)) | st.integers(0, 255))
        elif what == "bit":
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del damaged[max(place, 1) :]
        else:
            damaged[place : place + 8 * (what == "delete")] = data.draw(st.binary(max_size=8))
        if not damaged:
            return
    started = time.process_time()
    try:
        assert to_rgb(upright(open_image("photo", bytes(damaged)))).mode == "RGB"
    except InputError as error:
        assert str(error).startswith("photo: ") and "\n" not in str(error) and "BytesIO" not in str(error)
    assert time.process_time() - started < 20


@pytest.mark.parametrize("name", REFUSED)
def test_a_small_file_that_takes_long_or_much_memory_is_refused(name):
    make, words = REFUSED[name]
    data = make()
    assert len(data) < 2**23
    started = time.process_time()
    with pytest.raises(InputError, match=f"^photo: {words}"):
        open_image("photo", data)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("name", READ)
def test_only_the_first_picture_of_a_file_is_decoded(name):
    data = READ[name]()
    started = time.process_time()
    image = to_rgb(upright(open_image("photo", data)))
    assert time.process_time() - started < 4
    assert np.asarray(image).max() == 0


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), KeyError("x"), zlib.error("y"), OSError()])
def test_whatever_a_decoder_raises_is_one_line(monkeypatch, error):
    def fail(_):
        raise error

    data = encoded(picture("RGB"), "BMP")
    monkeypatch.setattr(Image.Image, "load", fail)
    with pytest.raises(InputError, match="^photo: not a whole image"):
        open_image("photo", data)


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


@pytest.mark.filterwarnings("error")
def test_the_limit_of_pixels_is_ours_and_not_pillows():
    """Pillow warns from 89 million pixels on, and raises from 179 million on."""
    for width, height in ((10_000, 9_000), (15_000, 13_000)):
        image = open_image("photo", encoded(Image.new("1", (width, height)), "PNG"))
        assert image.size == (width, height)
    with pytest.raises(InputError, match=f"^photo: 20000x15000 pixels, at most {LARGEST_PIXELS} are read$"):
        open_image("photo", png(20_000, 15_000))
