"""Every layer computes in the precision of its dtype policy, and a frozen layer runs as in inference."""

import inspect

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.layers.attention.layer import AttentionOptions
from axial.layers.batch_norm import BatchNormConfig, LogitNorm
from axial.layers.blocks import AxialPair, Bottleneck, StridedLocalAttention
from axial.layers.spatial_attention.attended import AttendedMiddle, Mechanism
from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from axial.models.attended_resnet.ccnet import CCNet, CCNetOptions
from axial.models.attention_resnet.network import AttentionStem
from axial.models.axial_deeplab.axial_decoder import AxialDecoderDeepLab, AxialDecoderOptions
from axial.models.axial_deeplab.axial_resnet import AxialStem
from axial.models.faster_rcnn.network import BoxHead, MaskHead, ProposalHead, Pyramid
from axial.models.panoptic_deeplab.network import DecoderOptions, PanopticDeepLab, PanopticDeepLabOptions
from axial.models.resnet.network import ConvResNetOptions, ResNet, WideStem
from axial.models.transformer.network import Transformer, TransformerOptions, Translator, TranslatorOptions
from tests.conftest import randomize

NORM = BatchNormConfig(momentum=0.5)
ATTENTION = dict(heads=2, span=3)
WORDS = tf.constant([[3, 4, 5, 2], [6, 2, 0, 0]])


def normal(*shape):
    return tf.random.stateless_normal(shape, [0, sum(shape)], dtype=tf.float64)


class Narrow(ResNet):
    """A ResNet with few channels."""

    least_stride = 8

    def make_block(self, spec):
        return self.conv_bottleneck(spec)


def backbone(output_stride=16, **kw):
    options = ConvResNetOptions(output_stride, repeats=(1, 1, 1, 1), stem="deeplab", width=0.125)
    return Narrow(options, NORM, 4, **kw)


def axial_block(spec):
    pair = AxialPair(8, 8, NORM, spec.strides, attention=ATTENTION, name="attention")
    return Bottleneck(8, spec.filters, pair, NORM, spec.strides, name=spec.name)


def transformer(**kw):
    options = TransformerOptions(1, 16, 16, 2, encoder_deformable=True, decoder="dynamic", dropout=0.0)
    return Transformer(options, **kw)


MAP, PHOTO = normal(2, 9, 7, 8), normal(1, 33, 33, 3)
MAPS = {f"res{level}": normal(1, 2 ** (7 - level), 2 ** (7 - level), 8) for level in (2, 3, 4, 5)}
CROPS = normal(2, 3, 4, 4, 8), tf.constant([[1, 2, 0], [2, 1, 1]])
PANOPTIC = PanopticDeepLabOptions(0.0625, decoder=DecoderOptions(aspp=8, aspp_dropout=0.0))
DECODER = AxialDecoderOptions(0.25, AttentionOptions(2, 5))
# For each layer: (constructor call, list of inputs).
LAYERS = {
    "axial block": (
        lambda **kw: Bottleneck(8, 16, AxialPair(8, 8, NORM, 2, False, ATTENTION, **kw), NORM, 2, **kw),
        [MAP],
    ),
    "local pair": (lambda **kw: StridedLocalAttention(8, NORM, 2, ATTENTION, **kw), [MAP]),
    "deformable": (
        lambda **kw: AttendedMiddle(
            8, NORM, mechanism=Mechanism("1111", 2), spatial="deformable", deformable=dict(modulation="sigmoid"), **kw
        ),
        [MAP],
    ),
    "dynamic": (lambda **kw: AttendedMiddle(8, NORM, mechanism=Mechanism("dynamic", groups=2), **kw), [MAP]),
    "generalized 0010, window": (lambda **kw: GeneralizedAttention("0010", 2, window=3, **kw), [MAP]),
    "wide stem": (lambda **kw: WideStem(0.125, NORM, **kw), [PHOTO]),
    "axial stem": (lambda **kw: AxialStem(axial_block, 8, **kw), [PHOTO]),
    "attention stem": (lambda **kw: AttentionStem(8, NORM, 2, **kw), [PHOTO]),
    "panoptic": (lambda **kw: PanopticDeepLab(backbone(**kw), 3, NORM, PANOPTIC, **kw), [PHOTO]),
    "axial decoder": (lambda **kw: AxialDecoderDeepLab(backbone(**kw), 3, NORM, DECODER, **kw), [PHOTO]),
    "ccnet": (
        lambda **kw: CCNet(backbone(8, **kw), 3, NORM, CCNetOptions(8, Mechanism("1111", 2), 0.0), **kw),
        [PHOTO],
    ),
    "pyramid": (lambda **kw: Pyramid(8, **kw), [MAPS]),
    "proposals": (lambda **kw: ProposalHead(8, **kw), [MAPS]),
    "boxes": (lambda **kw: BoxHead(8, 3, **kw), CROPS[:1]),
    "masks": (lambda **kw: MaskHead(8, 3, **kw), CROPS),
    "translator": (
        lambda **kw: Translator(transformer(**kw), 7, None, TranslatorOptions("sinusoid", 0.0), **kw),
        [{"source": WORDS, "target": WORDS}],
    ),
}


