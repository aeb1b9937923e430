"""The registry of models: all variants by name, and the functions and the configuration that build them."""

import dataclasses
import importlib
import typing

import tensorflow as tf

from axial.errors import InputError, named, nearest
from axial.io.check import BelowOne, Checked, Name, shortened
from axial.io.read import first_line
from axial.layers import device
from axial.layers.batch_norm import BatchNormConfig, Norm
from axial.layers.device import BACKENDS
from axial.layers.rematerialisation import RECOMPUTE
from axial.models.attended_resnet.network import AttendedResNet
from axial.models.base import Network, Variant
from axial.models.names import VARIANTS_OF, check_model_name
from axial.models.resnet.network import ConvResNet

VARIANTS: dict[str, Variant] = {}
for _folder in VARIANTS_OF:
    VARIANTS |= importlib.import_module(f"axial.models.{_folder}.variants").VARIANTS
# Backbone arguments that change neither the names nor the shapes of weights.
FREE = ("output_stride", "span", "whole_up_to_span", "drop_path", "recompute", "backend")
# Maps the class of a backbone with added modules, which start as the identity, to the class without these modules.
PLAIN: dict[type, type] = {AttendedResNet: ConvResNet}


def find_variant(name: str, where: str = "") -> Variant:
    """The `Variant` of a name. Raises InputError if the name is unknown. The error's message starts with `where`."""
    check_model_name(name, VARIANTS, where)
    return VARIANTS[name]


def zeros(signature: typing.Any) -> typing.Any:
    """Zeros in the structure of `tf.TensorSpec`s, as inputs that build a model."""
    return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), signature)


def build_model(name: str, num_classes: int, norm: Norm = BatchNormConfig(), **changes) -> Network:
    """A registered model, not built yet.

    Args:
        name: name of the model, a key of `VARIANTS`.
        num_classes: number of classes, from the `DatasetSpec`.
        norm: `BatchNormConfig`, or None for the folded model.
        **changes: arguments that override the variant's; `Variant.parameters` lists their names. Every published model
            accepts `drop_path`, the stochastic depth of its backbone.

    Raises:
        InputError: a name or an argument is unknown (the message suggests the nearest), or the model rejects a value.

    Examples:
        >>> model = build_model("axial_deeplab_nano", num_classes=19)
        >>> model(tf.zeros([1, 65, 65, 3]))["semantic_logits"].shape
        TensorShape([1, 17, 17, 19])

        As a layer of your own model:

        >>> import tensorflow as tf
        >>> import tf_keras as keras
        >>> from axial.models import build_model
        >>> photo = keras.Input([65, 65, 3])
        >>> model = keras.Model(photo, build_model("axial_resnet_nano", num_classes=3)(photo)["logits"])
        >>> model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        >>> history = model.fit(tf.zeros([2, 65, 65, 3]), tf.constant([0, 2]), verbose=0)
    """
    variant = find_variant(name)
    for argument in changes:
        if argument not in (accepted := variant.parameters()):
            near = nearest(argument, accepted)
            raise InputError(f"model {name!r} has no argument {argument!r}{near}: {', '.join(accepted)}")
    with named(f"model {name!r}"):
        return variant.build(num_classes, norm, changes)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
    """Which model is trained, and how.

    Attributes:
        name: name of the model, a key of `VARIANTS`.
        norm: `BatchNormConfig`.
        drop_path: stochastic-depth rate of the backbone's last block.
        recompute: rematerialisation, which saves memory. The backward pass recomputes nothing ('none'), the softmax of
            attention ('softmax'), or all of each residual block of the backbone ('block'). 'auto' means 'none' if
            `backend` is 'kernel' and this machine can run the kernels, which need little memory, or if the model has no
            residual blocks; otherwise it means 'block'.
        backend: implementation of attention, one of `device.BACKENDS`. With 'kernel', the decoders' depthwise
            convolutions and the semantic loss use kernels too.
        arguments: dict of further arguments of the variant; see `build_model`.
        whole_up_to_span: whether each query attends to the whole axis if the axis is at most as long as the span. With
            False a query attends only to the window of `span` positions around it.

    Raises:
        InputError: the name is unknown.
    """

    name: Name
    norm: BatchNormConfig = BatchNormConfig()
    drop_path: BelowOne = 0.0
    recompute: typing.Literal[("auto", *RECOMPUTE)] = "none"  # type: ignore[valid-type]
    backend: typing.Literal[BACKENDS] = "auto"  # type: ignore[valid-type]
    arguments: dict = dataclasses.field(default_factory=dict)
    whole_up_to_span: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        find_variant(self.name)
        if self.whole_up_to_span:  # the outputs depend on it, so it must be in weight files, which record `arguments`
            object.__setattr__(self, "arguments", {"whole_up_to_span": True, **self.arguments})

    def settings(self) -> dict:
        """JSON dict of everything that the outputs depend on: name, batch norms, and all arguments with their defaults.

        The dict leaves out `recompute` and `backend`, which change how the outputs are computed but not the outputs.
        """
        variant = find_variant(self.name)
        arguments = variant.all_arguments({"drop_path": self.drop_path, **self.arguments})
        arguments = {name: value for name, value in arguments.items() if name not in ("recompute", "backend")}
        return {"name": self.name, "norm": dataclasses.asdict(self.norm), "arguments": arguments}

    def build(
        self, num_classes: int, image: tuple[int, ...], folded: bool = False, changes: dict | tuple = ()
    ) -> Network:
        """The built model.

        Args:
            num_classes: number of classes, from the `DatasetSpec`.
            image: (height, width) of the zero image that builds the model; (length,) of the sentences for a translator.
            folded: whether the batch norms are folded into the convolutions.
            changes: dict of further arguments; see `build_model`.

        Raises:
            InputError: the model cannot be built with the `arguments`.
        """
        accepted, recompute, backend = find_variant(self.name).parameters(), self.recompute, self.backend
        if recompute == "auto":
            kernels = backend == "kernel" and device.has_tpu() and device.has_kernels()
            recompute = "none" if kernels or "recompute" not in accepted else "block"
        if backend == "kernel" and "backend" not in accepted:
            backend = "auto"  # the model has no layer with kernels
        chosen = dict(drop_path=self.drop_path, recompute=recompute, backend=backend)
        chosen = {k: v for k, v in chosen.items() if v != getattr(ModelConfig, k)}  # some variants accept fewer
        norm = None if folded else self.norm
        try:
            model = build_model(self.name, num_classes, norm, **{**chosen, **self.arguments, **dict(changes)})
            model(zeros(find_variant(self.name).model.signature(image)))
        except InputError:
            raise
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            if not self.arguments:
                raise
            where = f"ModelConfig.arguments = {shortened(self.arguments)}"
            raise InputError(f"{where}: no {self.name} can be built with them ({first_line(error)})") from error
        return model


def check_model(config: ModelConfig, *tasks: str) -> None:
    """Raises InputError unless the model of a `ModelConfig` is for one of `tasks`."""
    name, task = config.name, find_variant(config.name).task
    if task not in tasks:
        raise InputError(f"ModelConfig.name = {name!r}: for {task}; a model for {' or '.join(tasks)} is expected")
