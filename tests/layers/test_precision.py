"""Every layer of ours computes in its own precision, and as in inference where it is frozen."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import axial.layers
import axial.models
from axial.layers.attention.folded import FoldedAttention
from axial.layers.attention.layer import Attention, LogitNorm
from axial.layers.axial_attention import AxialAttention
from axial.layers.batch_norm import BatchNorm, BatchNormConfig
from axial.layers.blocks import AxialPair, BasicBlock, Bottleneck, ResidualBlock, StridedLocalAttention
from axial.layers.configured import Layer, Model
from axial.layers.conv import Conv, SeparableConv
from axial.layers.local_attention import LocalAttention
from axial.layers.spatial_attention.attended import AttendedMiddle, Mechanism
from axial.layers.spatial_attention.deformable_conv import DeformableConv, DeformableConv1D
from axial.layers.spatial_attention.dynamic_conv import DynamicConv
from axial.layers.spatial_attention.generalized_attention import TEXT, GeneralizedAttention
from axial.layers.spatial_attention.transformer import DecoderLayer, EncoderLayer
from axial.models.attention_resnet import AttentionStem
from axial.models.axial_decoder import AxialDecoderDeepLab
from axial.models.axial_resnet import AxialStem
from axial.models.base import Network
from axial.models.ccnet import CCNet
from axial.models.classifier import Classifier
from axial.models.faster_rcnn import BoxHead, FasterRCNN, MaskHead, ProposalHead, Pyramid
from axial.models.panoptic_deeplab import PanopticDeepLab
from axial.models.resnet import DeepLabStem, ResNet, WideStem, bottlenecks, convolutions
from axial.models.transformer import Transformer, Translator
from axial.models.xception import Xception71
from axial.weights.loading import Features
from tests.conftest import randomize

NORM = BatchNormConfig(momentum=0.5)
ATTENTION = dict(heads=2, span=3)
WORDS = tf.constant([[3, 4, 5, 2], [6, 2, 0, 0]])


def normal(*shape):
    return tf.random.stateless_normal(shape, [0, sum(shape)], dtype=tf.float64)


def attention(axis="height", **options):
    return AxialAttention(8, 8, axis, **ATTENTION, **options)


def backbone(output_stride=16, **own):
    blocks = bottlenecks(convolutions(NORM), NORM, "none")
    stem = Conv(8, 3, NORM, strides=2, name="stem", **own)
    return ResNet(stem, blocks, filters=4, repeats=(1, 1, 1, 1), output_stride=output_stride, least_stride=8, **own)


def axial_block(filters, *, strides, dilation=1, drop_path=0.0, input_stride=1, dtype=None, **own):
    del dilation, drop_path, input_stride
    pair = AxialPair(8, 8, NORM, strides, attention=ATTENTION, dtype=dtype, name="attention")
    return Bottleneck(8, filters, pair, NORM, strides, dtype=dtype, **own)


def transformer(**own):
    return Transformer(1, 16, 16, 2, encoder_deformable=True, decoder="dynamic", dropout=0.0, **own)


MAP, TOKENS, PHOTO = normal(2, 9, 7, 8), normal(2, 6, 8), normal(1, 33, 33, 3)
MAPS = {f"res{level}": normal(1, 2 ** (7 - level), 2 ** (7 - level), 8) for level in (2, 3, 4, 5)}
CROPS = normal(2, 3, 4, 4, 8), tf.constant([[1, 2, 0], [2, 1, 1]])
# What makes a layer, and what it takes.
LAYERS = {
    "axial attention": (attention, [MAP]),
    "axial attention of a whole axis": (lambda **own: AxialAttention(8, 8, "width", 2, **own), [MAP]),
    "local attention": (lambda **own: LocalAttention(8, 8, 2, 3, True, **own), [MAP]),
    "local attention without norms": (lambda **own: LocalAttention(8, 8, 2, 3, batch_norm=False, **own), [MAP]),
    "folded attention": (lambda **own: FoldedAttention(attention().spec, **own), [MAP]),
    "batch norm": (lambda **own: BatchNorm(NORM, **own), [MAP]),
    "convolution": (lambda **own: Conv(8, 3, NORM, 2, **own), [MAP]),
    "separable convolution": (lambda **own: SeparableConv(8, 3, NORM, inner_norm=True, **own), [MAP]),
    "axial pair": (lambda **own: AxialPair(8, 8, NORM, 2, attention=ATTENTION, **own), [MAP]),
    "local pair": (lambda **own: StridedLocalAttention(8, NORM, 2, ATTENTION, **own), [MAP]),
    "basic block": (lambda **own: BasicBlock(16, NORM, 2, **own), [MAP]),
    "axial block": (lambda **own: axial_block(16, strides=2, **own), [MAP]),
    "deformable middle": (
        lambda **own: AttendedMiddle(
            8, NORM, mechanism=Mechanism("1111", 2), spatial="deformable", deformable=dict(modulation="sigmoid"), **own
        ),
        [MAP],
    ),
    "dynamic middle": (lambda **own: AttendedMiddle(8, NORM, mechanism=Mechanism("dynamic", groups=2), **own), [MAP]),
    "deformable by products": (lambda **own: DeformableConv(8, 3, NORM, form="hat", **own), [MAP]),
    **{
        f"generalized {setting} {options}": (
            lambda setting=setting, options=options, **own: GeneralizedAttention(setting, 2, **options, **own),
            [MAP],
        )
        for setting, options in (("1111", {}), ("0010", {"window": 3}), ("0001", {"key_stride": 2}), ("0011", {}))
    },
    "generalized, of tokens": (lambda **own: GeneralizedAttention("1111", 2, causal=True, **TEXT, **own), [TOKENS]),
    "deformable, of tokens": (lambda **own: DeformableConv1D(8, 3, True, **own), [TOKENS]),
    "dynamic, of tokens": (lambda **own: DynamicConv(3, 2, 1, **own), [TOKENS]),
    "encoder": (lambda **own: EncoderLayer(8, 8, Mechanism("0110", 2), True, 0.0, **own), [TOKENS]),
    "decoder": (
        lambda **own: DecoderLayer(8, 8, Mechanism("1111", 2), memory=Mechanism("1000", 2), dropout=0.0, **own),
        [TOKENS, normal(2, 5, 8)],
    ),
    "deep stem": (lambda **own: DeepLabStem(0.125, NORM, **own), [PHOTO]),
    "wide stem": (lambda **own: WideStem(0.125, NORM, **own), [PHOTO]),
    "axial stem": (lambda **own: AxialStem(axial_block, 8, **own), [PHOTO]),
    "attention stem": (lambda **own: AttentionStem(8, NORM, 2, **own), [PHOTO]),
    "backbone": (backbone, [PHOTO]),
    "features": (lambda **own: Features(backbone(**own)), [PHOTO]),
    "classifier": (lambda **own: Classifier(backbone(**own), 3, **own), [PHOTO]),
    "panoptic": (
        lambda **own: PanopticDeepLab(backbone(**own), 3, NORM, decoder_width=0.0625, aspp=8, aspp_dropout=0.0, **own),
        [PHOTO],
    ),
    "axial decoder": (
        lambda **own: AxialDecoderDeepLab(backbone(**own), 3, NORM, width=0.25, span=5, heads=2, **own),
        [PHOTO],
    ),
    "ccnet": (
        lambda **own: CCNet(backbone(8, **own), 3, NORM, context=8, mechanism="1111", heads=2, dropout=0.0, **own),
        [PHOTO],
    ),
    "pyramid": (lambda **own: Pyramid(8, **own), [MAPS]),
    "proposals": (lambda **own: ProposalHead(8, **own), [MAPS]),
    "boxes": (lambda **own: BoxHead(8, 3, **own), CROPS[:1]),
    "masks": (lambda **own: MaskHead(8, 3, **own), CROPS),
    "translator": (
        lambda **own: Translator(transformer(**own), 7, "sinusoid", 0.0, **own),
        [{"source": WORDS, "target": WORDS}],
    ),
}
SLOW = {"xception": (lambda **own: Classifier(Xception71(NORM, **own), 3, **own), [PHOTO])}
EVERY = {**LAYERS, **SLOW}
NAMES = [*LAYERS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def run(layer, inputs, training):
    """The numbers that a layer returns, as a list of tensors."""
    options = {"training": training} if "training" in inspect.signature(layer.call).parameters else {}
    return tf.nest.flatten(layer(*inputs, **options))


def inputs_of(name, dtype):
    def cast(x):
        return tf.cast(x, dtype) if x.dtype.is_floating else x

    return tf.nest.map_structure(cast, EVERY[name][1])


def made(name, **own):
    """A layer with random weights."""
    layer = EVERY[name][0](**own)
    run(layer, inputs_of(name, tf.float32), False)
    randomize(layer)
    for weight in layer.weights:  # a deep network of large numbers magnifies rounding
        if "kernel" in weight.name:
            weight.assign(0.5 * weight)
    return layer


def parts(layer):
    return [part for part in layer.submodules if isinstance(part, keras.layers.Layer)] + [layer]


def test_the_layers_here_are_all_layers_of_ours():
    for package in (axial.layers, axial.models):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "tpu" not in module.name and "pallas" not in module.name:
                importlib.import_module(module.name)

    def below(kind):
        return {kind}.union(*(below(sub) for sub in kind.__subclasses__()))

    ours = {kind for kind in below(keras.layers.Layer) if kind.__module__.startswith(("axial.layers", "axial.models"))}
    here = {type(part) for name in EVERY for part in parts(made(name))}
    # Five are bases of others. Faster R-CNN is its parts here and the layers of tf-models-official, which are float32.
    assert ours - here == {Layer, Model, Network, Attention, ResidualBlock, FasterRCNN}


@pytest.mark.parametrize("name", NAMES)
def test_a_float32_layer_is_float32_under_every_global_policy(name):
    results, weights = [], None
    for policy in ("mixed_bfloat16", "float32"):
        keras.mixed_precision.set_global_policy(policy)
        layer = made(name, dtype="float32")
        assert {part.compute_dtype for part in parts(layer)} == {"float32"}
        weights = weights or layer.get_weights()
        layer.set_weights(weights)
        results.append([y for training in (False, True) for y in run(layer, inputs_of(name, tf.float32), training)])
        results[-1] += [tf.convert_to_tensor(w) for w in layer.weights]
    for half, whole in zip(*results, strict=True):
        assert half.dtype == whole.dtype and half.dtype != tf.bfloat16
        np.testing.assert_array_equal(half, whole)


FLOAT32_PARTS = LogitNorm, keras.layers.LayerNormalization  # under every policy but float64


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_lower_precision_has_float32_statistics_and_heads_alone(name):
    layer = made(name, dtype="mixed_bfloat16")
    for part in parts(layer):
        head = isinstance(part, FLOAT32_PARTS) or (part.compute_dtype == "float32" and part.name in HEADS_OR_PARTS)
        assert part.compute_dtype == ("float32" if head else "bfloat16"), part.name
    assert {w.dtype for w in layer.weights} == {tf.float32}


# Names of `make_logits`, and of the convolution in it.
HEADS_OR_PARTS = (
    "logits", "conv", "semantic_head", "center_head", "offset_head", "scores", "codes", "classes", "masks"
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_float64_layer_is_float64_throughout(name):
    """Differences of its results over a small step are its gradient: one float32 number on the way would spoil them.

    The step is along a random direction of inputs and weights. Slopes of a deep network are steep, and change soon.
    """
    layer, inputs = made(name, dtype="float64"), inputs_of(name, tf.float64)
    assert {w.dtype for w in layer.weights} == {tf.float64}
    rng, step = np.random.default_rng(1), 1e-10 if name in SLOW else 1e-7
    floats = [x for x in tf.nest.flatten(inputs) if x.dtype.is_floating]
    directions = [rng.normal(size=x.shape) for x in [*floats, *layer.trainable_weights]]

    def moved(by):
        way = iter(directions)
        return tf.nest.map_structure(lambda x: x + by * next(way) if x.dtype.is_floating else x, inputs)

    def loss(outputs):
        return tf.add_n([tf.reduce_sum(y * c) for y, c in zip(outputs, cotangents, strict=True)])

    def along(training, by):
        start = layer.get_weights()
        for weight, way in zip(layer.trainable_weights, directions[len(floats) :], strict=True):
            weight.assign_add(by * way)
        value = loss(run(layer, moved(by), training)).numpy()
        layer.set_weights(start)
        return value

    for training in (False, True):
        outputs = run(layer, inputs, training)
        assert {y.dtype for y in outputs} == {tf.float64}
        cotangents = [rng.normal(size=y.shape) for y in outputs]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            total = loss(run(layer, inputs, training))
        slopes = tape.gradient(total, [*floats, *layer.trainable_weights], unconnected_gradients="zero")
        slope = sum(np.sum(way * tf.convert_to_tensor(g).numpy()) for way, g in zip(directions, slopes, strict=True))
        found = (along(training, step) - along(training, -step)) / (2 * step)
        assert abs(found - slope) < 1e-5 * max(abs(slope), 1.0), (found, slope)


@pytest.mark.parametrize(
    "name,when",
    [
        *(("axial pair", when) for when in ("as it is made", "before it is built")),
        *(pytest.param(n, "after it is built", marks=[pytest.mark.slow] if n in SLOW else []) for n in EVERY),
    ],
)
def test_a_frozen_layer_runs_as_in_inference(name, when):
    """As Keras' BatchNormalization: no weight moves, statistics included."""
    layer = EVERY[name][0](**({"trainable": False} if when == "as it is made" else {}))
    inputs = inputs_of(name, tf.float32)
    if when == "before it is built":
        layer.trainable = False
    run(layer, inputs, False)
    randomize(layer)
    if when == "after it is built":
        layer.trainable = False
    before = layer.get_weights()
    wanted, found = run(layer, inputs, False), run(layer, inputs, True)
    for y, z in zip(wanted, found[-len(wanted) :], strict=True):  # CCNet's training has an auxiliary map before it
        np.testing.assert_array_equal(y, z)
    for value, old in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    assert not layer.trainable_weights
