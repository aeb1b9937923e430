"""Position-sensitive axial attention and the systems built on it.

`axial.load` gives a model with its weights, `axial.predict` what it finds on photos; see `axial.api`.
"""

# Before TensorFlow: tensorflow-tpu 2.18 brings an OpenSSL of its own, and Python's hashlib crashes when Ubuntu 22.04's
# is loaded after it (https://github.com/tensorflow/tensorflow/issues/82208).
import hashlib  # noqa: F401
import os
import sys
import typing

from axial.errors import check_docstrings

if typing.TYPE_CHECKING:  # what `__getattr__` imports
    from axial.api import load as load
    from axial.api import predict as predict

__version__ = "0.2.0"


def __getattr__(name: str) -> typing.Any:
    """`load` and `predict`, which import TensorFlow when they are first named; see PEP 562.

    TensorFlow is quiet then, as in commands. A program that imports it first, or that sets TF_CPP_MIN_LOG_LEVEL, keeps
    its own choice.
    """
    if name not in ("load", "predict"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_docstrings()
    quiet = "tensorflow" not in sys.modules and "TF_CPP_MIN_LOG_LEVEL" not in os.environ
    if quiet:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from axial import api
    from axial.cli import app

    if quiet:
        app.silence_xla()
    return getattr(api, name)
