"""Runs jax's Pallas kernels in a TensorFlow graph. This needs the extra `kernel`, which installs jax."""

import functools

import jax
from jax import export
from jax.experimental import jax2tf
from jax.experimental.pallas import tpu as pltpu

from axial.layers import device

FAST_MEMORY = 64 * 2**20  # bytes of fast memory that a kernel may use; a v5e has 128 MiB
FAST_MEMORY_V4 = 16 * 2**20


def compiler_params(*semantics, memory=FAST_MEMORY):
    """Parameters of the TPU's compiler: 'parallel' or 'arbitrary' for each axis of the grid, and the largest memory."""
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=memory)


def on_tensors(function, *static, interpret=False):
    """Turns a function of jax arrays that runs kernels into a function of tensors, without a gradient.

    TensorFlow calls the function as an `XlaCallModule`. Many layers of a model have the same kernels, so jax lowers a
    function only once per set of shapes.

    Args:
        function: function of `static`, `interpret` and jax arrays.
        static: the first arguments of `function`, which are hashable.
        interpret: whether jax interprets the kernels on a CPU, slowly, instead of running them on a TPU.
    """

    def run(*tensors):
        flat, structure = jax.tree.flatten(tensors)
        signature = structure, tuple((tuple(x.shape), x.dtype.name) for x in flat)
        return jax2tf.convert(
            _lower(function, static, interpret, signature).call,
            with_gradient=False,
            native_serialization_platforms=(_platform(interpret),),
            # Without this setting, tracing for a TPU fails on a machine without a TPU.
            native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
        )(*tensors)

    return run


def tpu_generation():
    """The generation of the TPU; 5 if the generation is unknown."""
    return device.tpu_generation() or 5


@functools.cache
def _lower(function, static, interpret, signature):
    """The `jax.export.Exported` of a function. `signature` has the structure, shapes and dtypes of its arrays."""
    structure, shapes = signature
    arrays = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    compiled = jax.jit(functools.partial(function, *static, interpret))
    checks = (export.DisabledSafetyCheck.platform(),)
    return export.export(compiled, platforms=(_platform(interpret),), disabled_checks=checks)(*arrays)


def _platform(interpret):
    return "cpu" if interpret else "tpu"
