"""Reads gin files and bindings into a checked `Recipe`. This module neither imports nor builds what a recipe names.

`settings` lists the arguments that gin may bind. `configuration` binds and builds a recipe. Only `configuration`
imports TensorFlow, which takes longer than all work of this module.
"""

import dataclasses
import os
import pathlib
import re
import sys
import tokenize

from gin import config_parser

from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.paths import experiments_dir
from axial.io.read import first_line, read_text
from axial.models.names import check_model_name
from axial.recipes.settings import first_sentence, read_settings

LARGEST = 2**17  # most characters of a configuration with its included files; axial's recipes have a few thousand
LARGEST_USES = 100  # most references that a value leads to. Each use counts, because gin builds an object for it
MOST_QUOTES = 2000  # most quotes in a text, because gin's parser takes quadratic time for adjacent strings
DEEPEST = 50  # most levels of nested brackets or included files
FLAG = "--gin_binding"  # stands for the position of a binding from the command line
LARGEST_NUMBER, LONGEST_TEXT = 2**64, 2**12
_LARGE = f"has a number above 2**64, a text of more than {LONGEST_TEXT} bytes, or {DEEPEST} brackets in each other"
_VALUES = "expected a number, True, False, None, text in quotes like 'nuclei', a list, @NAME() or %MACRO"


# === Files ===


def find_file(name):
    """Path of a gin file, from its path on disk or its name in `experiments_dir`.

    Raises:
        InputError: there is no such file. The message suggests the nearest name.
    """
    root, below = experiments_dir(), name.removeprefix("experiments/")
    for path in (name, os.path.join(root, below)):
        if gfile.exists(path) and not gfile.isdir(path):
            return path
    names = [str(path.relative_to(root)) for path in pathlib.Path(root).rglob("*.gin")]
    raise InputError(f"{name}: no such gin file{nearest(below, names)}")


def _is_run_config(path):
    """Whether `configuration.save` has written this gin file."""
    folder, name = os.path.split(path)
    return name == "config.gin" and gfile.exists(os.path.join(folder, "spec.json"))


# === Recipes ===

COLUMNS = ("recipe", "model", "data", "steps", "batch", "canvas", "what it is")
_NO_LEAVES = ("tasks/", "tiny/")  # no recipes: recipes include the files of tasks/, and files of tiny/ override recipes


@dataclasses.dataclass(frozen=True)
class Reference:
    """A reference in a value, such as @WarmupPoly() or the macro %STEPS.

    `name` is 'WarmupPoly' or '%STEPS' in these examples. `called` is whether '()' follows the name.
    """

    name: str
    called: bool

    def __repr__(self):
        return self.name if self.name[0] == "%" else f"@{self.name}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The content of gin files and bindings.

    Attributes:
        path: path relative to experiments/, for one of axial's recipes; else ''.
        purpose: first sentence of the comment at the beginning of the first file.
        bindings: dict from each macro or argument, like 'STEPS' or 'LossConfig.top_k', to its value. The
            bindings of included files are among these.
        positions: dict from the same keys to the position of the statement: 'FILE:LINE', or `FLAG`.
    """

    path: str = ""
    purpose: str = ""
    bindings: dict = dataclasses.field(default_factory=dict)
    positions: dict = dataclasses.field(default_factory=dict)

    def chain(self, key):
        """List of the keys that lead to a value: the argument, the macro that it is bound to, the next macro, ..."""
        chain = []
        while key in self.bindings and key not in chain:
            chain.append(key)
            value = self.bindings[key]
            key = value.name[1:] if isinstance(value, Reference) and value.name[0] == "%" else None
        return chain

    def value(self, key, default=None):
        """The value that an argument is bound to, directly or through macros; the default if it is not bound."""
        keys = self.chain(key)
        return self.bindings[keys[-1]] if keys else default

    def is_set_by_user(self, key):
        """Whether the user has bound an argument, by a flag or in a file that is neither axial's nor a run's."""
        position = self.positions[self.chain(key)[-1]]
        path, recipes = (pathlib.Path(path).resolve() for path in (position.rpartition(":")[0], experiments_dir()))
        return position == FLAG or not (recipes in path.parents or _is_run_config(path))

    def task(self):
        """Name of the recipe's task, or None."""
        task = self.value("experiment.task")
        return task.name if isinstance(task, Reference) else None

    @property
    def model(self):
        return self.bindings["MODEL"]

    @property
    def canvas(self):
        """(height, width) of the canvas; None for texts, and for detectors, whose canvases have several sizes."""
        return self.bindings.get("CANVAS") or self.bindings.get("IMAGE")

    def cells(self):
        """The recipe's row in a table of recipes: a string for each of `COLUMNS`."""
        canvas = "x".join(map(str, self.canvas)) if self.canvas else "-"
        numbers = (str(self.bindings.get(name, "-")) for name in ("STEPS", "BATCH"))
        return self.path, self.model, os.path.dirname(self.path), *numbers, canvas, self.purpose

    def settings(self):
        """List of a tuple (name, default, meaning) for each setting of the configurables that the recipe names."""
        named = {key.partition(".")[0] for key in self.bindings}.union(*map(names_in, self.bindings.values()))
        settings = {name: arguments for name, arguments in read_settings().items() if name in named}
        return [(f"{name}.{key}", *about) for name, arguments in settings.items() for key, about in arguments.items()]


