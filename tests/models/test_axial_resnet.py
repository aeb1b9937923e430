"""Recomputing in the backward pass changes no number."""

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.recompute import RECOMPUTE
from axial.models.axial_resnet import axial_resnet
from tests.conftest import relative_error


def train(recompute, span):
    """Outputs, gradients and weights after one training step in graph mode."""
    norm = BatchNormConfig(momentum=0.5)
    options = dict(span=span, heads=4, norm=norm, recompute=recompute)
    net = axial_resnet(0.25, (1, 1, 1, 1), "imagenet", 32, **options)
    images = tf.random.stateless_normal([2, 64, 64, 3], [0, 1])
    net(images)
    for i, weight in enumerate(net.weights):
        if weight.name.endswith("kernel:0") or "table" in weight.name:
            weight.assign(tf.random.stateless_normal(weight.shape, [1, i], stddev=weight.shape[-2] ** -0.5))
        elif weight.name.endswith("gamma:0"):  # zero would hide the block's branch
            weight.assign(tf.ones_like(weight))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = net(x, training=True)["res5"]
            loss = tf.reduce_mean(tf.square(y - 1))
        gradients = tape.gradient(loss, [x, *net.trainable_weights])
        return y, [tf.convert_to_tensor(g) for g in gradients]

    y, gradients = step(images)
    return y, gradients, [w.numpy() for w in net.weights if "moving" in w.name]


@pytest.mark.parametrize("span", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_recomputing_changes_no_number(span):
    y, gradients, moving = train("none", span)
    scale = max(np.abs(g).max() for g in gradients)
    for recompute in RECOMPUTE[1:]:
        y2, gradients2, moving2 = train(recompute, span)
        assert relative_error(y2, y) < 1e-5
        for ours, theirs in zip(gradients2, gradients, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * scale, rtol=1e-3)
        for ours, theirs in zip(moving2, moving, strict=True):
            assert relative_error(ours, theirs) < 1e-5


def test_an_unknown_value_is_named():
    with pytest.raises(InputError, match="recompute must be one of none, softmax, block: got 'blocks' .did you mean"):
        axial_resnet(recompute="blocks")
