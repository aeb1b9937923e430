"""The kind of device that will run the traced graph, and the backend that computes attention there."""

import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re

import tensorflow as tf
from packaging.version import Version

from axial.errors import InputError, pip_install
from axial.io import metadata
from axial.io.check import check_choice
from axial.io.show import say
from axial.layers.context import holds

# The backends of attention. 'auto' chooses 'cpu' or 'xla' by the device. 'kernel' uses Pallas kernels on a TPU if the
# kernels support the layer. Otherwise 'kernel' equals 'auto', with a warning on a TPU without the extra `kernel`.
# 'reference' computes the equation as it is written.
BACKENDS = ("auto", "cpu", "xla", "kernel", "reference")
OLDEST_LIBTPU = "0.0.24"  # the oldest version with which the kernels compile
OLDEST_TPU = 4  # the oldest generation that the kernels support

_PORTABLE = contextvars.ContextVar("portable", default=False)


def on_cpu():
    """True without an accelerator and outside of `portable`. Some operations have their own implementation for CPUs."""
    return not _PORTABLE.get() and not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def has_tpu():
    """True on a machine with a TPU that TensorFlow has connected to."""
    return bool(tf.config.list_logical_devices("TPU"))


def on_tpu():
    """True in a graph on a machine with a TPU. The result is False in eager code, which runs on the TPU's host."""
    return not (_PORTABLE.get() or tf.executing_eagerly()) and has_tpu()


@functools.cache
def has_xla():
    """Whether XLA compiles for the device of eager code. tensorflow-tpu has XLA for TPUs but not for CPUs."""
    try:
        with tf.init_scope():
            tf.function(lambda: tf.constant(0), jit_compile=True)()
    except tf.errors.NotFoundError:
        return False
    return True


def is_compiled(wish):
    """Whether XLA compiles a train step as one program.

    Args:
        wish: 'yes', 'no', or 'auto' to compile for GPUs but not for CPUs. With a TPU the result is False, because
            TensorFlow always compiles for TPUs.

    Raises:
        InputError: `wish` has another value.
    """
    if wish not in ("auto", "yes", "no"):
        raise InputError(f"TrainingConfig.jit_compile = {wish!r}: expected 'auto', 'yes' or 'no'")
    if has_tpu():
        return False
    return bool(tf.config.list_logical_devices("GPU")) if wish == "auto" else wish == "yes"


def compiled(function, by_xla=True):
    """A `tf.function` of a function of tensors. With `by_xla`, XLA compiles it as one program."""
    return tf.function(function, autograph=False, jit_compile=by_xla or None)


@functools.cache
def tpu_generation():
    """The number in the TPU's name, such as 5 for a v5e or a v5p; None if the name is unknown.

    The name comes from the environment variable AXIAL_TPU, which axial-tpu sets, or TPU_ACCELERATOR_TYPE, or from the
    metadata of a TPU VM.
    """
    names = os.environ.get("AXIAL_TPU"), os.environ.get("TPU_ACCELERATOR_TYPE")
    name = next(filter(None, names), None) or metadata.tpu_environment().get("ACCELERATOR_TYPE", "")
    match = re.match(r"(?:v|tpu)(\d+)", name)
    return int(match[1]) if match else None


def choose(backend, can_use_kernels=lambda: False):
    """The backend that runs in the traced graph, for attention and for all other layers that have TPU kernels.

    No other function chooses a backend.

    Args:
        backend: one of `BACKENDS`.
        can_use_kernels: function that returns whether the kernels support this layer and image. The function may import
            jax, because `choose` calls it only if jax is installed.

    Returns:
        'cpu', 'xla', 'reference' or 'kernel'.

    Raises:
        InputError: the backend is unknown.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "kernel" and on_tpu() and has_kernels() and can_use_kernels():
        return "kernel"
    if backend in ("auto", "kernel"):
        return "cpu" if on_cpu() else "xla"
    return backend


@functools.cache
def has_kernels():
    """Whether jax is installed, and libtpu and the TPU are new enough for the kernels. If not, warns once."""
    lacks = None if importlib.util.find_spec("jax") else "jax is not installed"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # Older releases of libtpu had TensorFlow's version numbers, such as 2.18.0.
        if not Version(OLDEST_LIBTPU) <= Version(version := importlib.metadata.version("libtpu")) < Version("1"):
            lacks = f"libtpu {version} is too old"
    if (tpu_generation() or OLDEST_TPU) < OLDEST_TPU:
        lacks = f"a TPU v{tpu_generation()} is too old"
    if lacks:
        needed = f"{pip_install('kernel')} and libtpu {OLDEST_LIBTPU} or later"
        say(f"backend = 'kernel' needs {needed} ({lacks}); the slower 'xla' takes its place", error=True)
    return not lacks


def import_kernels(name):
    """Imports a module of Pallas kernels."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax only lowers kernels, and must not take the TPU
    return importlib.import_module(name)


def portable():
    """A context in which traced graphs use the implementations for accelerators, which are plain products and sums."""
    return holds(_PORTABLE, True)


def local_replicas(strategy):
    """The number of a strategy's replicas that this process controls: all replicas, except with several workers."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return len(strategy.extended.worker_devices)
    return strategy.num_replicas_in_sync
