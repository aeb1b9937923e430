"""Content attention by jax's flash kernel, with which layers.py compares ours."""

import numpy as np
import pytest

pytest.importorskip("jax")

import tensorflow as tf

import flash
from axial.layers.batch_norm import BatchNormConfig


def softmax_attention(q, k, v):
    """Of float64 [N, H, L, D]."""
    logits = q @ k.swapaxes(-1, -2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_the_layer_is_projection_attention_and_norms():
    layer = flash.FlashAttention(8, 16, 2, norm=BatchNormConfig(epsilon=1e-12))
    x = np.random.default_rng(0).normal(size=[3, 1, 5, 12])
    y = layer(tf.constant(x, tf.float32))
    kernel = layer.project.kernel.numpy()
    parts = np.split(x[:, 0] @ kernel, [8, 16], -1)
    q, k, v = (part.reshape(3, 5, 2, -1).swapaxes(1, 2) for part in parts)
    expected = softmax_attention(q, k, v).swapaxes(1, 2).reshape(3, 1, 5, 16)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
