"""The models, to be imported from here: `from axial.models import build_model`.

They are models of tf_keras (`import tf_keras as keras`). TensorFlow is imported with the first name, and with it all
models and layers, so that tf_keras knows them when it loads a model.
"""

import importlib

from axial.errors import check_docstrings

__all__ = ["VARIANTS", "build_model"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_docstrings()
    return getattr(importlib.import_module(f"{__name__}.registry"), name)


def __dir__():
    return sorted({*globals(), *__all__})
