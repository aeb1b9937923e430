"""The hyperparameters of a run. The run's folder keeps them, so that a resumed training uses the same ones."""

import dataclasses
import os
import typing

import msgspec
import numpy as np

from axial.data.tfrecord import fingerprint
from axial.errors import InputError, nearest
from axial.io.read import read_existing
from axial.io.schemas import Count, Strict, Text
from axial.io.show import say
from axial.training.saving import save_json

FILE = "training.json"
# Settings that older versions did not have or write. Runs of these versions were trained with these values.
BEFORE = {
    "photo_scale": None,
    "quarter_turns": False,
    "brightness": [1.0, 1.0],
    "gamma": [1.0, 1.0],
    "decay_tables": False,
    "loss_rule": "tf-models-official",  # of detectors
}
# Fields of a task's data that the fingerprint covers or that only evaluations use.
NO_HYPERPARAMETERS = ("train_split", "eval_split", "central", "tile_overlap")


class SettingChange(Strict):
    """A setting that a resumed training changed, and the step from which the new value holds."""

    step: Count
    setting: Text
    before: typing.Any
    after: typing.Any


class TrainingSettings(Strict):
    """training.json of a run: its hyperparameters and their changes."""

    format: typing.Literal[1]
    settings: dict[str, typing.Any]
    changes: list[SettingChange] = []


def hyperparameters(task, optimizer, config):
    """JSON-compatible dict of all settings that affect a run's weights, except its number of steps and its devices.

    Args:
        task: a `Task`. Its `trained_by` names the fields that its losses depend on.
        optimizer: `Rule` of `axial.training.optimizers`.
        config: `TrainingConfig`.
    """
    data, rate = vars(task.data), optimizer.learning_rate  # the optimizer keeps a constant rate in float32
    settings = {
        "data": fingerprint(task.data_dir, task.data.train_split),
        "model": task.model.settings(),
        **{name: getattr(task, name) for name in task.trained_by},
        **{name: value for name, value in data.items() if name not in NO_HYPERPARAMETERS},
        **{name: getattr(config, name) for name in ("batch", "accumulate", "seed", "precision", "clip_norm")},
        "optimizer": {name: value for name, value in _arguments(optimizer).items() if name != "learning_rate"},
        "learning_rate": _arguments(rate) if dataclasses.is_dataclass(rate) else float(str(np.float32(rate))),
    }
    return msgspec.json.decode(msgspec.json.encode(settings))  # with the types that decoded JSON has


def _arguments(built):
    """dict of a dataclass instance's fields, with the class's name under 'name'."""
    return {"name": type(built).__name__, **dataclasses.asdict(built)}


def check_names(change, settings):
    """Raises InputError unless `settings` has all names in `change`. The message suggests the nearest name."""
    for name in change:
        if name not in settings:
            raise InputError(f"--change={name}: expected one of {', '.join(settings)}{nearest(name, settings)}")


def check_continues(model_dir, settings, change=()):
    """Raises InputError unless a training continues with the settings of its run. Prints the allowed differences.

    Args:
        model_dir: folder of a run with a checkpoint.
        settings: dict of `hyperparameters`.
        change: names of settings that may differ from the run's.

    Raises:
        InputError: another setting differs. The message has the run's value and the value in `settings`.
    """
    stored = _read(model_dir)
    if stored is None:
        say(f"{model_dir}: has no {FILE} with its hyperparameters; it goes on with what this command says", error=True)
        return
    differing = {
        name: "; ".join(f"{path} is {old!r} in the run and {new!r} here" for path, old, new in changes)
        for name, changes in _differences(stored.settings, settings).items()
    }
    if refused := [f"of another {name} ({text})" for name, text in differing.items() if name not in change]:
        goes_on = f"--change={','.join(differing)} goes on with what this command says"
        raise InputError(f"{model_dir}: {', '.join(refused)}; {goes_on}")
    for name, text in differing.items():
        say(f"{model_dir}: goes on with another {name}: {text}", error=True)


def keep_settings(model_dir, settings, step=None):
    """Writes the settings of a run into its folder, with a list of the settings that changed.

    Args:
        model_dir: folder of the run.
        settings: dict of `hyperparameters`.
        step: the step that the training resumes from; None for a new run.
    """
    stored = None if step is None else _read(model_dir)
    differences = _differences(stored.settings, settings).values() if stored else ()
    changes = [SettingChange(step, *difference) for rows in differences for difference in rows]
    content = TrainingSettings(1, settings, [*(stored.changes if stored else ()), *changes])
    if content != stored:
        save_json(os.path.join(model_dir, FILE), content)


def _read(model_dir):
    """`TrainingSettings` of a run; None if an older version of axial wrote the run."""
    return read_existing(os.path.join(model_dir, FILE), TrainingSettings)


def _differences(stored, current):
    """dict from each setting that differs to its list of (path, stored value, current value).

    A name that only one dict has comes from another version of axial, and is skipped unless `BEFORE` has its value.
    """
    stored = {**{name: BEFORE[name] for name in current if name in BEFORE}, **stored}

    def compare(path, a, b):
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return [(path, a, b)] if a != b else []
        keys = ["name"] if a.get("name") != b.get("name") else [key for key in b if key in a or key in BEFORE]
        return [row for key in keys for row in compare(f"{path}.{key}", a.get(key, BEFORE.get(key)), b.get(key))]

    differences = {name: compare(name, stored[name], current[name]) for name in current if name in stored}
    return {name: rows for name, rows in differences.items() if rows}
