"""The door out: paths that are tried before the work begins, and files that appear only when they are complete.

Links. A path that the user gives may be a link, or lead through links. Below it no link is followed to write or to
delete, as the folder may be a stranger's:

- A file takes the place of a link that has its name. So does the temporary file that it is before.
- A folder that leads out of the user's one is refused (`output_folder`, `output_file`).
- Of a folder that is removed, the links are removed, not what they lead to.

This holds for what lies there when the command begins. Who can change the folder meanwhile can do as much as the user.

Kills and power cuts. A local file of `write_whole` is the old one or the whole new one, whenever the process is killed
or the machine loses its power: its bytes are on the disk before it has its name, and the name before `write_whole`
returns. The same holds for a folder of `new_folder` and for checkpoints (`training.saving`). Summaries and traces are
on the disk when the system likes, as TensorFlow writes them. A network file system promises what its fsync promises.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
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
from axial.io.read import check_regular, first_line, read_text
from axial.io.show import plain, say

WAITS = (1, 2, 4, 8, 16)  # seconds before a write is tried again
_SAVED = {"JPEG": {"quality": 88}, "TIFF": {"compression": "tiff_adobe_deflate"}}
NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # of a file system that has no fsync, or no locks


def retried(what, write):
    """write(), which is called again after growing waits while the file system fails. `what` is its name in messages.

    Raises:
        InputError: it has failed to the end.
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
    """The path of a folder to write to, in a folder of the user's; see `inside`.

    Raises:
        InputError: it leads out of the user's folder, by its name or by a link.
    """
    path, real = inside(folder, name, what), os.path.realpath(folder)
    if not is_remote(path) and os.path.commonpath([real, os.path.realpath(path)]) != real:
        raise InputError(f"{path}: a link that leads out of {folder}, where nothing is written; remove the link")
    return path


def output_file(folder, name, what):
    """The path of a file to write, in a folder of the user's; see `output_folder`."""
    path = inside(folder, name, what)
    parent = os.path.dirname(name)
    return os.path.join(output_folder(folder, parent, what), os.path.basename(name)) if parent else path


def refuse_links(folder):
    """Raises InputError if a link is anywhere in a local folder whose files only other libraries write."""
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in folders + files):
            if os.path.islink(path):
                raise InputError(f"{path}: a link, where TensorFlow would write through it; remove the link")


def make_folder(path):
    """Makes a folder, with those above it, if it is missing. Returns the local folders that it made, the last first."""
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
    """Removes those of `make_folder` in which nothing was made."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(folder)


def remove_folder(path):
    """Removes a folder and all in it, or what else is there. Of a link, there or below, only the link is removed."""
    if is_remote(path):
        gfile.tf_gfile().rmtree(path)
    elif os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


# === Whole files ===


def sync(path):
    """Waits until the bytes of a file, or the names in a folder, are on the disk.

    A file system without fsync is left to itself.
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
    """Calls write(temporary path), then gives the file the name `path`: it is there complete or not at all.

    The temporary file of a remote path is local, so that any library can write it. It is copied with `retried`.
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
    """Yields the path of a file that no other process writes, to be renamed; it is removed if the block fails.

    Its name is `partial_path`, so that the next writer removes what a killed one has left. While a process that lives
    has that name, as by its lock, it is a name of its own.
    """
    temporary = partial_path(path)
    if os.path.isdir(temporary):  # which a killed `new_folder` has left
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
            # What is raised without a name, as for a full disk, gets it. A library's own text has no number.
            if isinstance(error, OSError) and error.errno and not error.filename:
                raise OSError(error.errno, error.strerror, path) from None
            if isinstance(error, gfile.passing_errors()) and not isinstance(error, OSError):
                raise OSError(errno.EIO, first_line(error), path) from None
            raise


def lock_file(path, wait=False):
    """The open and locked file at a path, or None if another process has locked it and `wait` is false.

    The system releases the lock when the process ends, however it ends. A link in its place, or a file with a second
    name, is removed and not followed, as the folder may be a stranger's. A file system without locks has one writer.
    """
    while True:
        make_folder(os.path.dirname(path))  # which its last holder may have just removed, as it was empty
        with contextlib.suppress(FileNotFoundError):
            if not _is_plain(os.lstat(path)):
                os.remove(path)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue
        file = open(handle, "r+", encoding="utf-8")  # noqa: SIM115, the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            if error.errno not in NO_SUCH_CALL:
                raise
        with contextlib.suppress(FileNotFoundError):  # its last holder has just removed it
            if os.path.samestat(os.fstat(handle), os.lstat(path)) and _is_plain(os.fstat(handle)):
                return file
        file.close()


def _is_plain(status):
    """Whether the lstat of a path is that of a file with no second name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def _upload(local, path):
    make_folder(os.path.dirname(path))
    temporary = partial_path(path)
    bucket = gfile.tf_gfile()
    with contextlib.suppress(*gfile.missing_errors()):  # ram:// would append to it
        bucket.remove(temporary)
    bucket.copy(local, temporary)
    bucket.rename(temporary, path, overwrite=True)


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
    remove_folder(temporary)  # which stays when its process is killed
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
    """Whether something has the name, be it a link to nothing."""
    return gfile.exists(path) if is_remote(path) else os.path.lexists(path)


