"""Batch norms folded away: the same function of the image, with none left."""

import tensorflow as tf

from axial.models.registry import build_model


def fold(task, model, **changes):
    """A float32 model without batch norms, equal to `model` in inference up to rounding.

    A convolution takes the scale of its batch norm into its kernel and the shift as its bias;
    `AxialAttention.folded_weights` says what becomes of attention.

    Args:
        task: `PanopticTask` that made the model.
        model: its model.
        **changes: with which `build_model` made it.
    """
    twin = build_model(task.model, task.spec.num_classes, norm=None, **changes)
    twin(tf.zeros([1, *task.canvas, 3]))
    for folded, source in zip(_units(twin), _units(model), strict=True):
        for weight, value in zip(folded.weights, source.folded_weights(), strict=True):
            weight.assign(value)
    return twin


def _units(model):
    """The layers that know their folded weights; together they hold every weight."""
    return [layer for layer in model.submodules if hasattr(layer, "folded_weights")]
