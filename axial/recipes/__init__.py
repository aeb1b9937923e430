"""The one reader of gin: files and bindings become a checked `Recipe`. Nothing is imported or built.

`settings` says what gin may bind. `configuration` binds and builds a recipe; it imports TensorFlow, which takes longer
than all that is done here.
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

LARGEST = 2**17  # characters of a configuration, with all that it includes; axial's own have a few thousand
LARGEST_USES = 100  # references that a value leads to, each as often as it is used: gin builds every use anew
MOST_QUOTES = 2000  # in a text, as gin's parser takes quadratic time for strings in a row
DEEPEST = 50  # brackets or files, each within the one before
FLAG = "--gin_binding"  # the place of a binding that no file has
LARGEST_NUMBER, LONGEST_TEXT = 2**64, 2**12
_LARGE = f"has a number above 2**64, a text of more than {LONGEST_TEXT} bytes, or {DEEPEST} brackets in each other"
_VALUES = "expected a number, True, False, None, text in quotes like 'nuclei', a list, @NAME() or %MACRO"


# === Files ===


def find_file(name):
    """Path of a gin file from its path on disk or its name in `experiments_dir`.

    Raises:
        InputError: there is no such file; names the nearest.
    """
    root, below = experiments_dir(), name.removeprefix("experiments/")
    for path in (name, os.path.join(root, below)):
        if gfile.exists(path) and not gfile.isdir(path):
            return path
    names = [str(path.relative_to(root)) for path in pathlib.Path(root).rglob("*.gin")]
    raise InputError(f"{name}: no such gin file{nearest(below, names)}")


def _is_run_config(path):
    """Whether a gin file is one that `configuration.save` has written."""
    folder, name = os.path.split(path)
    return name == "config.gin" and gfile.exists(os.path.join(folder, "spec.json"))


# === Recipes ===

COLUMNS = ("recipe", "model", "data", "steps", "batch", "canvas", "what it is")
_NO_LEAVES = ("tasks/", "tiny/")  # folders of what recipes include, and of what is laid over a leaf


@dataclasses.dataclass(frozen=True)
class Reference:
    """A configurable or a macro in a value: `name` is 'WarmupPoly' or '%STEPS'. gin calls what is `called`."""

    name: str
    called: bool

    def __repr__(self):
        return self.name if self.name[0] == "%" else f"@{self.name}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What gin files and bindings say.

    Attributes:
        path: of a recipe of axial, below experiments/.
        purpose: the first sentence of the comment that the first file begins with.
        bindings: dict from macros and arguments, like 'STEPS' and 'LossConfig.top_k', to their values. It includes
            those of included files.
        positions: dict from the same keys to the file and line, or the flag, of the statement.
    """

    path: str = ""
    purpose: str = ""
    bindings: dict = dataclasses.field(default_factory=dict)
    positions: dict = dataclasses.field(default_factory=dict)

    def chain(self, key):
        """Keys of the bindings of an argument, of the macro that it is, of the macro that this one is, and so on."""
        chain = []
        while key in self.bindings and key not in chain:
            chain.append(key)
            value = self.bindings[key]
            key = value.name[1:] if isinstance(value, Reference) and value.name[0] == "%" else None
        return chain

    def value(self, key, default=None):
        """What an argument is bound to, through macros that are set; the default if it is not bound."""
        keys = self.chain(key)
        return self.bindings[keys[-1]] if keys else default

    def is_own(self, key):
        """Whether the user has set a bound argument: by a flag, or in a gin file that is no recipe of axial or run."""
        position = self.positions[self.chain(key)[-1]]
        path, recipes = (pathlib.Path(path).resolve() for path in (position.rpartition(":")[0], experiments_dir()))
        return position == FLAG or not (recipes in path.parents or _is_run_config(path))

    def task(self):
        """The name of the task that is built, or None."""
        task = self.value("experiment.task")
        return task.name if isinstance(task, Reference) else None

    @property
    def model(self):
        return self.bindings["MODEL"]

    @property
    def canvas(self):
        """(height, width) of the photos, or None for texts and detectors, whose photos have several sizes."""
        return self.bindings.get("CANVAS") or self.bindings.get("IMAGE")

    def cells(self):
        """The strings of the recipe's row, in the order of `COLUMNS`."""
        canvas = "x".join(map(str, self.canvas)) if self.canvas else "-"
        numbers = (str(self.bindings.get(name, "-")) for name in ("STEPS", "BATCH"))
        return self.path, self.model, os.path.dirname(self.path), *numbers, canvas, self.purpose

    def settings(self):
        """List of (name, default, meaning) of the settings of the configurables that the recipe names."""
        named = {key.partition(".")[0] for key in self.bindings}.union(*map(names_in, self.bindings.values()))
        settings = {name: arguments for name, arguments in read_settings().items() if name in named}
        return [(f"{name}.{key}", *about) for name, arguments in settings.items() for key, about in arguments.items()]


def read_recipes():
    """List of all `Recipe`s: every file of experiments/ that has a MODEL, itself or by what it includes."""
    leaves = sorted(pathlib.Path(experiments_dir()).glob("*/*.gin"))
    recipes = [read_recipe(f"{leaf.parent.name}/{leaf.name}") for leaf in leaves]
    return [recipe for recipe in recipes if "MODEL" in recipe.bindings and not recipe.path.startswith(_NO_LEAVES)]


