"""`attend`, the one entry to all forms of the arithmetic, and `choose`, which says where each of them runs."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os

import tensorflow as tf
from packaging.version import Version

from axial.errors import pip_install
from axial.io.check import check_choice
from axial.io.show import say
from axial.layers import device
from axial.layers.attention import cpu, reference, xla
from axial.layers.attention.reference import TERMS

# What computes attention. 'auto' is 'cpu' or 'xla', by the device. 'kernel' is the Pallas kernels of `tpu/` on a TPU
# wherever they can serve, and 'auto' everywhere else, with a warning if a TPU lacks the extra `kernel`. 'reference' is
# the plain equation.
BACKENDS = ("auto", "cpu", "xla", "kernel", "reference")

_FORMS = {"cpu": cpu.attend, "xla": xla.attend, "reference": reference.attend}
KERNELS = "axial.layers.attention.tpu.layer"
OLDEST_LIBTPU = "0.0.24"  # that is known to compile the kernels
OLDEST_TPU = 4  # that the kernels are compiled for
LARGEST_MAP = 2**27  # logits of one term at a time in inference: 0.5 GB


def choose(backend, can_use_kernels=lambda: False):
    """The form that runs in the graph being traced: 'cpu', 'xla', 'reference' or 'kernel'.

    This is the one place that decides.

    Args:
        backend: of `BACKENDS`.
        can_use_kernels: function that says whether the kernels can serve this layer and image. It is called only where
            jax is there, which it may import.

    Raises:
        InputError: the backend is unknown.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "kernel" and device.on_tpu() and has_kernels() and can_use_kernels():
        return "kernel"
    if backend in ("auto", "kernel"):
        return "cpu" if device.on_cpu() else "xla"
    return backend


@functools.cache
def has_kernels():
    """Whether jax, which the kernels are written in, is there, and no libtpu or TPU is too old. If not, warns once."""
    lacks = None if importlib.util.find_spec("jax") else "jax is not installed"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # Before 0.0 its versions were TensorFlow's: 2.18.0.
        if not Version(OLDEST_LIBTPU) <= Version(version := importlib.metadata.version("libtpu")) < Version("1"):
            lacks = f"libtpu {version} is too old"
    if (device.tpu_generation() or OLDEST_TPU) < OLDEST_TPU:
        lacks = f"a TPU v{device.tpu_generation()} is too old"
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


def attend(q, k, v, tables, *, windows, scales, heads, terms=TERMS, recompute="none", training=False, backend="auto"):
    """Position-sensitive attention (Axial-DeepLab, Eq. 3 and 4). Arguments and result: see `reference.attend`.

    In inference, if the logits of all lines would exceed `LARGEST_MAP`, the lines are computed in parts, one part after
    the other. This needs a static number of images.

    Args:
        recompute: 'softmax' recomputes the softmax in the backward pass; the other values of `RECOMPUTE` keep it.
        training: see `hide`.
        backend: of `BACKENDS`.

    Raises:
        InputError: the backend is unknown.
    """
    form = _FORMS[choose(backend)]

    def run(q, k, v, windows):
        options = dict(scales=scales, heads=heads, terms=terms, recompute=recompute, training=training)
        return form(q, k, v, tables, windows=windows, **options)

    if callable(scales) or q.shape[0] is None:
        return run(q, k, v, windows)
    lines = q.shape[0] * windows.rows
    parts = -(-lines * heads * windows.blocks * windows.queries * windows.keys // LARGEST_MAP)
    if parts <= 1:
        return run(q, k, v, windows)
    size = -(-lines // parts)
    parts = -(-lines // size)

    def cut(x):
        x = tf.pad(windows.split_rows(x), [[0, parts * size - lines], [0, 0], [0, 0], [0, 0]])
        return tf.reshape(x, [parts, size, *x.shape[1:]])

    def run_part(x):
        return [y for y in run(*x, windows.one_row()) if y is not None]

    inputs = cut(q), cut(k), cut(v)
    signature = [tf.TensorSpec(inputs[2].shape[1:], v.dtype)] * (1 + ("value" in tables))
    outputs = tf.map_fn(run_part, inputs, parallel_iterations=1, fn_output_signature=signature)
    outputs = [windows.join_rows(tf.reshape(y, [-1, *y.shape[2:]])[:lines]) for y in outputs]
    return (*outputs, None)[:2]
