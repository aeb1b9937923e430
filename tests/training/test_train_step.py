"""The train step: repetition of a bad step, gradient accumulation, compilation, and steps that are not finite."""

import types
import unittest.mock

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError, NonFiniteError
from axial.layers import device, random
from axial.models.registry import ModelConfig
from axial.tasks.translation.input_pipeline import TextData
from axial.tasks.translation.task import TranslationTask
from axial.training import train_step
from axial.training.optimizers import Adam
from axial.training.train_step import TrainStep
from axial.training.trainer import TrainingConfig, check_loop
from tests.conftest import relative_error, two_replicas
from tests.tasks.contract import moved_by_a_step
from tests.training.runs import small_task


class Recorder:
    """A task whose losses record their images and random numbers. The loss of the image `bad` is NaN."""

    def __init__(self, bad):
        self.bad, self.calls = bad, []

    def train_dataset(self, batch, seed, first_step, context):
        replica_batch = batch // context.num_replicas_in_sync
        images = tf.data.Dataset.range(first_step * batch, (first_step + 1) * batch).batch(replica_batch)
        return images.map(lambda i: {"image": tf.cast(i, tf.float32)[:, None]})

    def by_shape(self, compute, batch):
        return compute(batch)

    def losses(self, model, batch, whole=None):
        images = batch["image"][:, 0].numpy().astype(int).tolist()
        self.calls.append((images, float(random.uniform([]))))
        spoilt = float("nan") if self.bad in images else 0.0
        return {"total": tf.reduce_sum(model(batch["image"])) + spoilt}


def repeat(task, step=3):
    """Calls `_repeat` for a step of eight images on two replicas with two micro-batches each."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model(tf.zeros([1, 1]))
    config = types.SimpleNamespace(batch=8, seed=0, accumulate=2)
    return train_step._repeat(task, model, config, step, replicas=2)


def test_a_step_is_repeated_in_the_parts_that_memory_held():
    """The search ends at the first bad micro-batch, and each micro-batch has the random numbers of its train step."""
    task = Recorder(bad=29)
    assert repeat(task)[0] == "loss total"
    assert [images for images, _ in task.calls] == [[24, 25], [26, 27], [28, 29]]
    for (_, drawn), (micro_batch, replica) in zip(task.calls, [(0, 0), (1, 0), (0, 1)]):
        with random.seeded(0, 3 * 2 + micro_batch, replica):
            assert drawn == float(random.uniform([]))
    assert repeat(Recorder(bad=None)) == ["none when the step is repeated operation by operation"]


def test_a_step_too_large_to_be_repeated_is_named_too(monkeypatch):
    """If the repetition runs out of memory, the error names the step, but no tensor that is not finite."""

    def repeat(*_, **__):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    monkeypatch.setattr(train_step, "_repeat", repeat)
    loop = unittest.mock.Mock(**{"optimizer.bad_step": tf.Variable(7)})
    with pytest.raises(NonFiniteError, match="step 7: .* not finite; first: not known, there is not enough memory"):
        TrainStep.train_loop_end(loop)


# The detector has a quick test in `test_detection_task`.
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_in_parts_has_the_gradients_of_the_whole(replicas, texts_dir):
    """Two micro-batches with different numbers of tokens give the whole batch's losses and update up to rounding."""
    small = dict(layers=1, channels=16, inner=16, heads=2, dropout=0.0)
    model = ModelConfig("transformer_nano", arguments=small)
    task = TranslationTask(model, TextData("train", "val", (16, 48)), texts_dir)
    losses, moves = moved_by_a_step(task, 192, "no")
    mean_losses, mean_moves = moved_by_a_step(task, 192, "no", two_replicas() if replicas > 1 else None, accumulate=2)
    assert losses == pytest.approx(mean_losses, rel=1e-4) and all(value > 0 for value in losses.values())
    for name, value in moves.items():
        assert relative_error(mean_moves[name], value) < 1e-4 or np.abs(value).max() < 1e-7, name


# === Compiled by XLA ===


def test_the_parts_of_a_step_are_the_step(colours_dir, monkeypatch):
    """A step that is split for compilation into two functions equals the plain step bit by bit, on two replicas.

    XLA does not sum over replicas on CPUs, so this test does not compile the functions.
    """
    task, config = small_task(colours_dir), TrainingConfig(1, 4, jit_compile="yes")
    _, whole = moved_by_a_step(task, 4, "no", two_replicas())
    with pytest.raises(InputError, match="^TrainingConfig.jit_compile = 'yes': XLA cannot sum over replicas on CPUs"):
        check_loop(task, task.built, config, two_replicas())
    monkeypatch.setattr(device, "compiled", lambda function: function)
    _, parts = moved_by_a_step(task, 4, "yes", two_replicas())
    assert any("moving" in name and np.any(value) for name, value in whole.items())
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value, err_msg=name)


@pytest.fixture
def portable():
    """Layers use their implementations for accelerators. Skips the test if this TensorFlow has no XLA for CPUs."""
    if not device.has_xla():
        pytest.skip("this TensorFlow has XLA for TPUs only")
    with device.portable():
        yield


@pytest.mark.usefixtures("portable")
def test_a_compiled_step_that_is_not_finite_stops_training_there(colours_dir):
    """Step 2 is in the middle of a loop. Weights, moving statistics, slots and step keep their old values."""
    task = small_task(colours_dir, spoilt=2)
    model = task.build_model()
    optimizer = Adam(0.01).build(model.trainable_variables)
    config = TrainingConfig(8, 4, jit_compile="yes")
    loop = TrainStep(task, model, optimizer, config, tf.distribute.get_strategy())
    begun = [w.numpy() for w in model.weights]
    loop.run(2)
    held = [w.numpy() for w in (*model.weights, *optimizer.variables)]
    assert any(np.any(a != b) for a, b in zip(begun, held))
    with pytest.raises(NonFiniteError, match="^step 2: the loss or a gradient is not finite; first: input image"):
        loop.run(4)
    assert optimizer.iterations.numpy() == 2
    for weight, value in zip((*model.weights, *optimizer.variables), held, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value, err_msg=weight.name)
