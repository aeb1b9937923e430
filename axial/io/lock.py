"""One writer a folder, and one writer a file at a time."""

import contextlib
import fcntl
import json
import os
import socket
import stat

from axial.errors import InputError
from axial.io.check import is_remote
from axial.io.write import make_folder, partial_path, remove_empty


def locked_file(path):
    """Holds the lock of a file, for who reads it, adds to it and writes it anew. Waits until the lock is free."""
    name = os.path.basename(partial_path(path)).replace(".partial.", ".lock.", 1)
    return locked(os.path.dirname(path) or ".", name=name)


@contextlib.contextmanager
def locked(folder, flag=None, name=".lock"):
    """Holds the lock of a local folder. Remote folders (`gs://`) have no lock.

    A folder that is missing is made. At the end it is removed if it is empty.

    The lock is a file that names its host and process. The system releases it when the process ends, however it ends.
    A link in its place is removed and not followed, as the folder may be a stranger's.

    Args:
        folder: to write to.
        flag: name of the flag that has the folder; None to wait until the lock is free.
        name: of the lock.

    Raises:
        InputError: another process holds the lock. The message names it.
    """
    if is_remote(folder):
        yield
        return
    made = make_folder(folder)
    path = os.path.join(folder, name)
    file = _take(path, wait=flag is None)
    if file is None:
        raise InputError(f"--{flag}={folder}: {_holder(path)} is writing there; wait for it or choose another folder")
    try:
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
        file.flush()
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
        remove_empty(made)
        file.close()


def _take(path, wait):
    """The open and locked file, or None if another process has locked it."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            if not _is_plain(os.lstat(path)):
                os.remove(path)  # a lock is what this module made; it takes the place of a stranger's link
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # its last holder has just removed the folder, which was empty
            make_folder(os.path.dirname(path))
            continue
        file = open(handle, "r+", encoding="utf-8")  # noqa: SIM115, the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(handle).st_ino == os.lstat(path).st_ino:
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:  # its last holder has just removed it
            pass
        file.close()


def _is_plain(status):
    """Whether the lstat of a path is that of a file with no second name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def _holder(path):
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, encoding="utf-8") as file:
        holder = json.load(file)
        return f"process {holder['process']} on {holder['host']}"
    return "another process"
