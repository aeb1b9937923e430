"""Pallas kernels of jax in a graph of TensorFlow. It needs the extra `kernel`."""

from jax.experimental import jax2tf


def on_tensors(function, interpret=False, with_gradient=False):
    """A function of tensors from one of jax arrays that runs kernels.

    Args:
        function: of jax arrays. It is lowered while a step is traced, and TensorFlow calls it as an `XlaCallModule`.
        interpret: whether the kernels are interpreted on a CPU, slowly, and not run on a TPU.
        with_gradient: whether jax differentiates the function.
    """
    return jax2tf.convert(
        function,
        with_gradient=with_gradient,
        native_serialization_platforms=("cpu" if interpret else "tpu",),
        # Without this, tracing for a TPU on a machine that has none would be refused.
        native_serialization_disabled_checks=(jax2tf.DisabledSafetyCheck.platform(),),
    )
