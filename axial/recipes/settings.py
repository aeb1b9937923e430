"""Lists the arguments that gin may bind. The arguments are read from the source text of axial's modules.

`configuration` builds the configurables. It imports TensorFlow, which takes longer than all work of this module.
"""

import ast
import functools
import os
import pathlib
import re
import sys

from axial.io.paths import PACKAGE


@functools.cache
def read_settings(tasks=()):
    """All settings that a gin binding may set.

    Args:
        tasks: further task classes that a program has added.

    Returns:
        dict from the name of each configurable, in the order of `configuration._BUILDERS`, to a dict. The inner dict
        maps each argument's name to (source text of its default or None, first sentence of its description or None).
    """
    configurables = _module("axial.recipes.configuration").expanded("_BUILDERS")
    for task in tasks:
        if task.__name__ not in configurables:
            configurables[task.__name__] = _Module(sys.modules[task.__module__].__file__).find(task.__name__)
    for node, module in [*configurables.values()]:
        if isinstance(node, ast.ClassDef):
            configurables |= module.expanded("configures", node.body)
    return {name: _arguments(*defined) for name, defined in configurables.items()}


def first_sentence(text):
    """The first sentence of a text, on one line.

    >>> first_sentence("CamVid (Brostow et al., 2009) at 145x193. A leaf sets MODEL.")
    'CamVid (Brostow et al., 2009) at 145x193.'
    """
    return re.split(r"(?<=\.)\s+(?=[A-Z`@'0-9])", " ".join(text.split()))[0]


class _Module:
    """The syntax tree of a module, whose file is at `path`."""

    def __init__(self, path):
        self.body = ast.parse(pathlib.Path(path).read_text(encoding="utf-8")).body

    def find(self, name, body=None):
        """(statement that defines a name, `_Module` of the statement); None without a definition. Imports are followed.

        `body` is the class body to search for a class attribute; None to search the module.
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
        """dict from the name of each class or function listed in the variable `name` to the result of `find`."""
        node, module = self.find(name, body) or (None, None)
        if not isinstance(node, ast.Assign):
            return {name: (node, module)} if node else {}
        names = [child for child in ast.walk(node.value) if isinstance(child, ast.Name)]
        names.sort(key=lambda child: (child.lineno, child.col_offset))
        return {key: definition for child in names for key, definition in module.expanded(child.id).items()}


@functools.cache
def _module(name):
    """The `_Module` of one of axial's modules."""
    path = os.path.join(PACKAGE, *name.split(".")[1:])
    return _Module(os.path.join(path, "__init__.py") if os.path.isdir(path) else f"{path}.py")


def _arguments(node, module):
    """dict from each argument of a function or a constructor to (default, description); see `read_settings`."""
    meanings, arguments = _meanings(ast.get_docstring(node) or ""), {}
    functions = [statement for statement in (node, *node.body) if isinstance(statement, ast.FunctionDef)]
    for statement in (statement for statement in functions if statement.name in (node.name, "__init__")):
        parameters = [argument for argument in statement.args.args if argument.arg != "self"]
        defaults = [None] * (len(parameters) - len(statement.args.defaults)) + statement.args.defaults
        pairs = [*zip(parameters, defaults), *zip(statement.args.kwonlyargs, statement.args.kw_defaults)]
        return {a.arg: (default and ast.unparse(default), meanings.get(a.arg)) for a, default in pairs}
    for base in node.bases:
        if isinstance(base, ast.Name):
            arguments |= _arguments(*module.find(base.id))
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            name = statement.target.id
            arguments[name] = statement.value and ast.unparse(statement.value), arguments.get(name, (None, None))[1]
    return {name: (default, meanings.get(name, meaning)) for name, (default, meaning) in arguments.items()}


def _meanings(docstring):
    """dict from each name in a docstring's sections 'Args' and 'Attributes' to its description's first sentence."""
    meanings = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.M):
        for names, text in re.findall(r"^ {4}(\w[\w, ]*?): (.*(?:\n {5,}.*)*)", section, re.M):
            meanings.update(dict.fromkeys(names.split(", "), first_sentence(text)))
    return meanings
