"""Rematerialisation (gradient checkpointing): the backward pass computes again what the forward pass has not kept."""

import contextlib
import contextvars

import tensorflow as tf

# What the backward pass recomputes: nothing, the softmax of every attention layer, or whole residual blocks.
RECOMPUTE = ("none", "softmax", "block")

_kept = contextvars.ContextVar("kept", default=False)


def are_statistics_kept():
    """Whether this is within `statistics_kept`."""
    return _kept.get()


@contextlib.contextmanager
def statistics_kept():
    """Within this context, layers in training leave their moving statistics as they are."""
    token = _kept.set(True)
    try:
        yield
    finally:
        _kept.reset(token)


def rematerialised(function, *inputs):
    """function(*inputs). Only the inputs are kept for the backward pass, which calls the function again.

    Moving statistics are updated in the forward pass only. Of what `function` closes over, only variables get a
    gradient.
    """
    calls, scope = [], tf.get_current_name_scope()

    def run(*inputs):
        calls.append(len(calls))
        once = statistics_kept() if calls[-1] > 0 else contextlib.nullcontext()
        with once, tf.name_scope(f"{scope}/" if scope else ""):  # the backward pass has another scope
            return function(*inputs)

    return tf.recompute_grad(run)(*inputs)
