"""gin: the builders that it configures, and checks that gin itself does not make.

No other module uses gin or its decorators. This module registers everything that gin may configure.
"""

import inspect
import os
import re
import tokenize

import gin
import tensorflow as tf
from gin import config_parser

from axial.data.classification import ClassificationData
from axial.data.coco import sample_data_dir
from axial.data.detection import DetectionData
from axial.data.panoptic_targets import TargetConfig
from axial.data.pipeline import Augmentation, DataConfig
from axial.data.specs import DatasetSpec, TextSpec
from axial.data.text import TextData
from axial.errors import InputError, nearest
from axial.io.read import first_line, read_text
from axial.io.write import write_json, write_text
from axial.layers.batch_norm import BatchNormConfig
from axial.losses import LossConfig
from axial.models.registry import ModelConfig
from axial.postprocess import PostprocessConfig
from axial.serving.export import text_operations
from axial.serving.files import FileModel, network_file
from axial.serving.predictor import Predictor, RunPredictor, check_export
from axial.tasks.classification import ClassificationTask
from axial.tasks.detection import DetectionTask
from axial.tasks.panoptic import PanopticTask
from axial.tasks.segmentation import SegmentationTask
from axial.tasks.translation import TranslationTask
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
from axial.weights.restore import find_checkpoints, restore_average

TASKS = PanopticTask, SegmentationTask, ClassificationTask, DetectionTask, TranslationTask
OPTIMIZERS = RAdamLookahead, NesterovMomentum, Adam


