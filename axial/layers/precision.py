"""The type of softmax, statistics and heads: float32 under every lower precision, float64 under float64."""

import tensorflow as tf


def wide(dtype):
    """tf.float64 for float64, tf.float32 for every other type."""
    return tf.float64 if tf.as_dtype(dtype) == tf.float64 else tf.float32


def widen(x):
    """x in the type that `wide` names."""
    return tf.cast(x, wide(x.dtype))
