"""The statements of gin files and bindings, checked from their text: nothing of them is imported or built.

`configuration` builds them. It needs TensorFlow, whose import takes longer than all that is done here.
"""

import graphlib
import os
import pathlib
import re
import tokenize
import typing

from gin import config_parser

from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.check import is_remote
from axial.io.read import first_line, read_text
from axial.recipes import check_model_name, experiments_dir, read_arguments

LARGEST = 2**17  # characters of a configuration, with all that it includes; axial's own have a few thousand
LARGEST_INCLUDES = 1000  # files that a configuration includes; a few that include each other twice make millions
LARGEST_USES = 1000  # references that a value leads to, each as often as it is used: gin builds every use anew
MOST_QUOTES = 2000  # in a text, as gin's parser takes quadratic time for strings in a row
DEEPEST = 50  # brackets, files or scopes, each within the one before
LARGEST_NUMBER, LONGEST_TEXT = 2**64, 2**12
_LARGE = f"has a number above 2**64, a text of more than {LONGEST_TEXT} bytes, or {DEEPEST} brackets in each other"
_VALUES = "expected a number, True, False, None, text in quotes like 'nuclei', a list, @NAME() or %MACRO"
_SINCE = "since axial 0.2 (CHANGELOG.md); a run of axial 0.1 resumes with that version only"
# New names of the arguments that PanopticTask had in version 0.1. The config.gin of such a run has the old names.
_MOVED = {
    **{name: f"DataConfig.{name}" for name in ("train_split", "eval_split", "canvas", "augmentation", "shuffle")},
    **{name: f"ModelConfig.{name}" for name in ("norm", "drop_path")},
    "model": "ModelConfig.name",
    "memory": "ModelConfig.recompute and ModelConfig.backend",
}


class Reference(typing.NamedTuple):
    """What a value refers to, as gin's `ConfigurableReference` has it: 'Name', 'scope/Name' or 'MACRO/gin.macro'."""

    scoped_name: str
    evaluate: bool


def check(files, bindings=(), whole=True):
    """The `Statements` of gin files and bindings; without `whole` others are added later, which may set their macros.

    Raises:
        InputError: what `configuration.load` refuses, or an unknown model.
    """
    statements = Statements(read_arguments()).read(files, bindings, whole)
    if isinstance(name := statements.value("ModelConfig", "name"), str):
        check_model_name(name)
    return statements


def run_file(model_dir):
    """Path of the config.gin of a run. Raises InputError if there is none."""
    path = os.path.join(model_dir, "config.gin")
    if not gfile.exists(path):
        raise InputError(f"{path}: no such file; a run of axial-train is expected")
    return path


def check_continued(model_dir):
    """Raises InputError where a folder is of a run that this version of axial cannot continue."""
    if gfile.exists(os.path.join(model_dir, "config.gin")):
        Statements(read_arguments()).file(run_file(model_dir))


def check_change(names):
    """Raises InputError for a name that no setting of a training has; `continuing` knows those of one training."""
    known = {"data", "model", "optimizer"}.union(*read_arguments().values())
    for name in names:
        if name not in known:
            raise InputError(f"--change={name}: no setting of a training has this name{nearest(name, sorted(known))}")


def find_file(name):
    """Path of a gin file from its path on disk or its name in `experiments_dir`.

    Raises:
        InputError: there is no such file; names the nearest.
    """
    root = experiments_dir()
    candidates = [name, os.path.join(root, name), os.path.join(root, name.removeprefix("experiments/"))]
    for path in candidates:
        if gfile.exists(path) and not gfile.isdir(path):
            return path
    known = [str(path.relative_to(root)) for path in pathlib.Path(root).rglob("*.gin")]
    raise InputError(f"{name}: no such gin file{nearest(name.removeprefix('experiments/'), known)}")


def _place(where, line):
    return where if where == "--gin_binding" else f"{where}:{line}"


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


