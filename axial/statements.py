"""The statements of gin files and bindings, checked from their text: nothing of them is imported or built.

`configuration` builds them. It needs TensorFlow, whose import takes longer than all that is done here.
"""

import os
import re
import tokenize
import typing

from gin import config_parser

from axial.errors import InputError, nearest
from axial.io import gfile
from axial.io.read import first_line, read_text
from axial.recipes import check_model_name, experiments_dir, read_arguments

LARGEST_INCLUDES = 1000  # files that a configuration includes; a few that include each other twice make millions
# New names of the arguments of version 0.1. The config.gin of such a run has the old names.
_MOVED = {
    "PanopticTask.model": "ModelConfig.name",
    "PanopticTask.norm": "ModelConfig.norm",
    "PanopticTask.drop_path": "ModelConfig.drop_path",
    "PanopticTask.memory": "ModelConfig.recompute and ModelConfig.backend",
    "PanopticTask.train_split": "DataConfig.train_split",
    "PanopticTask.eval_split": "DataConfig.eval_split",
    "PanopticTask.canvas": "DataConfig.canvas",
    "PanopticTask.augmentation": "DataConfig.augmentation",
    "PanopticTask.shuffle": "DataConfig.shuffle",
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
    name = statements.value("ModelConfig", "name")
    if isinstance(name, str):
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
    path = os.path.join(model_dir, "config.gin")
    if gfile.exists(path):
        Statements(read_arguments()).file(path)


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
    known = [
        os.path.relpath(os.path.join(folder, file), root)
        for folder, _, files in os.walk(root)
        for file in files
        if file.endswith(".gin")
    ]
    raise InputError(f"{name}: no such gin file{nearest(name.removeprefix('experiments/'), known)}")


def _of_run(path):
    """Whether a gin file is one that `save` has written."""
    folder, name = os.path.split(path)
    return name == "config.gin" and gfile.exists(os.path.join(folder, "spec.json"))


class Statements(config_parser.ParserDelegate):
    """Statements of gin files and bindings, as gin's parser reads them. Checks that every name in them exists.

    Attributes:
        bindings: dict from keys of `gin.bind_parameter` to (value, names that it refers to), of the last statement on
            each key.

    Args:
        arguments: dict from the names of the configurables to the lists of their arguments.
        refer: function of (scoped name, whether it is called) that makes a value of a reference.
    """

    def __init__(self, arguments, refer=Reference):
        self._arguments, self._refer = arguments, refer
        self.bindings, self._places = {}, {}  # of the same keys
        self._set, self._used = {}, {}  # macros, with the place where each is set and first used
        self._scoped = []  # (scope, configurable, place) of the bindings with a scope
        self._entered = set()  # (scope, configurable) of the references with a scope
        self._within = {}  # of a configurable's name or a '%macro', the names that its values refer to
        self._made = {}  # of a reference's id, the reference, which so stays alive, and the name that it is to
        self._where, self._open, self._included = "", [], 0

    def read(self, files, bindings, whole=True):
        """Reads gin files and bindings, and checks macros and scopes if they are the `whole`. Returns itself.

        Raises:
            InputError: see `configuration.load`.
        """
        for file in files:
            self.file(find_file(file))
        for binding in bindings:
            self.text(binding, "--gin_binding")
        if whole:
            self.check_macros()
            self.check_scopes()
        return self

    def value(self, name, argument):
        """What an argument is bound to, through macros that are read without gin; None if it is not bound."""
        value = self.bindings.get(("", name, argument), (None,))[0]
        while isinstance(value, Reference) and value.scoped_name.endswith("/gin.macro"):
            macro = value.scoped_name.removesuffix("/gin.macro")
            value = self.bindings.get((macro, "gin.macro", "value"), (None,))[0]
        return value

    def is_own(self, name, argument):
        """Whether the user has set a bound argument: by a flag, or in a gin file that is no recipe of axial or run."""
        key = "", name, argument
        while key in self.bindings:
            place, (_, names) = self._places[key], self.bindings[key]
            key = next(iter(names), "%")[1:], "gin.macro", "value"
        path = os.path.realpath(place.rpartition(":")[0])
        recipes = os.path.join(os.path.realpath(experiments_dir()), "")
        return place == "--gin_binding" or not (path.startswith(recipes) or _of_run(path))

    def own_data_dir(self):
        """What the configuration itself binds as its task's data, or None."""
        task = self.value("experiment", "task")
        return self.value(task.scoped_name, "data_dir") if isinstance(task, Reference) else None

    def file(self, path):
        """Reads a gin file and what it includes. Raises InputError."""
        if path in self._open:
            raise InputError(f"{self._open[-1]}: includes {path}, which includes it")
        self._open.append(path)
        self.text(read_text(path), path)
        self._open.pop()

    def text(self, text, where):
        """Reads statements. `where` is their file or flag in messages. Raises InputError."""
        self._where = where
        try:
            for statement in config_parser.ConfigParser(text, self):
                self._statement(statement, where)
                self._where = where
        except InputError as error:
            raise InputError(first_line(error)) from None  # gin appends the location
        except (SyntaxError, ValueError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
            if word := re.search(r"Failed to parse token '(.*)'", str(error)):
                raise InputError(f"{self._place(where, error.lineno)}: {self._no_value(word[1])}") from None
            raise InputError(f"{where}: not gin's syntax ({first_line(error)})") from None

    @staticmethod
    def _place(where, line):
        return where if where == "--gin_binding" else f"{where}:{line}"

    def _no_value(self, word):
        """The message on a word that stands where a value is expected."""
        names = *(f"@{name}()" for name in self._arguments), *(f"%{name}" for name in self._set)
        known = "True", "False", "None", *names
        return (
            f"{word} is no value{nearest(word, known)}; expected a number, True, False, None, text in quotes like "
            "'nuclei', a list, @NAME() or %MACRO"
        )

    def _statement(self, statement, where):
        place = self._place(where, statement.location.line_num)
        if isinstance(statement, config_parser.ImportStatement):
            raise InputError(f"{place}: imports are refused; a configuration only binds what axial has")
        if isinstance(statement, config_parser.IncludeStatement):
            self._included += 1
            if self._included > LARGEST_INCLUDES:
                raise InputError(f"{place}: more than {LARGEST_INCLUDES} files are included")
            self.file(find_file(statement.filename))
        elif isinstance(statement, config_parser.BlockDeclaration):
            self._known(statement.selector, place)
        elif not statement.arg_name:
            macro = "/".join(filter(None, (statement.scope, statement.selector)))
            self._set[macro] = place
            self._within[f"%{macro}"] = self._names_in(statement.value)
            self.bindings[macro, "gin.macro", "value"] = statement.value, self._names_in(statement.value)
            self._places[macro, "gin.macro", "value"] = place
        else:
            self._binding(statement, place)

    def _binding(self, statement, place):
        name, argument = statement.selector.removeprefix("axial."), statement.arg_name
        moved = _MOVED.get(f"{name}.{argument}")
        if moved and (argument not in self._arguments[name] or isinstance(statement.value, str)):
            raise InputError(
                f"{place}: {name}.{argument} is {moved} since axial 0.2 (CHANGELOG.md); a run of axial 0.1 resumes "
                "with that version only"
            )
        self._known(name, place)
        if argument not in self._arguments[name]:
            raise InputError(f"{place}: {name} has no argument {argument!r}{nearest(argument, self._arguments[name])}")
        if statement.scope:
            self._scoped.append((statement.scope, name, place))
        names = self._names_in(statement.value)
        self._within.setdefault(name, set()).update(names)
        self.bindings[statement.scope, name, argument] = statement.value, names
        self._places[statement.scope, name, argument] = place

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
        made = self._refer(scoped_name, evaluate)
        self._made[id(made)] = made, name
        return made

    def _names_in(self, value):
        """The set of the names that a value refers to; that of a macro is '%MACRO'."""
        if id(value) in self._made:
            return {self._made[id(value)][1]}
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        return set().union(*map(self._names_in, value)) if isinstance(value, (list, tuple, set)) else set()

    def _reached(self, name):
        """Names that the values of a configurable or '%macro' refer to, and what those refer to, and so on."""
        reached, queue = set(), list(self._within.get(name, ()))
        while queue:
            found = queue.pop()
            if found not in reached:
                reached.add(found)
                queue += self._within.get(found, ())
        return reached

    def effective(self):
        """(key, value) of the bindings, without the macros whose every use another binding has replaced."""
        macros = {f"%{scope}": refers for (scope, name, _), (_, refers) in self.bindings.items() if name == "gin.macro"}
        queue = [refers for (_, name, _), (_, refers) in self.bindings.items() if name != "gin.macro"]
        live = set()
        while queue:
            found = queue.pop() & macros.keys() - live
            live |= found
            queue += [macros[name] for name in found]
        for (scope, name, argument), (value, _) in self.bindings.items():
            if name != "gin.macro" or f"%{scope}" in live:
                yield (scope, name, argument), value

    def check_macros(self):
        """Raises InputError unless every macro that is set is used, and every macro that is used is set.

        The config.gin of an older run may hold a macro whose only use another binding has replaced.
        """
        for name, place in self._set.items():
            if name not in self._used and not _of_run(place.rpartition(":")[0]):
                raise InputError(f"{place}: the macro {name!r} is not used anywhere{nearest(name, self._used)}")
        for name, place in self._used.items():
            if name not in self._set:
                raise InputError(f"{place}: the macro {name!r} is not set{nearest(name, self._set)}")
        for name, place in self._set.items():
            if f"%{name}" in self._reached(f"%{name}"):
                raise InputError(f"{place}: the macro {name!r} is set to itself")

    def check_scopes(self):
        """Raises InputError unless some reference enters the scope of each binding and leads to its configurable."""
        for scope, name, place in self._scoped:
            if not any(
                f"{entered}/".startswith(f"{scope}/") and name in {start, *self._reached(start)}
                for entered, start in self._entered
            ):
                raise InputError(
                    f"{place}: {scope}/{name} has no effect, as nothing refers to @{scope}/{name}; "
                    f"leave out the scope {scope!r}"
                )