def read_recipe(path):
    """The `Recipe` of one file of experiments/."""
    return dataclasses.replace(read([os.path.join(experiments_dir(), path)], whole=False), path=path)


def names_in(value, depth=0):
    """List of the names that a value refers to, once for each use.

    Raises:
        ValueError: a part of the value is too large, or no file can hold it: half a surrogate pair of UTF-16.
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
    """The `Recipe` of gin files and bindings; without `whole` others are added later, which may set their macros.

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
    """Collects what gin's parser reads, text by text. Checks that every name in it exists.

    Attributes:
        purpose: of the `Recipe`.
        statements: list of (key, value, place).
    """

    def __init__(self):
        self.purpose, self.statements = None, []
        registry = sys.modules.get("axial.tasks.registry")  # to which a program may have added tasks
        self._configurables = read_settings(tuple(registry.TASKS) if registry else ())
        self._open, self._size = [], 0

    def file(self, name, position=""):
        """Reads a gin file and the files that it includes. `place` is that of the statement that includes it."""
        try:
            if position and gfile.is_remote(name) and name.split("/")[:3] != position.split("/")[:3]:
                raise InputError(f"{name}: a local file is expected, or one of the same bucket")
            path = find_file(name)
            if path in self._open or len(self._open) > DEEPEST:
                raise InputError(f"{path}, which includes it, or more than {DEEPEST} files are in a row")
            text = read_text(path)
        except InputError as error:
            raise InputError(f"{position}: includes {error}" if position else error) from None
        if self.purpose is None:
            self.purpose = first_sentence(re.sub("^# ", "", re.match("(# .*\n)*", text)[0], flags=re.M))
        self._open.append(path)
        self.text(text, path)
        self._open.pop()

    def text(self, text, where):
        """Reads statements. `where` is their file or flag in messages. Raises InputError."""
        self._size += len(text)
        if self._size > LARGEST or sum(map(text.count, "'\"")) > MOST_QUOTES:
            raise InputError(
                f"{where}: at most {LARGEST} characters with what it includes, {MOST_QUOTES} quotes are read"
            )
        for statement, position in self._parsed(text, where):
            if isinstance(statement, config_parser.IncludeStatement):
                self.file(statement.filename, position)
                continue
            try:
                self._bind(statement, position)
            except ValueError as error:
                raise InputError(f"{position}: {first_line(error)}") from None

    def _parsed(self, text, where):
        """Yields (statement of gin's parser, its place). Raises InputError for what is not gin's syntax."""
        line = "" if where == FLAG else ":{}"
        try:
            for statement in config_parser.ConfigParser(text, self):
                yield statement, where + line.format(statement.location.line_num)
        except (SyntaxError, ValueError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
            if word := re.search(r"Failed to parse token '(.*)'", str(error)):
                names = *(f"@{name}()" for name in self._configurables), *(f"%{key}" for key, *_ in self.statements)
                near = nearest(word[1], ("True", "False", "None", *names))
                raise InputError(
                    f"{where}{line.format(error.lineno)}: {word[1]} is no value{near}; {_VALUES}"
                ) from None
            raise InputError(f"{where}: not gin's syntax ({first_line(error)})") from None

    def _bind(self, statement, position):
        """Keeps what a statement binds. Raises ValueError."""
        if isinstance(statement, config_parser.ImportStatement):
            raise InputError("imports are refused; a configuration only binds what axial has")
        if isinstance(statement, config_parser.BlockDeclaration):
            return  # its bindings follow, each with its name
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
        """What gin's parser makes of `@Name` and `@Name()`."""
        return Reference(scoped_name.removeprefix("axial."), evaluate)

    def macro(self, scoped_name):
        """What gin's parser makes of `%NAME`."""
        return Reference(f"%{scoped_name}", True)


def _check_macros(statements):
    """Raises InputError unless every macro that is set is used, and every macro that is used is set.

    The config.gin of a run may hold a macro whose only use another binding has replaced.
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
    """Raises InputError for a value that leads to itself, or to so many references that gin never ends."""
    graph, positions = {}, {}
    for key, value in recipe.bindings.items():
        name, dot, _ = key.partition(".")
        node = name if dot else f"%{name}"
        graph.setdefault(node, []).extend(names_in(value)[: LARGEST_USES + 1])  # more take memory alone
        positions[node] = recipe.positions[key]
    uses = {node: _uses(graph, node) for node in graph}
    # What leads to itself comes first: all that leads there has too many references.
    for node, names in sorted(uses.items(), key=lambda item: (item[0] not in item[1], item[0][0] != "%")):
        if node in names:
            what = f"the macro {node[1:]!r} is set to" if node[0] == "%" else f"{node} is an argument of"
            raise InputError(f"{positions[node]}: {what} itself")
        if len(names) > LARGEST_USES:
            raise InputError(f"{positions[node]}: {node} leads to more than {LARGEST_USES} references")


def _uses(graph, node):
    """The references that a node leads to, each as often as it is used, until they are too many."""
    uses = [*graph[node]]
    for name in uses:  # which grows
        uses += graph.get(name, [])
        if len(uses) > LARGEST_USES:
            break
    return uses
