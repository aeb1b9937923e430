"""Locks: one writer per folder, and one writer per file at a time."""

import contextlib
import os
import socket

from axial.errors import InputError
from axial.io.gfile import is_remote
from axial.io.read import read_file
from axial.io.write import lock_file, make_folder, partial_path, remove_empty


def locked_file(path):
    """Holds the lock of a file while a caller reads, extends and rewrites it. Waits until the lock is free."""
    return locked(os.path.dirname(path) or ".", name=os.path.basename(partial_path(path, ".lock.")))


@contextlib.contextmanager
def locked(folder, flag=None, name=".lock"):
    """Holds the lock of a local folder. Remote folders (`gs://`) have no lock.

    Creates a missing folder, and removes it at the end if it is empty.

    The lock is a file that holds the host and process id of its holder; see `lock_file`.

    Args:
        folder: folder to lock.
        flag: name of the flag that gave the folder, for the message; None to wait until the lock is free.
        name: file name of the lock.

    Raises:
        InputError: another process holds the lock. The message names that process.
    """
    if is_remote(folder):
        yield
        return
    made, holder = make_folder(folder), "another process"
    path = os.path.join(folder, name)
    file = lock_file(path, wait=flag is None)
    if file is None:
        with contextlib.suppress(InputError, OSError):
            holder = read_file(path, 1000).decode(errors="replace") or holder
        raise InputError(f"--{flag}={folder}: {holder} is writing there; wait for it or choose another folder")
    try:
        file.truncate(0)
        # Unbuffered, because `close` would write a buffer after the file is removed.
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
        remove_empty(made)
        file.close()
