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
    for folded, source in zip(_units(twin), _units(model), strict=True):
        for weight, value in zip(folded.weights, source.folded_weights(), strict=True):
            weight.assign(value)
    return twin


def _units(model):
    """The layers that have `folded_weights`, or a model that has. Together they hold every weight of inference."""
    if hasattr(model, "folded_weights"):
        return [model]
    auxiliary = getattr(model, "auxiliary_head", None)
    unused = [] if auxiliary is None else [id(layer) for layer in auxiliary.submodules]
    layers = (layer for layer in model.submodules if id(layer) not in unused)
    return [layer for layer in layers if hasattr(layer, "folded_weights")]
