"""gin: the builders that it configures, and checks that gin itself does not make.

No other module uses gin or its decorators. This module registers everything that gin may configure.
"""

import dataclasses
import inspect
import os
import re
import tokenize

import gin
import tensorflow as tf
from gin import config_parser

from axial.data.converters.coco import sample_data_dir
from axial.data.converters.nuclei import nuclei_data_dir
from axial.data.specs import DatasetSpec, TextSpec, difference, text_operations
from axial.data.tfrecord import read_manifest
from axial.errors import InputError, nearest
from axial.io.read import first_line, read_text
from axial.io.write import write_json, write_text
from axial.layers.attention.folded import fill_scales
from axial.layers.batch_norm import BatchNormConfig
from axial.models.registry import ModelConfig
from axial.recipes import experiments_dir
from axial.serving.files import FileModel, network_file
from axial.serving.predictor import Predictor, RunPredictor, check_export
from axial.tasks.registry import TASKS
from axial.training.optimizers import (
    Adam,
    NesterovMomentum,
    RAdamLookahead,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupPoly,
    WarmupSteps,
)
from axial.training.trainer import TrainingConfig
from axial.weights.convert import gin_text
from axial.weights.interchange import SUFFIX, restore_tensors
from axial.weights.restore import find_checkpoints, find_weights, restore_average
from axial.weights.shipped import shipped_folder

OPTIMIZERS = RAdamLookahead, NesterovMomentum, Adam


def experiment(task, training, optimizer):
    """The root of a configuration: the task, how long it is trained, and the optimizer. Raises InputError."""
    for name, value, kinds in (
        ("task", task, tuple(TASKS)),
        ("training", training, (TrainingConfig,)),
        ("optimizer", optimizer, OPTIMIZERS),
    ):
        if not isinstance(value, kinds):
            expected = " or ".join(f"@{kind.__name__}()" for kind in kinds)
            raise InputError(f"experiment.{name} = {value!r}: expected {expected}")
    return task, training, optimizer


_BUILDERS = (
    experiment,
    *TASKS,
    ModelConfig,
    TrainingConfig,
    *OPTIMIZERS,
    WarmupPoly,
    WarmupCosine,
    WarmupSteps,
    WarmupInverseSqrt,
    BatchNormConfig,
    sample_data_dir,
    nuclei_data_dir,
    *dict.fromkeys(config for task in TASKS for config in task.configures),
)
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
LARGEST_INCLUDES = 1000  # files that a configuration includes; a few that include each other twice make millions
_GIN_ADDS = "\n  In call to configurable"  # gin appends this to a builder's error, once for each level of calls
CONFIGURABLES = {b.__name__: gin.external_configurable(b, b.__name__, "axial") for b in _BUILDERS}
ARGUMENTS = {b.__name__: list(inspect.signature(b).parameters) for b in _BUILDERS}


def find_file(name):
    """Path of a gin file from its path on disk or its name in `experiments_dir`.

    Raises:
        InputError: there is no such file; names the nearest.
    """
    root = experiments_dir()
    candidates = [name, os.path.join(root, name), os.path.join(root, name.removeprefix("experiments/"))]
    for path in candidates:
        if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path):
            return path
    known = [
        os.path.relpath(os.path.join(folder, file), root)
        for folder, _, files in os.walk(root)
        for file in files
        if file.endswith(".gin")
    ]
    raise InputError(f"{name}: no such gin file{nearest(name.removeprefix('experiments/'), known)}")


def load(files, bindings=()):
    """Parses gin files and bindings into gin's global configuration. They replace the configuration before.

    gin's parser reads each text once. The statements that are checked here are the statements that gin keeps, and gin
    never runs its own `import` or `include`.

    Raises:
        InputError: one line for a missing file, a syntax error, a macro that is not set, an unknown configurable,
            argument or macro, or a scope without effect. For an unknown name the line has the nearest one.
    """
    statements = _Statements()
    for file in files:
        statements.file(find_file(file))
    for binding in bindings:
        statements.text(binding, "--gin_binding")
    statements.check_macros()
    statements.check_scopes()
    gin.clear_config()
    with gin.unlock_config():
        for key, value in statements.effective():
            gin.bind_parameter(key, value)


def text():
    """The loaded configuration as the text of one gin file without includes."""
    return gin.config_str()


