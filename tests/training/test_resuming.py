"""Runs that go on after they stopped or were killed, and runs that start from the weights of others."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from runs import curve, run, small_task, weights

from axial.errors import InputError, Preempted
from axial.evaluation.loop import evaluate
from axial.training import trainer
from axial.weights.restore import find_checkpoint, initialize, restore_model
from conftest import relative_error


@pytest.fixture(scope="module")
def uninterrupted(sample_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("uninterrupted")
    run(sample_dir, path)
    return path


def test_resumed_in_the_same_process(sample_dir, tmp_path, uninterrupted):
    """A run in two parts, whose first part ends in the middle of a loop, has the same curve and weights."""
    run(sample_dir, tmp_path, steps=3)
    run(sample_dir, tmp_path)
    whole, parts = curve(uninterrupted), curve(tmp_path)
    assert set(whole) == {2, 4, 6, 8, 10}
    for step in (2, 6, 8, 10):
        np.testing.assert_allclose(parts[step], whole[step], rtol=1e-5)
    for name, value in weights(uninterrupted).items():
        assert relative_error(weights(tmp_path)[name], value) < 1e-5, name


@pytest.mark.slow  # four trainings, two minutes
def test_a_resumed_run_draws_the_same_random_numbers(sample_dir, tmp_path):
    """The random numbers of stochastic depth and dropout depend on the step."""
    options = dict(repeats=(2, 0, 0, 0), drop_path=0.5, arguments={"aspp": 16, "aspp_dropout": 0.5})
    for name, parts in (("whole", [4]), ("parts", [1, 3, 4])):
        for steps in parts:
            run(sample_dir, tmp_path / name, steps=steps, task=small_task(sample_dir, **options), steps_per_loop=1)
    whole, parts = curve(tmp_path / "whole"), curve(tmp_path / "parts")
    assert set(whole) == set(parts) == {1, 2, 3, 4}
    for step, value in whole.items():
        np.testing.assert_allclose(parts[step], value, rtol=1e-5)


COMMAND = """
import os, sys, time
sys.path[:0] = {path!r}
from runs import run
from axial.cli import app, train
from axial.training import trainer

stop_if_asked = trainer._Run._stop_if_asked
trainer._Run._stop_if_asked = lambda run: (time.sleep(1), stop_if_asked(run))  # time to be killed between two loops
sys.argv[0] = "train"
app.run(lambda _: bool(run({sample!r}, {model!r})), train)
"""


def start(sample_dir, model_dir):
    path = list(sys.path)
    text = COMMAND.format(path=path, sample=sample_dir, model=str(model_dir))
    return subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(model_dir, process, number):
    for _ in range(12000):
        if os.path.exists(os.path.join(model_dir, f"ckpt-{number}.index")) or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError("no checkpoint appeared")


def test_killed_and_terminated_runs_go_on(sample_dir, tmp_path, uninterrupted):
    process = start(sample_dir, tmp_path)
    wait_for_checkpoint(tmp_path, process, 2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process = start(sample_dir, tmp_path)
    wait_for_checkpoint(tmp_path, process, 4)
    process.send_signal(signal.SIGTERM)
    message = process.communicate()[1]
    assert process.returncode == 42, message
    assert "SIGTERM: saved at step" in message
    process = start(sample_dir, tmp_path)
    message = process.communicate()[1]
    assert process.returncode == 0, message
    whole, parts = curve(uninterrupted), curve(tmp_path)
    for step, value in whole.items():
        np.testing.assert_allclose(parts[step], value, rtol=1e-4)
    for name, value in weights(uninterrupted).items():
        assert relative_error(weights(tmp_path)[name], value) < 1e-4, name


def test_a_run_starts_from_another_runs_weights(sample_dir, uninterrupted, tmp_path):
    run(sample_dir, tmp_path, steps=1, rate=0.0, init_checkpoint=str(uninterrupted))
    before, after = weights(uninterrupted), weights(tmp_path)
    assert set(before) == set(after)
    trained = [name for name in before if "moving" not in name]
    assert trained and all(np.array_equal(before[name], after[name]) for name in trained)


def test_other_classes_take_all_but_the_last_layer(sample_dir, uninterrupted, tmp_path):
    task = small_task(sample_dir)
    task.spec = dataclasses.replace(
        task.spec, **{k: getattr(task.spec, k)[:7] for k in ("class_names", "category_ids", "things")}
    )
    task.num_classes = 7
    model = task.build_model()
    made = [w.numpy() for w in model.semantic_head.logits.weights]
    line = initialize(model, str(uninterrupted))
    assert f"{len(model.weights) - 2} of {len(model.weights)} weights" in line
    for weight, value in zip(model.semantic_head.logits.weights, made):
        np.testing.assert_array_equal(weight, value)
    whole = small_task(sample_dir).build_model()
    restore_model(whole, find_checkpoint(str(uninterrupted)))
    for weight, other in zip(model.backbone.weights, whole.backbone.weights):
        np.testing.assert_array_equal(weight, other)
    path = tf.train.Checkpoint(v=tf.Variable(1.0)).save(str(tmp_path / "foreign"))
    with pytest.raises(InputError, match="no weight of it fits the model"):
        initialize(model, path)
    with pytest.raises(InputError, match="no checkpoint here"):
        initialize(model, sample_dir)


class Killed(Exception):
    pass


def test_an_evaluation_that_was_killed_or_stopped_is_made_up_for(sample_dir, tmp_path, monkeypatch):
    """The same command evaluates that step first, and keeps the same best checkpoint."""
    options = dict(steps=4, eval_interval=2)
    whole = run(sample_dir, tmp_path / "whole", **options)
    evaluations = 0

    def dies(*args, **kwargs):
        nonlocal evaluations
        evaluations += 1
        if evaluations == 2:
            raise Killed
        return evaluate(*args, **kwargs)

    def is_stopped(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(trainer, "evaluate", dies)
    with pytest.raises(Killed):
        run(sample_dir, tmp_path / "killed", **options)
    monkeypatch.setattr(trainer, "evaluate", is_stopped)
    with pytest.raises(Preempted, match="SIGTERM: saved at step 4"):
        run(sample_dir, tmp_path / "killed", **options)
    monkeypatch.undo()
    np.testing.assert_equal(run(sample_dir, tmp_path / "killed", **options), whole)
    for name in ("evaluated.json", "best/scores.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert run(sample_dir, tmp_path / "killed", **options) == {}  # nothing is left to do
