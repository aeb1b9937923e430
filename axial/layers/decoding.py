"""What layers that decode a sequence one token at a time share, and a check of kernels and windows."""

import tensorflow as tf

from axial.errors import InputError


def check_odd(name, value):
    """Raises InputError unless `value` is an odd number of at least 1."""
    if value < 1 or value % 2 == 0:
        raise InputError(f"{name} = {value}: expected an odd number, so that a query is at its middle")


def check_index(index, length):
    """Raises InputError unless a cache of `length` tokens holds the token at `index`. A tensor is not checked."""
    if isinstance(index, int) and not 0 <= index < length:
        raise InputError(f"index = {index}: expected fewer tokens than the {length} of the cache")


def written(cache, new, index):
    """A cache [B, L, ...] with `new` [B, 1, ...] at `index`."""
    here = tf.cast(tf.reshape(tf.one_hot(index, cache.shape[1]), [1, -1] + [1] * (cache.shape.rank - 2)), tf.bool)
    return tf.where(here, new, cache)
