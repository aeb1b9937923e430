"""The door out: paths that are tried before the work begins, and files that appear only when they are complete."""

import hashlib
import os

import msgspec
import tensorflow as tf

from axial.errors import InputError
from axial.io.read import first_line


def write_whole(path, write):
    """Calls write(temporary path), then renames the file to `path`: it is there complete or not at all."""
    if os.path.dirname(path):
        tf.io.gfile.makedirs(os.path.dirname(path))
    temporary = partial_path(path)
    write(temporary)
    tf.io.gfile.rename(temporary, path, overwrite=True)


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


def file_digest(path):
    """Bytes of a file, and its SHA-256 as text."""
    digest, size = hashlib.sha256(), 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def folder_digests(folder, leave=()):
    """dict from the files below a folder to their SHA-256, but for those that `leave` names."""
    names = [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, files in tf.io.gfile.walk(folder)
        for name in files
    ]
    return {name: file_digest(os.path.join(folder, name))[1] for name in sorted(names) if name not in leave}


def partial_path(path):
    """The name that a file has while it is written."""
    return os.path.join(os.path.dirname(path), f".partial.{os.path.basename(path)}")


def try_file(flag, path, suffixes=()):
    """Raises InputError unless a file can be written at `path`, the value of a flag. None is no path."""
    if path is None:
        return
    where = f"--{flag}={path}"
    if not os.path.basename(path):
        raise InputError(f"{where}: names a folder, a file is expected")
    if suffixes and not path.lower().endswith(tuple(suffixes)):
        raise InputError(f"{where}: its name must end in {' or '.join(suffixes)}")
    try:
        if tf.io.gfile.isdir(path):
            raise InputError(f"{where}: a folder, a file is expected")
        if os.path.dirname(path):
            tf.io.gfile.makedirs(os.path.dirname(path))
        if "://" not in path and os.path.exists(path):
            with tf.io.gfile.GFile(path, "ab"):
                pass
        with tf.io.gfile.GFile(partial_path(path), "wb") as file:
            file.write(b"")
        tf.io.gfile.remove(partial_path(path))
    except (tf.errors.OpError, OSError, UnicodeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: cannot be written ({first_line(error)})") from None


def try_folder(flag, path):
    """Raises InputError unless files can be written into the folder `path`, the value of a flag. None is no path."""
    if path is None:
        return
    where = f"--{flag}={path}"
    try:
        if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path):
            raise InputError(f"{where}: a file, a folder is expected")
        tf.io.gfile.makedirs(path)
        probe = os.path.join(path, ".partial.try")
        with tf.io.gfile.GFile(probe, "wb") as file:
            file.write(b"")
        tf.io.gfile.remove(probe)
    except (tf.errors.OpError, OSError, UnicodeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: cannot be written ({first_line(error)})") from None


def try_new_folder(flag, path):
    """Raises InputError if there is something at `path`, or if a folder cannot be made there."""
    where = f"--{flag}={path}"
    path = path.rstrip("/")
    if tf.io.gfile.exists(path):
        raise InputError(f"{where}: exists; it is never overwritten, choose another")
    try_file(flag, path)
