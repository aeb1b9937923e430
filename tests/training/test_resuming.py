"""Runs that resume after a stop, a kill or damage, and runs that start from another run's weights."""

import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError, Preempted
from axial.training import evaluating
from axial.training.evaluating import Evaluations
from axial.training.split_run import SplitRun
from axial.weights.restore import find_checkpoint
from tests.cloud.slice_fixture import until
from tests.training.runs import begin, curve, run, small_task, weights


@pytest.fixture(scope="module")
def uninterrupted(colours_dir, tmp_path_factory):
    """The folder of a run of ten steps."""
    path = tmp_path_factory.mktemp("uninterrupted")
    run(colours_dir, path)
    return path


COMMAND = """
import sys, time
sys.path[:0] = {path!r}
from tests.cloud.slice_fixture import until
from tests.training.runs import run
from axial.cli import app, flags
from axial.training.train_step import TrainStep

run_loop = TrainStep.run
TrainStep.run = lambda loop, count: (time.sleep(0.5), run_loop(loop, count))[1]  # leaves time for a kill between loops
sys.argv[0] = "train"
app.run({{"": (flags.Flags, lambda _: bool(run({data!r}, {model!r})))}})
"""


def start(data_dir, model_dir):
    """A process that trains the small task like axial-train."""
    text = COMMAND.format(path=list(sys.path), data=data_dir, model=str(model_dir))
    return subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(model_dir, process, number):
    until(lambda: (model_dir / f"ckpt-{number}.index").exists() or process.poll() is not None, 600)


def test_killed_and_terminated_runs_go_on_to_the_same_bits(colours_dir, tmp_path, uninterrupted):
    """After SIGKILL, a resume, SIGTERM and a resume, losses and weights equal the uninterrupted run's bit by bit."""
    process = start(colours_dir, tmp_path)
    wait_for_checkpoint(tmp_path, process, 2)
    process.send_signal(signal.SIGKILL)
    assert process.communicate() and process.returncode == -signal.SIGKILL
    process = start(colours_dir, tmp_path)
    wait_for_checkpoint(tmp_path, process, 4)
    process.send_signal(signal.SIGTERM)
    message = process.communicate()[1]
    assert process.returncode == 42 and "SIGTERM: saved at step" in message, message
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "preempted"
    run(colours_dir, tmp_path)
    assert curve(tmp_path) == curve(uninterrupted)
    for start_of_names in ("model/", "optimizer/"):
        expected, actual = (weights(folder, start_of_names) for folder in (uninterrupted, tmp_path))
        assert expected
        np.testing.assert_equal(actual, expected)


def test_a_run_starts_from_another_runs_weights_and_resumes_without_them(colours_dir, uninterrupted, tmp_path):
    """With a learning rate of 0, the weights stay the other run's weights. The run resumes without the other run."""
    other = shutil.copytree(uninterrupted, tmp_path / "other")
    options = dict(rate=0.0, init_checkpoint=str(other))
    run(colours_dir, tmp_path / "run", steps=2, **options)
    before, after = weights(uninterrupted), weights(tmp_path / "run")
    assert set(before) == set(after)
    trained = [name for name in before if "moving" not in name]
    assert trained and all(np.array_equal(before[name], after[name]) for name in trained)
    shutil.rmtree(other)
    run(colours_dir, tmp_path / "run", steps=4, **options)
    assert (tmp_path / "run" / "ckpt-4.index").exists()


def skips(task):
    """Returns a list that will collect the argument `skip` of each call of the task's `eval_dataset`."""
    examples, skipped = task.eval_dataset, []
    task.eval_dataset = lambda **arguments: skipped.append(arguments.get("skip")) or examples(**arguments)
    return skipped


