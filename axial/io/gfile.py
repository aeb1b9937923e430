"""File operations on local paths (by `os`) and on paths of buckets (by TensorFlow).

Only operations on buckets import TensorFlow, which takes seconds. A command checks its local files before that.
"""

import glob as patterns
import os
import sys

from axial.errors import InputError


def is_remote(path):
    """Whether a path is in a bucket, like gs://. Buckets can neither rename nor lock folders."""
    return "://" in os.fspath(path)


def tf_gfile():
    """The module tf.io.gfile, for paths of buckets."""
    import tensorflow as tf

    return tf.io.gfile


def exists(path):
    return tf_gfile().exists(path) if is_remote(path) else os.path.exists(path)


def isdir(path):
    return tf_gfile().isdir(path) if is_remote(path) else os.path.isdir(path)


def listdir(path):
    return tf_gfile().listdir(path) if is_remote(path) else os.listdir(path)


def glob(start, pattern):
    """Paths that begin with the literal text `start` and continue with a match of `pattern`."""
    return tf_gfile().glob(patterns.escape(start) + pattern)


def check_plain(path):
    """Raises InputError if TensorFlow would read the path of a checkpoint or SavedModel as a glob pattern."""
    if sign := next((sign for sign in "*?[\\" if sign in path), None):
        raise InputError(f"{path}: TensorFlow reads {sign} in this path as a pattern; rename the folder")


def size(path):
    """Size of a file in bytes."""
    return tf_gfile().stat(path).length if is_remote(path) else os.path.getsize(path)


def remove(path):
    """Removes a file."""
    tf_gfile().remove(path) if is_remote(path) else os.remove(path)


def open_binary(path, mode):
    """Opens a file in a binary mode: 'rb' or 'wb'."""
    return tf_gfile().GFile(path, mode) if is_remote(path) else open(path, mode)


def missing_errors():
    """Exceptions that a missing file raises, for `except`."""
    errors = _errors()
    return (FileNotFoundError, errors.NotFoundError) if errors else (FileNotFoundError,)


def file_errors():
    """Exceptions that file systems raise, for `except`."""
    errors = _errors()
    return (OSError, errors.OpError) if errors else (OSError,)


def passing_errors():
    """Exceptions of a bucket or disk that is full, slow, unavailable or denies access: a retry may succeed."""
    if not (e := _errors()):
        return (OSError,)
    full = OSError, e.ResourceExhaustedError, e.PermissionDeniedError, e.UnauthenticatedError
    return *full, e.AbortedError, e.DeadlineExceededError, e.UnavailableError, e.UnknownError


def _errors():
    """The module tf.errors, or None if TensorFlow is not imported and so cannot raise."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow and tensorflow.errors