def _of_run(path):
    """Whether a gin file is one that `save` has written."""
    folder, name = os.path.split(path)
    return name == "config.gin" and gfile.exists(os.path.join(folder, "spec.json"))


class Statements(config_parser.ParserDelegate):
    """Statements of gin files and bindings, as gin's parser reads them. Checks that every name in them exists.

    The name of a macro that a value refers to is '%MACRO', that of a configurable has no scope.

    Attributes:
        bindings: dict from keys of `gin.bind_parameter` to (value, names that it refers to, place of the statement).

    Args:
        arguments: dict from the names of the configurables to the lists of their arguments.
        refer: function of (scoped name, whether it is called) that makes a value of a reference.
    """

    def __init__(self, arguments, refer=Reference):
        self._arguments, self._refer = arguments, refer
        self.bindings = {}
        self._used = {}  # macros, with the place of their first use
        self._scoped = []  # (scope, configurable, place) of the bindings with a scope
        self._entered = set()  # (scope, configurable) of the references with a scope
        self._made = {}  # of a reference's id, the reference, which so stays alive, and the name that it is to
        self._where, self._open, self._included, self._size = "", [], 0, 0

    def read(self, files, bindings=(), whole=True):
        """Reads gin files and bindings, and checks macros and scopes if they are the `whole`. Returns itself.

        Raises:
            InputError: see `configuration.load`.
        """
        for file in files:
            self.file(file)
        for binding in bindings:
            self.text(binding, "--gin_binding")
        if whole:
            self.check_macros()
            self.check_scopes()
        self.check_uses()
        return self

    def chain(self, name, argument):
        """Keys of the bindings of an argument, of the macro that it is, of the macro that this one is, and so on."""
        key, found = ("", name, argument), []
        while key in self.bindings and key not in found:
            found.append(key)
            _, refers = self._made.get(id(self.bindings[key][0]), (None, ""))
            key = refers.removeprefix("%"), "gin.macro" if refers.startswith("%") else "", "value"
        return found

    def value(self, name, argument, default=None):
        """What an argument is bound to, through macros that are set; the default if it is not bound."""
        keys = self.chain(name, argument)
        return self.bindings[keys[-1]][0] if keys else default

    def is_own(self, name, argument):
        """Whether the user has set a bound argument: by a flag, or in a gin file that is no recipe of axial or run."""
        *_, place = self.bindings[self.chain(name, argument)[-1]]
        path, recipes = (pathlib.Path(path).resolve() for path in (place.rpartition(":")[0], experiments_dir()))
        return place == "--gin_binding" or not (recipes in path.parents or _of_run(path))

    def own_data_dir(self):
        """What the configuration itself binds as its task's data, or None."""
        task = self.value("experiment", "task")
        return self.value(task.scoped_name.removeprefix("axial."), "data_dir") if isinstance(task, Reference) else None

    def file(self, name, before=""):
        """Reads a gin file and what it includes. Raises InputError, which has `before` ahead of the file's name."""
        try:
            path = find_file(name)
            if path in self._open:
                raise InputError(f"{path}, which includes it")
            text = read_text(path)
        except InputError as error:
            raise InputError(f"{before}{error}") from None
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
                self._statement(statement, where)
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
        return {macro: place for (macro, name, _), (*_, place) in self.bindings.items() if name == "gin.macro"}

    def _statement(self, statement, where):
        place = _place(where, statement.location.line_num)
        if isinstance(statement, config_parser.ImportStatement):
            raise InputError(f"{place}: imports are refused; a configuration only binds what axial has")
        if isinstance(statement, config_parser.IncludeStatement):
            self._include(statement.filename, where, place)
        elif isinstance(statement, config_parser.BlockDeclaration):
            self._known(statement.selector, place)
        elif statement.arg_name:
            self._binding(statement, place)
        else:
            macro = "/".join(filter(None, (statement.scope, statement.selector)))
            self._bind((macro, "gin.macro", "value"), statement.value, place)

    def _include(self, name, where, place):
        """Reads a file that another includes, if it is a local one or of the same bucket."""
        self._included += 1
        if self._included > LARGEST_INCLUDES or len(self._open) > DEEPEST:
            raise InputError(f"{place}: more than {LARGEST_INCLUDES} files are included, or {DEEPEST} in a row")
        if is_remote(name) and name.split("/")[:3] != where.split("/")[:3]:
            raise InputError(f"{place}: includes {name}: a local file is expected, or one of the same bucket")
        self.file(name, f"{place}: includes ")

    def _binding(self, statement, place):
        name, argument = statement.selector.removeprefix("axial."), statement.arg_name
        moved = _MOVED.get(argument) if name == "PanopticTask" else None
        if moved and (argument not in self._arguments[name] or isinstance(statement.value, str)):
            raise InputError(f"{place}: {name}.{argument} is {moved} {_SINCE}")
        self._known(name, place)
        if argument not in self._arguments[name]:
            raise InputError(f"{place}: {name} has no argument {argument!r}{nearest(argument, self._arguments[name])}")
        if statement.scope:
            self._scoped.append((statement.scope, name, place))
        self._bind((statement.scope, name, argument), statement.value, place)

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
        if scope:
            self._entered.add((scope, name))
        return self._make(scoped_name, evaluate, name)

    def macro(self, scoped_name):
        """What gin's parser makes of `%NAME`."""
        self._used.setdefault(scoped_name, self._where)
        return self._make(f"{scoped_name}/gin.macro", True, f"%{scoped_name}")

    def _make(self, scoped_name, evaluate, name):
        """A reference, of which `_names_in` knows the name."""
        if scoped_name.count("/") > DEEPEST:
            raise InputError(f"{self._where}: more than {DEEPEST} scopes in each other")
        made = self._refer(scoped_name, evaluate)
        self._made[id(made)] = made, name
        return made

    def _bind(self, key, value, place):
        self.bindings[key] = value, self._names_in(value, place), place

    def _names_in(self, value, place, depth=0):
        """List of the names that a value refers to, each as often as it does. Raises ValueError."""
        if id(value) in self._made:
            return [self._made[id(value)][1]]
        # Half a surrogate pair, which no file can hold, raises UnicodeEncodeError, a ValueError.
        size = len(value.encode() if isinstance(value, str) else value) if isinstance(value, (str, bytes)) else 0
        if size > LONGEST_TEXT or depth > DEEPEST or (isinstance(value, int) and abs(value) > LARGEST_NUMBER):
            raise InputError(f"{place}: {_LARGE}")
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        parts = value if isinstance(value, (list, tuple)) else ()
        return [name for part in parts for name in self._names_in(part, place, depth + 1)]

    def _graph(self):
        """dict from each '%MACRO' and configurable to the names that what is bound of it refers to."""
        graph = {}
        for key, (_, names, _) in self.bindings.items():
            graph.setdefault(_node(*key), []).extend(names)
        return graph

    def effective(self):
        """(key, value) of the bindings, without the macros whose every use another binding has replaced."""
        graph = self._graph()
        live = _reached((node for node in graph if node[0] != "%"), graph)
        return [(key, value) for key, (value, *_) in self.bindings.items() if _node(*key) in live]

    def check_macros(self):
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

    def check_uses(self):
        """Raises InputError for a value that leads to itself, or to so many references that gin never ends."""
        graph, uses = self._graph(), {}
        places = {_node(*key): place for key, (*_, place) in self.bindings.items()}
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

    def check_scopes(self):
        """Raises InputError unless some reference enters the scope of each binding and leads to its configurable."""
        graph = self._graph()
        reached = {start: _reached([start], graph) for _, start in self._entered}
        for scope, name, place in self._scoped:
            if not any(f"{own}/".startswith(f"{scope}/") and name in reached[start] for own, start in self._entered):
                what = f"{scope}/{name}"
                raise InputError(
                    f"{place}: {what} has no effect, as nothing refers to @{what}; leave out the scope {scope!r}"
                )
