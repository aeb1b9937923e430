"""Which kind of device will run the graph that is being traced, and in which form."""

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

# What computes attention. 'auto' is 'cpu' or 'xla', by the device. 'kernel' is Pallas kernels on a TPU
# wherever they can serve, and 'auto' everywhere else, with a warning if a TPU lacks the extra `kernel`. 'reference' is
# the plain equation.
BACKENDS = ("auto", "cpu", "xla", "kernel", "reference")
OLDEST_LIBTPU = "0.0.24"  # that is known to compile the kernels
OLDEST_TPU = 4  # that the kernels are compiled for

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


def compiled(function, by_xla=True):
    """A `tf.function` of a function of tensors, which XLA compiles as one program; see `tf.function`."""
    return tf.function(function, autograph=False, jit_compile=by_xla or None)


@functools.cache
def tpu_generation():
    """The number in a TPU's name: 5 of a v5e or a v5p. None where nothing says which TPU this is.

    AXIAL_TPU says it (axial-tpu sets it), or TPU_ACCELERATOR_TYPE, or the metadata of a TPU VM.
    """
    names = os.environ.get("AXIAL_TPU"), os.environ.get("TPU_ACCELERATOR_TYPE")
    name = next(filter(None, names), None) or metadata.tpu_environment().get("ACCELERATOR_TYPE", "")
    match = re.match(r"(?:v|tpu)(\d+)", name)
    return int(match[1]) if match else None


def choose(backend, can_use_kernels=lambda: False):
    """The form that runs in the graph being traced, of attention and of whatever else has kernels for a TPU.

    This is the one place that decides.

    Args:
        backend: of `BACKENDS`.
        can_use_kernels: function that says whether the kernels can serve this layer and image. It is called only where
            jax is there, which it may import.

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
    """Whether jax, which the kernels are written in, is there, and no libtpu or TPU is too old. If not, warns once."""
    lacks = None if importlib.util.find_spec("jax") else "jax is not installed"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # Before 0.0 its versions were TensorFlow's: 2.18.0.
        if not Version(OLDEST_LIBTPU) <= Version(version := importlib.metadata.version("libtpu")) < Version("1"):
            lacks = f"libtpu {version} is too old"
    if (tpu_generation() or OLDEST_TPU) < OLDEST_TPU:
        lacks = f"a TPU v{tpu_generation()} is too old"
    if lacks:
        say(
            f"backend = 'kernel' needs {pip_install('kernel')} and libtpu {OLDEST_LIBTPU} or later ({lacks}); the "
            "slower form 'xla' runs",
            error=True,
        )
    return not lacks


def import_kernels(name):
    """A module of Pallas kernels."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax only lowers: it must not take a TPU that TensorFlow uses
    return importlib.import_module(name)


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
