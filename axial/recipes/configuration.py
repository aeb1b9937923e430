"""Builds tasks, trainings and runs from gin, with checks that gin itself does not make.

No other module uses gin or its decorators. This module registers everything that gin may configure.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

from axial.data.converters.coco import sample_data_dir
from axial.data.converters.nuclei import nuclei_data_dir
from axial.data.files import find_manifest
from axial.data.objects import OBJECTS, Objects, read_objects
from axial.data.specs import DatasetSpec, Spec, field_difference
from axial.data.tfrecord import read_manifest
from axial.errors import InputError
from axial.io.show import say
from axial.io.write import write_json, write_text
from axial.layers.batch_norm import BatchNormConfig
from axial.models.base import Network
from axial.models.registry import ModelConfig
from axial.recipes import Recipe, Reference, read
from axial.serving.files import FileModel
from axial.serving.predictor import Predictor, check_export
from axial.tasks.base import Task
from axial.tasks.registry import TASKS
from axial.training.optimizers import OPTIMIZERS, SCHEDULES
from axial.training.trainer import TrainingConfig
from axial.weights.convert import gin_text
from axial.weights.interchange import WeightsCard, restore_tensors
from axial.weights.restore import find_weights, restore_average
from axial.weights.source import SUFFIX, Location, resolve, run_file, without_recipe


def experiment(task: Task, training: TrainingConfig, optimizer: Any) -> tuple[Task, TrainingConfig, Any]:
    """The root of a configuration.

    Args:
        task: the `Task` to train.
        training: the `TrainingConfig`.
        optimizer: the optimizer, one of `OPTIMIZERS`.

    Raises:
        InputError: an argument has the wrong type.
    """
    expected = {"task": TASKS, "training": (TrainingConfig,), "optimizer": OPTIMIZERS}
    for (name, kinds), value in zip(expected.items(), (task, training, optimizer)):
        if not isinstance(value, tuple(kinds)):
            names = " or ".join(f"@{kind.__name__}()" for kind in kinds)
            raise InputError(f"experiment.{name} = {value!r}: expected {names}")
    return task, training, optimizer


_BUILDERS = (
    experiment,
    *TASKS,
    ModelConfig,
    TrainingConfig,
    *OPTIMIZERS,
    *SCHEDULES,
    BatchNormConfig,
    sample_data_dir,
    nuclei_data_dir,
    *dict.fromkeys(config for task in TASKS for config in task.configures),  # type: ignore[attr-defined]
)
_GIN_ADDS = "\n  In call to configurable"  # gin appends this to a builder's error, once for each nested call
CONFIGURABLES = {b.__name__: gin.external_configurable(b, b.__name__, "axial") for b in _BUILDERS}
_loaded = [Recipe()]


def load(files: list[str], bindings: Sequence[str] = ()) -> None:
    """Reads gin files and bindings, and makes them gin's configuration; see `bind`.

    gin's parser reads each text once. gin never runs its own `import` or `include`.

    Raises:
        InputError: one line for a missing file, a syntax error, a macro that is not set, an unknown configurable,
            argument or macro, or a scope. For an unknown name, the line suggests the nearest known one.
    """
    bind(read(files, bindings))


def bind(recipe: Recipe) -> None:
    """Replaces gin's global configuration by a `Recipe`."""
    _loaded[0] = recipe
    gin.clear_config()
    with gin.unlock_config():
        for key, value in recipe.bindings.items():
            gin.bind_parameter(key if "." in key else f"{key}/gin.macro.value", _gin_value(value))


def _gin_value(value):
    """The value with gin's own references in place of its `Reference`s."""
    if isinstance(value, Reference):
        name = f"{value.name[1:]}/gin.macro" if value.name[0] == "%" else value.name
        return gin.config.ConfigurableReference(name, value.called)
    if isinstance(value, dict):
        return dict(zip(_gin_value([*value]), _gin_value([*value.values()])))
    return type(value)(map(_gin_value, value)) if isinstance(value, (list, tuple)) else value


