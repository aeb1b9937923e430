"""Base classes of layers and models whose config is their constructor's arguments.

tf_keras saves, loads and clones these layers by the config. A config may hold plain values, dataclasses of axial such
as `BatchNormConfig`, layers, initializers, and lists and dicts of these. In place of the argument `options` it holds
the flat name and the value of each option (see `options.py`).
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
import tf_keras as keras
from tf_keras.src.saving.serialization_lib import SafeModeScope

from axial.errors import InputError
from axial.io.show import say
from axial.layers import options
from axial.layers.context import holds

# The entries that tf_keras adds to a layer's config, and the argument `weights` (initial weights), which it leaves out.
_COMMON = ("name", "trainable", "dtype", "batch_input_shape", "weights")
_KINDS = {
    "layers": keras.layers.Layer,
    "initializers": keras.initializers.Initializer,
    "regularizers": keras.regularizers.Regularizer,
}

Initializer: TypeAlias = str | keras.initializers.Initializer


class NoConfig(InputError, NotImplementedError):
    """An argument of a layer has no config. tf_keras catches NotImplementedError and saves a model without config."""


@functools.cache
def _tell_type(floats):
    """Prints once that Keras' default dtype is float16 or float64, which another program may have chosen."""
    if floats in ("float16", "float64"):
        setting = "floatx of ~/.keras/keras.json, set_floatx or the global policy"
        say(f"layers without a dtype compute in {floats}, as Keras is set ({setting})", error=True)


_dtype = contextvars.ContextVar("dtype", default=None)


class _Policies(type):
    """The metaclass of layers and models. Sublayers that a constructor makes get the layer's dtype policy by default.

    The metaclass handles the argument `dtype`, so constructors do not declare it.
    """

    def __call__(cls, *args, dtype=None, **kwargs):
        if dtype is None and _dtype.get() is None:
            _tell_type(keras.mixed_precision.global_policy().name)
        with holds(_dtype, _dtype.get() if dtype is None else dtype):
            return super().__call__(*args, **kwargs)


class Configured(metaclass=_Policies):
    """Mixin of layers and models; see the module's docstring. tf_keras registers subclasses as 'axial>NAME'.

    A config holds the attribute `trainable` of the whole layer, but not the attributes `trainable` of its sublayers.

    Attributes:
        defaults: the default of the argument `options`, a dataclass; None for classes without this argument.
    """

    defaults: Any = None

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("axial."):  # users register their own subclasses
            keras.saving.register_keras_serializable("axial")(cls)

    def __new__(cls, *args, **kwargs) -> Any:
        layer: Any = super().__new__(cls, *args, **kwargs)
        # A partial holds the arguments, because TensorFlow does not track or wrap the contents of a partial. So the
        # arguments do not change the keys of checkpoints.
        layer._made_by = functools.partial(cls, **_by_name(cls, args, kwargs))
        return layer

    def __init__(self, **kwargs):
        if "dtype" in kwargs:  # passed by a user's subclass, whose sublayers get the same dtype
            _dtype.set(kwargs["dtype"])
        super().__init__(**{"dtype": _dtype.get(), **kwargs})

    def get_config(self: Any) -> dict:
        """The constructor's arguments, as JSON values.

        Raises:
            InputError: an argument has no config.
        """
        arguments = {name: value for name, value in self._made_by.keywords.items() if name not in _COMMON}
        if self.defaults is not None:
            arguments |= options.flatten(arguments.pop("options"))
        where = f"{type(self).__name__} {self.name!r}: argument"
        config = {name: _described(value, f"{where} {name!r}") for name, value in arguments.items()}
        return {**config, **keras.layers.Layer.get_config(self)}

    @classmethod
    def from_config(cls, config: dict) -> Any:
        """An unbuilt layer, from a config that `get_config` returned."""
        arguments = {name: _restored(value) for name, value in config.items() if name not in _COMMON}
        common = {name: config[name] for name in _COMMON if name in config}
        if cls.defaults is not None:
            flat = options.flatten(cls.defaults)
            rest = {name: value for name, value in arguments.items() if name not in flat}
            arguments = {"options": options.replace(cls.defaults, arguments), **rest}
        trainable = common.pop("trainable", True)
        layer: Any = cls(**arguments, **common)
        if not trainable:
            layer.trainable = False
        return layer

    def _maybe_build(self, inputs):
        """Refuses tensors of Keras 3. tf_keras calls this before each call of a layer."""
        if any(type(x).__module__.partition(".")[0] == "keras" for x in tf.nest.flatten(inputs)):
            what = f"{type(self).__name__} is of tf_keras and got a tensor of Keras 3"
            raise InputError(f"{what}: import tf_keras as keras, or set TF_USE_LEGACY_KERAS=1 before the first import")
        super()._maybe_build(inputs)

    @property
    def _nested_layers(self):
        """All sublayers, for tf_keras' saver, which does not look into lists of lists of layers.

        The saver visits attributes in reverse order of their names, so it finds every other path to a layer first.
        """
        return [layer for layer in self.submodules if isinstance(layer, keras.layers.Layer)]


