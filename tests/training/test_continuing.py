"""A run's folder stores the hyperparameters. A resumed training uses the same ones, or prints which ones it changes."""

import contextlib
import dataclasses
import functools
import json
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.data.tfrecord import fingerprint
from axial.errors import InputError
from axial.tasks.segmentation.input_pipeline import Augmentation
from axial.tasks.segmentation.losses import LossConfig
from axial.training import trainer
from axial.training.continuing import check_continues, hyperparameters, keep_settings
from axial.training.optimizers import Adam, NesterovMomentum, RAdamLookahead, WarmupCosine, WarmupPoly, averaged
from axial.training.trainer import TrainingConfig
from axial.weights.restore import latest_checkpoint
from tests.conftest import make_task
from tests.training.runs import SmallTask, begin, run, small_task


@pytest.fixture(scope="module")
def begun(colours_dir, tmp_path_factory):
    """The folder of a run of two steps."""
    path = tmp_path_factory.mktemp("begun")
    run(colours_dir, path, steps=2)
    return path


@pytest.fixture
def goes_on(colours_dir, begun, tmp_path):
    """A function that resumes a copy of the run up to its first step. It returns (folder of the copy, step).

    Its argument `before` is a function that changes the copy. Its other arguments go to `run`.
    """

    def resume(before=None, **options):
        folder = shutil.copytree(begun, tmp_path / "run", dirs_exist_ok=True)
        if before:
            before(folder)
        return folder, begin(colours_dir, folder, **options)[0]

    return resume


def panoptic_task(sample_dir, repeats=(1, 0, 0, 0), arguments=None, **options):
    """Returns a panoptic task with a tiny network, for the sample data on a canvas of 33x33."""
    return make_task(sample_dir, (33, 33), model={"arguments": {"repeats": repeats, **(arguments or {})}}, **options)


def kept(folder):
    """Returns the content of a run's training.json."""
    return json.loads((folder / "training.json").read_text())