def text() -> str:
    """The loaded configuration as the text of one gin file without includes."""
    return gin.config_str()


def build(name: str = "experiment", data_dir: str | None = None, spec: Spec | None = None) -> Any:
    """Builds a configurable of the loaded configuration; by default (task, training, optimizer).

    Args:
        name: name of the configurable, a key of `CONFIGURABLES`.
        data_dir: folder of the data set that replaces the task's own.
        spec: spec that replaces the data set's own.

    Raises:
        InputError: a builder refuses a value, an argument is missing, or the data lacks a split that the user set.
    """
    if data_dir:
        with gin.unlock_config():
            gin.bind_parameter(f"{_task()}.data_dir", data_dir)
    configurable = CONFIGURABLES[name]
    built = _build(functools.partial(configurable, spec=spec) if spec else configurable)
    if name == "experiment":
        for split in ("train_split", "eval_split"):
            _split(built[0], split)
    return built


def _build(configurable):
    """The result of a gin configurable. Turns its errors into InputError."""
    try:
        return configurable()
    except InputError as error:
        raise InputError(str(error).split(_GIN_ADDS)[0]) from None
    except TypeError as error:
        raise InputError(f"the gin configuration does not fit: {str(error).splitlines()[0]}") from None


def with_macros(message: str) -> str:
    """The message, and after it the macro of each argument that the message names and that a macro sets."""
    names = re.findall(rf"\b(?:{'|'.join(CONFIGURABLES)})\.\w+\b", message)
    chains = {name: _loaded[0].chain(name) for name in names}
    remarks = "; ".join(f"{name} is the macro {keys[-1]}" for name, keys in chains.items() if len(keys) > 1)
    return f"{message} ({remarks})" if remarks else message


def query(name: str, default: Any) -> Any:
    """The value that the loaded configuration gives an argument like 'TrainingConfig.steps', or the default."""
    value = _loaded[0].value(name, default)
    return _build(_gin_value(value).scoped_configurable_fn) if isinstance(value, Reference) else value


def _task():
    """Name of the task that the loaded configuration builds. Raises InputError."""
    name = _loaded[0].task()
    if name not in [task.__name__ for task in TASKS]:
        raise InputError(f"experiment.task: expected {' or '.join(f'@{task.__name__}()' for task in TASKS)}")
    return name


def restore_run(
    what: Location,
    checkpoint: str | None = None,
    data_dir: str | None = None,
    bindings: Sequence[str] = (),
    *,
    average: int = 1,
    arguments: dict | tuple = (),
    splits: Sequence[str | None] = (),
) -> tuple[Task, Network]:
    """(task, model) of a run of axial-train, with the run's weights. The run's data is not needed.

    Args:
        what: the run, its export by axial-export --format=safetensors, or the name of a shipped model; see `resolve`.
        checkpoint: prefix of one checkpoint, or a safetensors file; the default is `find_weights`' choice.
        data_dir: folder of the data set that replaces the run's own.
        bindings: gin bindings that override the run's own.
        average: number of the run's latest checkpoints whose weights are averaged; 1 for no averaging.
        arguments: dict of model arguments that replace the run's own.
        splits: splits that the run's data must have. An item None stands for the run's evaluation split.

    Raises:
        InputError: there is no such run or split, or the checkpoint does not fit the model.
    """
    source = resolve(what)
    if source.kind == "weights":
        raise InputError(without_recipe(source.path))
    load([run_file(source.folder)], bindings)
    spec = DatasetSpec.read(os.path.join(source.folder, "spec.json"))
    task = build(_task(), data_dir, spec=spec)
    model = dataclasses.replace(task.model, arguments={**task.model.arguments, **dict(arguments)})
    task = dataclasses.replace(task, model=model)
    check_splits(task, splits)
    files = find_weights(checkpoint or source, average)
    model = task.build_model()
    if files[0].endswith(SUFFIX):
        restore_tensors(model, files[0], task.model.name, spec)
    else:
        restore_average(model, files)
    return task, model


