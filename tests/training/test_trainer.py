"""The training loop: replicas, precision, the files that it writes, and its messages when it cannot continue."""

import dataclasses
import glob
import io
import json
import pathlib
import shutil
import time
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from axial.errors import InputError, NonFiniteError, Preempted
from axial.evaluation import split_run
from axial.io import show
from axial.tasks.segmentation.feed import Augmentation
from axial.tasks.segmentation.panoptic import PanopticTask
from axial.training import monitor, trainer
from axial.training.optimizers import RAdamLookahead, WarmupPoly
from axial.training.trainer import TrainingConfig, train
from axial.weights.restore import find_checkpoint, restore_model
from tests.conftest import two_replicas
from tests.data.record_fixture import change_record, empty, shorten, spoil
from tests.training.runs import curve, run, small_task, weights


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


def test_the_time_that_is_left_does_not_count_the_first_step(monkeypatch):
    """The first step compiles for 100 seconds, each further one takes two."""
    run, clock = object.__new__(trainer._Run), [0.0]
    run._first, run.step = 5, 5
    run.progress = show.progress(None, "train", total=15, initial=5, unit="step", file=io.StringIO())
    run.progress._time = lambda: clock[0]
    run.progress.start_t = run.progress.last_print_t = 0.0
    run.progress.set_postfix_str(trainer.COMPILING)
    assert "compiling the first step" in str(run.progress)
    for run.step, clock[0] in ((6, 100.0), (7, 102.0), (8, 104.0)):
        run._show()
    assert str(run.progress) == "train:  53% 8/15 [00:04<00:14,  2.00s/step]"
    run.progress.close()


@pytest.mark.parametrize(
    "words,options",
    [
        ("no such checkpoint", {"init_checkpoint": "/nowhere"}),
        ("no split 'nope'", {"eval_interval": 2}),
    ],
)
def test_what_is_not_there_is_named_before_the_model_is_built(sample_dir, tmp_path, monkeypatch, words, options):
    task = small_task(sample_dir)
    task.data = dataclasses.replace(task.data, eval_split="nope")
    monkeypatch.setattr(task, "build_model", lambda: pytest.fail("it is built"))
    with pytest.raises(InputError, match=words):
        run(sample_dir, tmp_path / "run", task=task, **options)


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_a_split_without_any_label_is_refused_before_the_model_is_built(sample_dir, tmp_path, monkeypatch, split):
    data = shutil.copytree(sample_dir, tmp_path / "data")
    for number in range(8):
        change_record(*data.glob(f"{split}-*.tfrecord"), number, "segment/id", empty)
    monkeypatch.setattr(PanopticTask, "build_model", lambda task: pytest.fail("it is built"))
    with pytest.raises(InputError, match=f"{data}: no photo of '{split}' has a label"):
        run(str(data), tmp_path / "run", eval_interval=2)


@pytest.mark.slow
def test_a_run_resumes_without_the_weights_that_it_began_with(sample_dir, tmp_path):
    run(sample_dir, tmp_path / "first", steps=2)
    first = find_checkpoint(str(tmp_path / "first"))
    run(sample_dir, tmp_path / "run", steps=2, init_checkpoint=first)
    shutil.rmtree(tmp_path / "first")
    run(sample_dir, tmp_path / "run", steps=4, init_checkpoint=first)
    assert (tmp_path / "run" / "ckpt-4.index").exists()


def test_what_a_run_leaves(sample_dir, tmp_path):
    scores = run(sample_dir, tmp_path, steps=8, eval_interval=4, keep=2, profile=(8, 99))
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
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    model = small_task(sample_dir).build_model()
    restore_model(model, find_checkpoint(str(tmp_path)))


def test_mixed_bfloat16_trains(sample_dir, tmp_path):
    run(sample_dir, tmp_path, steps=2, precision="mixed_bfloat16")
    assert np.isfinite(list(curve(tmp_path).values())).all()
    # Weights, statistics, momentum and averages stay in float32.
    saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path)))
    kinds = {str(dtype.name) for dtype in saved.get_variable_to_dtype_map().values()}
    assert "bfloat16" not in kinds and "float32" in kinds


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

    def losses(self, model, batch, whole=None):
        layer = model.semantic_decoder.projections[0]
        bad = tf.where(tf.reduce_max(batch["image"]) > 1e20, float("inf"), 0.0)
        call = layer.call
        layer.call = lambda x, training=False: call(x, training) + bad
        try:
            image = tf.clip_by_value(batch["image"], -1.0, 1.0)
            return super().losses(model, {**batch, "image": image}, whole)
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
    assert json.loads((tmp_path / "stopped" / "status.json").read_text())["state"] == "failed"
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