# dict from a setting's name to (change of the run, change of the task, regular expression that matches the message).
CHANGES = {
    "batch": ({"batch": 4}, {}, "batch is 2 in the run and 4 here"),
    "seed": ({"seed": 7}, {}, "seed is 0 in the run and 7 here"),
    "learning_rate": ({"rate": 0.002}, {}, "learning_rate.peak is 0.001 in the run and 0.002 here"),
    "optimizer": ({"optimizer": NesterovMomentum}, {}, "optimizer.name is 'RAdamLookahead' in the run and 'Nesterov"),
    "loss": ({}, {"loss": LossConfig(top_k=1.0)}, "loss.top_k is 0.2 in the run and 1.0 here"),
    "augmentation": ({}, {"data": {"augmentation": Augmentation(flip=False)}}, "augmentation.flip is True in the run"),
    "model": ({}, {"arguments": {"aspp": 16}}, r"model \(model.arguments.aspp is None in the run and 16 here"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_setting_is_refused_or_asked_for(sample_dir, tmp_path, name, capsys):
    """A changed setting raises InputError. With --change=NAME it is printed, and training.json lists it once."""
    config, task_options, words = CHANGES[name]

    def settings(task, rate=1e-3, optimizer=RAdamLookahead, batch=2, **config):
        built = optimizer(WarmupPoly(rate, 50, 5))
        return hyperparameters(task, built, TrainingConfig(steps=10, batch=batch, **config))

    keep_settings(str(tmp_path), settings(panoptic_task(sample_dir)))
    other = settings(panoptic_task(sample_dir, **task_options), **config)
    with pytest.raises(InputError, match=words) as caught:
        check_continues(str(tmp_path), other)
    assert f"of another {name} " in str(caught.value) and f"--change={name} goes on" in str(caught.value)
    assert kept(tmp_path)["changes"] == []
    check_continues(str(tmp_path), other, change=("steps", name))
    assert f"{tmp_path}: goes on with another {name}: " in capsys.readouterr().err
    keep_settings(str(tmp_path), other, step=7)
    content = kept(tmp_path)
    assert [(change["step"], change["setting"].partition(".")[0]) for change in content["changes"]] == [(7, name)]
    check_continues(str(tmp_path), other)  # the command resumes once more
    keep_settings(str(tmp_path), other, step=9)
    assert kept(tmp_path) == content and content["settings"] == other


def test_settings_that_older_runs_lack_are_what_they_were(sample_dir, tmp_path):
    """If a run lacks some settings, it continues with their values in `BEFORE`, and refuses other values."""

    def settings(decay_tables=False, **data):
        optimizer, training = NesterovMomentum(0.1, decay_tables=decay_tables), TrainingConfig(steps=10, batch=2)
        return hyperparameters(panoptic_task(sample_dir, data=data), optimizer, training)

    old = settings()
    del old["photo_scale"], old["optimizer"]["decay_tables"]
    for name in ("quarter_turns", "brightness", "gamma"):
        del old["augmentation"][name]
    keep_settings(str(tmp_path), old)
    check_continues(str(tmp_path), settings())
    for data, words in (
        ({"decay_tables": True}, "optimizer.decay_tables is False in the run and True here"),
        ({"photo_scale": 1.0}, "photo_scale is None in the run and 1.0 here"),
        ({"augmentation": Augmentation(quarter_turns=True)}, "augmentation.quarter_turns is False in the run"),
        ({"augmentation": Augmentation(gamma=(1, 2))}, r"augmentation.gamma is \[1.0, 1.0\] in the run and \[1.0, 2.0"),
    ):
        with pytest.raises(InputError, match=words):
            check_continues(str(tmp_path), settings(**data))


def test_a_training_is_refused_or_goes_on(goes_on, monkeypatch):
    """If two settings differ, `change` must have both names. A name that does not exist is refused."""
    options = dict(batch=4, rate=0.002)
    with monkeypatch.context() as patch, pytest.raises(InputError) as caught:
        patch.setattr(SmallTask, "build_model", None)  # the settings are checked before a model is built
        goes_on(**options, change=("batch",))
    assert "learning_rate.peak" in str(caught.value) and "batch is" not in str(caught.value)
    assert "--change=batch,learning_rate goes on" in str(caught.value)
    with pytest.raises(InputError, match=r"--change=bach: expected one of data, .*did you mean 'batch'"):
        goes_on(change=("bach",))
    folder, step = goes_on(**options, change=("batch", "learning_rate"))
    assert step == 2 and [change["step"] for change in kept(folder)["changes"]] == [2, 2]


def test_what_changes_no_weight_may_change(colours_dir, goes_on):
    """The evaluation split, rematerialisation, the backend and the intervals may change: they change no weight."""
    task = small_task(colours_dir)
    task.data = dataclasses.replace(task.data, eval_split="train")
    task.model = dataclasses.replace(task.model, recompute="block", backend="xla")
    options = dict(steps=5, keep=1, checkpoint_interval=3, steps_per_loop=1, seconds_per_loop=1.0)
    folder, step = goes_on(task=task, **options)
    assert step == 2 and kept(folder)["changes"] == []


def test_a_copy_of_the_data_is_the_same_data(colours_dir, goes_on, tmp_path):
    """The fingerprint of a split depends on its content, not on its path."""
    copy = shutil.copytree(colours_dir, tmp_path / "copy")
    assert goes_on(task=small_task(str(copy)))[1] == 2
    assert fingerprint(str(copy), "val") == fingerprint(colours_dir, "val") != fingerprint(colours_dir, "train")
    manifest = json.loads((copy / "train.json").read_text())
    manifest["spec"]["class_names"][0] = "azure"
    (copy / "train.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="of another data"):
        goes_on(task=small_task(str(copy)))


def test_a_run_of_an_older_version_goes_on_with_a_warning(goes_on, capsys):
    """A run without training.json resumes with other settings, prints a warning, and gets a training.json."""
    folder, step = goes_on(before=lambda folder: (folder / "training.json").unlink(), rate=0.002)
    assert step == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{folder}: has no training.json")
    assert kept(folder)["settings"]["learning_rate"]["peak"] == 0.002  # the run has a training.json now
    with pytest.raises(InputError, match="batch is 2 in the run and 4 here"):
        goes_on(batch=4)


def test_settings_of_another_version_are_not_compared(goes_on):
    """Settings whose names only the run or only this version has are not compared."""

    def other_version(folder):
        content = kept(folder)
        content["settings"]["model"]["arguments"]["of_old"] = content["settings"]["of_old"] = 1
        del content["settings"]["shuffle"], content["settings"]["optimizer"]["beta_1"]
        (folder / "training.json").write_text(json.dumps(content))

    assert goes_on(before=other_version)[1] == 2


# === Other optimizers ===


def loop_of(optimizer, value=5.0):
    """Returns a stand-in for a `TrainStep`. Its model has one weight, which starts at `value`."""
    start = keras.initializers.Constant(value)
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer=start, input_shape=(1,))])
    optimizer, config = optimizer.build(model.trainable_variables), types.SimpleNamespace(init_checkpoint=None)
    return types.SimpleNamespace(model=model, optimizer=optimizer, config=config, task=None)


