"""Every layer of ours computes in its own precision, and as in inference where it is frozen."""

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
    """A ResNet of few channels."""

    least_stride = 8

    def make_block(self, place):
        return self.conv_bottleneck(place)


def backbone(output_stride=16, **own):
    options = ConvResNetOptions(output_stride, repeats=(1, 1, 1, 1), stem="deeplab", width=0.125)
    return Narrow(options, NORM, 4, **own)


def axial_block(place):
    pair = AxialPair(8, 8, NORM, place.strides, attention=ATTENTION, name="attention")
    return Bottleneck(8, place.filters, pair, NORM, place.strides, name=place.name)


def transformer(**own):
    options = TransformerOptions(1, 16, 16, 2, encoder_deformable=True, decoder="dynamic", dropout=0.0)
    return Transformer(options, **own)


MAP, PHOTO = normal(2, 9, 7, 8), normal(1, 33, 33, 3)
MAPS = {f"res{level}": normal(1, 2 ** (7 - level), 2 ** (7 - level), 8) for level in (2, 3, 4, 5)}
CROPS = normal(2, 3, 4, 4, 8), tf.constant([[1, 2, 0], [2, 1, 1]])
PANOPTIC = PanopticDeepLabOptions(0.0625, decoder=DecoderOptions(aspp=8, aspp_dropout=0.0))
DECODER = AxialDecoderOptions(0.25, AttentionOptions(2, 5))
# What makes a layer, and what it takes.
LAYERS = {
    "axial block": (
        lambda **own: Bottleneck(8, 16, AxialPair(8, 8, NORM, 2, False, ATTENTION, **own), NORM, 2, **own),
        [MAP],
    ),
    "local pair": (lambda **own: StridedLocalAttention(8, NORM, 2, ATTENTION, **own), [MAP]),
    "deformable middle": (
        lambda **own: AttendedMiddle(
            8, NORM, mechanism=Mechanism("1111", 2), spatial="deformable", deformable=dict(modulation="sigmoid"), **own
        ),
        [MAP],
    ),
    "dynamic middle": (lambda **own: AttendedMiddle(8, NORM, mechanism=Mechanism("dynamic", groups=2), **own), [MAP]),
    "generalized 0010, window": (lambda **own: GeneralizedAttention("0010", 2, window=3, **own), [MAP]),
    "wide stem": (lambda **own: WideStem(0.125, NORM, **own), [PHOTO]),
    "axial stem": (lambda **own: AxialStem(axial_block, 8, **own), [PHOTO]),
    "attention stem": (lambda **own: AttentionStem(8, NORM, 2, **own), [PHOTO]),
    "panoptic": (
        lambda **own: PanopticDeepLab(backbone(**own), 3, NORM, PANOPTIC, **own),
        [PHOTO],
    ),
    "axial decoder": (
        lambda **own: AxialDecoderDeepLab(backbone(**own), 3, NORM, DECODER, **own),
        [PHOTO],
    ),
    "ccnet": (
        lambda **own: CCNet(backbone(8, **own), 3, NORM, CCNetOptions(8, Mechanism("1111", 2), 0.0), **own),
        [PHOTO],
    ),
    "pyramid": (lambda **own: Pyramid(8, **own), [MAPS]),
    "proposals": (lambda **own: ProposalHead(8, **own), [MAPS]),
    "boxes": (lambda **own: BoxHead(8, 3, **own), CROPS[:1]),
    "masks": (lambda **own: MaskHead(8, 3, **own), CROPS),
    "translator": (
        lambda **own: Translator(transformer(**own), 7, None, TranslatorOptions("sinusoid", 0.0), **own),
        [{"source": WORDS, "target": WORDS}],
    ),
}


QUICK = "axial block", "deformable middle", "generalized 0010, window", "ccnet", "masks"
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS]


def run(layer, inputs, training):
    """The numbers that a layer returns, as a list of tensors."""
    options = {"training": training} if "training" in inspect.signature(layer.call).parameters else {}
    return tf.nest.flatten(layer(*inputs, **options))


