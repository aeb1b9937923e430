"""Paths as files and folders: local ones by the system, those of buckets by TensorFlow, imported for them alone.

TensorFlow takes seconds to import, and a command has looked at its local files before that.
"""

import glob as patterns
import os
import sys

from axial.errors import InputError


def is_remote(path):
    """Whether a path is of a bucket, like gs://, where a folder cannot be renamed and no lock is held."""
    return "://" in os.fspath(path)


def tf_gfile():
    """tf.io.gfile, for what only buckets need."""
    import tensorflow as tf

    return tf.io.gfile


def exists(path):
    return tf_gfile().exists(path) if is_remote(path) else os.path.exists(path)


def isdir(path):
    return tf_gfile().isdir(path) if is_remote(path) else os.path.isdir(path)


def listdir(path):
    return tf_gfile().listdir(path) if is_remote(path) else os.listdir(path)


def glob(start, pattern):
    """Paths that begin with `start`, as it is, and go on as a pattern says."""
    return tf_gfile().glob(patterns.escape(start) + pattern)


def check_plain(path):
    """Raises InputError for the path of a checkpoint or SavedModel that TensorFlow takes for a pattern."""
    if sign := next((sign for sign in "*?[\\" if sign in path), None):
        raise InputError(f"{path}: TensorFlow takes {sign} in this path for a pattern; rename the folder")


def size(path):
    """Bytes of a file."""
    return tf_gfile().stat(path).length if is_remote(path) else os.path.getsize(path)


def remove(path):
    """Removes a file."""
    tf_gfile().remove(path) if is_remote(path) else os.remove(path)


def open_binary(path, mode):
    """A file that is open in binary mode: 'rb' or 'wb'."""
    return tf_gfile().GFile(path, mode) if is_remote(path) else open(path, mode)


def missing_errors():
    """The exceptions that say that there is no such file, for `except`."""
    errors = _errors()
    return (FileNotFoundError, errors.NotFoundError) if errors else (FileNotFoundError,)


def file_errors():
    """The exceptions of a file system, for `except`."""
    errors = _errors()
    return (OSError, errors.OpError) if errors else (OSError,)


def passing_errors():
    """What a bucket or a disk raises when it is full, slow, away, or does not know who asks."""
    if not (e := _errors()):
        return (OSError,)
    full = OSError, e.ResourceExhaustedError, e.PermissionDeniedError, e.UnauthenticatedError
    return *full, e.AbortedError, e.DeadlineExceededError, e.UnavailableError, e.UnknownError


def _errors():
    """The module of TensorFlow's exceptions; None where nothing has imported it, as nothing raises them there."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow and tensorflow.errors
