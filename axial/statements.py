"""The one reader of gin: files and bindings become checked statements. Nothing of them is imported or built.

`configuration` builds them. It needs TensorFlow, whose import takes longer than all that is done here.
"""

import dataclasses
import graphlib
import itertools
import os
import pathlib
import re
import tokenize

from gin import config_parser

from axial.builders import PACKAGE, check_model_name, read_arguments
from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.check import is_remote
from axial.io.read import first_line, read_text

LARGEST = 2**17  # characters of a configuration, with all that it includes; axial's own have a few thousand
LARGEST_INCLUDES = 1000  # files that a configuration includes; a few that include each other twice make millions
LARGEST_USES = 1000  # references that a value leads to, each as often as it is used: gin builds every use anew
MOST_QUOTES = 2000  # in a text, as gin's parser takes quadratic time for strings in a row
DEEPEST = 50  # brackets, files or scopes, each within the one before
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


# === Checks ===


def check(files, bindings=(), whole=True):
    """The `Statements` of gin files and bindings; without `whole` others are added later, which may set their macros.

    Raises:
        InputError: what `configuration.load` refuses, or an unknown model.
    """
    statements = Statements().read(files, bindings, whole)
    if isinstance(name := statements.value("ModelConfig", "name"), str):
        check_model_name(name)
    return statements


def check_continued(model_dir):
    """Raises InputError where a folder is of a run that this version of axial cannot continue."""
    if gfile.exists(os.path.join(model_dir, "config.gin")):
        Statements().read([run_file(model_dir)], whole=False)


def check_change(names):
    """Raises InputError for a name that no setting of a training has; `continuing` knows those of one training."""
    known = {"data", "model", "optimizer"}.union(*read_arguments().values())
    for name in names:
        if name not in known:
            raise InputError(f"--change={name}: no setting of a training has this name{nearest(name, sorted(known))}")


# === Statements ===


@dataclasses.dataclass(frozen=True)
class Reference:
    """A configurable or a macro in a value.

    Attributes:
        scoped_name: as gin's `ConfigurableReference` has it: 'Name', 'scope/Name' or 'MACRO/gin.macro'.
        evaluate: whether gin calls it.
    """

    scoped_name: str
    evaluate: bool

    @property
    def name(self):
        """'%MACRO', or the name of the configurable."""
        scope, _, name = self.scoped_name.rpartition("/")
        return f"%{scope}" if name == "gin.macro" else name.removeprefix("axial.")

    def __repr__(self):
        return self.name if self.name.startswith("%") else f"@{self.scoped_name}{'()' if self.evaluate else ''}"


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


def _node(scope, name, _):
    """What a key of `gin.bind_parameter` is part of: '%MACRO', or the name of a configurable."""
    return f"%{scope}" if name == "gin.macro" else name


def _reached(starts, graph):
    """Set of names, what they refer to, what those refer to, and so on."""
    reached, queue = set(), list(starts)
    while queue:
        found = queue.pop()
        if found not in reached:
            reached.add(found)
            queue += graph.get(found, ())
    return reached


def _place(where, line):
    return where if where == "--gin_binding" else f"{where}:{line}"


