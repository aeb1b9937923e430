"""Sweeps, stress tests, and evaluation of checkpoints during training, with a small network."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from PIL import Image

from axial.errors import InputError
from axial.tasks.metrics import evaluate
from axial.tasks.segmentation.drawing import save_stress
from axial.tasks.segmentation.evaluator import PANOPTIC, PanopticMetrics
from axial.tasks.segmentation.grouping import PostprocessConfig
from axial.tasks.segmentation.studies import add_changes, combinations, stress_test, sweep
from axial.training.saving import checkpoints
from tests.conftest import make_task
from tests.tasks.contract import eagerly

GROUPING = PostprocessConfig(center_threshold=0.0, nms_kernel=7, stuff_area=16)

MODEL = {"name": "panoptic_deeplab_resnet_nano", "arguments": {"repeats": (1, 0, 0, 0)}}


@pytest.fixture(scope="module")
def task(sample_dir):
    return make_task(sample_dir, (33, 33), model=MODEL, grouping=GROUPING)


@pytest.fixture(scope="module")
def model(task):
    """A Panoptic-DeepLab with random weights, whose scores differ between the knobs of the grouping."""
    keras.utils.set_random_seed(0)
    model = task.build_model()
    for head in (model.semantic_head, model.center_head):  # larger logits, so that scores differ
        head.logits.conv.kernel.assign(30 * head.logits.conv.kernel)
    return model


def take_examples(task, count=3):
    return list(task.eval_dataset("val2017").take(count))


@eagerly()
def test_a_sweep_is_as_many_evaluations(task, model):
    """A sweep gives each grouping the same scores as a separate evaluation with this grouping."""
    examples = take_examples(task)
    knobs, configs = zip(*combinations(GROUPING, ["stuff_area=1,100", "thing_area=10"]))
    assert knobs == ({"stuff_area": 1, "thing_area": 10}, {"stuff_area": 100, "thing_area": 10})
    tasks = [dataclasses.replace(task, grouping=grouping) for grouping in configs]
    results = sweep(tasks, model, examples)
    for one, scores in zip(tasks, results, strict=True):
        np.testing.assert_equal(scores, evaluate(examples, one.predictions(model), PanopticMetrics(task.spec)))
    assert len({str(scores["pq"]) for scores in results}) > 1


@pytest.mark.slow  # traces the network once per size
def test_stress_at_one_is_the_plain_evaluation(task, model):
    rows = list(stress_test(task, model, "val2017", (0.5, 1.0)))
    assert [row["canvas"] for row in rows] == [[17, 17], [33, 33]]
    plain = evaluate(task.eval_dataset(), task.predictions(model), PanopticMetrics(task.spec))
    np.testing.assert_equal({k: rows[1][k] for k in PANOPTIC.headline(plain)}, PANOPTIC.headline(plain))


def make_rows(*scores):
    """Makes rows as `stress_test` returns them. `scores` are tuples (ratio, PQ, PQ of things)."""
    return [{"ratio": r, "pq": pq, "pq_things": things, "pq_stuff": float("nan")} for r, pq, things in scores]


def test_relative_changes_of_one_run_are_from_ratio_1():
    rows, others = make_rows((0.5, 0.2, 0.1), (1.0, 0.4, 0.0), (2.0, 0.5, 0.3)), make_rows((0.5, 0.2, 0.1))
    add_changes([rows])
    add_changes([others])
    assert [row["relative_change"] for row in rows] == pytest.approx([-0.5, 0, 0.25])
    assert {row["relative_change_things"] for row in rows} == {others[0]["relative_change"]} == {None}


def test_relative_changes_of_two_runs_are_from_the_first_at_the_same_ratio(tmp_path):
    """Fig. 4 of Axial-DeepLab shows such changes. `save_stress` plots the same rows."""
    first, second = make_rows((0.5, 0.2, 0.1), (1.0, 0.4, 0.4)), make_rows((0.5, 0.3, 0.3), (1.0, 0.5, 0.2))
    add_changes([first, second])
    assert [row["relative_change"] for row in first] == [0, 0]
    assert [row["relative_change"] for row in second] == pytest.approx([0.5, 0.25])
    assert [row["relative_change_things"] for row in second] == pytest.approx([2, -0.5])
    save_stress(tmp_path / "stress.png", {"ours": first, "theirs": second})
    assert Image.open(tmp_path / "stress.png").size[0] > 1000


def test_knobs():
    ((knobs, changed),) = combinations(GROUPING, ["top_k=None", "pieces = split"])
    assert knobs == {"top_k": None, "pieces": "split"} and (changed.top_k, changed.pieces) == (None, "split")
    for knobs, words in (
        (["centre_threshold=1"], "did you mean 'center_threshold'"),
        (["top_k=many"], "PostprocessConfig.top_k = 'many': expected int | None, got str"),
        (["nms_kernel=6"], "nms_kernel must be odd: got 6"),
        (["top_k"], "expected KNOB=VALUE,VALUE"),
        (["top_k=5", "top_k=7"], "--knob=top_k=7: top_k is given twice"),
    ):
        with pytest.raises(InputError, match=words):
            combinations(GROUPING, knobs)


def test_checkpoints_are_waited_for_until_a_timeout(tmp_path):
    folder, variable = str(tmp_path), tf.Variable(1.0)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=variable), folder, None)
    manager.save(checkpoint_number=8)
    assert [s for s, _ in checkpoints(folder, lambda: 99, timeout=1)] == [8]


def test_no_checkpoint_is_skipped_while_one_is_evaluated(tmp_path, capsys):
    """Training saves three checkpoints during each evaluation and keeps four. A line names each removed checkpoint."""
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), str(tmp_path), 4)
    manager.save(checkpoint_number=10)
    (tmp_path / "ckpt-15_temp").mkdir()  # a checkpoint that is not yet complete
    (tmp_path / "ckpt-15.index").write_bytes(b"")
    steps, saves = [], iter((20, 30, 40, 50, 60, 70, 80, 90, 100))
    for step, prefix in checkpoints(str(tmp_path), lambda: 100, timeout=30):
        assert prefix == str(tmp_path / f"ckpt-{step}")
        steps.append(step)
        for _ in range(3):
            if number := next(saves, None):
                manager.save(checkpoint_number=number)
    # After the evaluation of step 20, checkpoints 40 to 70 exist. After the evaluation of step 40, 70 to 100 exist.
    assert steps == [10, 20, 40, 70, 80, 90, 100]
    lines = capsys.readouterr().err.splitlines()
    removed = [line.partition(": was removed before its turn")[0][-7:] for line in lines]
    assert removed == ["ckpt-30", "ckpt-50", "ckpt-60"]
