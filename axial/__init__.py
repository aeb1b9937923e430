"""Position-sensitive axial attention and the systems built on it.

`axial.load` loads a model with its weights, and `axial.predict` predicts photos with it; see `axial.api`.
"""

# hashlib must load before TensorFlow: tensorflow-tpu 2.18 brings its own OpenSSL, and hashlib crashes if Ubuntu 22.04's
# OpenSSL is loaded after it (https://github.com/tensorflow/tensorflow/issues/82208).
import hashlib  # noqa: F401
import os
import sys
import typing

from axial.errors import check_docstrings

if typing.TYPE_CHECKING:  # `__getattr__` imports these at run time
    from axial.api import load as load
    from axial.api import predict as predict

__version__ = "0.2.0"

# Hides TensorFlow's log, as the commands do. A program that imports TensorFlow first, or that sets the variable, keeps
# its own log level.
_QUIET = "tensorflow" not in sys.modules and "TF_CPP_MIN_LOG_LEVEL" not in os.environ
if _QUIET:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def __getattr__(name: str) -> typing.Any:
    """Imports `load` and `predict`, and with them TensorFlow, at their first use; see PEP 562."""
    if name not in ("load", "predict"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_docstrings()
    from axial import api
    from axial.cli import app

    if _QUIET:
        app.silence_xla()
    return getattr(api, name)
