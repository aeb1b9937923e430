"""What gin may bind, and the models that there are, read from the text of our own modules: nothing is imported.

`configuration` builds it. It needs TensorFlow, whose import takes longer than all that is done here.
"""

import ast
import dataclasses
import functools
import inspect
import os
import pathlib
import re
import sys

from axial.errors import InputError, nearest

PACKAGE = os.path.dirname(os.path.abspath(__file__))


@dataclasses.dataclass(frozen=True)
class Setting:
    """An argument that a gin binding may set.

    Attributes:
        name: like 'TrainingConfig.steps'.
        default: the text of its default, or None where a recipe must set it.
        meaning: first sentence of what its docstring says.
    """

    name: str
    default: str | None
    meaning: str


def read_settings():
    """List of the `Setting`s of every configurable, in the order of `configuration._BUILDERS`."""
    found = []
    for name, (node, module) in _configurables().items():
        about = ast.get_docstring(node)
        said = _meanings(about)
        arguments = _arguments(node, module, said).items()
        whole = first_sentence(about.partition("\n\n")[0])
        found += [Setting(f"{name}.{argument}", default, said.get(argument, whole)) for argument, default in arguments]
    return found


def read_arguments():
    """dict from the names of all configurables to the lists of their arguments.

    A program that has imported the tasks may have added tasks of its own.
    """
    found = {name: list(_arguments(*defined, {})) for name, defined in _configurables().items()}
    registry = sys.modules.get("axial.tasks.registry")
    for task in registry.TASKS if registry else ():
        for made in (task, *task.configures):
            found.setdefault(made.__name__, [*inspect.signature(made).parameters])
    return found


def model_names():
    """Names of all registered models: those of each home's `VARIANTS`, in the order of `models.registry`."""
    homes = sorted(path.parent.name for path in pathlib.Path(PACKAGE, "models").glob("*/variants.py"))
    found = [_module(f"axial.models.{home}.variants").find("VARIANTS")[0] for home in homes]
    return [key.value for node in found for key in node.value.keys]


def check_model_name(name, known=None, where=""):
    """Raises InputError, which begins with `where`, unless a registered model has a name.

    Args:
        name: of a model.
        known: all names; by default `model_names`.
        where: for the message.
    """
    known = model_names() if known is None else known
    if name not in known:
        raise InputError(f"{where}no model is called {name!r}{nearest(name, known)}: {', '.join(known)}")


def first_sentence(text):
    """The first sentence of a text, on one line.

    >>> first_sentence("CamVid (Brostow et al., 2009) at 145x193. A leaf sets MODEL.")
    'CamVid (Brostow et al., 2009) at 145x193.'
    """
    return re.split(r"(?<=\.)\s+(?=[A-Z`@'0-9])", " ".join(text.split()))[0]


def _configurables():
    """dict from the names of all configurables to (class or function, `_Module` that defines it)."""
    found = _module("axial.configuration").expanded("_BUILDERS")
    for node, module in [*found.values()]:
        if isinstance(node, ast.ClassDef):
            found |= module.expanded("configures", node.body)
    return found


class _Module:
    """The syntax of one of our modules."""

    def __init__(self, name):
        path = os.path.join(PACKAGE, *name.split(".")[1:])
        path = os.path.join(path, "__init__.py") if os.path.isdir(path) else f"{path}.py"
        self.body = ast.parse(pathlib.Path(path).read_text(encoding="utf-8")).body

    def find(self, name, body=None):
        """(statement that defines a name, its `_Module`), also of a name that is imported; None where there is none.

        `body` is that of a class whose attribute it is.
        """
        for node in body or self.body:
            if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
                return _module(node.module).find(name)
            targets = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
            if name in (getattr(node, "name", None), *targets):
                return node, self
        return None

    def expanded(self, name, body=None):
        """dict from the names of the classes and functions that a variable lists to what `find` says of each."""
        node, module = self.find(name, body) or (None, None)
        if not isinstance(node, ast.Assign):
            return {name: (node, module)} if node else {}
        names = [part for part in ast.walk(node.value) if isinstance(part, ast.Name)]
        names.sort(key=lambda part: (part.lineno, part.col_offset))
        return {found: where for part in names for found, where in module.expanded(part.id).items()}


_module = functools.cache(_Module)


def _arguments(node, module, said):
    """dict from the arguments of a function, or of a class' constructor, to the text of their defaults or None.

    `said` is completed by the docstrings of base classes.
    """
    for part in (node, *node.body):
        if isinstance(part, ast.FunctionDef) and (part is node or part.name == "__init__"):
            return _of_function(part)
    found = {}
    for base in node.bases:
        if isinstance(base, ast.Name):
            above, of_base = module.find(base.id)
            for name, meaning in _meanings(ast.get_docstring(above) or "").items():
                said.setdefault(name, meaning)
            found |= _arguments(above, of_base, said)
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation):
            found[part.target.id] = part.value and ast.unparse(part.value)
    return found


def _of_function(node):
    given = node.args.args
    defaults = [None] * (len(given) - len(node.args.defaults)) + node.args.defaults
    pairs = [*zip(given, defaults), *zip(node.args.kwonlyargs, node.args.kw_defaults)]
    return {argument.arg: default and ast.unparse(default) for argument, default in pairs if argument.arg != "self"}


def _meanings(docstring):
    """dict from the names in the sections 'Args' and 'Attributes' of a docstring to what each is."""
    found = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.M):
        for names, text in re.findall(r"^ {4}(\w[\w, ]*?): (.*(?:\n {5,}.*)*)", section, re.M):
            found.update(dict.fromkeys(names.split(", "), first_sentence(text)))
    return found
