"""Names of the registered models, read from the text of the homes' `variants.py`: nothing is imported."""

import pathlib
import re

from axial.errors import InputError, nearest


def model_names():
    """The names in each home's `VARIANTS`, in the order of `registry.VARIANTS`."""
    homes = sorted(pathlib.Path(__file__).parent.glob("*/variants.py"))
    return [name for home in homes for name in re.findall(r'^    "(\w+)": ', home.read_text("utf-8"), re.M)]


def check_model_name(name, names=None, where=""):
    """Raises InputError, which begins with `where`, unless a registered model has a name.

    Args:
        name: of a model.
        names: all names; by default `model_names`.
        where: for the message.
    """
    names = model_names() if names is None else names
    if name not in names:
        raise InputError(f"{where}no model is called {name!r}{nearest(name, names)}: {', '.join(names)}")
