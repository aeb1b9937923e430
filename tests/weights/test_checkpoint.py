"""TensorFlow's object checkpoints: reading a prefix, a folder or an archive, and choosing a run's checkpoint."""

import os
import shutil
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.weights.checkpoint import check_whole, read_checkpoint, run_checkpoints
from axial.weights.restore import find_checkpoint, find_weights


def write_checkpoint(arrays, prefix):
    """Writes a checkpoint of a dict from object paths to arrays. Returns the checkpoint's prefix."""
    root = tf.Module()
    for path, array in arrays.items():
        *parents, last = path.split("/")
        node = root
        for name in parents:
            if not hasattr(node, name):
                setattr(node, name, tf.Module())
            node = getattr(node, name)
        setattr(node, last, tf.Variable(array))
    top = {name: getattr(root, name) for name in {path.split("/")[0] for path in arrays}}
    return tf.train.Checkpoint(**top).write(prefix)


KERNEL = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
ARRAYS = {"encoder/_stem/_conv/kernel": KERNEL, "global_step": np.array(7, np.int64)}


@pytest.fixture
def folder(tmp_path):
    """A folder with one checkpoint, ckpt-7, which contains `ARRAYS`."""
    path = tmp_path / "model"
    path.mkdir()
    write_checkpoint(ARRAYS, str(path / "ckpt-7"))
    return path


def archive(folder, path, names):
    """Packs a folder's files into an archive at `path`. The function `names` gives a file's name in the archive."""
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, names(file.name))
    return path


@pytest.mark.parametrize("kind", ["prefix", "folder", "archive with other paths"])
def test_every_form_is_read(folder, tmp_path, kind):
    """`ARRAYS` are read from a prefix, a folder, and an archive with paths like ../../a. The archive writes no file."""
    path = folder
    if "archive" in kind:
        path = archive(folder, tmp_path / "a.tar.gz", lambda name: f"../../{name}")
    before = set(tmp_path.parent.rglob("*"))
    arrays = read_checkpoint(os.path.join(path, "ckpt-7") if kind == "prefix" else str(path))
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
    assert set(tmp_path.parent.rglob("*")) == before  # only a temporary folder was written


def cut(path, fraction):
    """Truncates a file to the first `fraction` of its bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])


def write_bad_files(folder, tmp_path):
    """Writes a truncated archive, a folder of two checkpoints, hostile archives, and truncated checkpoints."""
    cut(archive(folder, tmp_path / "cut.tar.gz", str), 0.5)
    (tmp_path / "two").mkdir()
    for name in "ckpt-1", "ckpt-2":
        write_checkpoint(ARRAYS, str(tmp_path / "two" / name))
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for name in "a", "b":
            tar.add(folder / "ckpt-7.index", f"{name}/ckpt-7.index")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        entry = tarfile.TarInfo("ckpt-7.index")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(entry)
    for name in ("ckpt-7.index", "ckpt-7.data-00000-of-00001"):
        cut(shutil.copytree(folder, tmp_path / name) / name, 0.7)


def test_harm_is_one_line(folder, tmp_path):
    """Missing, damaged, ambiguous and hostile files raise InputError of one line, which names the path."""
    write_bad_files(folder, tmp_path)
    for name, words in (
        ("cut.tar.gz", "not a whole"),
        ("missing.tar.gz", "no such file"),
        ("missing", "no such checkpoint"),
        ("link.tar", "holds 0 checkpoints"),
        ("ckpt-7.index", "cut short|not a whole checkpoint"),
        ("ckpt-7.data-00000-of-00001", "cut short|not a whole checkpoint"),
        ("two", "holds 2 checkpoints: ckpt-1, ckpt-2"),
        ("twice.tar", "two files called ckpt-7.index"),
    ):
        with pytest.raises(InputError, match=words) as error:
            read_checkpoint(str(tmp_path / name))
        assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


# === Choosing a checkpoint of a folder ===


def write_shards(prefix, count):
    """Writes a checkpoint in `count` shards, as several hosts do. Shard i has an int32 tensor [100 + i]."""
    shards = [f"{prefix}-part-{i}" for i in range(count)]
    for i, shard in enumerate(shards):
        names, tensors = [f"v{i}/.ATTRIBUTES/VARIABLE_VALUE"], [tf.range(100 + i)]
        tf.raw_ops.SaveV2(prefix=shard, tensor_names=names, shape_and_slices=[""], tensors=tensors)
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=shards, destination_prefix=prefix, delete_old_dirs=False)


def test_all_shards_of_a_checkpoint_are_needed(tmp_path):
    """The checkpoints of steps 5, 9 and 10 have two shards each. If step 10 lacks a shard, step 9 is the latest."""
    for step in (5, 9, 10):
        write_shards(str(tmp_path / f"ckpt-{step}"), 2)
    assert [os.path.basename(prefix) for prefix in run_checkpoints(str(tmp_path))] == ["ckpt-5", "ckpt-9", "ckpt-10"]
    assert find_checkpoint(str(tmp_path)).endswith("ckpt-10")
    (tmp_path / "ckpt-10.data-00000-of-00002").unlink()
    with pytest.raises(InputError, match="ckpt-10: cut short"):
        check_whole(str(tmp_path / "ckpt-10"))
    # Shards of an earlier checkpoint with another number of shards do not replace the missing shard.
    for name in ("00000-of-00001", "00001-of-00003"):
        (tmp_path / f"ckpt-10.data-{name}").write_bytes(bytes(1000))
    with pytest.raises(InputError, match="ckpt-10: not a whole checkpoint"):
        check_whole(str(tmp_path / "ckpt-10"))
    assert find_checkpoint(str(tmp_path)).endswith("ckpt-9")
    assert [os.path.basename(p) for p in find_weights(str(tmp_path), 2)] == ["ckpt-9", "ckpt-10"]


def test_a_damaged_best_checkpoint_is_named_before_the_latest_is_taken(tmp_path, capsys):
    """If best/ckpt-4 is truncated, a line warns and ckpt-8 is used. If both are damaged, InputError is raised."""
    write_shards(str(tmp_path / "ckpt-8"), 1)
    (tmp_path / "best").mkdir()
    write_shards(str(tmp_path / "best" / "ckpt-4"), 1)
    assert find_checkpoint(str(tmp_path)).endswith("best/ckpt-4")
    (tmp_path / "best" / "ckpt-4.data-00000-of-00001").write_bytes(b"")
    assert find_checkpoint(str(tmp_path)).endswith("ckpt-8")
    (line,) = capsys.readouterr().err.splitlines()
    assert "best/ckpt-4: cut short" in line and line.endswith(f"{tmp_path}/ckpt-8 is taken in its place")
    (tmp_path / "ckpt-8.index").write_bytes(b"")
    with pytest.raises(InputError, match="best/ckpt-4: cut short"):
        find_checkpoint(str(tmp_path))


def test_a_bucket_that_is_away_makes_no_checkpoint_damaged(tmp_path, monkeypatch):
    """If the newest checkpoint is unreachable, the bucket's error is raised. An older checkpoint would lose steps."""
    for step in (4, 8):
        write_shards(str(tmp_path / f"ckpt-{step}"), 1)
    read = tf.compat.v1.train.NewCheckpointReader

    def away(prefix):
        if prefix.endswith("ckpt-8"):
            raise tf.errors.UnavailableError(None, None, "503 of the bucket")
        return read(prefix)

    monkeypatch.setattr(tf.compat.v1.train, "NewCheckpointReader", away)
    with pytest.raises(tf.errors.OpError, match="503 of the bucket"):
        find_checkpoint(str(tmp_path))
