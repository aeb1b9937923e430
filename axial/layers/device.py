"""Which kind of device will run the graph that is being traced."""

import contextlib
import contextvars
import functools
import os
import re

import tensorflow as tf

from axial.errors import InputError
from axial.io import metadata

_PORTABLE = contextvars.ContextVar("portable", default=False)


def on_cpu():
    """True where there is no accelerator. Some operations have one form for CPUs and one for accelerators."""
    return not _PORTABLE.get() and not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def has_tpu():
    """True on a machine with a TPU that TensorFlow has connected to."""
    return bool(tf.config.list_logical_devices("TPU"))


def on_tpu():
    """True in a graph on a machine with a TPU. Eager code runs on the TPU's host and does not count."""
    return not (_PORTABLE.get() or tf.executing_eagerly()) and has_tpu()


@functools.cache
def has_xla():
    """Whether XLA compiles for the device that eager code runs on. tensorflow-tpu has XLA for TPUs, not for CPUs."""
    try:
        with tf.init_scope():
            tf.function(lambda: tf.constant(0), jit_compile=True)()
    except tf.errors.NotFoundError:
        return False
    return True


def is_compiled(wish):
    """Whether XLA is to compile a training step as one program.

    Args:
        wish: 'yes' or 'no'; 'auto' compiles for GPUs and not for CPUs. TPUs compile everything by themselves.

    Raises:
        InputError: it is something else.
    """
    if wish not in ("auto", "yes", "no"):
        raise InputError(f"TrainingConfig.jit_compile = {wish!r}: expected 'auto', 'yes' or 'no'")
    if has_tpu():
        return False
    return bool(tf.config.list_logical_devices("GPU")) if wish == "auto" else wish == "yes"


@functools.cache
def tpu_generation():
    """The number in a TPU's name: 5 of a v5e or a v5p. None where nothing says which TPU this is.

    AXIAL_TPU says it (axial-tpu sets it), or TPU_ACCELERATOR_TYPE, or the metadata of a TPU VM.
    """
    names = os.environ.get("AXIAL_TPU"), os.environ.get("TPU_ACCELERATOR_TYPE")
    name = next(filter(None, names), None) or metadata.tpu_environment().get("ACCELERATOR_TYPE", "")
    found = re.match(r"(?:v|tpu)(\d+)", name)
    return int(found[1]) if found else None


@contextlib.contextmanager
def portable():
    """Graphs that are traced inside have the accelerators' forms, which are made of plain products and sums."""
    token = _PORTABLE.set(True)
    try:
        yield
    finally:
        _PORTABLE.reset(token)


def local_replicas(strategy):
    """Number of a strategy's replicas that this process controls: all, unless there are several workers."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return len(strategy.extended.worker_devices)
    return strategy.num_replicas_in_sync
