"""The classification task: what it refuses, its loss, and a training that learns, resumes and keeps averages."""

import json

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.models.registry import ModelConfig
from axial.tasks.classification.feed import ClassificationData
from axial.tasks.classification.task import ClassificationTask
from axial.training.loop import Loop
from axial.training.optimizers import NesterovMomentum, WarmupCosine, averaged
from axial.training.trainer import TrainingConfig, train
from axial.weights.restore import restore_model
from tests.conftest import relative_error, two_replicas

SMALL = (16, 16)


def make(folder, name="resnet_50", **options):
    model = ModelConfig(name, BatchNormConfig(momentum=0.9), arguments=dict(width=0.125, repeats=(1, 1, 1, 1)))
    return ClassificationTask(model, ClassificationData("train", "val", SMALL, shuffle=24), folder, **options)


def run(folder, model_dir, steps, strategy=None, **options):
    strategy = strategy or tf.distribute.get_strategy()
    task = make(folder)
    with strategy.scope():
        optimizer = NesterovMomentum(WarmupCosine(0.1, 30, 2), decay=1e-4, average=0.9)
    options = dict(batch=8, steps_per_loop=5, checkpoint_interval=5, eval_interval=0) | options
    return task, train(task, str(model_dir), optimizer, TrainingConfig(steps, **options), strategy=strategy)


def latest(model_dir):
    reader = tf.train.load_checkpoint(str(model_dir))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name}


def test_it_learns_colours_and_best_has_the_averages(colours_dir, tmp_path):
    task, scores = run(colours_dir, tmp_path, 30, eval_interval=30)
    assert scores["top1"] == 1.0
    assert json.loads((tmp_path / "best" / "scores.json").read_text())["top1"] == 1.0
    last, best = latest(tmp_path), latest(tmp_path / "best")
    kernel = "model/logits/conv/kernel/.ATTRIBUTES/VARIABLE_VALUE"
    assert relative_error(best[kernel], last[kernel]) > 1e-4  # best/ has the average, not the weights
    model = task.build_model()
    restore_model(model, tf.train.latest_checkpoint(str(tmp_path)))
    np.testing.assert_array_equal(model.logits.weights[0], best[kernel])


PARTS_IN_BFLOAT16 = dict(accumulate=2, precision="mixed_bfloat16", steps_per_loop=1, checkpoint_interval=1)


@pytest.mark.parametrize("options,steps", [({}, 10), (PARTS_IN_BFLOAT16, 2)], ids=["plain", "accumulated in bfloat16"])
def test_a_resumed_training_is_an_uninterrupted_one(options, steps, colours_dir, tmp_path):
    run(colours_dir, tmp_path / "whole", steps, **options)
    run(colours_dir, tmp_path / "parts", steps // 2, **options)
    run(colours_dir, tmp_path / "parts", steps, **options)
    whole, parts = latest(tmp_path / "whole"), latest(tmp_path / "parts")
    assert whole.keys() == parts.keys() and any("averages" in name for name in whole)
    for name, value in whole.items():
        assert np.isfinite(value).all(), name
        if "save_counter" not in name:
            np.testing.assert_array_equal(value, parts[name], name)


@pytest.mark.slow
def test_two_replicas_are_one(colours_dir, tmp_path):
    """Weights, moving statistics and averages."""
    run(colours_dir, tmp_path / "one", 3)
    run(colours_dir, tmp_path / "two", 3, two_replicas())
    one, two = latest(tmp_path / "one"), latest(tmp_path / "two")
    compared = [name for name in one if name.startswith(("model/", "averages/"))]
    assert any(name.startswith("averages/") for name in compared)
    for name in compared:
        np.testing.assert_allclose(two[name], one[name], atol=5e-4, err_msg=name)  # rounding, three steps long


class Frozen:
    """A model whose batch norms keep their moving statistics."""

    def __init__(self, model):
        self._model, self.trainable_variables = model, model.trainable_variables

    def __call__(self, images, training):
        return self._model(images, training=False)


def gradients(folder, accumulate, training):
    """Gradients of a batch of 32, with batch norms that use the batch's statistics, or fixed ones."""
    task = make(folder)
    model = task.build_model()
    rng = np.random.default_rng(1)
    for weight in model.trainable_variables:
        weight.assign(rng.normal(0, 0.2, weight.shape))
    optimizer = NesterovMomentum(0.1)
    optimizer.build(model.trainable_variables)
    loop = Loop(
        task,
        model if training else Frozen(model),
        optimizer,
        config=TrainingConfig(1, 32, accumulate=accumulate),
        strategy=tf.distribute.get_strategy(),
    )
    batch = next(iter(task.train_dataset(32, 0)))
    _, found = loop._accumulated(batch, tf.constant(0, tf.int64), 0)
    return np.concatenate([g.numpy().ravel() for g in found])


def test_accumulated_gradients(colours_dir):
    """4 x 8 equals 1 x 32 with frozen batch norms. With live ones, which see 8 photos, it differs."""
    whole, parts = gradients(colours_dir, 1, False), gradients(colours_dir, 4, False)
    assert relative_error(parts, whole) < 1e-5
    assert 1e-3 < relative_error(gradients(colours_dir, 4, True), gradients(colours_dir, 1, True)) < 10


def test_averages_are_put_back():
    variable = tf.Variable([1.0, 2.0])
    optimizer = NesterovMomentum(0.5, average=0.9)
    optimizer.build([variable])
    optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])
    before, average = variable.numpy(), optimizer.averages[0].numpy()
    with averaged(optimizer, [variable]):
        np.testing.assert_array_equal(variable, average)
    np.testing.assert_array_equal(variable, before)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss(colours_dir, smoothing):
    task = make(colours_dir, label_smoothing=smoothing)
    logits = np.random.default_rng(0).normal(size=[4, 3])
    labels = np.eye(3)[[0, 2, 1, 1]]

    def model(images, training):
        return {"logits": tf.constant(logits, tf.float32)}

    batch = {"image": None, "label": tf.constant(labels, tf.float32)}
    target = labels * (1 - smoothing) + smoothing / 3
    wanted = -(target * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1).mean()
    assert float(task.losses(model, batch)["total"]) == pytest.approx(wanted, abs=1e-6)


def test_what_is_refused(colours_dir, tmp_path):
    with pytest.raises(InputError, match="'axial_deeplab_s': for panoptic; a model for classification is expected"):
        make(colours_dir, "axial_deeplab_s")
    with pytest.raises(InputError, match="TrainingConfig.accumulate = 3: does not divide 8"):
        run(colours_dir, tmp_path, 1, accumulate=3)
    with pytest.raises(InputError, match=r"WarmupCosine.warmup = 30: expected fewer than 30"):
        WarmupCosine(0.1, 30, 30)
