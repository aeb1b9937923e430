"""The package's exceptions, suggestions for misspelled names, and commands that install what is missing."""

import difflib
import importlib.metadata
import importlib.util
import re
import shlex
import sys
import unicodedata

from packaging.requirements import Requirement

DISTRIBUTION = "axial-deeplab-tf"  # PyPI's `axial` is a package of somebody else
LONGEST = 4000  # characters of a message
# What a name is that Python cannot encode. Where the locale has few letters, these are most names.
NOT_UTF8 = "not UTF-8" if sys.getfilesystemencoding() == "utf-8" else "not of the locale's letters; set PYTHONUTF8=1"


class InputError(ValueError):
    """Something that the user gave is wrong. The message names it and says what was expected.

    A command prints the message as one line and exits with 2.
    """

    _keras_call_info_injected = True  # so that Keras adds no lines to what a layer's call raises
    __init__ = Exception.__init__  # AutoGraph raises an error again as its own type only with this constructor

    def __str__(self):
        """The message, `bounded`. AutoGraph puts the lines of code before it that led there."""
        message = super().__str__()
        if message.startswith("in user code:"):
            message = message.rstrip().splitlines()[-1].strip().removeprefix(f"{type(self).__name__}: ")
        return bounded(message)


def bounded(message):
    """A message without the ends of long words, and without its middle if it is long. The names of all models fit."""
    message = re.sub(r"(\S{500})\S+", r"\1...", message)
    return message if len(message) <= LONGEST else f"{message[: LONGEST - 1000]} ... {message[-900:]}"


def nearest(name, candidates):
    """' (did you mean ...?)' for the nearest of the `known` names, or '' if none is near.

    Names that look alike have several forms in Unicode: "\\xe9" is "e\\u0301" too. Of such a pair escapes are shown.
    A name with a backslash is of a system where that separates folders.
    """
    name, candidates = str(name)[:LONGEST], [str(k) for k in candidates]
    if "\\" in name:
        return " (a backslash separates no folders here; write /)"
    form = unicodedata.normalize("NFC", name)
    for other in candidates:
        if other != name and unicodedata.normalize("NFC", other) == form:
            return f" (did you mean {other!a}? {name!a} looks alike and is another name)"
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def pip_install(extra):
    """The command that installs the packages of an extra of setup.py.

    It names these packages, not axial: axial is on no index, so a package of its name there would be a stranger's.
    """
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # sources that nobody has installed
        return f"pip install '.[{extra}]' in axial's checkout"
    selected = [r for r in map(Requirement, requirements) if f'extra == "{extra}"' in str(r.marker)]
    return shlex.join(["pip", "install", *(f"{r.name}{r.specifier}" for r in selected)])


def check_installed(what, extra, *packages):
    """Raises InputError, which begins with `what`, unless packages of an extra are there. Imports none of them."""
    missing = [name for name in packages if sys.modules.get(name) is None and importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{what} {pip_install(extra)} (there is no {', '.join(missing)})")


def check_docstrings():
    """Raises InputError under `python -OO`, under which TensorFlow cannot be imported."""
    if sys.flags.optimize > 1:
        raise InputError(
            "python -OO (PYTHONOPTIMIZE=2) leaves out docstrings, which TensorFlow reads: use -O, or neither"
        )


class Preempted(Exception):
    """Training was asked to stop and has saved a checkpoint. A command exits with 42."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient is not finite. The message names the first such tensors."""
