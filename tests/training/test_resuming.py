"""Runs that go on after they stopped or were killed, and runs that start from the weights of others."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError, Preempted
from axial.evaluation.split_run import SplitRun
from axial.training import trainer
from axial.weights.restore import find_checkpoint
from tests.conftest import relative_error
from tests.training.runs import curve, run, small_task, weights


@pytest.fixture(scope="module")
def uninterrupted(sample_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("uninterrupted")
    run(sample_dir, path)
    return path


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
from tests.training.runs import run
from axial.cli import app, train
from axial.training import trainer

stop_if_asked = trainer._Run._stop_if_asked
trainer._Run._stop_if_asked = lambda run: (time.sleep(1), stop_if_asked(run))  # time to be killed between two loops
sys.argv[0] = "train"
app.run(lambda _: bool(run({sample!r}, {model!r}, jit_compile={wish!r})), train)
"""


def start(sample_dir, model_dir, wish="no"):
    path = list(sys.path)
    text = COMMAND.format(path=path, sample=sample_dir, model=str(model_dir), wish=wish)
    return subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(model_dir, process, number):
    for _ in range(12000):
        if os.path.exists(os.path.join(model_dir, f"ckpt-{number}.index")) or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError("no checkpoint appeared")


# A compiled run takes minutes.
@pytest.mark.parametrize("wish", ["no", pytest.param("yes", marks=pytest.mark.slow)])
def test_killed_and_terminated_runs_go_on(sample_dir, tmp_path, uninterrupted, wish):
    whole, parted = uninterrupted, tmp_path / "parted"
    if wish == "yes":  # weights without a gradient move by rounding alone, which a compiled step does otherwise
        whole = tmp_path / "whole"
        run(sample_dir, whole, jit_compile=wish)
    process = start(sample_dir, parted, wish)
    wait_for_checkpoint(parted, process, 2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process = start(sample_dir, parted, wish)
    wait_for_checkpoint(parted, process, 4)
    process.send_signal(signal.SIGTERM)
    message = process.communicate()[1]
    assert process.returncode == 42, message
    assert "SIGTERM: saved at step" in message
    process = start(sample_dir, parted, wish)
    message = process.communicate()[1]
    assert process.returncode == 0, message
    curves = curve(whole), curve(parted)
    for step, value in curves[0].items():
        np.testing.assert_allclose(curves[1][step], value, rtol=1e-4)
    for name, value in weights(whole).items():
        assert relative_error(weights(parted)[name], value) < 1e-4, name


def test_a_run_starts_from_another_runs_weights(sample_dir, uninterrupted, tmp_path):
    run(sample_dir, tmp_path, steps=1, rate=0.0, init_checkpoint=str(uninterrupted))
    before, after = weights(uninterrupted), weights(tmp_path)
    assert set(before) == set(after)
    trained = [name for name in before if "moving" not in name]
    assert trained and all(np.array_equal(before[name], after[name]) for name in trained)


class Killed(Exception):
    pass


def test_an_evaluation_that_was_killed_or_stopped_is_made_up_for(sample_dir, tmp_path, monkeypatch):
    """The same command evaluates that step first, and keeps the same best checkpoint."""
    options = dict(steps=4, eval_interval=2)
    whole = run(sample_dir, tmp_path / "whole", **options)
    evaluations, scored = 0, SplitRun.run

    def dies(*args, **kwargs):
        nonlocal evaluations
        evaluations += 1
        if evaluations == 2:
            raise Killed
        return scored(*args, **kwargs)

    def is_stopped(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return scored(*args, **kwargs)

    monkeypatch.setattr(SplitRun, "run", dies)
    with pytest.raises(Killed):
        run(sample_dir, tmp_path / "killed", **options)
    monkeypatch.setattr(SplitRun, "run", is_stopped)
    with pytest.raises(Preempted, match="SIGTERM: saved at step 4"):
        run(sample_dir, tmp_path / "killed", **options)
    monkeypatch.undo()
    task, skipped = small_task(sample_dir), []
    examples = task.eval_dataset
    task.eval_dataset = lambda **part: skipped.append(part.get("skip")) or examples(**part)
    np.testing.assert_equal(run(sample_dir, tmp_path / "killed", task=task, **options), whole)
    assert skipped == [None, 1]  # the check of the split; the photo that was scored before the stop
    assert not (tmp_path / "killed" / ".evaluating").exists()
    for name in ("evaluated.json", "best/scores.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert run(sample_dir, tmp_path / "killed", **options) == {}  # nothing is left to do


@pytest.mark.slow
def test_what_another_training_has_scored_is_not_taken(sample_dir, tmp_path, monkeypatch):
    """Its checkpoints are gone, the state of its evaluation of the same step is not."""
    scored = SplitRun.run

    def is_stopped(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return scored(*args, **kwargs)

    monkeypatch.setattr(SplitRun, "run", is_stopped)
    with pytest.raises(Preempted):
        run(sample_dir, tmp_path / "old", steps=2, eval_interval=2)
    monkeypatch.undo()
    shutil.copytree(tmp_path / "old" / ".evaluating", tmp_path / "new" / ".evaluating")
    task, skipped = small_task(sample_dir), []
    examples = task.eval_dataset
    task.eval_dataset = lambda **part: skipped.append(part.get("skip")) or examples(**part)
    assert run(sample_dir, tmp_path / "new", task=task, steps=2, eval_interval=2, seed=7)
    assert skipped == [None, 0]


@pytest.mark.parametrize("kind", ["split", "data", "grouping"])
def test_a_best_score_is_of_its_evaluation(sample_dir, tmp_path, monkeypatch, kind):
    """After a change of what is evaluated, the score of before is no measure, and its evaluation is not that one."""
    strategy = tf.distribute.get_strategy()
    model = small_task(sample_dir).build_model()

    def best_after(step, score, task):
        """(step of the best checkpoint after an evaluation with this score, whether the step was evaluated before)."""
        loop = types.SimpleNamespace(task=task, model=model, strategy=strategy)
        evaluation = trainer._Evaluation(loop, str(tmp_path))
        groups = {group: {"pq": score, "sq": score, "rq": score} for group in ("all", "things", "stuff")}
        scores = {"pq": groups, "miou": {"miou": score}, "ap": {"ap": score, "ap50": score}}
        monkeypatch.setattr(SplitRun, "run", lambda *args, **kwargs: scores)
        done = evaluation.is_done(step)
        evaluation.run(step, lambda: None)
        best = json.loads((tmp_path / "best" / "scores.json").read_text())
        assert [path.name for path in (tmp_path / "best").glob("*.index")] == [f"ckpt-{best['step']}.index"]
        return best["step"], done

    task = small_task(sample_dir)
    assert [best_after(*each, task) for each in ((1, 0.9), (2, 0.5))] == [(1, False), (1, False)]
    assert best_after(2, 0.5, small_task(sample_dir)) == (1, True)
    other = small_task(sample_dir)
    if kind == "split":
        other.data = dataclasses.replace(other.data, eval_split="train2017")
    elif kind == "data":
        shutil.copytree(sample_dir, tmp_path / "data")
        other.data_dir = str(tmp_path / "data")
        assert best_after(2, 0.5, other) == (1, True)  # a copy
        manifest = json.loads((tmp_path / "data" / "val2017.json").read_text())
        manifest["spec"]["things"][0] = False
        (tmp_path / "data" / "val2017.json").write_text(json.dumps(manifest))
        other.spec = dataclasses.replace(other.spec, things=(False, *other.spec.things[1:]))
    else:
        other.grouping = dataclasses.replace(other.grouping, top_k=3)
    assert [best_after(*each, other) for each in ((2, 0.1), (3, 0.0), (4, 0.2))] == [(2, False), (2, False), (4, False)]


def test_a_best_score_of_an_older_version_counts(sample_dir, tmp_path):
    """It does not say what it is of."""
    model = small_task(sample_dir).build_model()
    loop = types.SimpleNamespace(task=small_task(sample_dir), model=model, strategy=tf.distribute.get_strategy())
    evaluation = trainer._Evaluation(loop, str(tmp_path))
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "scores.json").write_text('{"step": 3, "pq": {"all": {"pq": 0.5}}, "miou": {"miou": 0.1}}')
    (tmp_path / "evaluated.json").write_text('{"step": 3}')
    assert evaluation._best() == 0.5 and evaluation.is_done(3) and not evaluation.is_done(4)


# === Folders whose files are not all there ===


def remove(*patterns):
    def change(folder):
        for pattern in patterns:
            paths = list(folder.glob(pattern))
            assert paths, pattern
            for path in paths:
                path.unlink()

    return change


def write(text):
    return lambda folder: (folder / "checkpoint").write_bytes(text)


def cut(pattern, share):
    def change(folder):
        (path,) = folder.glob(pattern)
        os.truncate(path, int(share * path.stat().st_size))

    return change


def flip(pattern):
    def change(folder):
        (path,) = folder.glob(pattern)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)

    return change


def both(*changes):
    def change(folder):
        for each in changes:
            each(folder)

    return change


ELSEWHERE = b'model_checkpoint_path: "/elsewhere/run/ckpt-10"\nall_model_checkpoint_paths: "/elsewhere/run/ckpt-10"\n'
# What happens to a run with checkpoints at the steps 6, 8 and 10, and the step from which it goes on.
DAMAGED = {
    "no list": (remove("checkpoint"), 10),
    "an empty list": (write(b""), 10),
    "a list of garbage": (write(b"\xff\x00{"), 10),
    "a list of another machine": (write(ELSEWHERE), 10),
    "a list of what is not there": (write(b'model_checkpoint_path: "ckpt-550"\n'), 10),
    "a list of an older one": (write(b'model_checkpoint_path: "ckpt-6"\n'), 10),
    "no newest index": (remove("ckpt-10.index"), 8),
    "no newest index, no list": (remove("ckpt-10.index", "checkpoint"), 8),
    "no newest data": (remove("ckpt-10.data*"), 8),
    "an empty newest index": (cut("ckpt-10.index", 0), 8),
    "half of the newest index": (cut("ckpt-10.index", 0.5), 8),
    "most of the newest data": (cut("ckpt-10.data*", 0.99), 8),
    "a bit of the newest data": (flip("ckpt-10.data*"), 8),
    "two damaged": (both(cut("ckpt-10.data*", 0.5), remove("ckpt-8.index")), 6),
    "no index": (remove("ckpt-*.index"), "ckpt-10: not a whole checkpoint .*; no other one there is whole"),
    "all cut short": (both(*(cut(f"ckpt-{n}.data*", 0.5) for n in (6, 8, 10))), "ckpt-10: cut short"),
    "no data": (remove("ckpt-*.data*"), "ckpt-10: cut short, 0 bytes"),
    "only the list": (remove("ckpt-*"), "has checkpoint of an earlier training"),
    "only best": (remove("ckpt-*", "checkpoint"), "has best/ckpt-1.index of an earlier training"),
}


@pytest.fixture(scope="module")
def kept(sample_dir, tmp_path_factory):
    """A run with its last three checkpoints and a best one."""
    path = tmp_path_factory.mktemp("kept")
    run(sample_dir, path, keep=3)
    (path / "best").mkdir()
    (path / "best" / "ckpt-1.index").write_bytes(b"")
    return path


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_run_goes_on_from_its_newest_whole_checkpoint(sample_dir, kept, tmp_path, kind, monkeypatch, capfd):
    """Or ends in one line. No checkpoint is lost."""
    change, wanted = DAMAGED[kind]
    folder = tmp_path / "moved"
    shutil.copytree(kept, folder)
    change(folder)
    before, steps = contents(folder, "**/*ckpt*"), []
    capfd.readouterr()
    monkeypatch.setattr(trainer._Run, "train", lambda self, resumed: steps.append(self.step))
    if isinstance(wanted, int):
        run(sample_dir, folder, keep=3)
        assert steps == [wanted]
        lines = [line for line in capfd.readouterr().err.splitlines() if "is taken in its place" in line]
        assert len(lines) == (10 - wanted) // 2  # a line for each that is not whole
        assert find_checkpoint(str(folder)).endswith(f"ckpt-{wanted}")
    else:
        with pytest.raises(InputError, match=wanted):
            run(sample_dir, folder, keep=3)
        assert not steps
    assert contents(folder, "**/*ckpt*") == before


def contents(folder, pattern="**/*"):
    return {path: path.read_bytes() for path in pathlib.Path(folder).glob(pattern) if path.is_file()}


def test_the_good_checkpoints_stay_while_a_run_saves(sample_dir, kept, tmp_path):
    """A run that goes on removes the oldest of those that are there, whatever its list says."""
    folder = tmp_path / "moved"
    shutil.copytree(kept, folder)
    remove("ckpt-10.index")(folder)
    good = {"ckpt-6.index", "ckpt-8.index"}
    run(sample_dir, folder, keep=3, steps=3, checkpoint_interval=1)  # it is past these steps already
    assert {p.name for p in folder.glob("ckpt-*.index")} == good
    write(ELSEWHERE)(folder)
    run(sample_dir, folder, keep=3, steps=12)
    assert {p.name for p in folder.glob("ckpt-*.index")} == {"ckpt-8.index", "ckpt-10.index", "ckpt-12.index"}
    assert (folder / "checkpoint").read_text().startswith('model_checkpoint_path: "ckpt-12"')


@pytest.mark.parametrize("index", [None, b"cut short"])
def test_a_first_save_that_was_killed_is_no_trace(sample_dir, tmp_path, index, monkeypatch):
    """The run starts again, and nothing is left of the save."""
    steps = []
    monkeypatch.setattr(trainer._Run, "train", lambda self, resumed: steps.append(self.step))
    (tmp_path / "ckpt-2_temp").mkdir()
    (tmp_path / "ckpt-2_temp" / "part-00000-of-00001.index").write_bytes(b"part")
    (tmp_path / "ckpt-2.data-00000-of-00001").write_bytes(b"part")
    if index:
        (tmp_path / "ckpt-2.index").write_bytes(index)
    run(sample_dir, tmp_path)
    assert steps == [0] and not list(tmp_path.glob("ckpt-*"))
