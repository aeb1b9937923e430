"""What gin may bind, read from the text of our own modules: nothing is imported.

`configuration` builds it. It needs TensorFlow, whose import takes longer than all that is done here.
"""

import ast
import dataclasses
import functools
import os
import pathlib
import re
import sys

from axial.io.paths import PACKAGE


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
    settings = []
    for name, (node, module) in _configurables().items():
        whole = first_sentence(ast.get_docstring(node).partition("\n\n")[0])
        for argument, (default, meaning) in _arguments(node, module).items():
            settings.append(Setting(f"{name}.{argument}", default, meaning or whole))
    return settings


@functools.cache
def read_arguments(tasks=()):
    """dict from the names of configurables to the lists of their arguments. `tasks` are further ones of a program."""
    arguments = {name: list(_arguments(*defined)) for name, defined in _configurables().items()}
    for made in [made for task in tasks for made in (task, *task.configures) if made.__name__ not in arguments]:
        module = _Module(sys.modules[made.__module__].__file__)
        arguments[made.__name__] = list(_arguments(*module.find(made.__name__)))
    return arguments


def first_sentence(text):
    """The first sentence of a text, on one line.

    >>> first_sentence("CamVid (Brostow et al., 2009) at 145x193. A leaf sets MODEL.")
    'CamVid (Brostow et al., 2009) at 145x193.'
    """
    return re.split(r"(?<=\.)\s+(?=[A-Z`@'0-9])", " ".join(text.split()))[0]


def _configurables():
    """dict from the names of all configurables to (class or function, `_Module` that defines it)."""
    found = _module("axial.recipes.configuration").expanded("_BUILDERS")
    for node, module in [*found.values()]:
        if isinstance(node, ast.ClassDef):
            found |= module.expanded("configures", node.body)
    return found


class _Module:
    """The syntax of a module, from the path of its file."""

    def __init__(self, path):
        self.body = ast.parse(pathlib.Path(path).read_text(encoding="utf-8")).body

    def find(self, name, body=None):
        """(statement that defines a name, its `_Module`), also of a name that is imported; None where there is none.

        `body` is that of a class whose attribute it is.
        """
        for node in body or self.body:
            match node:
                case ast.ImportFrom() if name in [alias.name for alias in node.names]:
                    return _module(node.module).find(name)
                case ast.ClassDef(name=other) | ast.FunctionDef(name=other) | ast.Assign(targets=[ast.Name(id=other)]):
                    if other == name:
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


@functools.cache
def _module(name):
    """The `_Module` of one of our modules."""
    path = os.path.join(PACKAGE, *name.split(".")[1:])
    return _Module(os.path.join(path, "__init__.py") if os.path.isdir(path) else f"{path}.py")


def _arguments(node, module):
    """dict from the arguments of a function or a constructor to (text of the default or None, meaning or None)."""
    said, arguments = _meanings(ast.get_docstring(node) or ""), {}
    makes = [part for part in (node, *node.body) if isinstance(part, ast.FunctionDef)]
    for part in makes:
        if part is node or part.name == "__init__":
            given = [argument for argument in part.args.args if argument.arg != "self"]
            defaults = [None] * (len(given) - len(part.args.defaults)) + part.args.defaults
            pairs = [*zip(given, defaults), *zip(part.args.kwonlyargs, part.args.kw_defaults)]
            return {a.arg: (default and ast.unparse(default), said.get(a.arg)) for a, default in pairs}
    for base in node.bases:
        if isinstance(base, ast.Name):
            arguments |= _arguments(*module.find(base.id))
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation):
            name = part.target.id
            arguments[name] = part.value and ast.unparse(part.value), arguments.get(name, (None, None))[1]
    return {name: (default, said.get(name, meaning)) for name, (default, meaning) in arguments.items()}


def _meanings(docstring):
    """dict from the names in the sections 'Args' and 'Attributes' of a docstring to what each is."""
    found = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.M):
        for names, text in re.findall(r"^ {4}(\w[\w, ]*?): (.*(?:\n {5,}.*)*)", section, re.M):
            found.update(dict.fromkeys(names.split(", "), first_sentence(text)))
    return found
