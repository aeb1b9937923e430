"""Files of torch.save: reading, writing, and refusing damaged and hostile files."""

import os
import pickle
import struct
import zipfile

import numpy as np
import pytest

from axial.errors import InputError
from axial.weights.pytorch import read_state_dict, state_dict_bytes
from tests.conftest import GOLDEN


@pytest.mark.parametrize("name", ["pt_kinds.pth", "pt_kinds_stream.pth"])
def test_both_formats_and_all_kinds_of_tensors(name):
    """Golden files in the formats of PyTorch since 1.6 and before 1.6 give the names, shapes, values and dtypes."""
    actual = read_state_dict(str(GOLDEN / name))
    with np.load(GOLDEN / "pt_kinds.npz") as expected:
        assert set(actual) == set(expected.files)
        for key in expected.files:
            assert actual[key].shape == expected[key].shape
            np.testing.assert_array_equal(actual[key].astype(np.float32), expected[key])
    assert actual["scalar"].dtype == np.int64 and actual["flags"].dtype == np.bool_


def test_what_is_written_is_read(tmp_path):
    """A written float32 array [2, 3, 1] and int64 scalar are read with the same order, dtypes and values."""
    rng = np.random.default_rng(0)
    arrays = {"a.weight": rng.normal(size=[2, 3, 1]).astype(np.float32), "count": np.array(2**40)}
    path = tmp_path / "a.pth"
    path.write_bytes(state_dict_bytes(arrays))
    actual = read_state_dict(str(path))
    assert list(actual) == list(arrays)
    for name, array in arrays.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array)


@pytest.mark.parametrize("wrap", [None, "net", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_wrappings_and_prefixes(tmp_path, wrap, prefix):
    """The weight's name is the same for a bare or nested state dict, with or without DataParallel's prefix."""
    path = tmp_path / "a.pth"
    path.write_bytes(state_dict_bytes({f"{prefix}w": np.ones([2], np.float32)}))
    if wrap:
        inner = rewritten(path, lambda data: data[2:-1])
        outer = b"\x80\x02}X" + struct.pack("<I", len(wrap)) + wrap.encode() + inner + b"s."
        rewritten(path, lambda _: outer)
    assert list(read_state_dict(str(path))) == ["w"]


def rewritten(path, change, method=zipfile.ZIP_STORED):
    """Applies the function `change` to the pickle in an archive. Returns the new pickle."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    structure = change(entries["archive/data.pkl"])
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in {**entries, "archive/data.pkl": structure}.items():
            archive.writestr(name, data)
    return structure


class Evil:
    """An object whose pickle calls os.system when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch hacked",)


@pytest.fixture
def path(tmp_path):
    """Path of a file with a float32 tensor [4, 5]."""
    path = tmp_path / "a.pth"
    path.write_bytes(state_dict_bytes({"w": np.ones([4, 5], np.float32)}))
    return path


def compressed(path):
    """Adds a zip bomb: an entry that decompresses to far more bytes than the file has."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data/1", bytes(2**24))


def overlapping(path):
    """Makes a zip bomb without compression: a directory with 100 entries for the same bytes."""
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    size, start = struct.unpack_from("<II", data, end + 12)
    directory, entries = data[start : start + size], []
    for number in range(100):
        entries.append(directory.replace(b"archive/data/0", f"archive/da/{number:03}".encode()))
    tail = bytearray(data[end:])
    struct.pack_into("<HH", tail, 8, 400, 400)
    struct.pack_into("<I", tail, 12, 100 * size)
    path.write_bytes(data[:start] + b"".join(entries) + bytes(tail))


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda p: rewritten(p, lambda _: pickle.dumps({"w": Evil()}, 2)), "posix.system.*runs no code"),
        (lambda p: rewritten(p, lambda _: pickle.dumps({"w": Evil()}, 4)), "refused"),
        (lambda p: p.write_bytes(pickle.dumps({"w": Evil()}, 2)), "posix.system.*runs no code"),
        # hashing this key would crash the process
        (lambda p: rewritten(p, lambda _: b"\x80\x02})" + b"\x85" * 10**6 + b"Ns."), "damaged"),
        (lambda p: rewritten(p, lambda _: b"\x80\x02]S'ls'\nios\nsystem\n."), "STRING, which is refused"),
        (lambda p: rewritten(p, lambda d: d.replace(b"K\x04K\x05\x86", b"K\x04K\x06\x86")), "not within its storage"),
        (lambda p: rewritten(p, lambda d: d.replace(b"K\x14", b"K\x15")), "cut short"),
        (lambda p: rewritten(p, lambda d: d.replace(b"K\x05\x86", b"J\xff\xff\xff\xff\x86")), "not within its"),
        (lambda p: rewritten(p, lambda _: pickle.dumps({"epoch": 3}, 2)), "no state dict"),
        (compressed, "compressed"),
        (overlapping, "twice|overlap"),
        (lambda p: p.write_bytes(p.read_bytes()[:-30]), "not a whole file"),
        (lambda p: p.write_bytes(b"hello, these are no weights"), "torch.save|refused"),
        (lambda p: p.unlink(), "no such file"),
    ],
)
def test_harm_is_one_line(path, damage, words, tmp_path, monkeypatch):
    """Each damage raises InputError of one line that names the path, and runs no code."""
    monkeypatch.chdir(tmp_path)
    damage(path)
    with pytest.raises(InputError, match=words) as error:
        read_state_dict(str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert not os.path.exists("hacked")


@pytest.mark.parametrize("name", ["pt_kinds.pth", "pt_kinds_stream.pth"])
def test_a_file_cut_anywhere_or_with_any_byte_changed_is_read_or_refused(name, tmp_path):
    """For 150 truncated and 150 changed files, the reader returns or raises InputError, and no other error."""
    data, path = (GOLDEN / name).read_bytes(), tmp_path / name
    rng = np.random.default_rng(0)
    for index in rng.integers(0, len(data), 150):
        changed = bytearray(data)
        changed[index] ^= int(rng.integers(1, 256))
        for damaged in (data[:index], bytes(changed)):
            path.write_bytes(damaged)
            try:
                read_state_dict(str(path))
            except InputError as error:
                assert str(path) in str(error)