def read_recipes():
    """List of all `Recipe`s: the files of experiments/ that set MODEL, directly or in an included file."""
    leaves = sorted(pathlib.Path(experiments_dir()).glob("*/*.gin"))
    recipes = [read_recipe(f"{leaf.parent.name}/{leaf.name}") for leaf in leaves]
    return [recipe for recipe in recipes if "MODEL" in recipe.bindings and not recipe.path.startswith(_NO_LEAVES)]


def read_recipe(path):
    """The `Recipe` of one file of experiments/."""
    return dataclasses.replace(read([os.path.join(experiments_dir(), path)], whole=False), path=path)


def names_in(value, depth=0):
    """List of the configurables and macros that a value names. A name is repeated for each use.

    Raises:
        ValueError: an item of the value is too large, or is text that UTF-8 cannot encode (half a surrogate pair).
    """
    if isinstance(value, Reference):
        return [value.name]
    size = len(value.encode() if isinstance(value, str) else value) if isinstance(value, (str, bytes)) else 0
    if size > LONGEST_TEXT or depth > DEEPEST or (isinstance(value, int) and abs(value) > LARGEST_NUMBER):
        raise InputError(_LARGE)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    items = value if isinstance(value, (list, tuple)) else ()
    return [name for item in items for name in names_in(item, depth + 1)]


# === Reading ===


def read(files, bindings=(), whole=True):
    """The `Recipe` of gin files and bindings. `whole=False` allows macros that a later file would set.

    Raises:
        InputError: see `configuration.load`.
    """
    reader = _Reader()
    for file in files:
        reader.file(file)
    for binding in bindings:
        reader.text(binding, FLAG)
    values = {key: value for key, value, _ in reader.statements}
    positions = {key: position for key, _, position in reader.statements}
    recipe = Recipe("", reader.purpose or "", values, positions)
    if whole:
        _check_macros(reader.statements)
    _check_uses(recipe)
    if isinstance(name := recipe.value("ModelConfig.name"), str):
        check_model_name(name)
    return recipe


