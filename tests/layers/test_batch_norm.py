"""Batch norm on one and on two replicas, compared with NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.attention.layer import LogitNorm
from axial.layers.batch_norm import BatchNorm, BatchNormConfig
from tests import oracles
from tests.conftest import built, outputs_and_gradients, relative_error, two_replicas


@pytest.mark.parametrize("shape,unbiased", [((4, 5, 6, 3), True), ((40, 3), False)])
def test_matches_numpy(shape, unbiased):
    rng = np.random.default_rng(0)
    x = rng.normal(2, 3, shape).astype(np.float32)
    layer = built(BatchNorm(BatchNormConfig(0.8, 1e-3, unbiased)), x)
    gamma, beta, mean, variance = (w.numpy().astype(np.float64) for w in layer.weights)
    expected = (x - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    assert relative_error(layer(x), expected) < 1e-5
    axes = tuple(range(len(shape) - 1))
    expected, m, v = oracles.batch_norm(x.astype(np.float64), axes, gamma, beta, 1e-3)
    assert relative_error(layer(x, training=True), expected) < 1e-5
    count = x.size / shape[-1]
    v = v * count / (count - 1) if unbiased else v
    assert relative_error(layer.moving_mean, 0.8 * mean + 0.2 * m.ravel()) < 1e-5
    assert relative_error(layer.moving_variance, 0.8 * variance + 0.2 * v.ravel()) < 1e-5


def test_frozen_statistics_are_used_and_kept():
    x = tf.random.stateless_normal([2, 4, 4, 3], [0, 0])
    layer = built(BatchNorm(BatchNormConfig(frozen=True)), x)
    before = layer.get_weights()
    y, *gradients = outputs_and_gradients(layer, x)
    np.testing.assert_array_equal(y, layer(x))
    assert len(gradients) == 3 and all(np.abs(gradient).max() > 0 for gradient in gradients)
    np.testing.assert_equal(layer.get_weights(), before)


HALVES = np.random.default_rng(2).normal(1, 2, [2, 4, 5, 5, 3]).astype(np.float32)  # the inputs of two replicas


def run_in_groups(group):
    """Runs a batch norm on both halves. Returns ([outputs, gradients of the inputs], moving mean)."""
    values, layer = on_two_replicas(lambda: make_norm(0.8, group), output_and_slope, HALVES)
    return [np.stack(values) for values in values], layer.moving_mean.numpy()


def run_alone(x):
    """Runs a batch norm without replicas. Returns (output, gradient of the input, moving mean)."""
    layer = make_norm(0.8)
    return *(value.numpy() for value in output_and_slope(layer, tf.constant(x))), layer.moving_mean.numpy()


def test_a_group_of_one_replica_has_its_own_statistics():
    (y, dx), moving = run_in_groups(1)
    expected = [np.stack(values) for values in zip(*map(run_alone, HALVES))]
    assert relative_error(y, expected[0]) < 1e-5 and relative_error(dx, expected[1]) < 1e-4
    assert relative_error(moving, expected[2].mean(0)) < 1e-5  # checkpoints have the groups' mean


def test_a_group_of_two_replicas_has_the_statistics_of_both():
    (y, dx), _ = run_in_groups(2)
    both = run_alone(np.concatenate(HALVES))
    assert relative_error(np.concatenate(y), both[0]) < 1e-5 and relative_error(np.concatenate(dx), both[1]) < 1e-4


def test_the_size_of_a_group_must_divide_the_number_of_replicas():
    with pytest.raises(InputError, match="BatchNormConfig.group = 3: does not divide 2"):
        run_in_groups(3)


def on_two_replicas(make, run, parts):
    """Makes a layer and runs it on two replicas. Replica i gets `parts[i]`. Returns (results of `run`, layer)."""
    strategy = two_replicas()
    with strategy.scope():
        layer = make()

    def pick(context):
        return tf.constant(parts[context.replica_id_in_sync_group])

    def both(x):
        return strategy.run(lambda x: run(layer, x), (x,))

    values = tf.function(both, autograph=False)(strategy.experimental_distribute_values_from_function(pick))
    return [strategy.experimental_local_results(value) for value in values], layer


def output_and_slope(layer, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        loss = tf.reduce_sum(y**3)
    return y, tape.gradient(loss, x)


def make_norm(momentum=0.0, group=0):
    """A built `BatchNorm` of three channels."""
    layer = BatchNorm(BatchNormConfig(momentum, group=group))
    layer.build([None, None, None, 3])
    return layer


@pytest.mark.parametrize("images,ratio", [((3, 1), 1000.0), ((4, 0), 0.0)])
def test_replicas_lose_no_variance_below_a_large_mean(ratio, images):
    """Statistics, outputs and gradients equal float64 NumPy's for the whole batch. A replica may have no image."""
    rng = np.random.default_rng(3)
    x = (rng.normal(ratio, 1, [4, 5, 6, 3]) * [1, 3, 0.01]).astype(np.float32)
    ((ys, slopes), layer) = on_two_replicas(make_norm, output_and_slope, np.split(x, images[:1]))
    wide = x.astype(np.float64)
    expected, mean, variance = oracles.batch_norm(wide, (0, 1, 2), 1.0, 0.0, 1e-3)
    assert np.max(np.abs(layer.moving_mean - mean.ravel()) / np.sqrt(variance.ravel())) < 2e-4  # in standard deviations
    np.testing.assert_allclose(layer.moving_variance, variance.ravel(), rtol=1e-3)
    assert relative_error(np.concatenate(ys), expected) < 1e-3
    d = 3 * expected**2  # gradient: d minus its mean and its projection on y
    along = expected * (d * expected).mean((0, 1, 2)) + d.mean((0, 1, 2))
    assert relative_error(np.concatenate(slopes), (d - along) / np.sqrt(variance + 1e-3)) < 1e-3


@pytest.mark.parametrize("few", [7, 0])
def test_logits_of_replicas_have_one_mean_and_variance(few):
    """Two replicas have different numbers and means of logits. Statistics equal NumPy's for all logits."""
    rng = np.random.default_rng(4)
    logits = [rng.normal(mean, 2, [3, 2, pairs]) for mean, pairs in ((5, 40), (-3, few))]
    sums = [np.stack([s.sum(2), (s**2).sum(2), np.full([3, 2], s.shape[2])], 2).astype(np.float32) for s in logits]

    def make():
        layer = LogitNorm([3, 2], BatchNormConfig(0.0))
        layer.build(None)
        return layer

    def run(layer, sums):
        return (layer(sums[..., :2], sums[0, 0, 2]),)

    ((scales,), layer) = on_two_replicas(make, run, sums)
    every = np.concatenate(logits, 2)
    assert relative_error(layer.moving_mean, every.mean(2)) < 1e-5
    assert relative_error(layer.moving_variance, every.var(2)) < 1e-5
    for values in scales:
        assert relative_error(values, 1 / np.sqrt(every.var(2) + 1e-3)) < 1e-5
