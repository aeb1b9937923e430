"""The one reader of gin: files and bindings become checked statements. Nothing of them is imported or built.

`configuration` builds them. It needs TensorFlow, whose import takes longer than all that is done here.
"""

import dataclasses
import graphlib
import itertools
import os
import pathlib
import re
import sys
import tokenize

from gin import config_parser

from axial.builders import PACKAGE, check_model_name, first_sentence, read_arguments, read_settings
from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.read import first_line, read_text

LARGEST = 2**17  # characters of a configuration, with all that it includes; axial's own have a few thousand
LARGEST_INCLUDES = 1000  # files that a configuration includes; a few that include each other twice make millions
LARGEST_USES = 100  # references that a value leads to, each as often as it is used: gin builds every use anew
MOST_QUOTES = 2000  # in a text, as gin's parser takes quadratic time for strings in a row
DEEPEST = 50  # brackets or files, each within the one before
LARGEST_NUMBER, LONGEST_TEXT = 2**64, 2**12
_LARGE = f"has a number above 2**64, a text of more than {LONGEST_TEXT} bytes, or {DEEPEST} brackets in each other"
_VALUES = "expected a number, True, False, None, text in quotes like 'nuclei', a list, @NAME() or %MACRO"


# === Files ===


def experiments_dir():
    """The folder of gin files, in the installed package or in the checkout."""
    installed = os.path.join(PACKAGE, "experiments")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(PACKAGE), "experiments")


def find_file(name):
    """Path of a gin file from its path on disk or its name in `experiments_dir`.

    Raises:
        InputError: there is no such file; names the nearest.
    """
    root, below = experiments_dir(), name.removeprefix("experiments/")
    for path in (name, os.path.join(root, name), os.path.join(root, below)):
        if gfile.exists(path) and not gfile.isdir(path):
            return path
    known = [str(path.relative_to(root)) for path in pathlib.Path(root).rglob("*.gin")]
    raise InputError(f"{name}: no such gin file{nearest(below, known)}")


def run_file(model_dir):
    """Path of the config.gin of a run. Raises InputError if there is none."""
    path = os.path.join(model_dir, "config.gin")
    if not gfile.exists(path):
        raise InputError(f"{path}: no such file; a run of axial-train is expected")
    return path


def _of_run(path):
    """Whether a gin file is one that `configuration.save` has written."""
    folder, name = os.path.split(path)
    return name == "config.gin" and gfile.exists(os.path.join(folder, "spec.json"))


# === Statements ===


@dataclasses.dataclass(frozen=True)
class Reference:
    """A configurable or a macro in a value: `name` is 'WarmupPoly' or '%STEPS'. gin calls what is `called`."""

    name: str
    called: bool

    def __repr__(self):
        return self.name if self.name[0] == "%" else f"@{self.name}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Statements:
    """What gin files and bindings say.

    Attributes:
        bindings: dict from macros and arguments, like 'STEPS' and 'LossConfig.top_k', to (value, place of the
            statement).
        comment: the first paragraph of the first file, if that is a comment.
    """

    bindings: dict = dataclasses.field(default_factory=dict)
    comment: str = ""

    def chain(self, key):
        """Keys of the bindings of an argument, of the macro that it is, of the macro that this one is, and so on."""
        chain = []
        while key in self.bindings and key not in chain:
            chain.append(key)
            value, _ = self.bindings[key]
            key = value.name[1:] if isinstance(value, Reference) and value.name[0] == "%" else None
        return chain

    def value(self, key, default=None):
        """What an argument is bound to, through macros that are set; the default if it is not bound."""
        keys = self.chain(key)
        return self.bindings[keys[-1]][0] if keys else default

    def is_own(self, key):
        """Whether the user has set a bound argument: by a flag, or in a gin file that is no recipe of axial or run."""
        _, place = self.bindings[self.chain(key)[-1]]
        path, recipes = (pathlib.Path(path).resolve() for path in (place.rpartition(":")[0], experiments_dir()))
        return place == "--gin_binding" or not (recipes in path.parents or _of_run(path))

    def task(self):
        """The name of the task that is built, or None."""
        task = self.value("experiment.task")
        return task.name if isinstance(task, Reference) else None


def _node(key):
    """What a binding's key is part of: '%MACRO', or the name of a configurable."""
    name, dot, _ = key.partition(".")
    return name if dot else f"%{name}"


