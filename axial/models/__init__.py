"""The registered models: `from axial.models import build_model`.

Every registered model is a tf_keras model (`import tf_keras as keras`). The first use of a name of this module imports
TensorFlow and all models and layers, so that tf_keras knows the classes when it loads a model.
"""

import importlib
import typing

from axial.errors import check_docstrings

if typing.TYPE_CHECKING:  # `__getattr__` imports these at run time
    from axial.models.registry import VARIANTS, build_model

__all__ = ["VARIANTS", "build_model"]


def __getattr__(name: str) -> typing.Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_docstrings()
    return getattr(importlib.import_module(f"{__name__}.registry"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