QUICK = "axial block", "deformable", "generalized 0010, window", "ccnet", "masks"
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS]


def run(layer, inputs, training):
    """Runs a layer and returns its outputs as a flat list of tensors."""
    options = {"training": training} if "training" in inspect.signature(layer.call).parameters else {}
    return tf.nest.flatten(layer(*inputs, **options))


def inputs_of(name, dtype):
    def cast(x):
        return tf.cast(x, dtype) if x.dtype.is_floating else x

    return tf.nest.map_structure(cast, LAYERS[name][1])


def made(name, **kw):
    """A built layer of `LAYERS` with random weights."""
    layer = LAYERS[name][0](**kw)
    run(layer, inputs_of(name, tf.float32), False)
    randomize(layer)
    for weight in layer.weights:  # smaller, as large weights of a deep network amplify rounding errors
        if "kernel" in weight.name:
            weight.assign(0.5 * weight)
    return layer


def all_layers(layer):
    return [each for each in layer.submodules if isinstance(each, keras.layers.Layer)] + [layer]


FLOAT32_LAYERS = LogitNorm, keras.layers.LayerNormalization  # float32 under every policy except float64


# Names of layers that `make_logits` makes, and of the convolution inside.
HEAD_NAMES = (
    "logits", "conv", "semantic_head", "center_head", "offset_head", "scores", "codes", "classes", "masks"
)  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_a_layer_computes_in_its_own_precision(name):
    """The global policy has no effect. LogitNorm, LayerNormalization and heads are float32, also in mixed_bfloat16."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layer = made(name, dtype="float32")
    assert {each.compute_dtype for each in all_layers(layer)} == {"float32"}
    assert {y.dtype for y in run(layer, inputs_of(name, tf.float32), True)} <= {tf.float32, tf.int32}
    keras.mixed_precision.set_global_policy("float32")
    layer = made(name, dtype="mixed_bfloat16")
    for each in all_layers(layer):
        head = isinstance(each, FLOAT32_LAYERS) or (each.compute_dtype == "float32" and each.name in HEAD_NAMES)
        assert each.compute_dtype == ("float32" if head else "bfloat16"), each.name
    assert {w.dtype for w in layer.weights} == {tf.float32}


def float64_loss(layer, inputs):
    """A randomly weighted sum of all outputs. Asserts that the outputs are float64."""
    outputs, rng = run(layer, inputs, True), np.random.default_rng(2)
    assert {y.dtype for y in outputs} == {tf.float64}
    return tf.add_n([tf.reduce_sum(y * rng.normal(size=y.shape)) for y in outputs])


def moved_loss(layer, inputs, start, directions, by):
    """`float64_loss` with `by * directions` added to the inputs and to the weights `start`."""
    way = iter(directions)
    shifted = tf.nest.map_structure(lambda x: x + by * next(way) if x.dtype.is_floating else x, inputs)
    layer.set_weights(start)
    for weight, direction in zip(layer.trainable_weights, way, strict=True):
        weight.assign_add(by * direction)
    return float64_loss(layer, shifted).numpy()


@pytest.mark.parametrize("name", SOME)
def test_a_float64_layer_is_float64_throughout(name):
    """The difference quotient equals the gradient, which fails if a single intermediate tensor is float32.

    The step along a random direction of inputs and weights is small, as gradients of a deep network change fast.
    """
    layer, inputs = made(name, dtype="float64"), inputs_of(name, tf.float64)
    assert {w.dtype for w in layer.weights} == {tf.float64}
    rng, by, start = np.random.default_rng(1), 1e-7, layer.get_weights()
    floats = [x for x in tf.nest.flatten(inputs) if x.dtype.is_floating]
    directions = [rng.normal(size=x.shape) for x in [*floats, *layer.trainable_weights]]
    with tf.GradientTape() as tape:
        tape.watch(floats)
        total = float64_loss(layer, inputs)
    slopes = tape.gradient(total, [*floats, *layer.trainable_weights], unconnected_gradients="zero")
    slope = sum(np.sum(way * tf.convert_to_tensor(g).numpy()) for way, g in zip(directions, slopes, strict=True))
    forward, backward = (moved_loss(layer, inputs, start, directions, step) for step in (by, -by))
    difference = (forward - backward) / (2 * by)
    assert abs(difference - slope) < 1e-5 * max(abs(slope), 1.0), (difference, slope)


@pytest.mark.parametrize("name", SOME)
def test_a_frozen_layer_runs_as_in_inference(name):
    """With trainable = False, no weight and no statistic changes, as for Keras' BatchNormalization."""
    layer, inputs = made(name), inputs_of(name, tf.float32)
    layer.trainable = False
    before = layer.get_weights()
    expected, actual = run(layer, inputs, False), run(layer, inputs, True)
    for y, z in zip(expected, actual[-len(expected) :], strict=True):  # in training, CCNet adds an output
        np.testing.assert_array_equal(y, z)
    for value, old in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    assert not layer.trainable_weights