class Unfolded:
    """Mixin of layers and models without a batch norm to fold."""

    def folded_weights(self: Any) -> list[tf.Tensor]:
        """The weights, unchanged."""
        return [tf.convert_to_tensor(w) for w in self.weights]


class Layer(Configured, keras.layers.Layer):
    """A Keras layer with a config."""

    def sized(self, x: tf.Tensor, built: Any = None) -> tf.Tensor:
        """x with the static size that Keras may have lost, for example in batches of a generator.

        `built` is a shape with this size, by default the shape for which the layer was built. In the scratch graph in
        which Keras makes a functional model, unknown sizes stay unknown, because the user chose them.
        """
        graph, built = getattr(tf.compat.v1.get_default_graph(), "name", ""), built or self._build_input_shape
        if x.shape[1:].is_fully_defined() or not built or graph.endswith("_scratch_graph"):
            return x
        return tf.ensure_shape(x, [None, *built[1:]])


class Model(Configured, keras.Model):
    """A Keras model with a config. Loading builds the model for the input shapes of the saved model's first call."""

    def get_build_config(self) -> dict | None:
        spec = self.save_spec()
        return spec and {"inputs": tf.nest.map_structure(lambda x: [x.shape.as_list(), x.dtype.name], spec[0][0])}

    def build_from_config(self, config: dict) -> None:
        tf.function(self).get_concrete_function(_inputs_spec(config["inputs"]))


def _by_name(cls, args, kwargs):
    """dict of a constructor's arguments, including the defaults, because a later version may change the defaults."""
    names, defaults = _parameters(cls)
    return {**defaults, **dict(zip(names, args)), **kwargs}


@functools.cache
def _parameters(cls):
    """The names of a constructor's arguments, and a dict of their defaults.

    The names of the base classes' arguments follow, because *args passes arguments on to the base classes.
    """
    specs = [inspect.getfullargspec(vars(base)["__init__"]) for base in cls.__mro__ if "__init__" in vars(base)]
    first = specs[0]
    defaults = dict(zip(reversed(first.args), reversed(first.defaults or ()))) | (first.kwonlydefaults or {})
    return [name for spec in specs for name in spec.args[1:]], defaults


# === Arguments as JSON ===


def _described(value, where):
    """The JSON form of an argument, from which `_restored` makes the argument. `where` names the argument in errors."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_described(item, where) for item in value]
    if isinstance(value, dict):
        return {name: _described(item, where) for name, item in value.items()}
    ours = type(value).__module__.startswith("axial.")  # Keras serialises a user's subclass, below
    if ours and isinstance(value, Configured):
        return {"axial": _path(type(value)), "config": value.get_config()}
    if ours and dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"axial": _path(type(value)), "config": {k: _described(v, where) for k, v in fields.items()}}
    for kind, base in _KINDS.items():
        if isinstance(value, base):
            return {"keras": kind, "config": getattr(keras, kind).serialize(value)}
    raise NoConfig(f"{where} is a {type(value).__name__}, which has no config: save the weights alone (save_weights)")


def _restored(value):
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("keras") in _KINDS:
        with SafeModeScope(True):  # otherwise a Lambda in a SavedModel would run its code
            restored = getattr(keras, value["keras"]).deserialize(value["config"])
        if not isinstance(restored, _KINDS[value["keras"]]):
            raise InputError(f"config of a layer: {value['config']['class_name']!r} is not known: pass custom_objects")
        return restored
    if "axial" in value:
        made = _find(value["axial"])
        config = value["config"]
        return made.from_config(config) if issubclass(made, Configured) else made(**_restored(config))
    return {name: _restored(item) for name, item in value.items()}


def _path(made):
    return f"{made.__module__}.{made.__qualname__}"


def _find(path):
    """The layer class or dataclass of axial at a dotted path."""
    module, _, name = str(path).rpartition(".")
    target = None
    if module.startswith(("axial.layers.", "axial.models.", "axial.weights.")):
        with contextlib.suppress(ImportError):
            target = getattr(importlib.import_module(module), name, None)
    if not isinstance(target, type) or not (issubclass(target, Configured) or dataclasses.is_dataclass(target)):
        raise InputError(f"config of a layer: {path!r} is not a layer of axial")
    return target


# === Inputs as JSON ===


def _inputs_spec(config):
    if isinstance(config, dict):
        return {name: _inputs_spec(item) for name, item in config.items()}
    return tf.TensorSpec(*config)
