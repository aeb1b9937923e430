"""A registered model with the weights of a file; `axial.load` is over it."""

from axial.errors import InputError
from axial.io.read import read_json
from axial.io.schemas import WeightsCard
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.configured import Model
from axial.models.registry import find_variant
from axial.weights.interchange import assign_tensors, built, built_of_card, read_safetensors
from axial.weights.restore import find_weights, restore_model
from axial.weights.source import CARD, SUFFIX, resolve


def load_weights(what, name=None, *, num_classes=None, **arguments):
    """A registered model, built, with the weights of a path.

    Args:
        what: of weights; see `resolve`.
        name: of `registry.VARIANTS`. A card beside the weights has it too; a checkpoint without a card needs it.
        num_classes: for a checkpoint without a card. By default ImageNet's 1000 or Cityscapes' 19.
        **arguments: of the model; see `build_model`. They replace those of the card.

    Returns:
        (the model, its `WeightsCard` or None).

    Raises:
        InputError: there are no weights at the path, they are damaged, or they are those of another model.
    """
    path, card, arrays, fill = _read(what)
    if card:
        check_asked(path, card.model, card.num_classes, (name, num_classes))
        model = built_of_card(card, path, arguments, arrays=arrays)
    elif name:
        model = built(name, num_classes or find_variant(name).classes, BatchNormConfig(), arguments)
    else:
        raise InputError(f"{path}: has no {CARD} beside it that names its model; say which, as model='NAME'")
    fill(model)
    return model, card


def read_weights(what):
    """The card of weights, and a function that gives them to a model.

    Args:
        what: of weights; see `resolve`.

    Returns:
        (`WeightsCard`, or None for a checkpoint without one; function of a built model). The function raises InputError
        unless there is every weight of the model, in its shape.

    Raises:
        InputError: there are no weights at the path, they are damaged, or some of them are random.
    """
    path, card, _, fill = _read(what)
    if card and card.unfilled:
        raise InputError(f"{path}: {len(card.unfilled)} weights are random, as the source has none: {card.unfilled[0]}")
    return card, fill


def _read(what):
    """(path, `WeightsCard` or None, arrays of a safetensors file or None, function that gives them to a model)."""
    source = resolve(what)
    (file,), path = find_weights(source), source.path
    if file.endswith(SUFFIX):
        card, arrays = read_safetensors(file)
        return path, card, arrays, lambda model: assign_tensors(model, path, arrays)
    card = read_json(source.card, WeightsCard)[1] if source.card else None
    return path, card, None, lambda model: restore_model(model, file)


def check_asked(path, model, num_classes, asked):
    """Raises InputError unless a model with weights is the one that is asked for.

    Args:
        path: of the weights.
        model, num_classes: name of the model and number of its classes.
        asked: (name, number of classes); None for any.
    """
    if asked[0] not in (None, model):
        find_variant(asked[0])
        raise InputError(f"{path}: holds {model!r}, not {asked[0]!r}")
    if asked[1] not in (None, num_classes):
        raise InputError(f"{path}: has {num_classes} classes, not {asked[1]}")


class Features(Model):
    """A model's backbone alone. It returns a dict of maps 'res2' to 'res5', at `strides`.

    A backbone with output stride 16 has this stride twice, one with output stride 8 three times.
    """

    def __init__(self, backbone, name="features", **kwargs):
        super().__init__(name=name, **{"dtype": backbone.dtype_policy, **kwargs})
        self.backbone = backbone

    @property
    def strides(self):
        """dict from the names of the maps to their strides."""
        last = self.backbone.output_stride
        return {"res2": 4, "res3": 8, "res4": min(last, 16), "res5": last}

    def call(self, images, training=False):
        maps = self.backbone(images, training=training and self.trainable)
        return {name: maps[name] for name in self.strides}
