"""Folding: turns a model into one without batch norms that computes the same."""


def fold(task, model):
    """A float32 model without batch norms that equals `model` in inference up to rounding.

    The scale of a batch norm goes into the kernel of its convolution, and its shift becomes a bias.
    `Attention.folded_weights` explains how attention is folded.

    Args:
        task: the task that made the model.
        model: its model.
    """
    twin = task.build_model(folded=True)
    for folded, source in zip(twin.folding_units(), model.folding_units(), strict=True):
        for weight, value in zip(folded.weights, source.folded_weights(), strict=True):
            weight.assign(value)
    return twin
