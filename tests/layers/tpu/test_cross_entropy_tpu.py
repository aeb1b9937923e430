"""The TPU kernels of the semantic loss, which jax interprets on a CPU."""

import functools

import numpy as np
import pytest

pytest.importorskip("jax")

import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.layers import device
from axial.layers.conv import triangle_weights
from axial.layers.tpu import cross_entropy as cross_entropy_tpu
from axial.models.outputs import AUXILIARY, SEMANTIC
from axial.tasks.segmentation import losses
from tests.conftest import relative_error


def oracle(logits, labels, d):
    """Returns float64 (loss of each pixel, gradient of the logits). `d` is the gradient of the pixels' losses."""
    rows, columns = (triangle_weights(*sizes, antialias=False) for sizes in zip(logits.shape[1:3], labels.shape[1:]))
    z = np.einsum("yh,xw,nhwc->nyxc", rows, columns, logits)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    hot = np.eye(logits.shape[-1])[labels]
    return -np.log((p * hot).sum(-1)), np.einsum("yh,xw,nyxc->nhwc", rows, columns, (p - hot) * d[..., None])


@pytest.mark.parametrize("size,classes,resized", [((9, 7), 133, (20, 150)), ((1, 1), 3, (8, 4))])
def test_equals_the_oracle(size, classes, resized):
    random = np.random.default_rng(0)
    logits = 3 * random.normal(size=[2, *size, classes])
    labels, d = random.integers(0, classes, [2, *resized]), random.normal(size=[2, *resized])
    x = tf.constant(logits, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = cross_entropy_tpu.resized_cross_entropy(x, tf.constant(labels, tf.int32), tf.float32, interpret=True)
    actual = y, tape.gradient(y, x, tf.constant(d, tf.float32))
    for ours, expected in zip(actual, oracle(logits, labels, d)):
        assert relative_error(ours, expected) < 1e-5


def test_large_logits_do_not_overflow():
    x = tf.constant([[[[300.0, -300.0]]]])
    y = cross_entropy_tpu.resized_cross_entropy(x, tf.constant([[[0, 1]]]), tf.float32, interpret=True)
    np.testing.assert_allclose(y, [[[0.0, 600.0]]])


def test_the_loss_of_a_step_is_the_same(monkeypatch):
    outputs = {name: tf.random.stateless_normal([2, 5, 7, 3], [0, i]) for i, name in enumerate((SEMANTIC, AUXILIARY))}
    targets = {
        "semantic": tf.random.stateless_uniform([2, 17, 25], [0, 2], 0, 4, tf.int32),
        "semantic_weight": tf.random.stateless_uniform([2, 17, 25], [0, 3], 1.0, 3.0),
    }
    spec = DatasetSpec("test", ("a", "b", "c"), (1, 2, 3), (True, False, False), ignore=3)

    def run():
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            values = losses.panoptic_losses(outputs, targets, spec, losses.LossConfig(2), backend="kernel")
        return [*values.values(), *tape.gradient(values["total"], outputs).values()]

    expected, kernels = run(), cross_entropy_tpu.resized_cross_entropy
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    calls, exact = [], functools.partial(kernels, dtype=tf.float32, interpret=True)
    monkeypatch.setattr(cross_entropy_tpu, "resized_cross_entropy", lambda *args: (calls.append(args), exact(*args))[1])
    for ours, theirs in zip(run(), expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5
    assert len(calls) == 2  # one for each output with classes