@pytest.mark.slow
def test_damaged_records_and_splits_are_named(sample_dir, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(sample_dir, data)
    shard = next(data.glob("train2017-*.tfrecord"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    with pytest.raises(InputError, match=rf"{shard.name}: record \d+ is damaged"):
        run(str(data), tmp_path / "run", steps=20)
    shutil.rmtree(data)
    shutil.copytree(sample_dir, data)
    (shard,) = data.glob("val2017-*.tfrecord")
    change_record(shard, 3, "panoptic/encoded", spoil)
    with pytest.raises(InputError, match=rf"{shard.name}: record 3 \(.*jpg\) is damaged \(Invalid PNG"):
        run(str(data), tmp_path / "evaluated", steps=1, eval_interval=1)
    (shard,) = data.glob("train2017-*.tfrecord")
    change_record(shard, 1, "segment/class", shorten)
    with pytest.raises(InputError, match=rf"{shard.name}: record 1 \(.*jpg\): segment/class: expected one for each"):
        run(str(data), tmp_path / "trained", steps=20)
    task = small_task(sample_dir)
    task.data = dataclasses.replace(task.data, eval_split="nope")
    with pytest.raises(InputError, match="no split 'nope'"):
        run(sample_dir, tmp_path / "other", task=task, eval_interval=2)


def test_what_only_people_look_at_ends_no_training(sample_dir, tmp_path, monkeypatch, capfd):
    """The status, summaries, pictures and the trace fail from the first to the last time."""

    def failing(*_, **__):
        raise tf.errors.UnknownError(None, None, "Stale file handle")

    monkeypatch.setattr(tf.summary, "create_file_writer", failing)
    monkeypatch.setattr(monitor, "write_json", failing)
    monkeypatch.setattr(split_run, "write_bytes", failing)
    monkeypatch.setattr(tf.profiler.experimental, "start", failing)
    task = small_task(sample_dir)
    task.picture = failing
    scores = run(sample_dir, tmp_path, steps=2, eval_interval=2, task=task, profile=(1, 2))
    assert scores and (tmp_path / "ckpt-2.index").exists() and (tmp_path / "best" / "scores.json").exists()
    lines = capfd.readouterr().err.replace("\r", "\n").splitlines()
    for what in (
        "status.json",
        "summaries",
        "a picture",
        "summaries of the evaluation",
        "the state of the evaluation",
        "the trace",
    ):
        assert any(f"{what}: not written (Stale file handle)" in line for line in lines), (what, lines)


def test_a_long_evaluation_is_no_hang(capfd):
    """Each photo shows that it goes on."""
    with monitor.Watchdog(3.0) as watchdog:
        run = types.SimpleNamespace(watchdog=watchdog, requests=types.SimpleNamespace(reason=""))
        for _ in range(9):
            time.sleep(0.4)
            trainer._Run._watch_evaluation(run)
    assert "Timeout" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["Aborted", "Cancelled", "DeadlineExceeded", "Unavailable"])
def test_a_request_that_is_given_up_is_no_lost_worker(sample_dir, tmp_path, name, monkeypatch):
    def failing(self, count):
        raise getattr(tf.errors, f"{name}Error")(None, None, "All 10 retry attempts failed: 503 of gs://b/train-00001")

    monkeypatch.setattr(trainer.Loop, "run", failing)
    with pytest.raises(Preempted) as caught:
        run(sample_dir, tmp_path)
    assert str(caught.value).startswith("a request was aborted (All 10 retry attempts failed: 503 of gs://b/train-000")
    assert str(caught.value).endswith(f"it goes on from the last checkpoint in {tmp_path}")
    assert "worker" not in str(caught.value)


@pytest.mark.parametrize("name", ["Aborted", "Cancelled", "DeadlineExceeded", "Unavailable"])
def test_a_worker_that_is_gone_or_late_is_named(name):
    said = pytest.raises(Preempted, match=r"another worker has stopped \(no answer\).* checkpoint in RUN")
    with said, trainer._name_lost_workers("RUN"):
        raise getattr(tf.errors, f"{name}Error")(None, None, "aborted by: no answer")


def test_a_step_is_a_function_of_its_own(sample_dir, tmp_path, monkeypatch):
    """In a loop's graph the gradient of the maximum pool would differ between processes."""
    loops = []
    monkeypatch.setattr(trainer._Run, "train", lambda self, resumed: loops.append(self.loop))
    run(sample_dir, tmp_path, steps=1)
    loop = loops[0].create_train_loop_fn()
    graph = loop.get_concrete_function(iter(loops[0].train_dataset), tf.constant(1)).graph.as_graph_def()
    pools = [f for f in graph.library.function if any(node.op == "MaxPoolGrad" for node in f.node_def)]
    assert pools and all(f.attr["_noinline"].b for f in pools), [f.signature.name for f in pools]
