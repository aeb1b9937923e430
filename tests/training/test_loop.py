"""The loop of training steps."""

import types

import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import NonFiniteError
from axial.layers import random
from axial.training.loop import Loop


class Recorder:
    """A task whose losses record images and random numbers, and of which some images give NaN."""

    def __init__(self, bad):
        self.bad, self.seen = bad, []

    def train_dataset(self, batch, seed, first_step, context):
        share = batch // context.num_replicas_in_sync
        images = tf.data.Dataset.range(first_step * batch, (first_step + 1) * batch).batch(share)
        return images.map(lambda i: {"image": tf.cast(i, tf.float32)[:, None]})

    def losses(self, model, batch):
        images = batch["image"][:, 0].numpy().astype(int).tolist()
        self.seen.append((images, float(random.uniform([]))))
        spoilt = float("nan") if self.bad in images else 0.0
        return {"total": tf.reduce_sum(model(batch["image"])) + spoilt}


@pytest.fixture
def repeat():
    def run(task, step=3):
        model = keras.Sequential([keras.layers.Dense(1)])
        model(tf.zeros([1, 1]))
        config = types.SimpleNamespace(batch=8, seed=0, accumulate=2)
        strategy = types.SimpleNamespace(num_replicas_in_sync=2)
        loop = types.SimpleNamespace(
            task=task, model=model, config=config, strategy=strategy, by_shape=lambda compute, batch: compute(batch)
        )
        return Loop._repeat(loop, step)

    return run


def test_a_step_is_repeated_in_the_parts_that_memory_held(repeat):
    """Eight images of step 3 on two replicas, each in two parts: the first that is not finite ends it."""
    task = Recorder(bad=29)
    assert repeat(task)[0] == "loss total"
    assert [images for images, _ in task.seen] == [[24, 25], [26, 27], [28, 29]]
    for (_, drawn), (part, replica) in zip(task.seen, [(0, 0), (1, 0), (0, 1)]):
        with random.seeded(0, 3 * 2 + part, replica):
            assert drawn == float(random.uniform([]))


def test_a_step_that_is_finite_when_it_is_repeated_says_so(repeat):
    task = Recorder(bad=None)
    assert repeat(task) == ["none when the step is repeated"]
    assert len(task.seen) == 4


def test_a_step_too_large_to_be_repeated_is_named_too():
    def repeat(step):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    loop = types.SimpleNamespace(bad_step=tf.Variable(7), _repeat=repeat)
    with pytest.raises(NonFiniteError, match="step 7: .* not finite; first: not known, there is not enough memory"):
        Loop._raise_if_stopped(loop)
