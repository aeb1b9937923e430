"""The training loop: resuming, replicas, the files that it writes, and its messages when it cannot continue."""

import dataclasses
import glob
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from axial.data.pipeline import Augmentation
from axial.errors import InputError, NonFiniteError
from axial.evaluation.loop import evaluate
from axial.layers.batch_norm import BatchNormConfig
from axial.tasks.panoptic import PanopticTask
from axial.training import trainer
from axial.training.optimizers import RAdamLookahead, WarmupPoly
from axial.training.trainer import TrainingConfig, train
from axial.weights.restore import find_checkpoint, initialize, restore_model
from conftest import make_task, relative_error, two_replicas

SMALL = (33, 33)


def small_task(sample_dir, repeats=(1, 0, 0, 0), arguments=None, drop_path=0.0, **options):
    """The nano model with a single block, which compiles in seconds."""
    arguments = {"repeats": repeats, **(arguments or {})}
    model = {"norm": BatchNormConfig(momentum=0.9), "drop_path": drop_path, "arguments": arguments}
    return make_task(sample_dir, SMALL, model=model, **options)


def run(sample_dir, model_dir, steps=10, batch=2, strategy=None, rate=1e-3, task=None, **options):
    strategy = strategy or tf.distribute.get_strategy()
    options = {"steps_per_loop": 2, "checkpoint_interval": 2, "eval_interval": 0, **options}
    with strategy.scope():
        optimizer = RAdamLookahead(WarmupPoly(rate, 50, 5))
    config = TrainingConfig(steps=steps, batch=batch, **options)
    return train(task or small_task(sample_dir), str(model_dir), optimizer, config, strategy=strategy)


def curve(model_dir, tag="total"):
    """dict from steps to the last value that was written for each."""
    values = {}
    for path in sorted(glob.glob(os.path.join(model_dir, "events*")), key=os.path.getmtime):
        events = EventAccumulator(path, {"tensors": 0}).Reload()
        for event in events.Tensors(tag) if tag in events.Tags()["tensors"] else []:
            values[event.step] = float(tf.make_ndarray(event.tensor_proto))
    return values


def weights(model_dir):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(model_dir)))
    names = [n for n in reader.get_variable_to_shape_map() if n.startswith("model/")]
    return {n: reader.get_tensor(n) for n in names if "OBJECT" not in n}


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
from test_trainer import run
from axial.cli import app, train
from axial.training import trainer

