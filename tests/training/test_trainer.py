"""Whole trainings: replicas, precision, written files, and messages of trainings that cannot continue."""

import dataclasses
import glob
import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from axial.errors import InputError, NonFiniteError, Preempted
from axial.training import monitor, split_run, trainer
from axial.training.trainer import TrainingConfig
from axial.weights.restore import find_checkpoint, restore_model
from tests.conftest import make_task, two_replicas
from tests.data.record_fixture import change_record, empty, spoil
from tests.training.runs import curve, run, small_task, weights


def test_two_replicas_equal_one_at_twice_the_batch(colours_dir, tmp_path):
    """Three steps at a global batch of 8: losses, gradient norms and weights agree up to rounding."""
    for name, strategy in (("one", None), ("two", two_replicas())):
        run(colours_dir, tmp_path / name, steps=3, batch=8, strategy=strategy)
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    for tag, tolerance in (("total", 1e-4), ("gradient_norm", 1e-3)):
        curves = [curve(tmp_path / name, tag) for name in ("one", "two")]
        assert set(curves[0]) == {2, 3}
        np.testing.assert_allclose(list(curves[1].values()), list(curves[0].values()), rtol=tolerance)
    for name, value in one.items():
        # Rounding can change RAdam's update for a tiny gradient, but three steps of 1e-3 bound the difference.
        assert np.abs(two[name] - value).max() < 5e-3 * max(np.abs(value).max(), 1e-3), name


def test_loops_are_bounded_in_seconds():
    """The next loop takes at most 10 seconds, at least one step, and at most twice the steps of this loop."""
    config, length = TrainingConfig(1000, 1, seconds_per_loop=10), 1
    for seconds, expected in ((0.01, 2), (0.01, 4), (2.0, 5), (6.0, 1), (60.0, 1), *[(0.001, 2**n) for n in (1, 2)]):
        length = trainer._length(config, length, seconds)
        assert length == expected
    assert trainer._length(config, 64, 0.001) == 100


@pytest.mark.parametrize(
    "words,options",
    [
        ("no such checkpoint", {"init_checkpoint": "/nowhere"}),
        ("no split 'nope'", {"eval_interval": 2}),
        ("TrainingConfig.accumulate = 3: does not divide 2", {"accumulate": 3}),
    ],
)
def test_what_does_not_fit_is_named_before_the_model_is_built(colours_dir, tmp_path, monkeypatch, words, options):
    task = small_task(colours_dir)
    task.data = dataclasses.replace(task.data, eval_split="nope")
    monkeypatch.setattr(task, "build_model", lambda: pytest.fail("it is built"))
    with pytest.raises(InputError, match=words):
        run(colours_dir, tmp_path / "run", task=task, **options)


def test_a_split_without_any_label_is_refused_before_the_model_is_built(sample_dir, tmp_path, monkeypatch):
    data = shutil.copytree(sample_dir, tmp_path / "data")
    for number in range(8):
        change_record(*data.glob("val2017-*.tfrecord"), number, "segment/id", empty)
    task = make_task(str(data))
    monkeypatch.setattr(task, "build_model", lambda: pytest.fail("it is built"))
    with pytest.raises(InputError, match=f"{data}: no photo of 'val2017' has a label"):
        run(str(data), tmp_path / "run", task=task, eval_interval=2)


def test_what_a_run_leaves(colours_dir, tmp_path):
    """A run of eight steps leaves two checkpoints, a best checkpoint, summaries, a trace and a status file."""
    scores = run(colours_dir, tmp_path, steps=8, eval_interval=4, keep=2, profile=(8, 99))
    assert set(scores) == {"right"}
    assert sorted(p.name for p in tmp_path.glob("ckpt-*.index")) == ["ckpt-6.index", "ckpt-8.index"]
    best = json.loads((tmp_path / "best" / "scores.json").read_text())
    assert best["step"] in (4, 8) and (tmp_path / "best" / f"ckpt-{best['step']}.index").exists()
    for tag in ("total", "gradient_norm", "learning_rate", "images_per_second"):
        assert set(curve(tmp_path, tag)) == {2, 4, 6, 8}, tag
    events = EventAccumulator(glob.glob(str(tmp_path / "events*"))[0], {"tensors": 0}).Reload()
    assert {"photo_truth_prediction/0", "eval/right"} <= set(events.Tags()["tensors"])
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    restore_model(small_task(colours_dir).build_model(), find_checkpoint(str(tmp_path)))


def test_mixed_bfloat16_trains(colours_dir, tmp_path):
    """In mixed_bfloat16, weights, moving statistics and slots stay float32."""
    run(colours_dir, tmp_path, steps=2, precision="mixed_bfloat16")
    assert np.isfinite(list(curve(tmp_path).values())).all()
    saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path)))
    kinds = {str(dtype.name) for dtype in saved.get_variable_to_dtype_map().values()}
    assert "bfloat16" not in kinds and "float32" in kinds


