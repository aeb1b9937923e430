"""Rematerialisation (gradient checkpointing): the backward pass recomputes activations that are not stored."""

import contextvars

import tensorflow as tf

from axial.layers.context import holds

# What the backward pass recomputes: nothing, the softmax of every attention layer, or whole residual blocks.
RECOMPUTE = ("none", "softmax", "block")

_kept = contextvars.ContextVar("kept", default=False)


def are_statistics_kept():
    """Whether the context `statistics_kept` is active."""
    return _kept.get()


def statistics_kept():
    """A context in which training does not update moving statistics."""
    return holds(_kept, True)


def rematerialised(function, *inputs):
    """function(*inputs). The forward pass stores only the inputs, and the backward pass calls the function again.

    Only the forward pass updates moving statistics. Tensors over which `function` closes get no gradient. Variables do
    get gradients.
    """
    calls, scope = [], tf.get_current_name_scope()

    def run(*inputs):
        calls.append(len(calls))
        kept = holds(_kept, _kept.get() or calls[-1] > 0)
        with kept, tf.name_scope(f"{scope}/" if scope else ""):  # the backward pass has another scope
            return function(*inputs)

    return tf.recompute_grad(run)(*inputs)
