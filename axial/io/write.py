"""Writes files atomically, and checks output paths before the work begins.

Links. A path that the user gives may be a link or pass through links. Below that path, axial never writes or deletes
through a link, because a stranger may have made the folder:

- A written file, and its temporary file, replace a link of the same name.
- `output_folder` and `output_file` refuse a path that leads out of the user's folder.
- Removing a folder removes the links in it, not their targets.

These rules hold for links that exist when the command begins. A process that makes links later has the user's rights
anyway.

Kills and power cuts. If the process is killed or the machine loses power, a local file of `write_whole` has either its
old or its complete new content: the bytes are on the disk before the file is renamed, and the name is on the disk
before `write_whole` returns. The same holds for folders of `new_folder` and for checkpoints (`training.saving`).
TensorFlow writes summaries and traces, and does not sync them. Network file systems are only as safe as their fsync.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import itertools
import os
import pathlib
import shutil
import stat
import tempfile
import time
import uuid

import msgspec

from axial.errors import InputError
from axial.io import gfile
from axial.io.gfile import is_remote
from axial.io.paths import LONGEST, inside
from axial.io.read import check_regular, first_line
from axial.io.show import plain, say

WAITS = (1, 2, 4, 8, 16)  # seconds before each retry of a write
_SAVED = {"JPEG": {"quality": 88}, "TIFF": {"compression": "tiff_adobe_deflate"}}
NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # a file system without fsync or without locks


def retried(what, write):
    """Returns the result of write(). Retries it while the file system fails. Messages begin with `what`.

    Raises:
        InputError: the last retry failed.
    """
    for wait in (*WAITS, None):
        try:
            return write()
        except gfile.passing_errors() as error:
            if "Collective ops" in str(error):  # another worker has stopped
                raise
            if wait is None:
                raise InputError(f"{what}: cannot be written ({first_line(error)})") from None
            say(f"{what}: cannot be written ({first_line(error)}); again in {wait} s", error=True)
            time.sleep(wait)


# === Folders, and links in them ===


def output_folder(folder, name, what):
    """The path of an output folder below the user's folder; see `inside`.

    Raises:
        InputError: the path leads out of the user's folder, by its name or by a link.
    """
    path, real = inside(folder, name, what), os.path.realpath(folder)
    if not is_remote(path) and os.path.commonpath([real, os.path.realpath(path)]) != real:
        raise InputError(f"{path}: a link that leads out of {folder}, where nothing is written; remove the link")
    return path


def output_file(folder, name, what):
    """The path of an output file below the user's folder; see `output_folder`."""
    path = inside(folder, name, what)
    parent = os.path.dirname(name)
    return os.path.join(output_folder(folder, parent, what), os.path.basename(name)) if parent else path


def refuse_links(folder):
    """Raises InputError if a local folder has a link at any depth. Used for folders that another library writes to."""
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in folders + files):
            if os.path.islink(path):
                raise InputError(f"{path}: a link, where TensorFlow would write through it; remove the link")


def make_folder(path):
    """Makes a folder and its missing parents. Returns the local folders that it made, the deepest first."""
    if is_remote(path):
        gfile.tf_gfile().makedirs(path)
        return []
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path.rstrip("/"))
        path = os.path.dirname(missing[-1])
    if missing:
        os.makedirs(missing[0], exist_ok=True)
    for new in missing:
        sync(os.path.dirname(new) or ".")
    return missing


def remove_empty(folders):
    """Removes each folder that `make_folder` made, if it is empty."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(folder)


def remove_folder(path):
    """Removes a folder with its contents, or a file. Removes links themselves, never their targets."""
    if is_remote(path):
        gfile.tf_gfile().rmtree(path)
    elif os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


# === Whole files ===


def sync(path):
    """Waits until the bytes of a file, or the names in a folder, are on the disk.

    Does nothing on a file system without fsync.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:
            raise
    finally:
        os.close(handle)