def weights_of_steps(loop, count=12, first=0):
    """Returns [(weight, moving average, or the weight without one)] after each step. Step s has the gradient cos(s)."""
    values = []
    for step in range(first, first + count):
        loop.optimizer.apply([tf.constant([[np.cos(step)]], tf.float32)], loop.model.trainable_variables)
        with averaged(loop.optimizer, loop.model.trainable_variables):
            average = loop.model.get_weights()[0].item()
        values.append((loop.model.get_weights()[0].item(), average))
    return values


def save(loop, folder, step):
    averages = loop.optimizer.averages
    tf.train.Checkpoint(model=loop.model, optimizer=loop.optimizer, averages=averages).write(f"{folder}/ckpt-{step}")


AVERAGED = functools.partial(NesterovMomentum, average=0.9)
OPTIMIZERS = {"RAdam": RAdamLookahead, "Nesterov": NesterovMomentum, "averaged": AVERAGED, "Adam": Adam}


@pytest.mark.parametrize(
    "before,after",
    [("RAdam", "RAdam"), ("averaged", "averaged"), ("RAdam", "averaged"), ("averaged", "Adam"), ("Adam", "RAdam")],
)
def test_another_optimizer_begins_at_the_weights_of_the_run(before, after, tmp_path):
    """Another optimizer starts from the run's weights with new slots. The same optimizer continues with its slots."""

    def restored():
        loop = loop_of(OPTIMIZERS[after](0.01), value=-3.0)
        trainer._restored(loop, latest_checkpoint(str(tmp_path)), None)
        return loop

    first = loop_of(OPTIMIZERS[before](0.01))
    weights_of_steps(first, 7)
    save(first, tmp_path, 7)
    value = first.model.get_weights()[0].item()
    expected = weights_of_steps(first if before == after else loop_of(OPTIMIZERS[after](0.01), value))
    second = restored()
    with averaged(second.optimizer, second.model.trainable_variables) if before != after else contextlib.nullcontext():
        assert second.model.get_weights()[0].item() == value  # the average also starts at the weight
    save(second, tmp_path, 8)  # a stop before the first step
    third = restored()
    actual = weights_of_steps(third, 5)
    save(third, tmp_path, 12)  # a stop after five steps
    actual += weights_of_steps(restored(), 7, first=5)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_changed_number_is_the_learning_rate(tmp_path):
    """The checkpoint stores a constant learning rate of 0.1. The new rate of 0.2 replaces it."""
    save(loop_of(NesterovMomentum(0.1)), tmp_path, 3)
    loop = loop_of(NesterovMomentum(0.2))
    trainer._restored(loop, latest_checkpoint(str(tmp_path)), None)
    assert float(loop.optimizer.learning_rate) == pytest.approx(0.2)


def test_learning_rates_are_kept(colours_dir):
    """The hyperparameters hold a constant rate as a number, and a schedule as a dict of its arguments."""
    config, task = TrainingConfig(steps=1, batch=2), small_task(colours_dir)
    assert hyperparameters(task, Adam(0.1), config)["learning_rate"] == 0.1
    cosine = hyperparameters(task, Adam(WarmupCosine(0.4, 20, 2)), config)["learning_rate"]
    assert cosine == {"name": "WarmupCosine", "peak": 0.4, "steps": 20, "warmup": 2}
