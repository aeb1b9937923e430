"""Layers and models whose config is how they were made, so that tf_keras can save, load and clone them.

A config holds the arguments of the constructor, or those of the function that made the layer (`makes_layer`). Arguments
are plain values, dataclasses of axial such as `BatchNormConfig`, layers, initializers, and lists and dicts of them.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect

import numpy as np
import tensorflow as tf
import tf_keras as keras
from tf_keras.src.saving.serialization_lib import SafeModeScope

from axial.errors import InputError
from axial.io.show import say

# What tf_keras itself puts into the config of a layer, and the initial weights, which it leaves out.
_COMMON = ("name", "trainable", "dtype", "batch_input_shape", "weights")
_KINDS = {
    "layers": keras.layers.Layer,
    "initializers": keras.initializers.Initializer,
    "regularizers": keras.regularizers.Regularizer,
}


class NoConfig(InputError, NotImplementedError):
    """An argument of a layer has no config. tf_keras catches NotImplementedError and writes a SavedModel without it."""


@functools.cache
def _tell_type(floats):
    """Says once that layers compute in other floats than float32, which may be a setting of another program."""
    if floats in ("float16", "float64"):
        setting = "floatx of ~/.keras/keras.json, set_floatx or the global policy"
        say(f"layers without a dtype compute in {floats}, as Keras is set ({setting})", error=True)


class Configured:
    """Mixin of layers and models; see the file's docstring. tf_keras knows its classes as 'axial>NAME'.

    A config holds whether the whole layer is trainable, not whether the parts that it makes are.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("axial."):  # a user's subclass is the user's to register
            keras.saving.register_keras_serializable("axial")(cls)

    def __new__(cls, *args, **kwargs):
        _tell_type(keras.mixed_precision.global_policy().name)
        layer = super().__new__(cls, *args, **kwargs)
        # A partial, because TensorFlow neither tracks nor wraps what is in it: keys of checkpoints stay.
        constructors = [base.__init__ for base in cls.__mro__ if "__init__" in vars(base)]
        layer._made_by = functools.partial(cls, **_by_name(constructors, (layer, *args), kwargs))
        return layer

    def get_config(self):
        """The arguments that the layer was made with, as JSON can hold them.

        Raises:
            InputError: an argument has no config.
        """
        made, where = self._made_by, f"{type(self).__name__} {self.name!r}: argument"
        own = {name: value for name, value in made.keywords.items() if name not in _COMMON}
        config = {name: _described(value, f"{where} {name!r}") for name, value in own.items()}
        if made.func is not type(self):
            config["maker"] = _path(made.func)
        return {**config, **keras.layers.Layer.get_config(self)}

    @classmethod
    def from_config(cls, config):
        """The layer that `get_config` describes, not built yet."""
        arguments = {name: _restored(value) for name, value in config.items() if name not in (*_COMMON, "maker")}
        common = {name: config[name] for name in _COMMON if name in config}
        trainable = common.pop("trainable", True)
        if "maker" in config:
            with _policy(common.get("dtype")):  # makers take no dtype
                layer = _find(config["maker"], _is_maker)(**arguments)
            layer._name = common["name"]
        else:
            layer = cls(**arguments, **common)
        if not trainable:
            layer.trainable = False
        return layer

    def _maybe_build(self, inputs):
        """tf_keras calls this before a call of a layer. Tensors of Keras 3 are refused here."""
        if any(type(x).__module__.partition(".")[0] == "keras" for x in tf.nest.flatten(inputs)):
            raise InputError(
                f"{type(self).__name__} is of tf_keras and got a tensor of Keras 3: build the model with "
                "`import tf_keras as keras`, or set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
            )
        super()._maybe_build(inputs)

    @property
    def _nested_layers(self):
        """All layers inside, for tf_keras' saver, which looks into lists of layers but not into lists of lists.

        The saver visits attributes in the reverse order of their names: every other path to a layer comes before.
        """
        return [layer for layer in self.submodules if isinstance(layer, keras.layers.Layer)]


class Unfolded:
    """Mixin of layers and models without a batch norm to fold."""

    def folded_weights(self):
        """The weights as they are. A layer that may have a batch norm calls this where it has none."""
        return [tf.convert_to_tensor(w) for w in self.weights]


