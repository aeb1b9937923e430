"""Helpers for sequence layers: caches for decoding, key masks, and checks of arguments."""

import functools
from typing import TypeAlias

import tensorflow as tf

from axial.errors import InputError

Mask: TypeAlias = tf.Tensor | None  # bool, False for padding; None if nothing is padding


def check_odd(name, value):
    """Raises InputError unless `value` is an odd number of at least 1."""
    if value < 1 or value % 2 == 0:
        raise InputError(f"{name} = {value}: expected an odd number, so that a query is at its centre")


def check_axes(axes, causal):
    """Raises InputError if `axes` is neither 1 (sequences) nor 2 (maps), or if a layer of maps is causal."""
    if axes not in (1, 2):
        raise InputError(f"axes = {axes}: expected 1 for sequences or 2 for maps")
    if causal and axes == 2:
        raise InputError("causal = True: expected axes = 1, because the pixels of a map have no order")


def joined_masks(*masks):
    """The logical and of the masks that are not None; None if all are None."""
    masks = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
    return functools.reduce(tf.logical_and, masks) if masks else None


def check_index(index, length):
    """Raises InputError if `index` is an int outside a cache of `length` tokens. A tensor `index` is not checked."""
    if isinstance(index, int) and not 0 <= index < length:
        raise InputError(f"index = {index}: expected fewer tokens than the {length} of the cache")


def written(cache, new, index, axis=1):
    """The cache after `new`, of length 1 along the axis of tokens, is written at `index`. Index -1 writes nothing."""
    here = tf.cast(tf.one_hot(index, cache.shape[axis]), tf.bool)
    return tf.where(tf.reshape(here, [-1, *[1] * (cache.shape.rank - 1 - axis)]), new, cache)
