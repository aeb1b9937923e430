"""Attention masks: hidden keys get exactly weight 0."""

import contextvars

import numpy as np
import tensorflow as tf

from axial.layers import device

# Training, and inference on a TPU, add this number to hidden logits. The addition needs no extra pass over the map. The
# number absorbs every logit of magnitude below 1e22, so the weight is exactly 0. The sum of the masks of rows, columns
# and padding is finite in bfloat16, so a row with only hidden keys gives no NaN.
MASKED = -1e30
STAYS = contextvars.ContextVar("stays", default=False)  # whether the traced graph stays in this process


def adds(training):
    """Whether `hide` adds `MASKED`: in training, on a TPU, if `training` is a tensor, or in a graph that `STAYS`."""
    return tf.is_tensor(training) or training or device.on_tpu() or STAYS.get()


def mask(visible, dtype):
    """0 where a key is visible, `MASKED` elsewhere."""
    where = np.where if isinstance(visible, np.ndarray) else tf.where  # for an array, the graph holds only the result
    return tf.cast(where(visible, 0.0, MASKED), dtype)


def hide(logits, visible, training=False):
    """The logits for a softmax over the visible keys. All other keys get exactly weight 0.

    Training, TPUs and predictions of this process add `MASKED`. Other inference must not add it, because its graph may
    go to a file: int8 files have one quantisation scale for all logits, and the smallest float16 is -65504. Such
    inference shifts each row so that the largest visible logit is 0. A hidden logit becomes the largest whole number
    whose exponential is 0 in the logits' precision: -104 in float32 and -746 in float64. The shift suits logits of any
    size. A row without a visible key has equal weights.

    Args:
        logits: [..., M] over M keys.
        visible: bool array or tensor, whose shape broadcasts to the logits' shape.
        training: whether the graph trains. A tensor counts as true.
    """
    if adds(training):
        return logits + mask(visible, logits.dtype)
    least = tf.reduce_min(logits, -1, keepdims=True)
    # Softmax ignores a constant shift, so its gradient is zero.
    largest = tf.stop_gradient(tf.reduce_max(tf.where(visible, logits, least), -1, keepdims=True))
    nothing = np.floor(np.log(np.finfo(logits.dtype.as_numpy_dtype).smallest_subnormal) - np.log(2))
    return tf.where(visible, logits - largest, tf.constant(nothing, logits.dtype))
