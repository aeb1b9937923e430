"""The package's exceptions, suggestions for misspelled names, and commands that install missing packages."""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import re
import shlex
import sys
import unicodedata

from packaging.requirements import Requirement

DISTRIBUTION = "axial-deeplab-tf"  # PyPI's `axial` is somebody else's package
LONGEST = 4000  # most characters of a message
# Says why Python cannot encode a name. In a locale with few letters, Python can encode few names.
NOT_UTF8 = "not UTF-8" if sys.getfilesystemencoding() == "utf-8" else "not of the locale's letters; set PYTHONUTF8=1"


class InputError(ValueError):
    """The user gave wrong input. The message names the input and says what was expected.

    A command prints the message as one line and exits with code 2.
    """

    _keras_call_info_injected = True  # so that Keras adds no lines to errors of a layer's call
    __init__ = Exception.__init__  # AutoGraph keeps the class of an error only if the class has this constructor

    def __str__(self):
        """The message, shortened by `bounded`. The lines of code that AutoGraph puts before it are removed."""
        message = super().__str__()
        if message.startswith("in user code:"):
            message = message.rstrip().splitlines()[-1].strip().removeprefix(f"{type(self).__name__}: ")
        return bounded(message)


@contextlib.contextmanager
def named(where):
    """A context that puts `where`, such as the path of a file, before the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def bounded(message):
    """Cuts the ends of words beyond 500 characters and the middle of a message beyond `LONGEST`.

    `LONGEST` is enough for a message that lists the names of all models.
    """
    message = re.sub(r"(\S{500})\S+", r"\1...", message)
    return message if len(message) <= LONGEST else f"{message[: LONGEST - 1000]} ... {message[-900:]}"


def nearest(name, candidates):
    """' (did you mean ...?)' with the nearest of the candidate names, or '' if none is near.

    Unicode can write the same letter in several ways: "\\xe9" and "e\\u0301". If a candidate differs from the name only
    in this way, both are shown with escapes. For a name with a backslash, which separates folders on other systems, the
    hint is to write a slash.
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

    The command names these packages, not axial: this axial is not on PyPI, and the package of that name is another.
    """
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # axial runs from its sources and is not installed
        return f"pip install '.[{extra}]' in axial's checkout"
    selected = [r for r in map(Requirement, requirements) if f'extra == "{extra}"' in str(r.marker)]
    return shlex.join(["pip", "install", *(f"{r.name}{r.specifier}" for r in selected)])


def check_installed(what, extra, *packages):
    """Raises InputError, which begins with `what`, unless an extra's packages are installed. Imports no package."""
    missing = [name for name in packages if sys.modules.get(name) is None and importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{what} {pip_install(extra)} (there is no {', '.join(missing)})")


def check_docstrings():
    """Raises InputError under `python -OO`, with which TensorFlow cannot be imported."""
    if sys.flags.optimize > 1:
        raise InputError("python -OO (PYTHONOPTIMIZE=2) drops docstrings, which TensorFlow reads: use -O, or neither")


class Preempted(Exception):
    """Training was asked to stop and has saved a checkpoint. A command exits with code 42."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient is not finite. The message names the first non-finite tensors."""