def experiment(task, training, optimizer):
    """The root of a configuration: the task, how long it is trained, and the optimizer. Raises InputError."""
    for name, value, kinds in (
        ("task", task, TASKS),
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
    DataConfig,
    ClassificationData,
    DetectionData,
    TextData,
    TrainingConfig,
    *OPTIMIZERS,
    WarmupPoly,
    WarmupCosine,
    WarmupSteps,
    WarmupInverseSqrt,
    BatchNormConfig,
    PostprocessConfig,
    Augmentation,
    TargetConfig,
    LossConfig,
    sample_data_dir,
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
_INCLUDE = re.compile(r"^\s*include\s+['\"](.+?)['\"].*$", re.MULTILINE)
_GIN_ADDS = "\n  In call to configurable"  # gin appends this to a builder's error, once for each level of calls
CONFIGURABLES = {b.__name__: gin.external_configurable(b, b.__name__, "axial") for b in _BUILDERS}
ARGUMENTS = {b.__name__: list(inspect.signature(b).parameters) for b in _BUILDERS}


def experiments_dir():
    """The folder of gin files, in the installed package or in the checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = os.path.join(package, "experiments")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(package), "experiments")


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

    Raises:
        InputError: one line for a missing file, a syntax error, a macro that is not set, or an unknown configurable,
            argument or macro. For an unknown name the line has the nearest one.
    """
    check = _Check()
    for file in files:
        check.file(find_file(file))
    for binding in bindings:
        check.text(binding, "--gin_binding")
    check.macros()
    gin.clear_config()
    with gin.unlock_config():
        gin.parse_config([*(with_includes(find_file(file)) for file in files), *bindings])


def with_includes(path):
    """Text of a gin file, with its includes inserted.

    Raises:
        InputError: a file cannot be read, or there is no such file.
    """
    # gin itself would also look for them on Python's path.
    return _INCLUDE.sub(lambda found: with_includes(find_file(found[1])), read_text(path))


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


def query(name, default):
    """The value that the loaded configuration gives an argument like 'TrainingConfig.steps', or the default."""
    try:
        value = gin.query_parameter(name)
    except ValueError:  # it is not set
        return default
    return value.scoped_configurable_fn() if isinstance(value, gin.config.ConfigurableReference) else value


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


def restore_run(model_dir, checkpoint=None, data_dir=None, bindings=(), *, average=1):
    """(task, model) of a run of axial-train, with the run's weights. The run's data is not needed.

    Args:
        model_dir: folder of the run.
        checkpoint: prefix of one checkpoint; by default the run's best, else its latest.
        data_dir: replaces the run's own data.
        bindings: gin bindings that override the run's own.
        average: number of the run's latest checkpoints whose weights are averaged; 1 for the checkpoint above.

    Raises:
        InputError: there is no such run, or the checkpoint does not fit.
    """
    path = os.path.join(model_dir, "config.gin")
    if not tf.io.gfile.exists(path):
        raise InputError(f"{path}: no such file; a run of axial-train is expected")
    load([path], bindings)
    spec = DatasetSpec.read(os.path.join(model_dir, "spec.json"))
    task = build(_task(), data_dir, spec=spec)
    model = task.build_model()
    restore_average(model, find_checkpoints(checkpoint or model_dir, average))
    return task, model


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
    if [value.shape for value in values] != [tuple(weight.shape) for weight in model.weights]:
        raise InputError(f"{path}: its weights are not those of the model in its config.gin; export again")
    model.set_weights(values)
    return task, model


def check_run(model_dir):
    """InputError where a folder is of a run that this version of axial cannot continue."""
    path = os.path.join(model_dir, "config.gin")
    if tf.io.gfile.exists(path):
        _Check().file(path)


def save(folder, spec):
    """Writes the configuration of a run or an export into its folder.

    'config.gin' is the whole configuration. 'operative_config.gin' is the part that was used, with all defaults.
    'spec.json' is the `DatasetSpec`.
    """
    tf.io.gfile.makedirs(folder)
    for name, text in (("config", gin.config_str()), ("operative_config", gin.operative_config_str())):
        write_text(os.path.join(folder, f"{name}.gin"), text)
    write_json(os.path.join(folder, "spec.json"), spec.to_json())


class _Check(config_parser.ParserDelegate):
    """Reads statements as gin does, and checks that every name in them exists."""

    def __init__(self):
        self.defined, self.used, self.within = {}, {}, {}
        self.where, self.files, self.macros_of_statement = "", [], set()

    def file(self, path):
        if path in self.files:
            raise InputError(f"{self.files[-1]}: includes {path}, which includes it")
        self.files.append(path)
        self.text(read_text(path), path)
        self.files.pop()

    def text(self, text, where):
        parser = config_parser.ConfigParser(text, self)
        self.where = where
        try:
            for statement in parser:
                self._statement(statement, where)
                self.where = where
                self.macros_of_statement = set()
        except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError) as error:
            message = first_line(error)  # gin appends the location
            if isinstance(error, InputError):
                raise InputError(message) from None
            raise InputError(f"{where}: not gin's syntax ({message})") from None

    def _statement(self, statement, where):
        place = where
        if getattr(statement, "location", None) and where != "--gin_binding":
            place = f"{where}:{statement.location.line_num}"
        if isinstance(statement, config_parser.ImportStatement):
            raise InputError(f"{place}: imports are refused; a configuration only binds what axial has")
        if isinstance(statement, config_parser.IncludeStatement):
            self.file(find_file(statement.filename))
        elif isinstance(statement, config_parser.BindingStatement):
            if not statement.arg_name:
                self.defined[statement.selector] = place
                self.within[statement.selector] = self.macros_of_statement
                return
            name = statement.selector.split(".")[-1]
            moved = _MOVED.get(f"{name}.{statement.arg_name}")
            if moved and (statement.arg_name not in ARGUMENTS[name] or isinstance(statement.value, str)):
                raise InputError(
                    f"{place}: {name}.{statement.arg_name} is {moved} since axial 0.2 (CHANGELOG.md); a run of "
                    "axial 0.1 resumes with that version only"
                )
            self._known(name, place)
            if statement.arg_name not in ARGUMENTS[name]:
                raise InputError(
                    f"{place}: {name} has no argument {statement.arg_name!r}"
                    f"{nearest(statement.arg_name, ARGUMENTS[name])}"
                )

    def _known(self, name, place):
        if name not in CONFIGURABLES:
            raise InputError(f"{place}: nothing is called {name!r}{nearest(name, CONFIGURABLES)}")

    def configurable_reference(self, scoped_name, evaluate):
        self._known(scoped_name.split("/")[-1].split(".")[-1], self.where)

    def macro(self, scoped_name):
        self.used.setdefault(scoped_name, self.where)
        self.macros_of_statement.add(scoped_name)

    def macros(self):
        """Raises InputError unless every macro that is set is used, and every macro that is used is set."""
        for name, place in self.defined.items():
            if name not in self.used:
                raise InputError(f"{place}: the macro {name!r} is not used anywhere{nearest(name, self.used)}")
        for name, place in self.used.items():
            if name not in self.defined:
                raise InputError(f"{place}: the macro {name!r} is not set{nearest(name, self.defined)}")
        for name, place in self.defined.items():
            reached, queue = set(), list(self.within[name])
            while queue:
                macro = queue.pop()
                if macro == name:
                    raise InputError(f"{place}: the macro {name!r} is set to itself")
                if macro not in reached:
                    reached.add(macro)
                    queue += self.within[macro]