def test_an_evaluation_that_was_killed_or_stopped_is_made_up_for(colours_dir, tmp_path, monkeypatch):
    """The same command first completes the interrupted evaluation. The files equal an uninterrupted run's files."""
    options, scored = dict(steps=2, eval_interval=2), SplitRun.run
    whole = run(colours_dir, tmp_path / "whole", **options)

    def dies(*args, **kwargs):
        raise KeyError("killed")

    def stops(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return scored(*args, **kwargs)

    for ends, kind, words in ((dies, KeyError, "killed"), (stops, Preempted, "SIGTERM: saved at step 2")):
        monkeypatch.setattr(SplitRun, "run", ends)
        with pytest.raises(kind, match=words):
            run(colours_dir, tmp_path / "killed", **options)
    monkeypatch.undo()
    task = small_task(colours_dir)
    skipped = skips(task)
    np.testing.assert_equal(run(colours_dir, tmp_path / "killed", task=task, **options), whole)
    assert skipped == [None, 1]  # the check of the split, then the evaluation without the scored example
    assert not (tmp_path / "killed" / ".evaluating").exists()
    for name in ("evaluated.json", "best/scores.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert run(colours_dir, tmp_path / "killed", **options) == {}  # the run is complete


def evaluations_of(task, folder):
    """Returns the `Evaluations` of a task with a new model, and an evaluation after every step."""
    config = types.SimpleNamespace(eval_interval=1, steps=9, hang_seconds=1e6, is_compiled=lambda: False)
    optimizer = types.SimpleNamespace(averages=())
    about = dict(task=task, config=config, strategy=tf.distribute.get_strategy(), optimizer=optimizer)
    return Evaluations(types.SimpleNamespace(model=task.build_model(), **about), str(folder))


def test_a_best_score_is_of_its_evaluation(colours_dir, tmp_path, monkeypatch):
    """After a change of data or evaluation settings, earlier scores and finished evaluations no longer count."""

    def best_after(step, score, task):
        """Evaluates with this score. Returns (step of the best checkpoint, whether the step was evaluated before)."""
        monkeypatch.setattr(SplitRun, "run", lambda *args, **kwargs: {"right": score})
        evaluations = evaluations_of(task, tmp_path)
        done = evaluations.is_done(step)
        evaluations.run(step, None)
        best = json.loads((tmp_path / "best" / "scores.json").read_text())
        assert [path.name for path in (tmp_path / "best").glob("*.index")] == [f"ckpt-{best['step']}.index"]
        return best["step"], done

    task = small_task(colours_dir)
    assert [best_after(*each, task) for each in ((1, 0.9), (2, 0.5))] == [(1, False), (1, False)]
    assert best_after(2, 0.5, small_task(str(shutil.copytree(colours_dir, tmp_path / "data")))) == (1, True)
    task.settings = {"scale": 2}
    assert [best_after(*each, task) for each in ((2, 0.1), (3, 0.0), (4, 0.2))] == [(2, False), (2, False), (4, False)]
    task.data = dataclasses.replace(task.data, eval_split="train")
    assert best_after(5, 0.0, task) == (5, False)


def test_a_best_score_of_an_older_version_counts(colours_dir, tmp_path):
    """The files of an older version have a score and a step, but no evaluation settings."""
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "scores.json").write_text('{"step": 3, "right": 0.5}')
    (tmp_path / "evaluated.json").write_text('{"step": 3}')
    evaluations = evaluations_of(small_task(colours_dir), tmp_path)
    assert [evaluations._is_best({"right": score}) for score in (0.5, 0.51)] == [False, True]
    assert evaluations.is_done(3) and not evaluations.is_done(4)


def test_a_long_evaluation_is_no_hang(colours_dir, tmp_path, monkeypatch):
    """The hang timer restarts after each of six examples and at the end. A damaged state is discarded."""
    resets = []
    monkeypatch.setattr(evaluating, "show_hangs", resets.append)
    (tmp_path / ".evaluating").mkdir()
    (tmp_path / ".evaluating" / ".val.0-of-1.state.json").write_text("{}")
    evaluations_of(small_task(colours_dir), tmp_path).run(1, types.SimpleNamespace(reason=""))
    assert resets == [1e6] * (6 + 1)


# === Damaged folders ===


def damage(folder, changes):
    """Changes files. `changes`: dict from glob patterns to new bytes, to a function of the old bytes, or to None.

    None deletes the file.
    """
    for pattern, change in changes.items():
        paths = list(folder.glob(pattern))
        assert paths, pattern
        for path in paths:
            if change is None:
                path.unlink()
            else:
                path.write_bytes(change(path.read_bytes()) if callable(change) else change)


def half(data):
    return data[: len(data) // 2]


def flipped(data):
    """Returns the data with one bit flipped."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]


ELSEWHERE = b'model_checkpoint_path: "/elsewhere/run/ckpt-10"\nall_model_checkpoint_paths: "/elsewhere/run/ckpt-10"\n'
# dict from name to (damage to a run with checkpoints at steps 6, 8 and 10, step that the run resumes from or message).
DAMAGED = {
    "no list": ({"checkpoint": None}, 10),
    "a list of another machine": ({"checkpoint": ELSEWHERE}, 10),
    "no newest index, no list": ({"ckpt-10.index": None, "checkpoint": None}, 8),
    "half of the newest index": ({"ckpt-10.index": half}, 8),
    "a bit of the newest data": ({"ckpt-10.data*": flipped}, 8),
    "two damaged": ({"ckpt-10.data*": half, "ckpt-8.index": None}, 6),
    "no index": ({"ckpt-*.index": None}, "ckpt-10: not a whole checkpoint .*; no other one there is whole"),
    "only best": ({"ckpt-*": None, "checkpoint": None}, "has best/ckpt-1.index of an earlier training"),
}


@pytest.fixture(scope="module")
def kept(uninterrupted, tmp_path_factory):
    """The folder of the uninterrupted run, with the last three checkpoints and an empty best checkpoint."""
    path = tmp_path_factory.mktemp("kept") / "run"
    shutil.copytree(uninterrupted, path)
    damage(path, {"ckpt-[24].*": None})
    (path / "best").mkdir()
    (path / "best" / "ckpt-1.index").write_bytes(b"")
    return path


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_run_goes_on_from_its_newest_whole_checkpoint(colours_dir, kept, tmp_path, kind, capfd):
    """If no checkpoint is whole, one line refuses the run. In all cases, the checkpoints stay as they are."""
    changes, expected = DAMAGED[kind]
    folder = shutil.copytree(kept, tmp_path / "moved")
    damage(folder, changes)
    before = contents(folder)
    capfd.readouterr()
    if isinstance(expected, int):
        assert begin(colours_dir, folder)[0] == expected
        lines = [line for line in capfd.readouterr().err.splitlines() if "is taken in its place" in line]
        assert len(lines) == (10 - expected) // 2  # one line for each damaged checkpoint
        assert find_checkpoint(str(folder)).endswith(f"ckpt-{expected}")
    else:
        with pytest.raises(InputError, match=expected):
            run(colours_dir, folder)
    assert contents(folder) == before


def contents(folder):
    """Returns a dict from the paths of checkpoint files to their bytes."""
    return {path: path.read_bytes() for path in pathlib.Path(folder).glob("**/*ckpt*") if path.is_file()}


def test_the_good_checkpoints_stay_while_a_run_saves(colours_dir, kept, tmp_path):
    """A resumed run removes the oldest checkpoints in its folder, even if TensorFlow's list is wrong."""
    folder = shutil.copytree(kept, tmp_path / "moved")
    damage(folder, {"ckpt-10.index": None})
    run(colours_dir, folder, keep=3, steps=3, checkpoint_interval=1)  # the run has already done these steps
    assert {p.name for p in folder.glob("ckpt-*.index")} == {"ckpt-6.index", "ckpt-8.index"}
    damage(folder, {"checkpoint": ELSEWHERE})
    run(colours_dir, folder, keep=3, steps=12)
    assert {p.name for p in folder.glob("ckpt-*.index")} == {"ckpt-8.index", "ckpt-10.index", "ckpt-12.index"}
    assert (folder / "checkpoint").read_text().startswith('model_checkpoint_path: "ckpt-12"')


def test_a_first_save_that_was_killed_is_no_trace(colours_dir, tmp_path):
    """If a folder has only a half-written first checkpoint, the run removes it and starts at step 0."""
    (tmp_path / "ckpt-2_temp").mkdir()
    (tmp_path / "ckpt-2_temp" / "part-00000-of-00001.index").write_bytes(b"part")
    (tmp_path / "ckpt-2.data-00000-of-00001").write_bytes(b"part")
    (tmp_path / "ckpt-2.index").write_bytes(b"cut short")
    assert begin(colours_dir, tmp_path)[0] == 0 and not list(tmp_path.glob("ckpt-*"))
