"""Position-sensitive axial attention and the systems built on it.

`axial.load` gives a model with its weights, `axial.predict` what it finds on photos; see `axial.cli.api`.
"""

# Before TensorFlow: tensorflow-tpu 2.18 brings an OpenSSL of its own, and Python's hashlib crashes when Ubuntu 22.04's
# is loaded after it (https://github.com/tensorflow/tensorflow/issues/82208).
import hashlib  # noqa: F401

__version__ = "0.2.0"


def __getattr__(name):
    """`load` and `predict`, which import TensorFlow when they are first named; see PEP 562."""
    if name not in ("load", "predict"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from axial.cli import api

    return getattr(api, name)
