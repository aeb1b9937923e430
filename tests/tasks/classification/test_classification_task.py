"""The classification task: its loss, a short training run, and errors."""

import json

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.models.registry import ModelConfig
from axial.tasks.classification.task import ClassificationData, ClassificationTask
from axial.training.optimizers import NesterovMomentum, WarmupCosine
from axial.training.trainer import TrainingConfig, train
from axial.weights.restore import restore_model
from tests.conftest import relative_error

SMALL = (16, 16)


def make(folder, name="resnet_50", **options):
    model = ModelConfig(name, BatchNormConfig(momentum=0.9), arguments=dict(width=0.125, repeats=(1, 0, 0, 0)))
    return ClassificationTask(model, ClassificationData("train", "val", SMALL, shuffle=24), folder, **options)


def run(folder, model_dir, steps, **options):
    task = make(folder)
    optimizer = NesterovMomentum(WarmupCosine(0.1, 30, 2), decay=1e-4, average=0.9)
    options = dict(batch=8, steps_per_loop=5, checkpoint_interval=5, eval_interval=0) | options
    return task, train(task, str(model_dir), optimizer, TrainingConfig(steps, **options))


def latest(model_dir):
    """dict from names to the tensors of a run's latest checkpoint."""
    reader = tf.train.load_checkpoint(str(model_dir))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name}


def test_it_learns_colours_and_best_has_the_averages(colours_dir, tmp_path):
    task, scores = run(colours_dir, tmp_path, 30, eval_interval=30)
    assert scores["top1"] == 1.0
    assert json.loads((tmp_path / "best" / "scores.json").read_text())["top1"] == 1.0
    last, best = latest(tmp_path), latest(tmp_path / "best")
    kernel = "model/logits/conv/kernel/.ATTRIBUTES/VARIABLE_VALUE"
    assert relative_error(best[kernel], last[kernel]) > 1e-4  # best/ has the averaged weights
    model = task.build_model()
    restore_model(model, tf.train.latest_checkpoint(str(tmp_path)))
    np.testing.assert_array_equal(model.logits.weights[0], best[kernel])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss(colours_dir, smoothing):
    """For given logits and labels, the loss is the mean cross-entropy with smoothed labels."""
    task = make(colours_dir, label_smoothing=smoothing)
    logits = np.random.default_rng(0).normal(size=[4, 3])
    labels = np.eye(3)[[0, 2, 1, 1]]

    def model(images, training):
        return {"logits": tf.constant(logits, tf.float32)}

    batch = {"image": None, "label": tf.constant(labels, tf.float32)}
    target = labels * (1 - smoothing) + smoothing / 3
    expected = -(target * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1).mean()
    assert float(task.losses(model, batch)["total"]) == pytest.approx(expected, abs=1e-6)


def test_what_is_refused(colours_dir, tmp_path):
    with pytest.raises(InputError, match="'axial_deeplab_s': for panoptic; a model for classification is expected"):
        make(colours_dir, "axial_deeplab_s")
    with pytest.raises(InputError, match="TrainingConfig.accumulate = 3: does not divide 8"):
        run(colours_dir, tmp_path, 1, accumulate=3)
    with pytest.raises(InputError, match=r"WarmupCosine.warmup = 30: expected fewer than 30"):
        WarmupCosine(0.1, 30, 30)
