"""The door out: paths that are tried before the work begins, and files that appear only when they are complete."""

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import time

import msgspec
import tensorflow as tf

from axial.errors import InputError
from axial.io.check import is_remote
from axial.io.read import check_regular, first_line, read_text

WAITS = (1, 2, 4, 8, 16)  # seconds before a write is tried again
# What a bucket or a disk says when it is full, slow, away, or does not know who asks.
PASSING = (
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnauthenticatedError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
    OSError,
)


def retried(what, write):
    """write(), which is called again after growing waits while the file system fails. `what` is its name in messages.

    Raises:
        InputError: it has failed to the end.
    """
    for wait in (*WAITS, None):
        try:
            return write()
        except PASSING as error:
            if "Collective ops" in str(error):  # another worker has stopped
                raise
            if wait is None:
                raise InputError(f"{what}: cannot be written ({first_line(error)})") from None
            print(f"{what}: cannot be written ({first_line(error)}); again in {wait} s", file=sys.stderr, flush=True)
            time.sleep(wait)


def write_whole(path, write):
    """Calls write(temporary path), then gives the file the name `path`: it is there complete or not at all.

    The temporary file of a remote path is local, so that any library can write it. It is copied with `retried`.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, os.path.basename(path))
            write(local)
            retried(path, functools.partial(_upload, local, path))
        return
    if os.path.dirname(path):
        tf.io.gfile.makedirs(os.path.dirname(path))
    temporary = partial_path(path)
    write(temporary)
    tf.io.gfile.rename(temporary, path, overwrite=True)


def _upload(local, path):
    tf.io.gfile.makedirs(os.path.dirname(path))
    temporary = partial_path(path)
    with contextlib.suppress(tf.errors.NotFoundError):  # ram:// would append to it
        tf.io.gfile.remove(temporary)
    tf.io.gfile.copy(local, temporary)
    tf.io.gfile.rename(temporary, path, overwrite=True)


@contextlib.contextmanager
def new_folder(path, last):
    """Yields a temporary folder, which gets the name `path` when the block ends, and is removed if the block fails.

    A remote folder cannot be renamed. There the files are copied, and the one without which no reader takes the folder
    comes last.

    Args:
        path: of the new folder.
        last: name of that file in the folder.

    Raises:
        InputError: `path` exists.
    """
    path = path.rstrip("/")
    if tf.io.gfile.exists(path):
        raise InputError(f"{path}: exists; it is never overwritten, choose another")
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            yield folder
            for name in sorted(_files(folder), key=lambda name: (name == last, name)):
                target = os.path.join(path, name)
                retried(target, functools.partial(_upload, os.path.join(folder, name), target))
        return
    temporary = partial_path(path)
    if tf.io.gfile.exists(temporary):
        tf.io.gfile.rmtree(temporary)
    tf.io.gfile.makedirs(temporary)
    try:
        yield temporary
        tf.io.gfile.rename(temporary, path)
    finally:
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)


def write_bytes(path, data):
    def write(temporary):
        with tf.io.gfile.GFile(temporary, "wb") as file:
            file.write(data)

    write_whole(path, write)


def write_text(path, text):
    write_bytes(path, text.encode())


def write_json(path, value):
    """Writes plain Python values. NaN and infinity, which JSON does not have, become null."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def write_block(path, name, text):
    """Writes a block of Markdown to a new file, or replaces the block of this name in an existing file.

    A block stands between the comments `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

    Raises:
        InputError: the file has no such block.
    """
    before, after = around_block(path, name)
    write_text(path, f"{before}<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->{after}")


def around_block(path, name):
    """The text of a file before and after a block. Raises InputError if it has no such block."""
    if not tf.io.gfile.exists(path):
        return "", "\n"
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = read_text(path).partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise InputError(f"{path}: holds no lines {begin} and {end} to write between")
    return before, after


def cache_dir():
    """Folder of what axial makes once and reads again, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "axial")


def file_digest(path):
    """Bytes of a file, and its SHA-256 as text. Raises InputError; see `check_regular`."""
    check_regular(path)
    digest, size = hashlib.sha256(), 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def folder_digests(folder, leave=()):
    """dict from the files below a folder to their SHA-256, but for those that `leave` names."""
    return {name: file_digest(os.path.join(folder, name))[1] for name in sorted(_files(folder)) if name not in leave}


def _files(folder):
    """The files below a folder, relative to it."""
    return [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, files in tf.io.gfile.walk(folder)
        for name in files
    ]


def partial_path(path):
    """The name that a file has while it is written."""
    return os.path.join(os.path.dirname(path), f".partial.{os.path.basename(path)}")


def try_file(flag, path, suffixes=()):
    """Raises InputError unless a file can be written at `path`, the value of a flag."""
    where = f"--{flag}={path}"
    if not os.path.basename(path):
        raise InputError(f"{where}: names a folder, a file is expected")
    if suffixes and not path.lower().endswith(tuple(suffixes)):
        raise InputError(f"{where}: its name must end in {' or '.join(suffixes)}")
    with _named(where):
        if tf.io.gfile.isdir(path):
            raise InputError(f"{where}: a folder, a file is expected")
        if not is_remote(path) and os.path.exists(path):
            with open(path, "ab"):
                pass
        _try(path)


def try_folder(flag, path):
    """Raises InputError unless files can be written into the folder `path`, the value of a flag."""
    where = f"--{flag}={path}"
    with _named(where):
        if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path):
            raise InputError(f"{where}: a file, a folder is expected")
        _try(os.path.join(path, "try"))


def try_new_folder(flag, path):
    """Raises InputError if there is something at `path`, or if a folder cannot be made there."""
    if tf.io.gfile.exists(path.rstrip("/")):
        raise InputError(f"--{flag}={path}: exists; it is never overwritten, choose another")
    try_file(flag, path.rstrip("/"))


def _try(path):
    """Writes and removes the temporary file of `write_whole`."""
    if os.path.dirname(path):
        tf.io.gfile.makedirs(os.path.dirname(path))
    with tf.io.gfile.GFile(partial_path(path), "wb") as file:
        file.write(b"")
    tf.io.gfile.remove(partial_path(path))


@contextlib.contextmanager
def _named(where):
    """InputError in place of what a file system raises."""
    try:
        yield
    except InputError:
        raise
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be written ({first_line(error)})") from None
