"""Pallas kernels of jax in a graph of TensorFlow. It needs the extra `kernel`."""

import functools

import jax
from jax import export
from jax.experimental import jax2tf

from axial.layers import device

FAST_MEMORY = 64 * 2**20  # bytes that a kernel may use; a v5e has 128 MiB
FAST_MEMORY_V4 = 16 * 2**20


def on_tensors(function, *static, interpret=False):
    """A function of tensors from one of jax arrays that runs kernels. It has no gradient.

    TensorFlow calls it as an `XlaCallModule`. A model has many layers with the same kernels, so jax lowers a function
    once for each set of shapes.

    Args:
        function: of `static`, `interpret` and jax arrays.
        static: hashable arguments.
        interpret: whether the kernels are interpreted on a CPU, slowly, and not run on a TPU.
    """

    def run(*tensors):
        flat, structure = jax.tree.flatten(tensors)
        signature = structure, tuple((tuple(x.shape), x.dtype.name) for x in flat)
        return jax2tf.convert(
            _lower(function, static, interpret, signature).call,
            with_gradient=False,
            native_serialization_platforms=(_platform(interpret),),
            # Without this, tracing for a TPU on a machine that has none would be refused.
            native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
        )(*tensors)

    return run


def tpu_generation():
    """Of the TPU; where nothing says it, a newer one than a v4."""
    return device.tpu_generation() or 5


@functools.cache
def _lower(function, static, interpret, signature):
    """`jax.export.Exported` of a function. `signature`: how its arrays are nested, and shape and dtype of each."""
    structure, shapes = signature
    arrays = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    compiled = jax.jit(functools.partial(function, *static, interpret))
    checks = (export.DisabledSafetyCheck.platform(),)
    return export.export(compiled, platforms=(_platform(interpret),), disabled_checks=checks)(*arrays)


def _platform(interpret):
    return "cpu" if interpret else "tpu"
