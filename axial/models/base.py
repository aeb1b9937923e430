"""What every model of the registry has: a backbone, a head, what people and commands need to know of them, its line."""

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
    """Options of a `Network`, beside those of its backbone."""


class Network(Model):
    """A backbone with a head.

    Args:
        backbone: layer from the input to the maps that the head takes.
        num_classes: from the `DatasetSpec`.
        norm: `BatchNormConfig`, or None (folded); the same as the backbone's.
        options: `NetworkOptions` of the subclass.

    Attributes:
        task: name of what the model is for, as `Task.models` has it.
        title: the same in words.
        hub: the same as Hugging Face's hub names it; see https://huggingface.co/tasks.
        classes: number of classes with which the paper counts the model.
        input_row: (name, type, shape, meaning) of what the model takes. C is the number of classes.
        maps: (name, shape) of each map that it returns, float32. h and w are sides of the input. Empty where it returns
            something else.
        spec, photo_scale, predictor: of a model of `axial.load`; see there. `know` sets them.
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
        """Keeps what `axial.load` knows of the model: its classes, the scale of its photos, and what predicts."""
        self.spec, self.photo_scale, self.predictor = spec, photo_scale, predictor

    def __deepcopy__(self, memo: dict) -> "Network":
        """A copy of a model of `axial.load` predicts as well."""
        copied = super().__deepcopy__(memo)
        copied.know(self.spec, self.photo_scale, self.predictor and self.predictor.copied(copied))
        return copied

    def __reduce__(self) -> tuple:
        """What pickle stores. Raises InputError for a model that would forget how it predicts."""
        if self.predictor:
            raise InputError(f"{self.name}: a pickle forgets how to predict; call axial.load in each process")
        return super().__reduce__()

    @property
    def output_stride(self) -> int:
        """The factor between the input and the backbone's last map. No side of an input may be smaller."""
        return self.backbone.output_stride

    @staticmethod
    def signature(size: tuple[int, ...], batch: int = 1) -> Any:
        """`tf.TensorSpec`s of the model's input: photos of `size`, (height, width)."""
        return tf.TensorSpec([batch, *size, 3])

    def folding_units(self) -> list[Layer]:
        """The layers that have `folded_weights`. Together they hold every weight of inference."""
        return [layer for layer in self.submodules if hasattr(layer, "folded_weights")]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A registered model.

    Attributes:
        model: class of the model, a `Network`, which takes a backbone and the number of classes.
        backbone: class of the backbone.
        arguments: flat dict of the options of both. An option that both have goes to both.
    """

    model: type[Any]
    backbone: type[Any]
    arguments: dict

    @classmethod
    def of(cls, model: type[Any], backbone: type[Any], **arguments) -> "Variant":
        """The variant with these arguments."""
        return cls(model, backbone, arguments)

    @property
    def classes(self) -> int:
        """Number of classes with which the paper counts the model, as its class says."""
        return self.model.classes

    @property
    def task(self) -> str:
        """Name of the task that the model is for, as its class says."""
        return self.model.task

    def parameters(self) -> list[str]:
        """Names of the arguments that the model or its backbone takes."""
        return sorted({**options.flatten(self.model.defaults), **options.flatten(self.backbone.defaults)})

    def backbone_arguments(self, changes: dict[str, Any]) -> dict[str, Any]:
        """dict of all arguments of the backbone. `changes` replace those of the variant."""
        return options.flatten(options.replace(self.backbone.defaults, self.arguments | changes))

    def all_arguments(self, changes: dict[str, Any]) -> dict[str, Any]:
        """dict of all arguments of model and backbone. `changes` replace those of the variant."""
        arguments = options.replace(self.model.defaults, self.arguments | changes)
        return {**self.backbone_arguments(changes), **options.flatten(arguments)}

    def build(self, num_classes: int, norm: Norm, changes: dict[str, Any]) -> "Network":
        """The model, not built yet. `changes` replace arguments of the variant."""
        arguments = self.arguments | changes
        backbone = self.backbone(options.replace(self.backbone.defaults, arguments), norm)
        return self.model(backbone, num_classes, norm, options.replace(self.model.defaults, arguments))


@dataclasses.dataclass(frozen=True)
class PublicWeights:
    """Weights of another implementation, which a home's `public_weights.py` lists.

    Attributes:
        source: its name.
        names: list of (pattern, replacement), which lead one after the other from their names to ours, or back.
        models: dict from what tells their models apart, the numbers of blocks, to names of registered models.
        norm: `BatchNormConfig` that they were trained with.
        unused: dict from patterns of their names to why our models need no value for them.
        arguments: dict of arguments of all of these models, which the files do not tell.
    """

    source: str
    names: list
    models: dict
    norm: BatchNormConfig
    unused: dict = dataclasses.field(default_factory=dict)
    arguments: dict = dataclasses.field(default_factory=dict)
