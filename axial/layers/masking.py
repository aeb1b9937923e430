"""Masks of attention: how keys that a query does not see get weight 0."""

import numpy as np
import tensorflow as tf

from axial.layers import device

# A mask that is added in training and on a TPU. It costs no pass over the map. It absorbs every logit of magnitude
# below 1e22, so the weight of such a key is exactly 0. It stays finite in bfloat16 and where masks of rows, columns
# and padding add up, so a row of hidden keys alone gives no NaN.
MASKED = -1e30


def adds(training):
    """Whether `hide` adds `MASKED`. A tensor counts as true."""
    return tf.is_tensor(training) or training or device.on_tpu()


def mask(visible, dtype):
    """0 where a key is visible, `MASKED` elsewhere."""
    where = np.where if isinstance(visible, np.ndarray) else tf.where  # of an array, the graph has the result alone
    return tf.cast(where(visible, 0.0, MASKED), dtype)


def hide(logits, visible, training=False):
    """The logits for a softmax over the visible keys: the weights of all others are exactly 0.

    Training adds `MASKED`. Inference elsewhere than on a TPU must not: files of 8 bits have one scale for all logits,
    and float16 ends at -65504. There the largest visible logit of each row becomes 0, and an invisible key gets the
    first whole number whose exponential is 0 in the logits' precision: -104 in float32, -746 in float64. So it does not
    matter how large the logits are. A row without a visible key has equal weights.

    Args:
        logits: [..., M], of M keys.
        visible: bool, array or tensor, whose shape broadcasts to that of the logits.
        training: whether the graph trains; a tensor counts as true.
    """
    if adds(training):
        return logits + mask(visible, logits.dtype)
    least = tf.reduce_min(logits, -1, keepdims=True)
    # A softmax does not depend on what is subtracted, so nothing is learned through it.
    largest = tf.stop_gradient(tf.reduce_max(tf.where(visible, logits, least), -1, keepdims=True))
    nothing = np.floor(np.log(np.finfo(logits.dtype.as_numpy_dtype).smallest_subnormal) - np.log(2))
    return tf.where(visible, logits - largest, tf.constant(nothing, logits.dtype))