class Statements(config_parser.ParserDelegate):
    """Statements of gin files and bindings, as gin's parser reads them. Checks that every name in them exists.

    Attributes:
        bindings: dict from keys of `gin.bind_parameter` to (value, place of the statement).
        comment: the first paragraph of the first file, if that is a comment.
    """

    def __init__(self):
        self.bindings, self.comment = {}, None
        self._arguments = read_arguments()
        self._used = {}  # macros, with the place of their first use
        self._scoped = []  # (scope, configurable, place) of the bindings with a scope
        self._entered = set()  # (scope, configurable) of the references with a scope
        self._where, self._open, self._included, self._size = "", [], 0, 0

    def read(self, files, bindings=(), whole=True):
        """Reads gin files and bindings, and checks macros and scopes if they are the `whole`. Returns itself.

        Raises:
            InputError: see `configuration.load`.
        """
        for file in files:
            self._file(file)
        for binding in bindings:
            self._text(binding, "--gin_binding")
        if whole:
            self._check_macros()
            self._check_scopes()
        self._check_uses()
        return self

    # --- What they say ---

    def chain(self, name, argument):
        """Keys of the bindings of an argument, of the macro that it is, of the macro that this one is, and so on."""
        key, found = ("", name, argument), []
        while key in self.bindings and key not in found:
            found.append(key)
            name = getattr(self.bindings[key][0], "name", "")
            key = name[1:], "gin.macro" if name.startswith("%") else "", "value"
        return found

    def value(self, name, argument, default=None):
        """What an argument is bound to, through macros that are set; the default if it is not bound."""
        keys = self.chain(name, argument)
        return self.bindings[keys[-1]][0] if keys else default

    def is_own(self, name, argument):
        """Whether the user has set a bound argument: by a flag, or in a gin file that is no recipe of axial or run."""
        _, place = self.bindings[self.chain(name, argument)[-1]]
        path, recipes = (pathlib.Path(path).resolve() for path in (place.rpartition(":")[0], experiments_dir()))
        return place == "--gin_binding" or not (recipes in path.parents or _of_run(path))

    def task(self):
        """The name of the task that is built, or None."""
        return getattr(self.value("experiment", "task"), "name", None)

    def effective(self):
        """(key, value) of the bindings, without the macros whose every use another binding has replaced."""
        graph = self._graph()
        live = _reached((node for node in graph if node[0] != "%"), graph)
        return [(key, value) for key, (value, _) in self.bindings.items() if _node(*key) in live]

    # --- How they are read ---

    def _file(self, name, before=""):
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
        self._text(text, path)
        self._open.pop()

    def _text(self, text, where):
        """Reads statements. `where` is their file or flag in messages. Raises InputError."""
        self._where = where
        self._size += len(text)
        if self._size > LARGEST or sum(map(text.count, "'\"")) > MOST_QUOTES:
            raise InputError(
                f"{where}: at most {LARGEST} characters with what it includes, {MOST_QUOTES} quotes are read"
            )
        try:
            for statement in config_parser.ConfigParser(text, self):
                self._statement(statement, _place(where, statement.location.line_num))
                self._where = where
        except InputError as error:
            raise InputError(first_line(error)) from None  # gin appends the location
        except (SyntaxError, ValueError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
            if word := re.search(r"Failed to parse token '(.*)'", str(error)):
                raise InputError(f"{_place(where, error.lineno)}: {self._no_value(word[1])}") from None
            raise InputError(f"{where}: not gin's syntax ({first_line(error)})") from None

    def _no_value(self, word):
        """The message on a word that stands where a value is expected."""
        names = *(f"@{name}()" for name in self._arguments), *(f"%{name}" for name in self._macros())
        return f"{word} is no value{nearest(word, ('True', 'False', 'None', *names))}; {_VALUES}"

    def _macros(self):
        """dict from the macros that are set to the places where they are."""
        return {macro: place for (macro, name, _), (_, place) in self.bindings.items() if name == "gin.macro"}

    def _statement(self, statement, place):
        if isinstance(statement, config_parser.ImportStatement):
            raise InputError(f"{place}: imports are refused; a configuration only binds what axial has")
        if isinstance(statement, config_parser.IncludeStatement):
            self._include(statement.filename, place)
            return
        if isinstance(statement, config_parser.BlockDeclaration):
            self._known(statement.selector, place)
            return
        scope, name, argument = statement.scope, statement.selector.removeprefix("axial."), statement.arg_name
        if argument:
            self._check_argument(statement, name, place)
        else:
            scope, name, argument = "/".join(filter(None, (scope, statement.selector))), "gin.macro", "value"
        try:
            names_in(statement.value)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        self.bindings[scope, name, argument] = statement.value, place

    def _include(self, name, place):
        """Reads a file that another includes, if it is a local one or of the same bucket."""
        self._included += 1
        if self._included > LARGEST_INCLUDES or len(self._open) > DEEPEST:
            raise InputError(f"{place}: more than {LARGEST_INCLUDES} files are included, or {DEEPEST} in a row")
        if is_remote(name) and name.split("/")[:3] != place.split("/")[:3]:
            raise InputError(f"{place}: includes {name}: a local file is expected, or one of the same bucket")
        self._file(name, f"{place}: includes ")

    def _check_argument(self, statement, name, place):
        argument, known = statement.arg_name, self._arguments[self._known(statement.selector, place)]
        if argument not in known:
            raise InputError(f"{place}: {name} has no argument {argument!r}{nearest(argument, known)}")
        if statement.scope:
            self._scoped.append((statement.scope, name, place))

    def _known(self, selector, place):
        """The name of a configurable. Raises InputError."""
        name = selector.removeprefix("axial.")
        if name not in self._arguments:
            raise InputError(f"{place}: nothing is called {selector!r}{nearest(selector, self._arguments)}")
        return name

    def configurable_reference(self, scoped_name, evaluate):
        """What gin's parser makes of `@scope/Name` and `@scope/Name()`."""
        scope, _, selector = scoped_name.rpartition("/")
        name = self._known(selector, self._where)
        if scope.count("/") >= DEEPEST:
            raise InputError(f"{self._where}: more than {DEEPEST} scopes in each other")
        if scope:
            self._entered.add((scope, name))
        return Reference(scoped_name, evaluate)

    def macro(self, scoped_name):
        """What gin's parser makes of `%NAME`."""
        self._used.setdefault(scoped_name, self._where)
        return Reference(f"{scoped_name}/gin.macro", True)

    # --- What is checked of all of them ---

    def _graph(self):
        """dict from each '%MACRO' and configurable to the names that what is bound of it refers to."""
        graph = {}
        for key, (value, _) in self.bindings.items():
            graph.setdefault(_node(*key), []).extend(names_in(value))
        return graph

    def _check_macros(self):
        """Raises InputError unless every macro that is set is used, and every macro that is used is set.

        The config.gin of an older run may hold a macro whose only use another binding has replaced.
        """
        macros = self._macros()
        for name, place in macros.items():
            if name not in self._used and not _of_run(place.rpartition(":")[0]):
                raise InputError(f"{place}: the macro {name!r} is not used anywhere{nearest(name, self._used)}")
        for name, place in self._used.items():
            if name not in macros:
                raise InputError(f"{place}: the macro {name!r} is not set{nearest(name, macros)}")

    def _check_uses(self):
        """Raises InputError for a value that leads to itself, or to so many references that gin never ends."""
        graph, uses = self._graph(), {}
        places = {_node(*key): place for key, (_, place) in self.bindings.items()}
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

    def _check_scopes(self):
        """Raises InputError unless some reference enters the scope of each binding and leads to its configurable."""
        graph = self._graph()
        reached = {start: _reached([start], graph) for _, start in self._entered}
        for scope, name, place in self._scoped:
            if not any(f"{own}/".startswith(f"{scope}/") and name in reached[start] for own, start in self._entered):
                what = f"{scope}/{name}"
                raise InputError(
                    f"{place}: {what} has no effect, as nothing refers to @{what}; leave out the scope {scope!r}"
                )
