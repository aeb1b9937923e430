"""Attention without positions, by jax's flash attention kernel: the TPU baseline for position-sensitive attention.

This module needs the extra `kernel`. layers.py compiles the layer. Off the TPU, the layer computes plain attention.
"""

import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax only lowers programs, and must leave the TPU to TensorFlow
import jax.numpy as jnp
import tensorflow as tf
import tf_keras as keras
from jax.experimental import jax2tf
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, SegmentIds, flash_attention

from axial.layers import device
from axial.layers.batch_norm import BatchNorm

LANES = 128


class FlashAttention(keras.layers.Layer):
    """Attention without positions along the width: projection, batch norm, flash attention, batch norm.

    The projection has as many channels as in `AxialAttention`. The kernel requires as many key channels as value
    channels, and a length that is a multiple of 128. Zeros pad both. A second segment id masks padded positions.

    Args:
        key_channels, value_channels: channels of all heads together.
        heads: number of heads.
        norm: `BatchNormConfig`.

    Shapes: [N, 1, L, C] -> [N, 1, L, value_channels].
    """

    def __init__(self, key_channels, value_channels, heads, norm, **kwargs):
        super().__init__(**kwargs)
        self.sizes, self.heads = (key_channels, key_channels, value_channels), heads
        self.project = keras.layers.Dense(sum(self.sizes), use_bias=False, dtype=self.dtype_policy)
        self.norms = [BatchNorm(norm, dtype=self.dtype_policy) for _ in range(2)]

    def call(self, x, training=False):
        length, most = x.shape[2], -(-x.shape[2] // LANES) * LANES
        tensors = tf.split(self.norms[0](self.project(x), training=training), self.sizes, -1)
        deepest = max(self.sizes) // self.heads

        def split_heads(tensor):
            tensor = tf.reshape(tensor, [-1, length, self.heads, tensor.shape[-1] // self.heads])
            tensor = tf.pad(tensor, [[0, 0], [0, most - length], [0, 0], [0, deepest - tensor.shape[-1]]])
            return tf.transpose(tensor, [0, 2, 1, 3])

        q, k, v = map(split_heads, tensors)
        if device.on_tpu():
            y = jax2tf.convert(
                functools.partial(_attend, length),
                native_serialization_platforms=("tpu",),
                native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
            )(q, k, v)
        else:
            y = tf.matmul(tf.nn.softmax(tf.matmul(q, k[:, :, :length], transpose_b=True)), v[:, :, :length])
        y = tf.transpose(y, [0, 2, 1, 3])[:, :length, :, : self.sizes[2] // self.heads]
        return self.norms[1](tf.reshape(y, [-1, 1, length, self.sizes[2]]), training=training)


def _attend(length, q, k, v):
    """Returns flash attention of q, k, v [N, H, M, D] over the first `length` of M positions.

    Each program of the kernel's grid computes one line and one head.
    """
    lines, _, most = q.shape[:3]
    sizes = {"block_b": 1} | {name: most for name in BlockSizes.__dataclass_fields__ if name != "block_b"}
    segments = jnp.broadcast_to(jnp.arange(most) >= length, [lines, most]).astype(jnp.int32)
    ids = SegmentIds(segments, segments) if most > length else None
    return flash_attention(q, k, v, segment_ids=ids, block_sizes=BlockSizes(**sizes))