def names_in(value, depth=0):
    """List of the names that a value refers to, each as often as it does. Raises ValueError for what is too large."""
    if isinstance(value, Reference):
        return [value.name]
    # Half a surrogate pair, which no file can hold, raises UnicodeEncodeError, a ValueError.
    size = len(value.encode() if isinstance(value, str) else value) if isinstance(value, (str, bytes)) else 0
    if size > LONGEST_TEXT or depth > DEEPEST or (isinstance(value, int) and abs(value) > LARGEST_NUMBER):
        raise InputError(_LARGE)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    parts = value if isinstance(value, (list, tuple)) else ()
    return [name for part in parts for name in names_in(part, depth + 1)]


# === Reading ===


def read(files, bindings=(), whole=True):
    """The `Statements` of gin files and bindings; without `whole` others are added later, which may set their macros.

    Raises:
        InputError: see `configuration.load`.
    """
    reader = _Reader()
    for file in files:
        reader.file(file)
    for binding in bindings:
        reader.text(binding, "--gin_binding")
    statements = Statements(reader.bindings, reader.comment)
    if whole:
        _check_macros(reader.bindings, reader.used)
    _check_uses(reader.bindings)
    if isinstance(name := statements.value("ModelConfig.name"), str):
        check_model_name(name)
    return statements


