"""A file's content is read as a checked value, or refused by one line that names the file and the field."""

import codecs
import copy
import dataclasses
import json
import os
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axial.data import specs, tfrecord
from axial.errors import InputError
from axial.io import read, schemas
from axial.io.read import read_file, read_json, read_text, read_yaml
from axial.io.write import file_digest
from axial.tasks.segmentation.panoptic import BestScores

RUNS = settings(deadline=None, derandomize=True)  # derandomized, so that each run tests the same examples
PANOPTIC = {
    "categories": [{"id": 1}],
    "images": [{"id": 7, "file_name": "7.jpg", "width": 20, "height": 10}],
    "annotations": [
        {"image_id": 7, "file_name": "7.png", "segments_info": [{"id": 1, "category_id": 1, "iscrowd": 0}]}
    ],
}
CONTENTS = {
    schemas.Panoptic: PANOPTIC,
    tfrecord.Manifest: {
        "format": 1,
        "spec": {"name": "mine", "class_names": ["a"], "category_ids": [1], "things": [True], "label_divisor": 1000},
        "split": "val",
        "examples": 3,
        "source": "x",
        "shards": [["val-00000-of-00001.tfrecord", 3, 100]],
    },
    specs.SpecFile: {"name": "mine", "classes": [{"id": 1, "name": "a", "thing": True, "color": [1, 2, 3]}]},
}
WRONG = st.sampled_from([None, True, -1, 0, 2**70, 0.5, "", "x", [], [1, 2], {}, {"a": 1}])


def places(value, path=()):
    """Yields the path, a tuple of keys and indices, of every field and item in a value."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def put(value, path, new):
    """Returns a copy of a value with `new` at a path. If `new` is `put` itself, the copy lacks the item at the path."""
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
@settings(RUNS, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_file_is_refused_or_has_its_types(tmp_path, schema, data):
    """A field or item is deleted, or gets a wrong type or range. Then bits are flipped, and the end is cut off."""
    field = data.draw(st.sampled_from(list(places(CONTENTS[schema]))))
    changed = bytearray(json.dumps(put(CONTENTS[schema], field, data.draw(st.just(put) | WRONG))).encode())
    for _ in range(data.draw(st.sampled_from((0, 0, 1, 3)))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "file.json"
    path.write_bytes(changed[: data.draw(st.just(len(changed)) | st.integers(0, len(changed)))])
    for reader in (lambda *given: read_json(*given)[1], read_yaml):
        try:
            value = reader(str(path), schema)
        except InputError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        else:
            read.convert("again: ", json.loads(read.msgspec.json.encode(value)), schema)


@pytest.mark.parametrize(
    "text,words",
    [
        (b"[" * 100_000, "expected a mapping, got a list"),
        (b'{"x": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"images": NaN}', "not JSON"),
        ("{}".encode("utf-16"), "not UTF-8 but UTF-16"),
        (json.dumps(put(PANOPTIC, ("annotations", 0, "segments_info", 0, "category_id"), True)).encode(), "got bool"),
        (json.dumps(put(PANOPTIC, ("images", 0, "file_name"), "")).encode(), "file_name: expected str of length >= 1"),
        (json.dumps(put(PANOPTIC, ("images", 0, "width"), 10**9)).encode(), "width: expected int <= 65536"),
        (json.dumps(PANOPTIC)[:-1].encode() + b', "images": []}', "file.json: the key 'images' is there twice"),
        (json.dumps(PANOPTIC)[:-1].encode() + b', "x": [{"a": 1, "\\u0061": 2}]}', "the key 'a' is there twice"),
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
        ("[" * 999 + "]" * 999, "nested too deeply"),
        ("!!python/object/apply:os.system ['true']", "line 1: the tag python/object/apply:os.system is not read"),
        ("<<: 1\nname: x\nclasses: []", "unknown field <<"),
        ("name: x\nclasses: 2024-13-45", "classes: expected a list, got str"),
        ("name: a\nclasses:\n\n- {id: 1, name: a, id: 2}", "line 4: the key 'id' is there twice"),
        ("name: a\n---\nname: b", "expected a single document"),
        ("name: ''\nclasses: [{id: 1, name: a}]", "name: expected str of length >= 1"),
        ("name: a\nclasses: [{id: 1, name: a}]\nignore: 99999999", "ignore: expected int <= 32768"),
    ],
)
def test_wrong_yaml_is_named(tmp_path, text, words):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_yaml(str(path), specs.SpecFile)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    steps: int = 1


@pytest.mark.parametrize(
    "text,words",
    [
        ("name,steps,more\na,1,2\n", "file.csv:2: has an unknown column more"),
        ("name,steps\na,1,2\n", "file.csv:2: has an unknown column None"),
        ("name,name\na,b\n", "file.csv: the column 'name' is there twice"),
        ("name,steps\na,1\nb,x\n", "file.csv:3: steps: expected int"),
        ("steps\n1\n", "file.csv:2: is missing the required field name"),
    ],
)
def test_rows_of_a_csv_are_checked(tmp_path, text, words):
    path = tmp_path / "file.csv"
    path.write_text("name,steps\na,2\n")
    assert list(read.read_rows(str(path), Row)) == [(f"{path}:2: ", Row("a", 2))]
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        list(read.read_rows(str(path), Row))


def test_a_byte_order_mark_is_removed(tmp_path):
    (tmp_path / "marked").write_bytes(codecs.BOM_UTF8 + b'{"images": []}\r\n')
    assert read_text(str(tmp_path / "marked")) == '{"images": []}\r\n'
    data, content = read_json(str(tmp_path / "marked"), schemas.ImageInfo)
    assert data.startswith(b"{") and content.images == []
    (tmp_path / "wide").write_text("a", "utf-16")
    with pytest.raises(InputError, match="wide: not UTF-8 but UTF-16"):
        read_text(str(tmp_path / "wide"))


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "large").write_bytes(bytes(100))
    (tmp_path / "latin").write_bytes(b"a\xe9b")
    for name, words in {
        "none": "no such file",
        "": "a folder; expected a file",
        "large": "100 bytes, at most 99 are read",
        "large/below": "cannot be read .Not a directory",
    }.items():
        with pytest.raises(InputError, match=words):
            read_file(str(tmp_path / name), 99)
    with pytest.raises(InputError, match="not UTF-8 .*at byte 1"):
        read_text(str(tmp_path / "latin"))


@pytest.fixture(params=["pipe", "socket", "device", "pipe as a URL"])
def special(request, tmp_path):
    """The path of a pipe, socket or device. The pipe has a writer, so that opening it does not block."""
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
    parsers = (lambda path: read_json(path, BestScores), lambda path: read_yaml(path, specs.SpecFile))
    for reader in (read_file, read_text, file_digest, *parsers):
        with pytest.raises(InputError, match=f"^{special}: a pipe, device or socket; expected a file$"):
            reader(special)


def test_a_file_of_an_image_may_have_half_a_gigabyte(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(b"0123456789")
    assert read_file(str(path)) == b"0123456789"
    monkeypatch.setattr("axial.io.gfile.size", lambda _: 2**29 + 1)
    with pytest.raises(InputError, match="a.png: 536870913 bytes, at most 536870912 are read"):
        read_file(str(path))
