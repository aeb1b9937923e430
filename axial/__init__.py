"""Position-sensitive axial attention and the systems built on it."""

# Before TensorFlow: tensorflow-tpu 2.18 brings an OpenSSL of its own, and Python's hashlib crashes when Ubuntu 22.04's
# is loaded after it (https://github.com/tensorflow/tensorflow/issues/82208).
import hashlib  # noqa: F401

__version__ = "0.2.0"