def write_whole(path, write):
    """Calls write(temporary path) and then renames the file to `path`, so that it appears complete or not at all.

    For a remote path the temporary file is local, so that any library can write it. `retried` copies it.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, os.path.basename(path))
            write(local)
            retried(path, functools.partial(_upload, local, path))
        return
    with _partial_file(path) as temporary:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(os.path.dirname(path) or ".")


@contextlib.contextmanager
def _partial_file(path):
    """Yields the path of a temporary file that no other process writes. Removes the file if the block fails.

    Its name is `partial_path`, so that the next writer replaces the file that a killed writer has left. While a live
    process holds the lock of that file, the name is random.
    """
    temporary = partial_path(path)
    if os.path.isdir(temporary):  # left by a killed `new_folder`
        remove_folder(temporary)
    file = lock_file(temporary)
    if file is None:
        temporary = partial_path(path, f".partial.{uuid.uuid4().hex}.")
        file = open(temporary, "xb")  # noqa: SIM115, closed below
    with file:
        try:
            file.truncate(0)
            yield temporary
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            # Adds the file name to an error without one, such as a full disk's. A library's own OSError has no errno.
            if isinstance(error, OSError) and error.errno and not error.filename:
                raise OSError(error.errno, error.strerror, path) from None
            if isinstance(error, gfile.passing_errors()) and not isinstance(error, OSError):
                raise OSError(errno.EIO, first_line(error), path) from None
            raise


def lock_file(path, wait=False):
    """Opens and locks the file at a path. Returns None if another process holds the lock and `wait` is false.

    The system releases the lock when the process ends or is killed. A new file replaces a link at the path, and a file
    with a second hard link, because a stranger may have made them. A file system without locks leaves it unlocked.
    """
    for attempt in itertools.count():
        make_folder(os.path.dirname(path))  # the lock's last holder may have just removed an empty folder
        with contextlib.suppress(FileNotFoundError):
            if not _is_plain(os.lstat(path)):
                os.remove(path)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            if attempt < 100:
                continue
            raise  # a folder like /proc, which takes no file
        file = open(handle, "r+", encoding="utf-8")  # noqa: SIM115, the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            if error.errno not in NO_SUCH_CALL:
                raise
        with contextlib.suppress(FileNotFoundError):  # the last holder has just removed the file
            if os.path.samestat(os.fstat(handle), os.lstat(path)) and _is_plain(os.fstat(handle)):
                return file
        file.close()


def _is_plain(status):
    """Whether an lstat result describes a regular file with one hard link."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def _upload(local, path):
    make_folder(os.path.dirname(path))
    temporary = partial_path(path)
    bucket = gfile.tf_gfile()
    with contextlib.suppress(*gfile.missing_errors()):  # TensorFlow would append to a file in ram://
        bucket.remove(temporary)
    bucket.copy(local, temporary)
    bucket.rename(temporary, path, overwrite=True)


@contextlib.contextmanager
def new_folder(path, last):
    """Yields a temporary folder. Renames it to `path` when the block ends, and removes it if the block fails.

    A remote folder cannot be renamed. Its files are copied instead, `last` after all others.

    Args:
        path: path of the new folder.
        last: name of a file in the folder, without which no reader accepts the folder.

    Raises:
        InputError: `path` exists.
    """
    path = path.rstrip("/")
    if _is_taken(path):
        raise InputError(f"{path}: exists; it is never overwritten, choose another")
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            yield folder
            for name in sorted(_files(folder), key=lambda name: name == last):
                target = os.path.join(path, name)
                retried(target, functools.partial(_upload, os.path.join(folder, name), target))
        return
    temporary = partial_path(path)
    remove_folder(temporary)  # left by a killed process
    _, *above = make_folder(temporary)
    try:
        yield temporary
        for parent, _, files in os.walk(temporary):
            for name in files:
                sync(os.path.join(parent, name))
            sync(parent)
        os.rename(temporary, path)
        sync(os.path.dirname(path) or ".")
    finally:
        remove_folder(temporary)
        remove_empty(above)


def _is_taken(path):
    """Whether a path exists, even as a broken link."""
    return gfile.exists(path) if is_remote(path) else os.path.lexists(path)


def write_bytes(path, data):
    write_whole(path, lambda temporary: pathlib.Path(temporary).write_bytes(data))


def name_broken(path, messages, what):
    """Reports broken files: prints the first 20 messages to standard error and writes all to a text file.

    Args:
        path: path of the text file.
        messages: one line for each broken file.
        what: how many files are broken, like '2 of 5 photos'.

    Returns:
        A summary line.
    """
    say(*messages[:20], error=True)
    write_text(path, "".join(f"{plain(message)}\n" for message in messages))
    return f"{what} are broken; all are listed in {path}"