def test_a_step_that_is_not_finite_stops_training_there(colours_dir, tmp_path, monkeypatch):
    """Step 3 is in the middle of a loop. Weights and slots equal the weights and slots of a run of three steps."""
    run(colours_dir, tmp_path / "expected", steps=3)
    task, loops, kept = small_task(colours_dir, spoilt=3), [], trainer._run
    monkeypatch.setattr(trainer, "_run", lambda loop, *rest, **more: loops.append(loop) or kept(loop, *rest, **more))
    with pytest.raises(NonFiniteError, match=r"^step 3: the loss or a gradient is not finite; first: input image"):
        run(colours_dir, tmp_path / "stopped", 9, task=task, steps_per_loop=8, checkpoint_interval=8)
    optimizer = loops[0].optimizer
    assert not list((tmp_path / "stopped").glob("ckpt*"))
    assert json.loads((tmp_path / "stopped" / "status.json").read_text())["state"] == "failed"
    assert int(optimizer.iterations) == 3
    tf.train.Checkpoint(model=task.built, optimizer=optimizer).save(str(tmp_path / "state" / "ckpt"))
    for start in ("model/", "optimizer/_variables"):
        expected, actual = (weights(tmp_path / name, start) for name in ("expected", "state"))
        assert actual and set(actual) == set(expected)
        for name, value in actual.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_checkpoint_of_another_model_is_named(colours_dir, tmp_path):
    run(colours_dir, tmp_path, steps=1)
    with pytest.raises(InputError, match="of another model"):
        run(colours_dir, tmp_path, task=small_task(colours_dir, width=5))


def test_damaged_records_are_named(colours_dir, tmp_path):
    """A training shard has a flipped bit, and an evaluation shard a broken photo. The errors name shard and record."""
    data = shutil.copytree(colours_dir, tmp_path / "data")
    shard = next(data.glob("train-*.tfrecord"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    with pytest.raises(InputError, match=rf"{shard.name}: record \d+ is damaged"):
        run(str(data), tmp_path / "run", steps=20)
    (shard,) = data.glob("val-*.tfrecord")
    change_record(shard, 3, "image/encoded", spoil)
    shutil.copy(next(pathlib.Path(colours_dir).glob("train-*.tfrecord")), data)
    with pytest.raises(InputError, match=rf"{shard.name}: record 3 \(.*jpg\) is damaged"):
        run(str(data), tmp_path / "evaluated", steps=1, eval_interval=1)


def test_what_only_people_look_at_ends_no_training(colours_dir, tmp_path, monkeypatch, capfd):
    """Every write of status, summaries, pictures and trace fails. The training prints each failure and continues."""

    def failing(*_, **__):
        raise tf.errors.UnknownError(None, None, "Stale file handle")

    monkeypatch.setattr(tf.summary, "create_file_writer", failing)
    monkeypatch.setattr(monitor, "write_json", failing)
    monkeypatch.setattr(split_run, "write_bytes", failing)
    monkeypatch.setattr(tf.profiler.experimental, "start", failing)
    task = small_task(colours_dir)
    monkeypatch.setattr(type(task.evaluator), "draw", failing)
    scores = run(colours_dir, tmp_path, steps=2, eval_interval=2, task=task, profile=(1, 2))
    assert scores and (tmp_path / "ckpt-2.index").exists() and (tmp_path / "best" / "scores.json").exists()
    lines = capfd.readouterr().err.replace("\r", "\n").splitlines()
    parts = "status.json", "summaries", "a picture", "summaries of the evaluation", "the state of the evaluation"
    for what in (*parts, "the trace"):
        assert any(f"{what}: not written (Stale file handle)" in line for line in lines), (what, lines)


def test_a_request_that_is_given_up_is_no_lost_worker(colours_dir, tmp_path, monkeypatch):
    """An aborted request in a single process and an unavailable worker raise Preempted with different messages."""

    def failing(self, count):
        raise tf.errors.AbortedError(None, None, "All 10 retry attempts failed: 503 of gs://b/train-00001")

    monkeypatch.setattr(trainer.TrainStep, "run", failing)
    with pytest.raises(Preempted) as caught:
        run(colours_dir, tmp_path)
    assert str(caught.value).startswith("a request was aborted (All 10 retry attempts failed: 503 of gs://b/train-000")
    assert str(caught.value).endswith(f"it goes on from the last checkpoint in {tmp_path}")
    said = pytest.raises(Preempted, match=r"another worker has stopped \(no answer\).* checkpoint in RUN")
    with said, trainer.name_lost_workers(model_dir="RUN"):
        raise tf.errors.UnavailableError(None, None, "aborted by: no answer")
