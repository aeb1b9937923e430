"""Random numbers in a training step. A resumed run draws the same numbers as an uninterrupted run.

XLA must compile the step in both runs or in neither, because XLA draws different numbers from the same key.
"""

import contextvars

import tensorflow as tf

from axial.errors import InputError
from axial.layers.context import holds
from axial.layers.precision import wide

_source = contextvars.ContextVar("source", default=None)


def seeded(seed, step, replica):
    """A context in which the random numbers of layers depend only on the arguments and on whether XLA compiles.

    Args:
        seed: int.
        step: int64 tensor, the index of the training step.
        replica: int or int32 tensor, the index of the replica.
    """
    key = tf.random.experimental.stateless_fold_in([seed, 2], tf.cast(step, tf.int32))
    key = tf.random.experimental.stateless_fold_in(key, tf.cast(replica, tf.int32))
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=key)
    return holds(_source, {"key": key, "counter": counter, "draws": 0})


def uniform(shape):
    """float32 random numbers in [0, 1). Outside of `seeded`, TensorFlow's global generator draws them."""
    source = _source.get()
    if source is None:
        return tf.random.uniform(shape)
    source["draws"] += 1
    # Each draw has a new key. A new seed would cost 550 more instructions under XLA, half of a Transformer's step.
    key = source["key"] + tf.constant(source["draws"], tf.uint64)
    algorithm = tf.random.Algorithm.AUTO_SELECT.value
    return tf.raw_ops.StatelessRandomUniformV2(shape=shape, key=key, counter=source["counter"], alg=algorithm)


def check_rate(name, rate):
    """Raises InputError unless `rate` is at least 0 and below 1, so that dropout keeps something."""
    if not 0 <= rate < 1:
        raise InputError(f"{name} must be at least 0 and below 1: got {rate}")


def drop_images(x, rate):
    """A float [N, 1, 1, 1] for x [N, h, w, C]: per image 0 with probability `rate`, otherwise 1 / (1 - rate)."""
    return tf.cast(uniform([tf.shape(x)[0], 1, 1, 1]) >= rate, wide(x.dtype)) / (1 - rate)


def dropout(x, rate):
    """x with each element zeroed with probability `rate` and the other elements divided by 1 - rate."""
    return x * tf.cast(uniform(tf.shape(x)) >= rate, x.dtype) * tf.cast(1 / (1 - rate), x.dtype)
