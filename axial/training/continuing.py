"""What a run is trained with. Its folder keeps it, so that a resumed training is the same one."""

import dataclasses
import os
import typing

import msgspec
import numpy as np
import tensorflow as tf

from axial.data.tfrecord import fingerprint
from axial.errors import InputError, nearest
from axial.io.read import read_json
from axial.io.schemas import Count, Strict, Text
from axial.io.show import say
from axial.training.saving import save_json

FILE = "training.json"
# What runs were trained with before their files had these settings.
BEFORE = {
    "photo_scale": None,
    "quarter_turns": False,
    "brightness": [1.0, 1.0],
    "gamma": [1.0, 1.0],
    "decay_tables": False,
    "loss_rule": "tf-models-official",  # of detectors
}
# Arguments of data that are in the fingerprint, or of evaluations.
OF_SPLITS = ("train_split", "eval_split", "central", "tile_overlap")


class SettingChange(Strict):
    """A setting that a resumed training has changed from that step on."""

    step: Count
    setting: Text
    before: typing.Any
    after: typing.Any


class TrainingSettings(Strict):
    """training.json of a run: what it is trained with."""

    format: typing.Literal[1]
    settings: dict[str, typing.Any]
    changes: list[SettingChange] = []


def hyperparameters(task, optimizer, config):
    """dict for JSON of all that decides a run's weights, but how long it is trained and on which devices.

    Args:
        task: a `Task`. Its `trained_by` names the arguments that its losses depend on.
        optimizer: `Rule` of `axial.training.optimizers`.
        config: `TrainingConfig`.
    """
    data, rate = vars(task.data), optimizer.learning_rate  # a number has 32 bits
    settings = {
        "data": fingerprint(task.data_dir, task.data.train_split),
        "model": task.model.settings(),
        **{name: getattr(task, name) for name in task.trained_by},
        **{name: value for name, value in data.items() if name not in OF_SPLITS},
        **{name: getattr(config, name) for name in ("batch", "accumulate", "seed", "precision", "clip_norm")},
        "optimizer": {name: value for name, value in _arguments(optimizer).items() if name != "learning_rate"},
        "learning_rate": _arguments(rate) if dataclasses.is_dataclass(rate) else float(str(np.float32(rate))),
    }
    return msgspec.json.decode(msgspec.json.encode(settings))  # as the file has them


def _arguments(built):
    """What a dataclass was made with, and its name."""
    return {"name": type(built).__name__, **dataclasses.asdict(built)}


def check_names(change, settings):
    """Raises InputError, which names the nearest, unless `settings` has all names in `change`."""
    for name in change:
        if name not in settings:
            raise InputError(f"--change={name}: expected one of {', '.join(settings)}{nearest(name, settings)}")


def check_continues(model_dir, settings, change=()):
    """Raises InputError unless a training goes on with the settings of its run. Prints what it changes.

    Args:
        model_dir: folder of a run with a checkpoint.
        settings: dict of `hyperparameters`.
        change: names of settings that may differ.

    Raises:
        InputError: others differ. The message has their values in the run and here.
    """
    stored = _read(model_dir)
    if stored is None:
        say(
            f"{model_dir}: has no {FILE}, so nobody knows what the run is trained with; it goes on with what this "
            "command says",
            error=True,
        )
        return
    differing = {
        name: "; ".join(f"{path} is {there!r} in the run and {here!r} here" for path, there, here in changes)
        for name, changes in _differences(stored.settings, settings).items()
    }
    if refused := [f"of another {name} ({text})" for name, text in differing.items() if name not in change]:
        goes_on = f"--change={','.join(differing)} goes on with what this command says"
        raise InputError(f"{model_dir}: {', '.join(refused)}; {goes_on}")
    for name, text in differing.items():
        say(f"{model_dir}: goes on with another {name}: {text}", error=True)


def keep_settings(model_dir, settings, step=None):
    """Writes the settings of a run into its folder, and notes which of them changed.

    Args:
        model_dir: folder of the run.
        settings: dict of `hyperparameters`.
        step: from which the training goes on; None for a new run.
    """
    stored = None if step is None else _read(model_dir)
    changes = stored.changes if stored else []
    for differences in _differences(stored.settings, settings).values() if stored else ():
        changes = [*changes, *(SettingChange(step, *difference) for difference in differences)]
    content = TrainingSettings(1, settings, changes)
    if content != stored:
        save_json(os.path.join(model_dir, FILE), content)


def _read(model_dir):
    """`TrainingSettings` of a run, or None if an older version of axial has made it."""
    path = os.path.join(model_dir, FILE)
    return read_json(path, TrainingSettings)[1] if tf.io.gfile.exists(path) else None


def _differences(stored, current):
    """dict from the names of settings that differ to lists of (path, stored value, current value).

    Names that only one of both has are of another version of axial. `BEFORE` says what some of them stand for.
    """
    stored = {**{name: BEFORE[name] for name in current if name in BEFORE}, **stored}

    def compare(path, a, b):
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return [(path, a, b)] if a != b else []
        keys = ["name"] if a.get("name") != b.get("name") else [key for key in b if key in a or key in BEFORE]
        return [row for key in keys for row in compare(f"{path}.{key}", a.get(key, BEFORE.get(key)), b.get(key))]

    every = {name: compare(name, stored[name], current[name]) for name in current if name in stored}
    return {name: each for name, each in every.items() if each}