show = trainer._show
trainer._show = lambda *args: (show(*args), time.sleep(1))  # time to be killed between two loops
sys.argv[0] = "train"
app.run(lambda _: bool(run({sample!r}, {model!r})), train)
"""


def start(sample_dir, model_dir):
    path = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    text = COMMAND.format(path=path, sample=sample_dir, model=str(model_dir))
    return subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(model_dir, process, number):
    for _ in range(1200):
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


def test_two_replicas_equal_one_at_twice_the_batch(sample_dir, tmp_path):
    mirrored = two_replicas()
    # There is no augmentation, and every batch has every photo. So both runs see the same images.
    results = []
    for name, strategy in (("one", None), ("two", mirrored)):
        plain = Augmentation((1.0, 1.0), flip=False, shift=False)
        task = small_task(sample_dir, data={"augmentation": plain, "shuffle": 0})
        run(sample_dir, tmp_path / name, steps=3, batch=8, strategy=strategy, task=task)
        results.append((curve(tmp_path / name), weights(tmp_path / name)))
    (one_curve, one), (two_curve, two) = results
    for step in one_curve:
        np.testing.assert_allclose(two_curve[step], one_curve[step], rtol=1e-3)
    one_norm, two_norm = (curve(tmp_path / name, "gradient_norm") for name in ("one", "two"))
    np.testing.assert_allclose(two_norm[2], one_norm[2], rtol=1e-2)  # of the first two steps
    for name in one:
        scale = max(np.abs(one[name]).max(), 1e-3)
        # Rounding can change RAdam's update for a tiny gradient, but three steps of 1e-3 bound the difference.
        assert np.abs(two[name] - one[name]).max() / scale < 5e-3, name


def test_what_a_run_leaves(sample_dir, tmp_path):
    scores = run(sample_dir, tmp_path, steps=8, eval_interval=4, keep=2)
    assert set(scores) == {"pq", "miou", "ap"}
    kept = sorted(p.name for p in tmp_path.glob("ckpt-*.index"))
    assert kept == ["ckpt-6.index", "ckpt-8.index"]
    best = json.loads((tmp_path / "best" / "scores.json").read_text())
    assert best["step"] in (4, 8)
    assert (tmp_path / "best" / f"ckpt-{best['step']}.index").exists()
    for tag in ("total", "semantic", "center", "offset", "learning_rate", "images_per_second"):
        assert set(curve(tmp_path, tag)) == {2, 4, 6, 8}, tag
    events = EventAccumulator(glob.glob(str(tmp_path / "events*"))[0], {"tensors": 0}).Reload()
    assert "photo_truth_prediction/0" in events.Tags()["tensors"]
    assert "eval/pq_all" in events.Tags()["tensors"]
    model = small_task(sample_dir).build_model()
    restore_model(model, find_checkpoint(str(tmp_path)))


def test_mixed_bfloat16_trains(sample_dir, tmp_path):
    run(sample_dir, tmp_path, steps=2, precision="mixed_bfloat16")
    assert np.isfinite(list(curve(tmp_path).values())).all()


class Spoilt(PanopticTask):
    """A task whose semantic decoder is infinite for the batch of one step."""

    bad_step = 2

    def train_dataset(self, batch, seed, first_step=0, context=None):
        def spoil(step, example):
            return {**example, "image": tf.where(first_step + step == self.bad_step, 1e30, example["image"])}

        return super().train_dataset(batch, seed, first_step, context).enumerate().map(spoil)

    def build_model(self, folded=False):
        self.built = super().build_model(folded)
        return self.built

    def losses(self, model, batch):
        layer = model.semantic_decoder.projections[0]
        bad = tf.where(tf.reduce_max(batch["image"]) > 1e20, float("inf"), 0.0)
        call = layer.call
        layer.call = lambda x, training=False: call(x, training) + bad
        try:
            image = tf.clip_by_value(batch["image"], -1.0, 1.0)
            return super().losses(model, {**batch, "image": image})
        finally:
            layer.call = call


def test_a_step_that_is_not_finite_stops_training_there(sample_dir, tmp_path):
    """The step is in the middle of a loop. Weights, moving statistics, slots and step stay as they were before it."""
    plain = small_task(sample_dir)
    run(sample_dir, tmp_path / "wanted", steps=2, task=plain)
    wanted = weights(tmp_path / "wanted")
    task = Spoilt(plain.model, plain.data, sample_dir)
    strategy = tf.distribute.get_strategy()
    optimizer = RAdamLookahead(WarmupPoly(1e-3, 50, 5))
    config = TrainingConfig(steps=8, batch=2, steps_per_loop=8, checkpoint_interval=8, eval_interval=0)
    with pytest.raises(NonFiniteError, match=r"step 2: .*first: output of \S*semantic_decoder/"):
        train(task, str(tmp_path / "stopped"), optimizer, config, strategy=strategy)
    assert not list((tmp_path / "stopped").glob("ckpt*"))
    assert int(optimizer.iterations) == 2
    prefix = tf.train.Checkpoint(model=task.built, optimizer=optimizer).save(str(tmp_path / "state" / "ckpt"))
    found = weights(tmp_path / "state")
    assert set(found) == set(wanted) and any("moving" in name for name in found)
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-7, err_msg=name)
    slots = tf.train.load_checkpoint(find_checkpoint(str(tmp_path / "wanted"))), tf.train.load_checkpoint(prefix)
    names = [n for n in slots[0].get_variable_to_shape_map() if n.startswith("optimizer/_variables")]
    assert names
    for name in names:
        theirs, ours = (reader.get_tensor(name) for reader in slots)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow  # takes 30 s; tests/tasks has the quick tests
def test_without_instances_the_best_checkpoint_is_by_miou(sample_dir, tmp_path):
    task = small_task(sample_dir, instances=False)
    scores = run(sample_dir, tmp_path, steps=2, eval_interval=2, task=task)
    assert json.loads((tmp_path / "best" / "scores.json").read_text())["miou"] == scores["miou"]
    assert set(curve(tmp_path, "semantic")) == {2} and not curve(tmp_path, "center")


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


def test_wrong_checkpoints_are_named(sample_dir, tmp_path):
    run(sample_dir, tmp_path, steps=1)
    prefix = find_checkpoint(str(tmp_path))
    with pytest.raises(InputError, match="of another model"):
        run(sample_dir, tmp_path, task=small_task(sample_dir, repeats=(2, 0, 0, 0)))
    index = pathlib.Path(prefix + ".index")
    content = index.read_bytes()
    index.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="not a whole checkpoint"):
        restore_model(small_task(sample_dir).build_model(), prefix)
    with pytest.raises(InputError, match="no such checkpoint"):
        find_checkpoint(str(tmp_path / "ckpt-99"))
    with pytest.raises(InputError, match="no checkpoint here"):
        find_checkpoint(str(tmp_path / "best") if (tmp_path / "best").exists() else sample_dir)


def test_a_batch_that_replicas_do_not_divide(sample_dir, tmp_path):
    with pytest.raises(InputError, match="batch 3 cannot be shared by 2 replicas"):
        run(sample_dir, tmp_path, batch=3, strategy=two_replicas())


class Killed(Exception):
    pass


def test_an_evaluation_that_was_killed_is_made_up_for(sample_dir, tmp_path, monkeypatch):
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

    monkeypatch.setattr(trainer, "evaluate", dies)
    with pytest.raises(Killed):
        run(sample_dir, tmp_path / "killed", **options)
    monkeypatch.undo()
    np.testing.assert_equal(run(sample_dir, tmp_path / "killed", **options), whole)
    for name in ("evaluated.json", "best/scores.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert run(sample_dir, tmp_path / "killed", **options) == {}  # nothing is left to do


def test_damaged_records_and_splits_are_named(sample_dir, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(sample_dir, data)
    shard = next(data.glob("train2017-*.tfrecord"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    with pytest.raises(InputError, match=rf"{shard.name}: record \d+ is damaged"):
        run(str(data), tmp_path / "run", steps=20)
    task = small_task(sample_dir)
    task.data = dataclasses.replace(task.data, eval_split="nope")
    with pytest.raises(InputError, match="no split 'nope'"):
        run(sample_dir, tmp_path / "other", task=task, eval_interval=2)
