"""Every public layer works in a user's tf_keras model: saving, cloning, training, freezing, unknown sizes."""

import contextlib
import dataclasses
import inspect
import json
import math
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tf_keras.src.saving.legacy.saved_model.utils import keras_option_scope

import axial.layers
from axial.errors import InputError
from axial.layers import (
    Attended,
    AttendedMiddle,
    AxialAttention,
    AxialPair,
    BasicBlock,
    BatchNorm,
    BatchNormConfig,
    Bottleneck,
    Conv,
    DecoderLayer,
    DeformableConv,
    DeformableConv1D,
    DynamicConv,
    EncoderLayer,
    GeneralizedAttention,
    LocalAttention,
    Mechanism,
    SeparableConv,
    StridedLocalAttention,
)
from axial.layers.attention.folded import FoldedAttention
from tests import keras_programs
from tests.conftest import built, relative_error

NORM = BatchNormConfig(0.9, unbiased=True)  # arguments that are not the defaults
SMALL = dict(heads=4, span=3)
MAP, LINE = [9, 7, 16], [9, 16]
# For each layer: (constructor call with arguments that are not the defaults, shapes of the inputs).
LAYERS = {
    "AxialAttention": (lambda: AxialAttention(16, 32, "height", terms=("content", "key"), norm=NORM, **SMALL), [MAP]),
    "LocalAttention": (lambda: LocalAttention(16, 32, position_sensitive=True, norm=NORM, **SMALL), [MAP]),
    "GeneralizedAttention": (lambda: GeneralizedAttention("0110", 4, key_stride=2), [MAP]),
    "DeformableConv": (lambda: DeformableConv(8, 3, NORM, 2, offset_groups=2, modulation="sigmoid"), [MAP]),
    "DeformableConv1D": (lambda: DeformableConv1D(8, 5, causal=True), [LINE]),
    "DynamicConv": (lambda: DynamicConv(5, groups=4), [MAP]),
    "BatchNorm": (lambda: BatchNorm(NORM, keras.initializers.RandomUniform(1, 2)), [MAP]),
    "Conv": (lambda: Conv(8, 3, NORM, strides=2, activation="gelu"), [MAP]),
    "SeparableConv": (lambda: SeparableConv(8, 3, NORM, dilation=2, inner_norm=True), [MAP]),
    "AxialPair": (lambda: AxialPair(16, 32, NORM, 2, average_pool=True, attention=SMALL), [MAP]),
    "StridedLocalAttention": (lambda: StridedLocalAttention(16, NORM, 2, attention=SMALL), [MAP]),
    "Bottleneck": (lambda: Bottleneck(16, 24, AxialPair(8, 16, NORM, attention=SMALL), NORM, activation="gelu"), [MAP]),
    "BasicBlock": (lambda: BasicBlock(8, None, 2), [MAP]),
    "Attended": (lambda: Attended(GeneralizedAttention("0010", 4, window=3)), [MAP]),
    "AttendedMiddle": (
        lambda: AttendedMiddle(
            16, NORM, 2, mechanism=Mechanism("dynamic", groups=4), spatial="deformable", deformable=dict(form="hat")
        ),
        [MAP],
    ),
    "EncoderLayer": (lambda: EncoderLayer(16, 32, Mechanism("1111", 4), deformable=True, dropout=0.0), [LINE]),
    "folded axial": (lambda: FoldedAttention(AxialAttention(16, 32, "height", backend="xla", **SMALL).spec), [MAP]),
    "folded local": (lambda: FoldedAttention(LocalAttention(16, 32, **SMALL).spec), [MAP]),
    "DecoderLayer": (lambda: DecoderLayer(16, 32, dropout=0.0, memory=Mechanism("0110", 4)), [LINE, [5, 16]]),
}


def inputs_of(name):
    specs = [tf.TensorSpec([4, *shape]) for shape in LAYERS[name][1]]
    return [tf.constant(x) for x in keras_programs.draw(specs)]


def model_of(name):
    """(functional model that consists of the layer, list of inputs with a batch size of 4)."""
    make, shapes = LAYERS[name]
    inputs = [keras.Input(shape) for shape in shapes]
    return keras.Model(inputs, make()(*inputs)), inputs_of(name)


def test_all_are_here():
    public = {*axial.layers.__all__} - {"BatchNormConfig", "Mechanism"}
    assert public == {name for name in LAYERS if "folded" not in name}
    assert {*axial.layers.__all__} <= {*dir(axial.layers)}


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_of_docstrings(name):
    """Tensors have the shapes in the docstring. A letter stands for a size, and a name for an argument's value."""
    layer, x = LAYERS[name][0](), inputs_of(name)
    (section,) = re.findall(r"^Shapes:\n((?:    .+\n?)+)", inspect.getdoc(type(layer)), re.MULTILINE)
    lines = dict(re.findall(r"^    - (\w+): (.+)$", section, re.MULTILINE))
    assert [*lines] == [*inspect.signature(layer.call).parameters][: len(x)] + ["output"]
    sizes = {"ceil": math.ceil, **layer.get_config(), **dataclasses.asdict(getattr(layer, "spec", NORM))}
    for line, tensor in zip(lines.values(), [*x, layer(*x)]):
        shapes = [[axis.strip() for axis in shape.split(",")] for shape in re.findall(r"\[(.+?)\]", line)]
        shapes = [["*"] * (tensor.ndim - 1) + axes[1:] if axes[0] == "..." else axes for axes in shapes]
        (axes,) = [axes for axes in shapes if len(axes) == tensor.ndim]
        for axis_index, (axis, size) in enumerate(zip(axes, tensor.shape)):
            if len(axis) == 1:
                assert sizes.setdefault(axis if axis != "*" else axis_index, size) == size, line
            else:
                assert eval(axis, {}, sizes) == size, line  # noqa: S307