class Layer(Configured, keras.layers.Layer):
    """A Keras layer with a config."""

    def sized(self, x, built=None):
        """x; if Keras has lost its size, as of what a generator yields, with the size that the layer was built for.

        `built` is the shape with that size, by default that of the layer's first input. While Keras makes a functional
        model, in a graph that it throws away, an unknown size is the user's.
        """
        graph, built = getattr(tf.compat.v1.get_default_graph(), "name", ""), built or self._build_input_shape
        if x.shape[1:].is_fully_defined() or not built or graph.endswith("_scratch_graph"):
            return x
        return tf.ensure_shape(x, [None, *built[1:]])


class Model(Configured, keras.Model):
    """A Keras model with a config. A model that is loaded is built for the inputs of its first call."""

    def get_build_config(self):
        spec = self.save_spec()
        return spec and {"inputs": tf.nest.map_structure(lambda x: [x.shape.as_list(), x.dtype.name], spec[0][0])}

    def build_from_config(self, config):
        tf.function(self).get_concrete_function(_inputs_spec(config["inputs"]))


def makes_layer(function):
    """Decorator of a function that makes a `Layer`, whose config becomes the function's name and arguments."""

    @functools.wraps(function)
    def make(*args, **kwargs):
        layer = function(*args, **kwargs)
        layer._made_by = functools.partial(make, **_by_name([function], args, kwargs))
        return layer

    make.makes_layer = True
    return make


def _by_name(functions, args, kwargs):
    """The arguments of a call by name. Those of the first function's *args are arguments of the second, and so on."""
    signature, given = inspect.signature(functions[0]), {}
    bound = signature.bind_partial(*args, **kwargs)
    bound.apply_defaults()  # a later version may have others
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            given |= _by_name(functions[1:], (args[0], *value), {}) if value else {}
        elif name != "self":
            given[name] = value
    return given


# === Arguments as JSON ===


def _described(value, where):
    """What `_restored` makes the argument of. `where` names it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_described(item, where) for item in value]
    if isinstance(value, dict):
        return {name: _described(item, where) for name, item in value.items()}
    ours = type(value).__module__.startswith("axial.")  # a subclass of the user's is known by Keras alone
    if ours and isinstance(value, Configured):
        return {"axial": _path(type(value)), "config": value.get_config()}
    if ours and dataclasses.is_dataclass(value):
        return {"axial": _path(type(value)), "config": dataclasses.asdict(value)}
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
        with SafeModeScope(True):  # a Lambda in a SavedModel would run its code otherwise
            found = getattr(keras, value["keras"]).deserialize(value["config"])
        if not isinstance(found, _KINDS[value["keras"]]):
            raise InputError(f"config of a layer: {value['config']['class_name']!r} is not known: pass custom_objects")
        return found
    if "axial" in value:
        made = _find(value["axial"], _is_class)
        return made.from_config(value["config"]) if issubclass(made, Configured) else made(**value["config"])
    return {name: _restored(item) for name, item in value.items()}


# Where the modules are that files of before the folder `spatial_attention` name.
_MOVED = {
    f"axial.layers.{name}": f"axial.layers.spatial_attention.{name}"
    for name in ("attended", "deformable_conv", "dynamic_conv", "generalized_attention", "transformer")
}


def _path(made):
    return f"{made.__module__}.{made.__qualname__}"


def _find(path, is_known):
    """The class or function of axial at a path: a layer or a dataclass, or what `makes_layer`."""
    module, _, name = str(path).rpartition(".")
    module, found = _MOVED.get(module, module), None
    if module.startswith(("axial.layers.", "axial.models.", "axial.weights.")):
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(module), name, None)
    if not is_known(found):
        raise InputError(f"config of a layer: {path!r} is not a layer of axial")
    return found


def _is_class(found):
    return isinstance(found, type) and (issubclass(found, Configured) or dataclasses.is_dataclass(found))


def _is_maker(found):
    return hasattr(found, "makes_layer")


@contextlib.contextmanager
def _policy(config):
    """Within this context, new layers have the dtype policy that a config holds; None keeps the current one."""
    before = keras.mixed_precision.global_policy()
    name = config["config"]["name"] if isinstance(config, dict) else config
    keras.mixed_precision.set_global_policy(name or before.name)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)


# === Inputs as JSON ===


def _inputs_spec(config):
    if isinstance(config, dict):
        return {name: _inputs_spec(item) for name, item in config.items()}
    return tf.TensorSpec(*config)