def write_image(path, image, format="PNG"):
    """Writes a Pillow image.

    A single request writes the file to a bucket, because there are many images. A bucket shows only complete files.
    """
    data = bytes_of(lambda file: image.save(file, format, **_SAVED.get(format, {})))
    if is_remote(path):
        import tensorflow as tf

        retried(path, lambda: tf.io.write_file(path, data))
    else:
        write_bytes(path, data)


def bytes_of(save):
    """The bytes that save(file) writes to a binary file."""
    file = io.BytesIO()
    save(file)
    return file.getvalue()


def write_text(path, text):
    write_bytes(path, text.encode())


def write_json(path, value):
    """Writes plain Python values as JSON. NaN and infinity, which JSON lacks, become null."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


# === Names and hashes of files ===


def file_digest(path):
    """(size in bytes, SHA-256 as hexadecimal text) of a file. Raises InputError; see `check_regular`."""
    check_regular(path)
    digest, size = hashlib.sha256(), 0
    with gfile.open_binary(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def folder_digests(folder, leave=()):
    """dict from the relative path of each file below a folder to its SHA-256. Omits hidden files and `leave`."""
    names = [name for name in _files(folder) if name not in leave and os.path.basename(name)[0] != "."]
    return {name: file_digest(os.path.join(folder, name))[1] for name in names}


def _files(folder):
    """The sorted relative paths of files below a folder. Raises InputError if links reach a folder twice."""
    names, visited = [], set()
    walk = gfile.tf_gfile().walk(folder) if is_remote(folder) else os.walk(folder, followlinks=True)
    for parent, _, files in walk:
        real = parent if is_remote(folder) else os.path.realpath(parent)
        if real in visited:
            raise InputError(f"{parent}: a link to a folder that was reached before; remove the link")
        visited.add(real)
        names += [os.path.relpath(os.path.join(parent, name), folder) for name in files]
    return sorted(names)


def partial_path(path, start=".partial."):
    """The path of a hidden file next to `path`: by default, its temporary file."""
    folder, name = os.path.split(path)
    partial = start + name
    if len(os.fsencode(name)) <= LONGEST < len(os.fsencode(partial)):
        partial = start + hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(folder, partial)


# === Checks of flags that name outputs ===


def try_file(flag, path, suffixes=()):
    """Raises InputError unless a file can be written to `path`, the value of a flag."""
    where = f"--{flag}={path}"
    if suffixes and not path.lower().endswith(tuple(suffixes)):
        raise InputError(f"{where}: its name must end in {' or '.join(suffixes)}")
    with _named(where):
        if not os.path.basename(path) or gfile.isdir(path):
            raise InputError(f"{where}: a folder; expected a file")
        check_regular(path)
        if not is_remote(path) and os.path.exists(path):
            with open(path, "ab"):
                pass
        _try(path)


def try_folder(flag, path):
    """Raises InputError unless files can be written into the folder `path`, the value of a flag."""
    where = f"--{flag}={path}"
    with _named(where):
        if gfile.exists(path) and not gfile.isdir(path):
            raise InputError(f"{where}: a file; expected a folder")
        _try(os.path.join(path, "try"))


def try_new_folder(flag, path):
    """Raises InputError if `path` exists or a folder cannot be made there."""
    if _is_taken(path.rstrip("/")):
        raise InputError(f"--{flag}={path}: exists; it is never overwritten, choose another")
    try_file(flag, path.rstrip("/"))


def _try(path):
    """Makes and removes the temporary file of `write_whole` and the folders that it needs."""
    made = make_folder(os.path.dirname(path))
    try:
        if not is_remote(path):
            with _partial_file(path) as temporary:
                os.remove(temporary)
            return
        with gfile.open_binary(partial_path(path), "wb") as file:
            file.write(b"")
        gfile.remove(partial_path(path))
    finally:
        remove_empty(made)


@contextlib.contextmanager
def _named(where):
    """Converts the errors of a file system to InputError."""
    try:
        yield
    except InputError:
        raise
    except (*gfile.file_errors(), ValueError) as error:
        raise InputError(f"{where}: cannot be written ({first_line(error)})") from None
