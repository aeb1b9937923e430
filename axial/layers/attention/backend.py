"""`attend`, the one entry to all forms of the arithmetic. `device.choose` says where each of them runs."""

import tensorflow as tf

from axial.layers.attention import cpu, reference, xla
from axial.layers.attention.reference import TERMS
from axial.layers.device import choose

_FORMS = {"cpu": cpu.attend, "xla": xla.attend, "reference": reference.attend}
KERNELS = "axial.layers.attention.tpu.layer"
LARGEST_MAP = 2**27  # logits of one term at a time in inference: 0.5 GB


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