ANY_SIZE = {"BatchNorm", "Conv", "SeparableConv", "BasicBlock"}


@pytest.mark.parametrize("name", LAYERS)
def test_a_config_makes_the_layer_again(name):
    """`from_config` makes a layer with the same arguments, including `trainable`, and the same output."""
    x = inputs_of(name)
    layer = built(LAYERS[name][0](), *x)
    layer.trainable = False
    twin = type(layer).from_config(json.loads(json.dumps(layer.get_config())))
    twin(*x)
    twin.set_weights(layer.get_weights())
    assert twin.get_config() == layer.get_config() and not twin.trainable_weights
    np.testing.assert_array_equal(twin(*x), layer(*x))


@pytest.mark.parametrize("name", LAYERS)
def test_unknown_sizes(name):
    """With unknown sizes a layer gives the same output or raises a one-line error, if it needs static sizes."""
    inputs = [keras.Input([None] * (len(shape) - 1) + shape[-1:]) for shape in LAYERS[name][1]]
    layer, x = LAYERS[name][0](), inputs_of(name)
    if name not in ANY_SIZE:
        with pytest.raises(InputError, match="^[^\n]*static[^\n]*$"):
            layer(*inputs)
    else:
        assert relative_error(keras.Model(inputs, layer(*inputs))(x), layer(*x)) < 1e-6


@pytest.mark.parametrize(
    "name", [name if name == "Conv" else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS]
)
def test_a_batch_of_no_image(name):
    """For an empty batch, the output is empty and no step changes a weight. oneDNN and XLA differ for such batches."""
    model, x = model_of(name)
    none, expected, before = [example[:0] for example in x], (0, *model.output_shape[1:]), model.get_weights()
    specs = [tf.TensorSpec([None, *example.shape[1:]]) for example in none]
    assert model(none).shape == model.predict_on_batch(none).shape == expected
    for jit in (False, True):
        step = tf.function(lambda *x: model(x, training=True), input_signature=specs, jit_compile=jit)
        assert step(*none).shape == expected
    model.compile("sgd", "mse")
    model.train_on_batch(none, np.zeros(expected, np.float32))
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_generator():
    """A layer accepts batches of a generator, whose static shapes Keras does not know."""
    model, (x,) = model_of("AxialAttention")
    assert relative_error(model.predict((x[i : i + 2] for i in (0, 2)), steps=2), model(x)) < 1e-6
    model.compile("sgd", "mse")
    y = np.ones([2, *model.output_shape[1:]], np.float32)
    assert np.isfinite(model.fit(((x[i : i + 2], y) for i in (0, 2)), verbose=0).history["loss"]).all()


def test_policies_of_the_file_not_of_the_process(tmp_path):
    """A model that was saved with mixed_bfloat16 gives the same output if the global policy is float32."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model, x = model_of("Bottleneck")
    expected = model(x)
    model.save(tmp_path / "model.keras")
    keras.mixed_precision.set_global_policy("float32")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.output.dtype == tf.bfloat16 and keras.mixed_precision.global_policy().name == "float32"
    np.testing.assert_array_equal(loaded(x), expected)


class Mine(Conv):
    """A user's subclass of a layer. It passes other arguments to the base class."""

    def __init__(self, *args, factor=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    def call(self, x, training=False):
        return self.factor * super().call(x, training=training)


def test_a_users_subclass():
    layer = Mine(8, 3, NORM, strides=2, factor=3.0, name="mine")
    twin = Mine.from_config(layer.get_config())
    assert type(twin) is Mine and twin.get_config() == layer.get_config() and twin.factor == 3.0
    assert twin.conv.strides == layer.conv.strides == (2, 2)
    assert keras.saving.get_registered_name(Mine) == "Mine"
    config = Attended(layer).get_config()
    with pytest.raises(InputError, match="'Mine' is not known: pass custom_objects"):
        Attended.from_config(config)
    with keras.saving.custom_object_scope({"Mine": Mine}):
        assert type(Attended.from_config(config).attention) is Mine


def test_an_argument_without_a_config_is_named():
    layer = Conv(8, 3, NORM, kernel_initializer=tf.zeros_like, name="stem")
    with pytest.raises(InputError, match="^Conv 'stem': argument 'kernel_initializer' is a .*which has no config"):
        layer.get_config()


def test_a_config_names_only_what_makes_layers():
    ours = ("axial.io.write.write_whole", "axial.layers.later.Layer", "axial.models.resnet.network.in_turn")
    for path in (*ours, "os.system"):
        with pytest.raises(InputError, match=f"'{path}' is not a layer of axial"):
            Attended.from_config({"attention": {"axial": path, "config": {"path": "x"}}})


def test_no_code_of_a_file_runs():
    code = keras.layers.Lambda(lambda x: x)
    for scope in (contextlib.nullcontext(), keras_option_scope(save_traces=False, in_tf_saved_model_scope=True)):
        config = {"attention": {"keras": "layers", "config": keras.layers.serialize(code)}}
        with scope, pytest.raises(ValueError, match="Lambda"):
            Attended.from_config(config)


@pytest.mark.parametrize("name", ["AxialAttention", "DeformableConv", "AxialPair"])
def test_tensors_of_keras_3_are_refused_in_one_line(name):
    keras_3 = pytest.importorskip("keras", "3.0")
    with pytest.raises(InputError, match=f"^{name} is of tf_keras and got a tensor of Keras 3.*TF_USE_LEGACY_KERAS=1"):
        LAYERS[name][0]()(keras_3.Input(MAP))