def inputs_of(name, dtype):
    def cast(x):
        return tf.cast(x, dtype) if x.dtype.is_floating else x

    return tf.nest.map_structure(cast, LAYERS[name][1])


def made(name, **own):
    """A layer with random weights."""
    layer = LAYERS[name][0](**own)
    run(layer, inputs_of(name, tf.float32), False)
    randomize(layer)
    for weight in layer.weights:  # a deep network of large numbers magnifies rounding
        if "kernel" in weight.name:
            weight.assign(0.5 * weight)
    return layer


def parts(layer):
    return [part for part in layer.submodules if isinstance(part, keras.layers.Layer)] + [layer]


FLOAT32_PARTS = LogitNorm, keras.layers.LayerNormalization  # under every policy but float64


# Names of `make_logits`, and of the convolution in it.
HEADS_OR_PARTS = (
    "logits", "conv", "semantic_head", "center_head", "offset_head", "scores", "codes", "classes", "masks"
)  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_a_layer_computes_in_its_own_precision(name):
    """Whatever the global policy is. Statistics and heads are never in lower precision."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layer = made(name, dtype="float32")
    assert {part.compute_dtype for part in parts(layer)} == {"float32"}
    assert {y.dtype for y in run(layer, inputs_of(name, tf.float32), True)} <= {tf.float32, tf.int32}
    keras.mixed_precision.set_global_policy("float32")
    layer = made(name, dtype="mixed_bfloat16")
    for part in parts(layer):
        head = isinstance(part, FLOAT32_PARTS) or (part.compute_dtype == "float32" and part.name in HEADS_OR_PARTS)
        assert part.compute_dtype == ("float32" if head else "bfloat16"), part.name
    assert {w.dtype for w in layer.weights} == {tf.float32}


@pytest.mark.parametrize("name", SOME)
def test_a_float64_layer_is_float64_throughout(name):
    """Differences of its results over a small step are its gradient: one float32 number on the way would spoil them.

    The step is along a random direction of inputs and weights. Slopes of a deep network are steep, and change soon.
    """
    layer, inputs = made(name, dtype="float64"), inputs_of(name, tf.float64)
    assert {w.dtype for w in layer.weights} == {tf.float64}
    rng, by = np.random.default_rng(1), 1e-7
    floats = [x for x in tf.nest.flatten(inputs) if x.dtype.is_floating]
    directions = [rng.normal(size=x.shape) for x in [*floats, *layer.trainable_weights]]
    start = layer.get_weights()

    def loss(inputs):
        outputs, rng = run(layer, inputs, True), np.random.default_rng(2)
        assert {y.dtype for y in outputs} == {tf.float64}
        return tf.add_n([tf.reduce_sum(y * rng.normal(size=y.shape)) for y in outputs])

    def moved(by):
        way = iter(directions)
        found = tf.nest.map_structure(lambda x: x + by * next(way) if x.dtype.is_floating else x, inputs)
        layer.set_weights(start)
        for weight, direction in zip(layer.trainable_weights, way, strict=True):
            weight.assign_add(by * direction)
        return loss(found).numpy()

    with tf.GradientTape() as tape:
        tape.watch(floats)
        total = loss(inputs)
    slopes = tape.gradient(total, [*floats, *layer.trainable_weights], unconnected_gradients="zero")
    slope = sum(np.sum(way * tf.convert_to_tensor(g).numpy()) for way, g in zip(directions, slopes, strict=True))
    found = (moved(by) - moved(-by)) / (2 * by)
    assert abs(found - slope) < 1e-5 * max(abs(slope), 1.0), (found, slope)


@pytest.mark.parametrize("name", SOME)
def test_a_frozen_layer_runs_as_in_inference(name):
    """As Keras' BatchNormalization: no weight moves, statistics included."""
    layer, inputs = made(name), inputs_of(name, tf.float32)
    layer.trainable = False
    before = layer.get_weights()
    wanted, found = run(layer, inputs, False), run(layer, inputs, True)
    for y, z in zip(wanted, found[-len(wanted) :], strict=True):  # CCNet's training has an auxiliary map before it
        np.testing.assert_array_equal(y, z)
    for value, old in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    assert not layer.trainable_weights
