"""Base classes of all models: a network (backbone and head), its options, its entry in the registry."""

import dataclasses
from typing import Any

import tensorflow as tf

from axial.data.specs import Spec
from axial.errors import InputError
from axial.layers import options
from axial.layers.batch_norm import BatchNormConfig, Norm
from axial.layers.configured import Layer, Model

PHOTOS = ("photos", "float32", "[N, h, w, 3]", "RGB from -1 to 1, a pixel / 127.5 - 1")


@dataclasses.dataclass(frozen=True)
class NetworkOptions:
    """Options of a `Network`, without the options of its backbone."""


class Network(Model):
    """A backbone with a head.

    Args:
        backbone: layer that computes the feature maps for the head.
        num_classes: number of classes, from the `DatasetSpec`.
        norm: `BatchNormConfig`, or None for a folded model. The backbone has the same batch norms.
        options: the subclass's `NetworkOptions`.

    Attributes:
        task: name of the model's task, one of `Task.models`.
        title: the task in words.
        hub: the task's name on Hugging Face's hub; see https://huggingface.co/tasks.
        classes: number of classes for which the paper counts the model's parameters.
        input_row: (name, type, shape, meaning) of the model's input. C is the number of classes.
        maps: (name, shape) of each float32 map that the model returns. h and w are the input's height and width. Empty
            if the model returns no maps.
        spec, photo_scale, predictor: arguments of `know` on a model that `axial.load` returns; None on other models.
    """

    task: str
    title: str
    hub: str
    classes: int
    input_row = PHOTOS
    maps: tuple[tuple[str, str], ...] = ()
    spec = photo_scale = predictor = None
    defaults = NetworkOptions()

    def __init__(self, backbone: Layer, num_classes: int, norm: Norm, options: NetworkOptions, name: str):
        super().__init__(name=name)
        self.backbone, self.num_classes, self.options = backbone, num_classes, options

    def know(self, spec: Spec | None, photo_scale: float | None, predictor: Any = None) -> None:
        """Stores what `axial.load` knows about the model: its classes, the scale of its photos, and its predictor."""
        self.spec, self.photo_scale, self.predictor = spec, photo_scale, predictor

    def __deepcopy__(self, memo: dict) -> "Network":
        """Copies the predictor too, so that the copy of a loaded model can predict."""
        copied = super().__deepcopy__(memo)
        copied.know(self.spec, self.photo_scale, self.predictor and self.predictor.copied(copied))
        return copied

    def __reduce__(self) -> tuple:
        """Supports pickle. Raises InputError if the model has a predictor, which a pickle would lose."""
        if self.predictor:
            raise InputError(f"{self.name}: a pickle forgets how to predict; call axial.load in each process")
        return super().__reduce__()

    @property
    def output_stride(self) -> int:
        """Stride of the backbone's last map, in pixels of the input. An input's sides must not be smaller."""
        return self.backbone.output_stride

    @property
    def side_step(self) -> int:
        """Step between the sides of inputs whose maps are aligned alike. It is also the smallest valid side."""
        return self.output_stride

    @staticmethod
    def signature(size: tuple[int, ...], batch: int = 1) -> Any:
        """`tf.TensorSpec` of the model's input: a batch of photos of `size` (height, width)."""
        return tf.TensorSpec([batch, *size, 3])

    def folding_units(self) -> list[Layer]:
        """The layers that have `folded_weights`. Together they hold every weight that inference needs."""
        return [layer for layer in self.submodules if hasattr(layer, "folded_weights")]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A registered model: the classes of its network and backbone, and their arguments.

    Attributes:
        model: subclass of `Network`.
        backbone: class of the backbone.
        arguments: flat dict of options of the model and the backbone. An option that both classes have applies to both.
    """

    model: type[Any]
    backbone: type[Any]
    arguments: dict

    @classmethod
    def of(cls, model: type[Any], backbone: type[Any], **arguments) -> "Variant":
        """A `Variant` from keyword arguments."""
        return cls(model, backbone, arguments)

    @property
    def classes(self) -> int:
        """Number of classes for which the paper counts the model's parameters."""
        return self.model.classes

    @property
    def task(self) -> str:
        """Name of the model's task."""
        return self.model.task

    def parameters(self) -> list[str]:
        """list of the names of the arguments that the model or its backbone accepts."""
        return sorted({**options.flatten(self.model.defaults), **options.flatten(self.backbone.defaults)})

    def backbone_arguments(self, changes: dict[str, Any]) -> dict[str, Any]:
        """dict from the name of each backbone argument to its value. `changes` override the variant's arguments."""
        return options.flatten(options.replace(self.backbone.defaults, self.arguments | changes))

    def all_arguments(self, changes: dict[str, Any]) -> dict[str, Any]:
        """dict from the name of each argument of model and backbone to its value; see `backbone_arguments`."""
        arguments = options.replace(self.model.defaults, self.arguments | changes)
        return {**self.backbone_arguments(changes), **options.flatten(arguments)}

    def build(self, num_classes: int, norm: Norm, changes: dict[str, Any]) -> "Network":
        """The model, not built yet. `changes` override the variant's arguments."""
        arguments = self.arguments | changes
        backbone = self.backbone(options.replace(self.backbone.defaults, arguments), norm)
        return self.model(backbone, num_classes, norm, options.replace(self.model.defaults, arguments))


@dataclasses.dataclass(frozen=True)
class PublicWeights:
    """How to read the published weights of another implementation.

    Attributes:
        source: name of the implementation.
        names: list of (pattern, replacement), applied in order. The patterns turn the source's weight names into ours,
            or our weight names into the source's.
        models: dict from a model of the source to the name of a registered model. The key is the number of blocks in
            each stage, or (these numbers, width).
        norm: `BatchNormConfig` of the source's training.
        unused: dict from patterns of the source's weight names to the reason why our models do not need these weights.
        arguments: dict of arguments that all of the source's models share and that its files do not record.
    """

    source: str
    names: list
    models: dict
    norm: BatchNormConfig
    unused: dict = dataclasses.field(default_factory=dict)
    arguments: dict = dataclasses.field(default_factory=dict)