def build(name="experiment", data_dir=None, **arguments):
    """Builds a configurable of the loaded configuration; by default (task, training, optimizer).

    Args:
        name: of `CONFIGURABLES`.
        data_dir: replaces the task's own.
        **arguments: replace those of the configuration.

    Raises:
        InputError: a builder refuses a value, or an argument is missing.
    """
    if data_dir:
        with gin.unlock_config():
            gin.bind_parameter(f"{_task()}.data_dir", data_dir)
    try:
        return CONFIGURABLES[name](**arguments)
    except InputError as error:
        raise InputError(str(error).split(_GIN_ADDS)[0]) from None
    except TypeError as error:
        raise InputError(f"the gin configuration does not fit: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise InputError("the gin configuration does not fit: a configurable is an argument of itself") from None


def with_macros(message):
    """A message with the macros of the loaded configuration that set the arguments it names, where macros do."""
    sets = {}
    for name in re.findall(rf"\b(?:{'|'.join(CONFIGURABLES)})\.\w+\b", message):
        value, macro = _bound(name), None
        while isinstance(value, gin.config.ConfigurableReference) and value.selector == "gin.macro":
            macro = "/".join(value.scopes)
            value = _bound(f"{macro}/gin.macro.value")
        if macro:
            sets[name] = macro
    remarks = "; ".join(f"{name} is the macro {macro}" for name, macro in sets.items())
    return f"{message} ({remarks})" if remarks else message


def query(name, default):
    """The value that the loaded configuration gives an argument like 'TrainingConfig.steps', or the default."""
    value = _bound(name, default)
    return value.scoped_configurable_fn() if isinstance(value, gin.config.ConfigurableReference) else value


def _bound(name, default=None):
    """What an argument is bound to, which may be a reference or a macro; the default if it is not bound."""
    try:
        return gin.query_parameter(name)
    except ValueError:  # it is not set
        return default


def own_data_dir():
    """The folder of data that the loaded configuration itself names, as those of the sample do, or None."""
    return query(f"{_task()}.data_dir", None)


def _task():
    """Name of the task that the loaded configuration builds. Raises InputError."""
    try:
        name = gin.query_parameter("experiment.task").selector.split(".")[-1]
    except (ValueError, AttributeError):
        name = None
    if name not in [task.__name__ for task in TASKS]:
        raise InputError(f"experiment.task: expected {' or '.join(f'@{task.__name__}()' for task in TASKS)}")
    return name


def restore_run(model_dir, checkpoint=None, data_dir=None, bindings=(), *, average=1, arguments=(), splits=()):
    """(task, model) of a run of axial-train, with the run's weights. The run's data is not needed.

    Args:
        model_dir: folder of the run, or what axial-export --format=safetensors wrote of one, or the name of a shipped
            model.
        checkpoint: prefix of one checkpoint, or a safetensors file; by default see `find_weights`.
        data_dir: replaces the run's own data.
        bindings: gin bindings that override the run's own.
        average: number of the run's latest checkpoints whose weights are averaged; 1 for the checkpoint above.
        arguments: dict of arguments of the model, which replace the run's own.
        splits: of the run's data, which must be there; None for the one that the run evaluates.

    Raises:
        InputError: there is no such run or split, or the checkpoint does not fit.
    """
    model_dir = shipped_folder(model_dir)
    path = os.path.join(model_dir, "config.gin")
    if not tf.io.gfile.exists(path):
        raise InputError(f"{path}: no such file; a run of axial-train is expected")
    load([path], bindings)
    spec = DatasetSpec.read(os.path.join(model_dir, "spec.json"))
    task = build(_task(), data_dir, spec=spec)
    task.model = dataclasses.replace(task.model, arguments={**task.model.arguments, **dict(arguments)})
    check_splits(task, splits)
    found = find_weights(checkpoint or model_dir) if average == 1 else ""
    prefixes = [found] if found else find_checkpoints(checkpoint or model_dir, average)
    model = task.build_model()
    if found.endswith(SUFFIX):
        restore_tensors(model, found, task.model.name, spec)
    else:
        restore_average(model, prefixes)
    return task, model


def check_splits(task, splits):
    """Raises InputError unless the task's data has these splits; None is the one that it evaluates."""
    for split in splits:
        read_manifest(task.data_dir, split or task.data.eval_split)


def task_of_weights(files, card, data_dir=None, bindings=(), *, path):
    """The task of a recipe with the network that weights are of.

    Args:
        files: gin files of the recipe.
        card: `WeightsCard`, whose network takes the place of the recipe's; None for the recipe's own.
        data_dir: replaces the recipe's own data.
        bindings: gin bindings over the recipe and the card.
        path: of the weights, for messages.

    Raises:
        InputError: the recipe does not fit; no data; weights of other classes than the data's.
    """
    load(files, [*([gin_text(card.source, card)] if card else []), *bindings])
    data_dir = data_dir or own_data_dir()
    if not data_dir:
        raise InputError(f"--data_dir is needed: {files[-1]} has no data of its own")
    task = build(_task(), data_dir)
    if card and card.num_classes != task.num_classes:
        raise InputError(f"{path}: has {card.num_classes} classes, {data_dir} has {task.num_classes}")
    if card and card.spec and (found := difference(card.spec, task.spec, ["class_names"])):
        raise InputError(f"{path}: is for other classes than {data_dir}: {found}")
    return task


def load_export(path):
    """The predictor of what axial-export wrote: a `Predictor`, or the `RunPredictor` of a file. Raises InputError."""
    if not network_file(path):
        return Predictor(path)
    spec = check_export(path)
    model = FileModel(path)
    load([os.path.join(path, "assets.extra", "config.gin")])
    task = build(_task(), spec=spec)
    if model.canvas != tuple(task.canvas):
        raise InputError(f"{model.path}: takes {model.canvas}, its config.gin says {tuple(task.canvas)}")
    task.one_canvas = True
    return RunPredictor(task, model)


def load_folded(path):
    """(task, folded model with its weights) of a SavedModel of axial-export.

    Raises:
        InputError: the folder is not a SavedModel of axial-export, or its weights are not those of its configuration.
    """
    spec = check_export(path)
    if network_file(path):
        raise InputError(f"{path}: holds a network in one file; a SavedModel is expected")
    if isinstance(spec, TextSpec):
        text_operations()
    try:
        values = [weight.numpy() for weight in tf.saved_model.load(path).weights]
    except Exception as error:  # whatever TensorFlow raises for a damaged graph or damaged variables
        raise InputError(f"{path}: not a whole SavedModel of axial-export ({first_line(error)})") from None
    load([os.path.join(path, "assets.extra", "config.gin")])
    task = build(_task(), spec=spec)
    model = task.build_model(folded=True)
    values = fill_scales(model.weights, values)
    if [value.shape for value in values] != [tuple(weight.shape) for weight in model.weights]:
        raise InputError(f"{path}: its weights are not those of the model in its config.gin; export again")
    model.set_weights(values)
    return task, model


def check_run(model_dir):
    """InputError where a folder is of a run that this version of axial cannot continue."""
    path = os.path.join(model_dir, "config.gin")
    if tf.io.gfile.exists(path):
        _Statements().file(path)


def save(folder, spec):
    """Writes the configuration of a run or an export into its folder.

    'config.gin' is the whole configuration. 'operative_config.gin' is the part that was used, with all defaults.
    'spec.json' is the `DatasetSpec`.
    """
    write_text(os.path.join(folder, "config.gin"), gin.config_str())
    write_text(os.path.join(folder, "operative_config.gin"), gin.operative_config_str())
    write_json(os.path.join(folder, "spec.json"), spec.to_json())


def _of_run(path):
    """Whether a gin file is one that `save` has written."""
    folder, name = os.path.split(path)
    return name == "config.gin" and tf.io.gfile.exists(os.path.join(folder, "spec.json"))


class _Statements(config_parser.ParserDelegate):
    """Statements of gin files and bindings, as gin's parser reads them. Checks that every name in them exists.

    Attributes:
        bindings: dict from keys of `gin.bind_parameter` to (value, names that it refers to), of the last statement on
            each key.
    """

    def __init__(self):
        self.bindings = {}
        self._set, self._used = {}, {}  # macros, with the place where each is set and first used
        self._scoped = []  # (scope, configurable, place) of the bindings with a scope
        self._entered = set()  # (scope, configurable) of the references with a scope
        self._within = {}  # of a configurable's name or a '%macro', the names that its values refer to
        self._of_statement = set()  # names that the statement being parsed refers to
        self._where, self._open, self._included = "", [], 0

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
                self._of_statement = set()
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
        known = "True", "False", "None", *(f"@{name}()" for name in CONFIGURABLES), *(f"%{name}" for name in self._set)
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
            self._within[f"%{macro}"] = self._of_statement
            self.bindings[macro, "gin.macro", "value"] = statement.value, self._of_statement
        else:
            self._binding(statement, place)

    def _binding(self, statement, place):
        name, argument = statement.selector.removeprefix("axial."), statement.arg_name
        moved = _MOVED.get(f"{name}.{argument}")
        if moved and (argument not in ARGUMENTS[name] or isinstance(statement.value, str)):
            raise InputError(
                f"{place}: {name}.{argument} is {moved} since axial 0.2 (CHANGELOG.md); a run of axial 0.1 resumes "
                "with that version only"
            )
        self._known(name, place)
        if argument not in ARGUMENTS[name]:
            raise InputError(f"{place}: {name} has no argument {argument!r}{nearest(argument, ARGUMENTS[name])}")
        if statement.scope:
            self._scoped.append((statement.scope, name, place))
        self._within.setdefault(name, set()).update(self._of_statement)
        self.bindings[statement.scope, name, argument] = statement.value, self._of_statement

    def _known(self, selector, place):
        """The name in `CONFIGURABLES`. Raises InputError."""
        name = selector.removeprefix("axial.")
        if name not in CONFIGURABLES:
            raise InputError(f"{place}: nothing is called {selector!r}{nearest(selector, CONFIGURABLES)}")
        return name

    def configurable_reference(self, scoped_name, evaluate):
        """What gin's parser makes of `@scope/Name` and `@scope/Name()`."""
        scope, _, selector = scoped_name.rpartition("/")
        name = self._known(selector, self._where)
        self._of_statement.add(name)
        if scope:
            self._entered.add((scope, name))
        return gin.config.ConfigurableReference(scoped_name, evaluate)

    def macro(self, scoped_name):
        """What gin's parser makes of `%NAME`."""
        self._used.setdefault(scoped_name, self._where)
        self._of_statement.add(f"%{scoped_name}")
        return gin.config.ConfigurableReference(f"{scoped_name}/gin.macro", True)

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