class _Reader(config_parser.ParserDelegate):
    """Collects the statements of gin's parser, and checks that every name in them exists.

    Attributes:
        purpose: see `Recipe`; None before the first file.
        statements: list of (key, value, position).
    """

    def __init__(self):
        self.purpose, self.statements = None, []
        registry = sys.modules.get("axial.tasks.registry")  # a program may have added tasks there
        self._configurables = read_settings(tuple(registry.TASKS) if registry else ())
        self._open, self._size = [], 0

    def file(self, name, position=""):
        """Reads a gin file and its included files. `position` is the position of the `include` statement."""
        try:
            if position and gfile.is_remote(name) and name.split("/")[:3] != position.split("/")[:3]:
                raise InputError(f"{name}: a local file is expected, or one of the same bucket")
            path = find_file(name)
            if path in self._open or len(self._open) > DEEPEST:
                raise InputError(f"{path}, which includes it, or which is nested more than {DEEPEST} files deep")
            text = read_text(path)
        except InputError as error:
            raise InputError(f"{position}: includes {error}" if position else error) from None
        if self.purpose is None:
            self.purpose = first_sentence(re.sub("^# ", "", re.match("(# .*\n)*", text)[0], flags=re.M))
        self._open.append(path)
        self.text(text, path)
        self._open.pop()

    def text(self, text, where):
        """Reads statements. `where` is the file or the flag, for messages. Raises InputError."""
        self._size += len(text)
        if self._size > LARGEST or sum(map(text.count, "'\"")) > MOST_QUOTES:
            raise InputError(f"{where}: at most {LARGEST} characters with its includes, {MOST_QUOTES} quotes are read")
        for statement, position in self._parsed(text, where):
            if isinstance(statement, config_parser.IncludeStatement):
                self.file(statement.filename, position)
                continue
            try:
                self._bind(statement, position)
            except ValueError as error:
                raise InputError(f"{position}: {first_line(error)}") from None

    def _parsed(self, text, where):
        """Yields (statement of gin's parser, its position). Raises InputError for a syntax error."""
        line = "" if where == FLAG else ":{}"
        try:
            for statement in config_parser.ConfigParser(text, self):
                yield statement, where + line.format(statement.location.line_num)
        except (SyntaxError, ValueError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
            if word := re.search(r"Failed to parse token '(.*)'", str(error)):
                names = *(f"@{name}()" for name in self._configurables), *(f"%{key}" for key, *_ in self.statements)
                near = nearest(word[1], ("True", "False", "None", *names))
                position = where + line.format(error.lineno)
                raise InputError(f"{position}: {word[1]} is no value{near}; {_VALUES}") from None
            raise InputError(f"{where}: not gin's syntax ({first_line(error)})") from None

    def _bind(self, statement, position):
        """Adds the binding of a statement. Raises ValueError."""
        if isinstance(statement, config_parser.ImportStatement):
            raise InputError("imports are refused; a configuration only binds what axial has")
        if isinstance(statement, config_parser.BlockDeclaration):
            return  # the block's bindings follow as separate statements
        key, argument = statement.selector, statement.arg_name
        if statement.scope:
            raise InputError(f"{statement.scope}/{key}: scopes are refused")
        if argument:
            name = self._configurable(key)
            key = f"{name}.{argument}"
            if argument not in (arguments := self._configurables[name]):
                raise InputError(f"{name} has no argument {argument!r}{nearest(argument, arguments)}")
        for name in names_in(statement.value):
            if name[0] != "%":
                self._configurable(name)
        self.statements.append((key, statement.value, position))

    def _configurable(self, selector):
        """The name of a configurable. Raises InputError."""
        name = selector.removeprefix("axial.")
        if name not in self._configurables:
            raise InputError(f"nothing is called {selector!r}{nearest(selector, self._configurables)}")
        return name

    def configurable_reference(self, scoped_name, evaluate):
        """The value of `@Name` and `@Name()`, which gin's parser asks for."""
        return Reference(scoped_name.removeprefix("axial."), evaluate)

    def macro(self, scoped_name):
        """The value of `%NAME`, which gin's parser asks for."""
        return Reference(f"%{scoped_name}", True)


def _check_macros(statements):
    """Raises InputError unless all set macros are used and all used macros are set.

    The config.gin of a run may set an unused macro, because a later binding may have replaced its only use.
    """
    macros = {key: position for key, _, position in statements if "." not in key}
    used = {name[1:]: position for _, value, position in statements for name in names_in(value) if name[0] == "%"}
    for name, position in macros.items():
        if name not in used and not _is_run_config(position.rpartition(":")[0]):
            raise InputError(f"{position}: the macro {name!r} is not used anywhere{nearest(name, used)}")
    for name, position in used.items():
        if name not in macros:
            raise InputError(f"{position}: the macro {name!r} is not set{nearest(name, macros)}")


def _check_uses(recipe):
    """Raises InputError for a value that leads to itself, or to so many references that gin would take too long."""
    graph, positions = {}, {}
    for key, value in recipe.bindings.items():
        name, dot, _ = key.partition(".")
        node = name if dot else f"%{name}"
        graph.setdefault(node, []).extend(names_in(value)[: LARGEST_USES + 1])  # a longer list would only take memory
        positions[node] = recipe.positions[key]
    uses = {node: _uses(graph, node) for node in graph}
    # Cycles come first, because everything that leads to a cycle has too many references too.
    for node, names in sorted(uses.items(), key=lambda item: (item[0] not in item[1], item[0][0] != "%")):
        if node in names:
            what = f"the macro {node[1:]!r} is set to" if node[0] == "%" else f"{node} is an argument of"
            raise InputError(f"{positions[node]}: {what} itself")
        if len(names) > LARGEST_USES:
            raise InputError(f"{positions[node]}: {node} leads to more than {LARGEST_USES} references")


def _uses(graph, node):
    """List of all references that a macro or configurable leads to, one for each use. The list ends after too many."""
    uses = [*graph[node]]
    for name in uses:  # the loop extends this list
        uses += graph.get(name, [])
        if len(uses) > LARGEST_USES:
            break
    return uses
