"""Names of the registered models, read from the text of each `variants.py` without importing a model."""

import pathlib
import re

from axial.errors import InputError, nearest

# Maps the name of a model's folder to the path of its `variants.py`.
VARIANTS_OF = {path.parent.name: path for path in sorted(pathlib.Path(__file__).parent.glob("*/variants.py"))}


def model_names():
    """Names of all registered models, in the order of `registry.VARIANTS`."""
    texts = (path.read_text("utf-8") for path in VARIANTS_OF.values())
    return [name for text in texts for name in re.findall(r'^    "(\w+)": ', text, re.M)]


def check_model_name(name, names=None, where=""):
    """Raises InputError if no registered model has the name.

    Args:
        name: name of a model.
        names: all names; by default `model_names()`.
        where: start of the message.
    """
    names = model_names() if names is None else names
    if name not in names:
        raise InputError(f"{where}no model is called {name!r}{nearest(name, names)}: {', '.join(names)}")
