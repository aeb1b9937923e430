"""Reads TensorFlow's object checkpoints and Keras' weight files as dicts of arrays."""

import contextlib
import io
import lzma
import math
import os
import re
import shutil
import tarfile
import tempfile
import zlib

import h5py
import numpy as np
import tensorflow as tf

from axial.data.files import names_in
from axial.errors import InputError
from axial.io.read import check_regular, first_line, read_file
from axial.io.write import remove_folder

LARGEST_ARCHIVE = 2**34  # bytes of all files; Axial-SWideRNet-(1, 1, 4.5) with its optimizer has 6 GB
LARGEST_H5 = 2**32  # bytes; a ResNet-152 has 0.2 GB
MOST_ENTRIES = 10_000
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_FILE = re.compile(r"(.+)\.(?:index|data-\d{5}-of-\d{5})")
_RUN_FILE = re.compile(r"ckpt-(\d+)\.(index|data-\d{5}-of-\d{5})")
UNFINISHED = "_temp"  # suffix of the folder beside an unfinished checkpoint
# Errors that do not mean a damaged file: a bucket is unavailable, or refuses access.
_AWAY = (tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_AWAY += (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError, tf.errors.UnavailableError)
_UNREADABLE = (tf.errors.OpError, AssertionError, ValueError, IndexError, RuntimeError, MemoryError, OSError)


def read_checkpoint(path):
    """A checkpoint's variables: a dict from each object path, like 'encoder/_stem/_conv/kernel', to the array.

    Args:
        path: prefix of the checkpoint, its folder, or an archive (.tar, .tar.gz or .tgz) with its files.

    Raises:
        InputError: there is no checkpoint or more than one, or the checkpoint is damaged. Only an archive's checkpoint
            files are unpacked, and only into a temporary folder.
    """
    if not re.search(r"\.(tar|tar\.gz|tgz)$", path):
        return dict(_tensors(path, _find(path)))
    with tempfile.TemporaryDirectory() as folder:
        _unpack(path, folder)
        return dict(_tensors(path, _find(folder, path)))


def _find(path, label=None):
    """The prefix of the only checkpoint at a path. `label` replaces the path in messages."""
    if tf.io.gfile.exists(f"{path}.index"):
        return path
    if not tf.io.gfile.isdir(path):
        raise InputError(f"{path}: no such checkpoint; a prefix, a folder or a .tar.gz is expected")
    prefixes = sorted(name.removesuffix(".index") for name in names_in(path) if name.endswith(".index"))
    if len(prefixes) != 1:
        names = f": {', '.join(prefixes[:5])}" if prefixes else ""
        raise InputError(f"{label or path}: holds {len(prefixes)} checkpoints{names}; one is expected")
    return os.path.join(path, prefixes[0])


def _unpack(path, folder):
    """Copies the checkpoint files of an archive into one folder, and ignores their paths in the archive."""
    total = 0
    check_regular(path)
    try:
        with tf.io.gfile.GFile(path, "rb") as packed, tarfile.open(fileobj=packed) as archive:
            for number, entry in enumerate(archive):
                name = os.path.basename(entry.name)
                total += entry.size
                if number >= MOST_ENTRIES or total > LARGEST_ARCHIVE:
                    raise InputError(f"{path}: more than {MOST_ENTRIES} entries, or {LARGEST_ARCHIVE} bytes")
                if not entry.isreg() or entry.issparse() or not _FILE.fullmatch(name):
                    continue
                with open(os.path.join(folder, name), "xb") as file:
                    shutil.copyfileobj(archive.extractfile(entry), file)
    except tf.errors.NotFoundError:
        raise InputError(f"{path}: no such file") from None
    except FileExistsError:
        raise InputError(f"{path}: holds two files called {name}") from None
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, tf.errors.OpError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a whole archive ({first_line(error)})") from None


def check_whole(prefix):
    """Reads all tensors of a checkpoint. Raises InputError if a file is missing, cut short or damaged."""
    for _ in _tensors(prefix, prefix):
        pass


def _tensors(label, prefix):
    """Yields (path, array) of a checkpoint's variables. TensorFlow verifies their checksums."""
    with refused(label, "not a whole checkpoint", passing=_AWAY):
        reader = tf.compat.v1.train.NewCheckpointReader(prefix)
        shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        kept = [name for name in shapes if name.endswith(VALUE) and types[name] != tf.string]
        folder, name = os.path.split(prefix)
        shards = [shard for shard in names_in(folder or ".") if shard.startswith(f"{name}.data-")]
        stored = sum(tf.io.gfile.stat(os.path.join(folder, shard)).length for shard in shards)
        needed = sum(math.prod(shapes[name]) * types[name].size for name in kept)
        if needed > stored:  # TensorFlow would allocate this memory before it reads
            raise InputError(f"{label}: cut short, {stored} bytes where its index has {needed}")
        if GRAPH in shapes:
            reader.get_tensor(GRAPH)  # this tensor is stored at the end of the file
        for name in sorted(kept):
            yield name.removesuffix(VALUE), np.asarray(reader.get_tensor(name))


# === The checkpoints of a run ===


def run_checkpoints(folder, with_index=True):
    """Prefixes of the checkpoints ckpt-STEP in a folder, by rising step.

    `with_index` leaves out checkpoints without an index file. TensorFlow's list of checkpoints, the file `checkpoint`,
    is not read: a copy of a run may lack this list, or have a list that names files of another machine.
    """
    matches = filter(None, map(_RUN_FILE.fullmatch, _names(folder)))
    steps = {int(match[1]) for match in matches if match[2] == "index" or not with_index}
    return [os.path.join(folder, f"ckpt-{step}") for step in sorted(steps)]


def is_unfinished(prefix):
    """Whether a process is writing the checkpoint, or was killed while it wrote it."""
    return tf.io.gfile.exists(f"{prefix}{UNFINISHED}")


def remove_unfinished(folder):
    """Removes the unfinished checkpoints of killed processes, because no later save removes them."""
    names = _names(folder)
    for name in (match[1] for match in map(re.compile(rf"(ckpt-\d+){UNFINISHED}").fullmatch, names) if match):
        try:
            check_whole(os.path.join(folder, name))  # whole if the process was killed after the last file
        except InputError:
            for shard in (shard for shard in names if shard.startswith(f"{name}.") and _RUN_FILE.fullmatch(shard)):
                tf.io.gfile.remove(os.path.join(folder, shard))
        remove_folder(os.path.join(folder, f"{name}{UNFINISHED}"))


def traces(folder):
    """Names of files, other than the folder's own checkpoints, which show that a run here has saved a checkpoint."""
    best = [f"best/{name}" for name in _names(os.path.join(folder, "best"))]
    later = {"checkpoint", "evaluated.json"} & set(_names(folder))
    return sorted(later) + sorted(name for name in best if _RUN_FILE.fullmatch(name[5:]) or name == "best/scores.json")


def _names(folder):
    """Names of a folder's files and folders; none if the folder does not exist."""
    return [name.rstrip("/") for name in tf.io.gfile.listdir(folder)] if tf.io.gfile.isdir(folder) else []


@contextlib.contextmanager
def refused(prefix, what, passing=()):
    """A context that turns TensorFlow's errors for a damaged or unsuitable checkpoint into an InputError.

    Args:
        prefix: prefix of the checkpoint.
        what: the problem, for the message.
        passing: exception types that are raised unchanged.
    """
    try:
        yield
    except _UNREADABLE as error:
        if isinstance(error, (InputError, *passing)):
            raise
        raise InputError(f"{prefix}: {what} ({first_line(error)})") from None


def read_h5(path):
    """The arrays of an .h5 file of Keras' save_weights: a dict from the name 'layer/weight' of each to its array.

    Raises:
        InputError: save_weights did not write the file, or its data is compressed or in another file.
    """
    arrays = {}

    def visit(name, node):
        if not isinstance(node, h5py.Dataset):
            return
        if node.external or node.is_virtual or node.id.get_storage_size() != node.nbytes:
            raise InputError(f"{path}: {name!r} is compressed or in another file; Keras writes neither")
        name = "/".join(name.split("/")[-2:]).removesuffix(":0")
        if name in arrays or node.dtype.kind != "f":
            raise InputError(f"{path}: {name!r} is there twice, or holds no numbers with fractions")
        arrays[name] = np.asarray(node, np.float32)

    data = io.BytesIO(read_file(path, LARGEST_H5))
    try:
        with h5py.File(data, "r") as file:
            file.visititems(visit)
    except InputError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        raise InputError(f"{path}: not a whole .h5 file ({first_line(error)})") from None
    return arrays
