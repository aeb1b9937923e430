"""TensorFlow's object checkpoints: read from a prefix, a folder or an archive, or refused in one line."""

import io
import os
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.weights.checkpoint import read_checkpoint


def write_checkpoint(arrays, prefix):
    """Writes arrays under object paths, as nested objects with attributes of these names."""
    root = tf.Module()
    for path, array in arrays.items():
        *parts, last = path.split("/")
        node = root
        for part in parts:
            if not hasattr(node, part):
                setattr(node, part, tf.Module())
            node = getattr(node, part)
        setattr(node, last, tf.Variable(array))
    return tf.train.Checkpoint(**{name: getattr(root, name) for name in {p.split("/")[0] for p in arrays}}).write(
        prefix
    )


ARRAYS = {
    "encoder/_stem/_conv/kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "global_step": np.array(7, np.int64),
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    write_checkpoint(ARRAYS, str(path / "ckpt-7"))
    return path


def archive(folder, path, names=None):
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, names(file.name) if names else f"model/{file.name}")
    return path


def in_a_bucket(path):
    """A copy of a file or a folder."""
    copy = f"ram://test_checkpoint/{path.parent.name}/{path.name}"
    for file in path.iterdir() if path.is_dir() else [path]:
        target = f"{copy}/{file.name}" if path.is_dir() else copy
        tf.io.gfile.makedirs(os.path.dirname(target))
        tf.io.gfile.copy(str(file), target)
    return copy


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", ["prefix", "folder", "archive", "archive with other paths"])
def test_every_form_is_read(folder, tmp_path, kind, remote):
    path = folder
    if "archive" in kind:
        path = archive(folder, tmp_path / "a.tar.gz", (lambda n: f"../../{n}") if "other" in kind else None)
    before = set(tmp_path.parent.rglob("*"))
    path = in_a_bucket(path) if remote else str(path)
    found = read_checkpoint(os.path.join(path, "ckpt-7") if kind == "prefix" else path)
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
    assert set(tmp_path.parent.rglob("*")) == before  # nothing lands outside of a temporary folder


def add(path, entry, data=b""):
    with tarfile.open(path, "w") as tar:
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return path


def link(path):
    entry = tarfile.TarInfo("ckpt-7.index")
    entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return add(path, entry)


def cut(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def test_harm_is_one_line(folder, tmp_path):
    packed = archive(folder, tmp_path / "cut.tar.gz")
    cut(packed, 0.5)
    two = tmp_path / "two"
    two.mkdir()
    for name in "ckpt-1", "ckpt-2":
        write_checkpoint(ARRAYS, str(two / name))
    twice = archive(folder, tmp_path / "twice.tar.gz", lambda n: n)
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for place in "a", "b":
            tar.add(folder / "ckpt-7.index", f"{place}/ckpt-7.index")
    assert twice.exists()
    (tmp_path / "text.tar.gz").write_text("no archive")
    for path, words in (
        (packed, "not a whole"),
        (tmp_path / "text.tar.gz", "not a whole archive"),
        (tmp_path / "missing.tar.gz", "no such file"),
        (tmp_path / "missing", "no such checkpoint"),
        (link(tmp_path / "link.tar"), "holds 0 checkpoints"),
        (two, "holds 2 checkpoints: ckpt-1, ckpt-2"),
        (tmp_path / "twice.tar", "two files called ckpt-7.index"),
    ):
        with pytest.raises(InputError, match=words) as error:
            read_checkpoint(str(path))
        assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("packing", ["gz", "xz", "bz2"])
def test_an_archive_whose_halves_are_exchanged_is_refused(packing, tmp_path):
    path = tmp_path / "a.tar.gz"
    data = np.random.default_rng(0).bytes(200_000)  # which no packing makes smaller
    with tarfile.open(path, f"w:{packing}") as tar:
        entry = tarfile.TarInfo("ckpt-7.data-00000-of-00001")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    packed = path.read_bytes()
    place = len(packed) // 2
    path.write_bytes(packed[:50_000] + packed[place:] + packed[50_000:place])
    with pytest.raises(InputError, match="not a whole archive") as error:
        read_checkpoint(str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["ckpt-7.index", "ckpt-7.data-00000-of-00001"])
@pytest.mark.parametrize("share", [0, 0.3, 0.7])
def test_a_file_that_is_cut_short_is_refused(folder, name, share):
    cut(folder / name, share)
    with pytest.raises(InputError, match="cut short|not a whole checkpoint"):
        read_checkpoint(str(folder))


def test_a_missing_shard_is_refused(folder):
    os.remove(folder / "ckpt-7.data-00000-of-00001")
    with pytest.raises(InputError, match="cut short|not a whole checkpoint"):
        read_checkpoint(str(folder))
