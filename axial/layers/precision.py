"""The dtype of softmax, statistics and prediction heads: float64 if layers compute in float64, otherwise float32."""

import tensorflow as tf


def wide(dtype):
    """tf.float64 for float64, tf.float32 for every other dtype."""
    return tf.float64 if tf.as_dtype(dtype) == tf.float64 else tf.float32


def widen(x):
    """x in the dtype that `wide` returns."""
    return tf.cast(x, wide(x.dtype))
