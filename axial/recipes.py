"""The recipes of experiments/ and what a gin binding may set, read from their text: nothing is imported or built.

`configuration` is what loads a recipe. It needs TensorFlow, whose import takes longer than all that is done here.
"""

import ast
import dataclasses
import inspect
import itertools
import os
import pathlib
import re
import sys

from axial.errors import InputError, nearest

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_INCLUDE = re.compile(r"^include '(.+)'$")
_BINDING = re.compile(r"^([\w.]+) = (.*?)(?:  #.*)?$")
_NO_LEAVES = ("tasks/", "tiny/")  # folders of what recipes include, and of what is laid over a leaf


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A leaf of experiments/.

    Attributes:
        path: below experiments/.
        purpose: first sentence of its comment.
        bindings: dict from macros and arguments, like 'STEPS' and 'LossConfig.top_k', to their text; those of included
            files are there too.
    """

    path: str
    purpose: str
    bindings: dict

    @property
    def model(self):
        return ast.literal_eval(self.bindings["MODEL"])

    @property
    def canvas(self):
        """(height, width) of the photos, or None for texts and detectors, whose photos have several sizes."""
        text = self.bindings.get("CANVAS") or self.bindings.get("IMAGE")
        return ast.literal_eval(text) if text else None

    def cells(self):
        """The strings of the recipe's row, in the order of `COLUMNS`."""
        canvas = "x".join(map(str, self.canvas)) if self.canvas else "-"
        numbers = (self.bindings.get(name, "-") for name in ("STEPS", "BATCH"))
        return self.path, self.model, os.path.dirname(self.path), *numbers, canvas, self.purpose


COLUMNS = ("recipe", "model", "data", "steps", "batch", "canvas", "what it is")


def experiments_dir():
    """The folder of gin files, in the installed package or in the checkout."""
    installed = os.path.join(_PACKAGE, "experiments")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(_PACKAGE), "experiments")


def read_recipes(experiments):
    """List of the `Recipe`s of a folder: every file below it that has a MODEL, itself or by what it includes."""
    leaves = sorted(pathlib.Path(experiments).glob("*/*.gin"))
    found = [read_recipe(experiments, f"{leaf.parent.name}/{leaf.name}") for leaf in leaves]
    return [recipe for recipe in found if "MODEL" in recipe.bindings and not recipe.path.startswith(_NO_LEAVES)]


def read_recipe(experiments, path):
    """The `Recipe` of one file."""
    lines = pathlib.Path(os.path.join(experiments, path)).read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(re.compile("# ").match, lines)  # the first paragraph
    bindings = {}
    for line in lines:
        if included := _INCLUDE.match(line):
            bindings.update(read_recipe(experiments, included[1]).bindings)
        elif found := _BINDING.match(line):
            bindings[found[1]] = found[2]
    return Recipe(path, first_sentence(" ".join(line.removeprefix("# ") for line in comment)), bindings)


def settings_of(recipe):
    """The `Setting`s of the configurables that a recipe names."""
    values = " ".join(recipe.bindings.values())
    named = {*re.findall(r"@(\w+)", values), *(name.partition(".")[0] for name in recipe.bindings if "." in name)}
    return [setting for setting in read_settings() if setting.name.partition(".")[0] in named]


def find_recipe(recipes, path):
    """The `Recipe` with a path. Raises InputError, which names the nearest."""
    path = path.removeprefix("experiments/")
    known = {recipe.path: recipe for recipe in recipes}
    if path not in known:
        raise InputError(f"{path}: no recipe has this name{nearest(path, known)}; axial-analyze recipes lists them")
    return known[path]


def model_names():
    """Names of all registered models: those of `models.variants.VARIANTS`, in its order."""
    for node in _Source("axial.models.variants").tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "VARIANTS":
            return [key.value for key in node.value.keys]
    raise LookupError("VARIANTS")


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


# === What a binding may set ===


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
    return [setting for name, source in _configurables().items() for setting in _settings(name, source)]


def read_arguments():
    """dict from the names of all configurables to the lists of their arguments.

    A program that has imported the tasks may have added tasks of its own.
    """
    found = {name: list(_arguments(*source.definition(name), {})) for name, source in _configurables().items()}
    registry = sys.modules.get("axial.tasks.registry")
    for task in registry.TASKS if registry else ():
        for made in (task, *task.configures):
            found.setdefault(made.__name__, [*inspect.signature(made).parameters])
    return found


def _configurables():
    """dict from the names of all configurables to a `_Source` that knows each."""
    source = _Source("axial.configuration")
    found = dict(source.assigned("_BUILDERS"))
    for name, source_of_task in source.assigned("TASKS"):
        task, source_of_task = source_of_task.definition(name)
        found |= source_of_task.assigned("configures", task)
    return found


class _Source:
    """The syntax of one of our modules."""

    def __init__(self, module):
        path = os.path.join(_PACKAGE, *module.split(".")[1:])
        path = os.path.join(path, "__init__.py") if os.path.isdir(path) else f"{path}.py"
        self.tree = ast.parse(pathlib.Path(path).read_text(encoding="utf-8"))

    def assigned(self, name, where=None):
        """List of (name, `_Source` of a module that knows it) in the tuple that a variable is.

        The variable is one of the module, or of a class `where` in it. Other variables in the tuple stand for their
        own names, and what is computed is left out.
        """
        names = []
        for node in (where or self.tree).body:
            if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
                return _Source(node.module).assigned(name)
            if isinstance(node, ast.Assign):
                targets, values = node.targets[0], node.value
                pairs = zip(targets.elts, values.elts) if isinstance(targets, ast.Tuple) else [(targets, values)]
                names += [part for target, value in pairs if getattr(target, "id", "") == name for part in value.elts]
        found = []
        for part in names:
            if not isinstance(part, ast.Starred):
                found.append((part.id, self))
            elif isinstance(part.value, ast.Name):
                found += self.assigned(part.value.id)
        return found

    def definition(self, name):
        """(class or function, `_Source` of its module) of a name that the module defines or imports."""
        for node in self.tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return node, self
            if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
                return _Source(node.module).definition(name)
        raise LookupError(name)


def _settings(name, source):
    """The `Setting`s of a class or function, of which a module knows the name."""
    node, source = source.definition(name)
    about = ast.get_docstring(node)
    said = _meanings(about)
    arguments = _arguments(node, source, said).items()
    whole = first_sentence(about.partition("\n\n")[0])
    return [Setting(f"{name}.{argument}", default, said.get(argument, whole)) for argument, default in arguments]


def _arguments(node, source, said):
    """dict from the arguments of a function, or of a class' constructor, to the text of their defaults or None.

    `said` is completed by the docstrings of base classes.
    """
    for part in (node, *node.body):
        if isinstance(part, ast.FunctionDef) and (part is node or part.name == "__init__"):
            return {name: default for name, default in _of_function(part).items() if name != "self"}
    found = {}
    for base in node.bases:
        if isinstance(base, ast.Name):
            above, of_base = source.definition(base.id)
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
    return {argument.arg: default and ast.unparse(default) for argument, default in pairs}


def _meanings(docstring):
    """dict from the names in the sections 'Args' and 'Attributes' of a docstring to what each is."""
    found, names = {}, []
    for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.M):
        for line in section.splitlines():
            if begun := re.match(r" {4}(\w[\w, ]*?): (.*)", line):
                names = begun[1].split(", ")
                found.update(dict.fromkeys(names, begun[2]))
            else:
                found.update({name: f"{found[name]} {line.strip()}" for name in names})
    return {name: first_sentence(text) for name, text in found.items()}