def write_bytes(path, data):
    write_whole(path, lambda temporary: pathlib.Path(temporary).write_bytes(data))


def name_broken(path, messages, what):
    """Names all broken files: the first 20 on standard error, and all in a text file, a line each.

    Args:
        path: of the text file.
        messages: a line on each of them.
        what: how many of what they are.

    Returns:
        One line that sums up.
    """
    say(*messages[:20], error=True)
    write_text(path, "".join(f"{plain(message)}\n" for message in messages))
    return f"{what} are broken; all are listed in {path}"


def write_image(path, image, format="PNG"):
    """Writes a Pillow image.

    A picture of a bucket is written by one request, as there are many: a bucket shows what is complete.
    """
    encoded = io.BytesIO()
    image.save(encoded, format, **_SAVED.get(format, {}))
    if is_remote(path):
        import tensorflow as tf

        retried(path, lambda: tf.io.write_file(path, encoded.getvalue()))
    else:
        write_bytes(path, encoded.getvalue())


def write_text(path, text):
    write_bytes(path, text.encode())


def write_json(path, value):
    """Writes plain Python values. NaN and infinity, which JSON does not have, become null."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


# === Blocks of a page ===


def write_block(path, name, text=None):
    """Writes a block of Markdown to a new file, or replaces the block of this name in an existing file.

    A block stands between the comments `<!-- NAME:begin -->` and `<!-- NAME:end -->`. Without a text, it is only looked
    for.

    Raises:
        InputError: the file has no such block.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, opened, rest = (read_text(path) if gfile.exists(path) else f"{begin}{end}\n").partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise InputError(f"{path}: holds no lines {begin} and {end} to write between")
    if text is not None:
        write_text(path, f"{before}{begin}\n{text}\n{end}{after}")


# === Names and hashes of files ===


def file_digest(path):
    """Bytes of a file, and its SHA-256 as text. Raises InputError; see `check_regular`."""
    check_regular(path)
    digest, size = hashlib.sha256(), 0
    with gfile.open_binary(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def folder_digests(folder, leave=()):
    """dict from the files below a folder to their SHA-256, but for hidden files and those that `leave` names."""
    names = [name for name in _files(folder) if name not in leave and os.path.basename(name)[0] != "."]
    return {name: file_digest(os.path.join(folder, name))[1] for name in names}


def _files(folder):
    """The files below a folder, sorted. Raises InputError for links that lead to the same folder twice."""
    names, visited = [], set()
    walk = gfile.tf_gfile().walk(folder) if is_remote(folder) else os.walk(folder, followlinks=True)
    for parent, _, files in walk:
        real = parent if is_remote(folder) else os.path.realpath(parent)
        if real in visited:
            raise InputError(f"{parent}: a link to a folder that is there already; remove the link")
        visited.add(real)
        names += [os.path.relpath(os.path.join(parent, name), folder) for name in files]
    return sorted(names)


def partial_path(path, start=".partial."):
    """The path of a hidden file beside another: of the file itself while it is written, by default."""
    folder, name = os.path.split(path)
    partial = start + name
    if len(os.fsencode(name)) <= LONGEST < len(os.fsencode(partial)):
        partial = start + hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(folder, partial)


# === Flags that name outputs ===


def try_file(flag, path, suffixes=()):
    """Raises InputError unless a file can be written at `path`, the value of a flag."""
    where = f"--{flag}={path}"
    if suffixes and not path.lower().endswith(tuple(suffixes)):
        raise InputError(f"{where}: its name must end in {' or '.join(suffixes)}")
    with _named(where):
        if not os.path.basename(path) or gfile.isdir(path):
            raise InputError(f"{where}: a folder, a file is expected")
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
            raise InputError(f"{where}: a file, a folder is expected")
        _try(os.path.join(path, "try"))


def try_new_folder(flag, path):
    """Raises InputError if there is something at `path`, or if a folder cannot be made there."""
    if _is_taken(path.rstrip("/")):
        raise InputError(f"--{flag}={path}: exists; it is never overwritten, choose another")
    try_file(flag, path.rstrip("/"))


def _try(path):
    """Writes and removes the temporary file of `write_whole`, and what it makes of folders."""
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
    """InputError in place of what a file system raises."""
    try:
        yield
    except InputError:
        raise
    except (*gfile.file_errors(), ValueError) as error:
        raise InputError(f"{where}: cannot be written ({first_line(error)})") from None