class _Reader(config_parser.ParserDelegate):
    """Collects what gin's parser reads, text by text. Checks that every name in it exists.

    Attributes:
        bindings, comment: of the `Statements`.
        used: dict from the macros that are used to the place of their first use.
    """

    def __init__(self):
        self.bindings, self.comment, self.used = {}, None, {}
        registry = sys.modules.get("axial.tasks.registry")  # to which a program may have added tasks of its own
        self._arguments = read_arguments(tuple(registry.TASKS) if registry else ())
        self._where, self._open, self._included, self._size = "", [], 0, 0

    def file(self, name, before=""):
        """Reads a gin file and what it includes. Raises InputError, which has `before` ahead of the file's name."""
        try:
            path = find_file(name)
            if path in self._open:
                raise InputError(f"{path}, which includes it")
            text = read_text(path)
        except InputError as error:
            raise InputError(f"{before}{error}") from None
        if self.comment is None:
            header = itertools.takewhile(re.compile("# ").match, text.splitlines())
            self.comment = " ".join(line.removeprefix("# ") for line in header)
        self._open.append(path)
        self.text(text, path)
        self._open.pop()

    def text(self, text, where):
        """Reads statements. `where` is their file or flag in messages. Raises InputError."""
        self._where = where
        self._size += len(text)
        if self._size > LARGEST or sum(map(text.count, "'\"")) > MOST_QUOTES:
            raise InputError(
                f"{where}: at most {LARGEST} characters with what it includes, {MOST_QUOTES} quotes are read"
            )
        try:
            for statement in config_parser.ConfigParser(text, self):
                self._statement(statement, self._place(statement.location.line_num))
                self._where = where
        except InputError as error:
            raise InputError(first_line(error)) from None  # gin appends the location
        except (SyntaxError, ValueError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
            if word := re.search(r"Failed to parse token '(.*)'", str(error)):
                names = *(f"@{name}()" for name in self._arguments), *(f"%{key}" for key in self.bindings)
                near = nearest(word[1], ("True", "False", "None", *names))
                raise InputError(f"{self._place(error.lineno)}: {word[1]} is no value{near}; {_VALUES}") from None
            raise InputError(f"{where}: not gin's syntax ({first_line(error)})") from None

    def _place(self, line):
        return self._where if self._where == "--gin_binding" else f"{self._where}:{line}"

    def _statement(self, statement, place):
        if isinstance(statement, config_parser.ImportStatement):
            raise InputError(f"{place}: imports are refused; a configuration only binds what axial has")
        if isinstance(statement, config_parser.IncludeStatement):
            self._include(statement.filename, place)
            return
        if isinstance(statement, config_parser.BlockDeclaration):
            self._known(statement.selector, place)
            return
        key, argument = statement.selector, statement.arg_name
        if statement.scope:
            raise InputError(f"{place}: {statement.scope}/{key}: scopes are refused")
        if argument:
            name = self._known(key, place)
            key = f"{name}.{argument}"
            if argument not in (known := self._arguments[name]):
                raise InputError(f"{place}: {name} has no argument {argument!r}{nearest(argument, known)}")
        try:
            names_in(statement.value)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        self.bindings[key] = statement.value, place

    def _include(self, name, place):
        """Reads a file that another includes, if it is a local one or of the same bucket."""
        self._included += 1
        if self._included > LARGEST_INCLUDES or len(self._open) > DEEPEST:
            raise InputError(f"{place}: more than {LARGEST_INCLUDES} files are included, or {DEEPEST} in a row")
        if gfile.is_remote(name) and name.split("/")[:3] != place.split("/")[:3]:
            raise InputError(f"{place}: includes {name}: a local file is expected, or one of the same bucket")
        self.file(name, f"{place}: includes ")

    def _known(self, selector, place):
        """The name of a configurable. Raises InputError."""
        name = selector.removeprefix("axial.")
        if name not in self._arguments:
            raise InputError(f"{place}: nothing is called {selector!r}{nearest(selector, self._arguments)}")
        return name

    def configurable_reference(self, scoped_name, evaluate):
        """What gin's parser makes of `@Name` and `@Name()`."""
        return Reference(self._known(scoped_name, self._where), evaluate)

    def macro(self, scoped_name):
        """What gin's parser makes of `%NAME`."""
        self.used.setdefault(scoped_name, self._where)
        return Reference(f"%{scoped_name}", True)


def _check_macros(bindings, used):
    """Raises InputError unless every macro that is set is used, and every macro that is used is set.

    The config.gin of a run may hold a macro whose only use another binding has replaced.
    """
    macros = {key: place for key, (_, place) in bindings.items() if "." not in key}
    for name, place in macros.items():
        if name not in used and not _of_run(place.rpartition(":")[0]):
            raise InputError(f"{place}: the macro {name!r} is not used anywhere{nearest(name, used)}")
    for name, place in used.items():
        if name not in macros:
            raise InputError(f"{place}: the macro {name!r} is not set{nearest(name, macros)}")


def _check_uses(bindings):
    """Raises InputError for a value that leads to itself, or to so many references that gin never ends."""
    graph, places, uses = {}, {}, {}
    for key, (value, place) in bindings.items():
        graph.setdefault(_node(key), []).extend(names_in(value))
        places[_node(key)] = place
    try:
        for node in graphlib.TopologicalSorter(graph).static_order():
            names = graph.get(node, [])
            uses[node] = len(names) + sum(uses[name] for name in names)
            if uses[node] > LARGEST_USES:
                raise InputError(f"{places[node]}: {node} leads to more than {LARGEST_USES} references")
    except graphlib.CycleError as error:
        cycle = error.args[1]
        node = next((node for node in cycle if node[0] == "%"), cycle[0])
        what = f"the macro {node[1:]!r} is set to" if node[0] == "%" else f"{node} is an argument of"
        raise InputError(f"{places[node]}: {what} itself") from None


# === Recipes ===

_NO_LEAVES = ("tasks/", "tiny/")  # folders of what recipes include, and of what is laid over a leaf
COLUMNS = ("recipe", "model", "data", "steps", "batch", "canvas", "what it is")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A leaf of experiments/, as `axial-analyze recipes` shows it.

    Attributes:
        path: below experiments/.
        purpose: first sentence of its comment.
        bindings: dict from macros and arguments, like 'STEPS' and 'LossConfig.top_k', to their values; those of
            included files are there too.
    """

    path: str
    purpose: str
    bindings: dict

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
        """The `Setting`s of the configurables that it names."""
        named = {name.partition(".")[0] for name in self.bindings if "." in name}
        named.update(*map(names_in, self.bindings.values()))
        return [setting for setting in read_settings() if setting.name.partition(".")[0] in named]


def read_recipes():
    """List of all `Recipe`s: every file of experiments/ that has a MODEL, itself or by what it includes."""
    leaves = sorted(pathlib.Path(experiments_dir()).glob("*/*.gin"))
    recipes = [read_recipe(f"{leaf.parent.name}/{leaf.name}") for leaf in leaves]
    return [recipe for recipe in recipes if "MODEL" in recipe.bindings and not recipe.path.startswith(_NO_LEAVES)]


def read_recipe(path):
    """The `Recipe` of one file."""
    statements = read([os.path.join(experiments_dir(), path)], whole=False)
    bindings = {key: value for key, (value, _) in statements.bindings.items()}
    return Recipe(path, first_sentence(statements.comment), bindings)


def find_recipe(recipes, path):
    """The `Recipe` with a path. Raises InputError, which names the nearest."""
    path = path.removeprefix("experiments/")
    known = {recipe.path: recipe for recipe in recipes}
    if path not in known:
        raise InputError(f"{path}: no recipe has this name{nearest(path, known)}; axial-analyze recipes lists them")
    return known[path]