def check_splits(task: Task, splits: Sequence[str | None]) -> None:
    """Raises InputError unless the task's data has the splits. An item None stands for the task's evaluation split."""
    for split in splits:
        read_manifest(task.data_dir, split or _split(task, "eval_split"))


def _split(task, name):
    """The split that a task uses. Raises InputError if the data lacks a split that the user has bound."""
    config, split = type(task.data).__name__, getattr(task.data, name)
    bound = query(f"{config}.{name}", split)
    if bound != split:
        if _loaded[0].is_set_by_user(f"{config}.{name}"):
            find_manifest(task.data_dir, bound)
        say(f"{task.data_dir}: has no split {bound!r} of the recipe; {split!r} takes its place", error=True)
    return split


def task_of_weights(
    files: list[str], card: WeightsCard | None, data_dir: str | None = None, bindings: Sequence[str] = (), *, path: str
) -> Task:
    """The task of a recipe, with the network that the weights belong to.

    Args:
        files: gin files of the recipe.
        card: `WeightsCard` that describes the network; None for the recipe's own network.
        data_dir: folder of the data set that replaces the recipe's own.
        bindings: gin bindings that override the recipe and the card.
        path: path of the weights, for messages.

    Raises:
        InputError: the recipe does not fit, there is no data, or the classes of weights and data differ.
    """
    load(files, [*([gin_text(card)] if card else []), *bindings])
    data_dir = data_dir or query(f"{_task()}.data_dir", None)  # recipes of the sample data set `data_dir`
    if not data_dir:
        raise InputError(f"--data_dir is needed: {files[-1]} has no data of its own")
    task = build(_task(), data_dir)
    if card and card.num_classes != task.num_classes:
        raise InputError(f"{path}: has {card.num_classes} classes, {data_dir} has {task.num_classes}")
    if card and card.spec and (text := field_difference("class_names", card.spec.class_names, task.spec.class_names)):
        raise InputError(f"{path}: is for other classes than {data_dir}: {text}")
    return task


def load_export(what: Location) -> Predictor:
    """The `Predictor` of a SavedModel, TFLite or ONNX file of axial-export; see `resolve`. Raises InputError."""
    source = resolve(what)
    if not source.file:
        return Predictor.of_saved_model(source)
    spec = check_export(source)
    model = FileModel(source.file)
    load([os.path.join(source.extra, "config.gin")])
    task = build(_task(), spec=spec)
    predictor = Predictor.of_task(exported(task), model, objects=read_objects(source.extra))
    if model.canvas is None:
        about = {name: tf.constant(x).numpy() for name, x in {**task.about, "canvas": task.canvas}.items()}
        predictions = task.evaluator.predictions({"image": model.predict}, spec, about)
        example = task.evaluator.example
        return dataclasses.replace(predictor, example=example, predictions=predictions, task=None, model=None)
    if model.canvas != tuple(task.canvas):
        raise InputError(f"{model.path}: takes {model.canvas}, its config.gin says {tuple(task.canvas)}")
    return predictor


def exported(task: Task) -> Task:
    """The task for an export. All photos then use the largest canvas, even if the task scales photos by a factor."""
    return task if task.scale is None else dataclasses.replace(task, one_canvas=True)


def save(folder: str, spec: Spec, objects: Objects | None = None) -> None:
    """Writes the configuration of a run or an export into its folder.

    'config.gin' is the whole configuration. 'operative_config.gin' has only the settings in use, including defaults.
    'spec.json' is the `DatasetSpec`. 'objects.json' is the `Objects`, if given.
    """
    write_text(os.path.join(folder, "config.gin"), gin.config_str())
    write_text(os.path.join(folder, "operative_config.gin"), gin.operative_config_str())
    write_json(os.path.join(folder, "spec.json"), spec.to_json())
    if objects:
        write_json(os.path.join(folder, OBJECTS), objects)
