"""Tests that all registered models of photos must pass, and errors of the registry."""

import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.analysis.counts import trace
from axial.analysis.model_counts import read_models
from axial.errors import InputError
from axial.layers.attention.layer import Attention
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.random import drop_images
from axial.models.outputs import AUXILIARY, CENTER, LOGITS, OFFSET, SEMANTIC
from axial.models.panoptic_deeplab.xception import Xception71
from axial.models.registry import VARIANTS, ModelConfig, build_model, find_variant
from axial.models.resnet.network import BackboneOptions, ConvResNet, ConvResNetOptions
from axial.serving.export import fold
from tests.conftest import ROOT, free_graphs, relative_error

CLASSES = 19
TOLERANCE = 1e-5
# Millions of parameters, from an analytic count that agrees with the published tables.
PARAMETERS = {
    "resnet_50": 25.557,
    "attention_resnet_no_bn": 18.019,
    "ps_attention_resnet_w100": 18.032,
    "axial_resnet_26_s": 5.914,  # csrhddlam: 5.945 with the norms in attention, which the paper leaves out
    "axial_resnet_s": 12.430,
    "full_axial_resnet_l": 45.797,
    "panoptic_deeplab_ps_attention": 17.277,
    "panoptic_deeplab_xception_71_aspp": 46.718,
    "axial_deeplab_l": 44.890,
    "axial_deeplab_xl": 173.044,
}
# A reduced network of each kind, with one block in each stage: dict from names to changed arguments.
ONE_EACH = dict(repeats=(1, 1, 1, 1))
REDUCED = {
    "full_axial_resnet_s": ONE_EACH,
    "axial_deeplab_s_axial_decoder": ONE_EACH,
    "axial_swidernet_1_1_1": dict(ONE_EACH, width=0.25, decoder_width=0.25),
    "max_s_backbone_gelu": dict(ONE_EACH, width=0.25, decoder_width=0.25),
    "panoptic_deeplab_ps_attention_aspp": dict(ONE_EACH, width=0.25),
    "attended_resnet_50_1111": dict(ONE_EACH, width=0.25, heads=2),
    "dilated_resnet_50_0010_deformable": dict(ONE_EACH, width=0.25, heads=2),
    "ccnet_resnet_50_dynamic": dict(ONE_EACH, width=0.25, heads=2, context=32, window=3),
}
# Tasks whose models are tested here. `test_faster_rcnn` and `test_transformer` test detectors and translators.
TASKS = "classification", "panoptic", "segmentation"
HARNESS = [*REDUCED.items(), *((name, {}) for name in VARIANTS if find_variant(name).task in TASKS)]


def test_counts():
    """experiments/models.csv has these numbers of parameters. `test_model_counts` compares the file with the models."""
    rows = {row.model: row for row in read_models(str(ROOT / "experiments" / "models.csv"))}
    assert {name: round(rows[name].parameters / 1e6, 3) for name in PARAMETERS} == PARAMETERS


@pytest.mark.parametrize(
    "name,changes",
    [
        ("axial_deeplab_nano", dict(repeats=(1, 0, 0, 0))),
        *(pytest.param(name, changes, marks=pytest.mark.slow) for name, changes in HARNESS),
    ],
)
def test_harness(name, changes, tmp_path):
    check(name, changes, tmp_path)
    free_graphs()  # frees memory before the next model


def check(name, changes, folder):
    """Checks a model on two random images of 64 or 65 pixels.

    Outputs are finite and have the expected shapes. Every weight has a gradient, and a step changes the outputs. Eager
    execution, graph and export agree up to 1e-5. Outputs in mixed bfloat16 are float32.
    """
    keras.mixed_precision.set_global_policy("float32")
    size = 64 if find_variant(name).classes == 1000 else 65
    images = tf.random.uniform([2, size, size, 3], -1, 1, seed=0)
    # With momentum 0.5, one training step is enough to set the moving statistics. No variance becomes so small that it
    # magnifies rounding errors.
    model = build_model(name, CLASSES, BatchNormConfig(momentum=0.5), **changes)
    model(images)
    # The scale of residual branches is initialised to 0, which stops the gradients of their layers. With a scale of 1,
    # a deep network magnifies rounding errors.
    for weight in model.weights:
        if weight.name.endswith(("expand/norm/gamma:0", "conv3/pointwise/norm/gamma:0", "attended/gamma:0")):
            weight.assign(tf.fill(weight.shape, 0.1))
    step = tf.function(lambda x: _loss_and_gradients(model, x), autograph=False)
    outputs, gradients = step(images)
    assert {k: v.shape[1:] for k, v in outputs.items()} == output_shapes(name)
    for value in outputs.values():
        assert np.isfinite(value).all()
    check_gradients(model, gradients)
    eager, graph = model(images), tf.function(model, autograph=False)(images)
    check_equal(graph, eager)
    loaded = exported(name, changes, model, size, folder)
    check_equal(loaded.run(images), eager)
    gradients, _ = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in gradients], 1.0)
    keras.optimizers.legacy.SGD(1e-3).apply_gradients(zip(gradients, model.trainable_weights))
    for key, value in step(images)[0].items():
        assert np.isfinite(value).all() and np.any(value.numpy() != outputs[key].numpy())
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    half = build_model(name, CLASSES, **changes)
    for value in half(images).values():
        assert value.dtype == tf.float32 and np.isfinite(value).all()


def output_shapes(name):
    """dict from the name of each output to its shape without the batch axis, for images of 64 or 65 pixels."""
    if find_variant(name).classes == 1000:
        return {LOGITS: (CLASSES,)}
    if find_variant(name).task == "segmentation":
        side = -(-65 // find_variant(name).arguments["output_stride"])
        return {SEMANTIC: (side, side, CLASSES), AUXILIARY: (side, side, CLASSES)}
    return {SEMANTIC: (17, 17, CLASSES), CENTER: (17, 17, 1), OFFSET: (17, 17, 2)}


def check_gradients(model, gradients):
    """Asserts that every weight's gradient is finite and, with one exception, not zero."""
    for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
        assert gradient is not None, weight.name
        gradient = tf.convert_to_tensor(gradient).numpy()
        assert np.isfinite(gradient).all(), weight.name
        # The width layer's batch norm removes this offset of the height layer, so its gradient is 0.
        if not ("height/" in weight.name and weight.name.endswith("output_norm/beta:0")):
            assert np.abs(gradient).max() > 0, weight.name


def check_equal(actual, expected):
    assert set(actual) == set(expected)
    for key in expected:
        assert relative_error(actual[key], expected[key]) < TOLERANCE, key


def exported(name, changes, model, size, folder):
    """Folds a model, saves it as a SavedModel, and returns the loaded SavedModel."""

    def build(folded):
        twin = build_model(name, CLASSES, None if folded else BatchNormConfig(), **changes)
        twin(tf.zeros([1, size, size, 3]))
        return twin

    twin = fold(types.SimpleNamespace(build_model=build), model)
    module = tf.Module()
    module.weights = twin.weights
    specification = tf.TensorSpec([2, size, size, 3])
    module.run = tf.function(twin, autograph=False, input_signature=[specification])
    tf.saved_model.save(module, str(folder))
    assert not [w for w in twin.weights if "norm" in w.name]
    return tf.saved_model.load(str(folder))


def _loss_and_gradients(model, images):
    with tf.GradientTape() as tape:
        outputs = model(images, training=True)
        loss = tf.add_n([tf.reduce_mean(tf.square(v - 1)) for v in outputs.values()])
    return outputs, tape.gradient(loss, model.trainable_weights)


@pytest.mark.parametrize(
    "name,changes,words",
    [
        ("axial_deeplab_z", {}, "did you mean 'axial_deeplab_"),
        ("axial_deeplab_s", dict(width=0.3), "heads do not divide"),
        ("axial_deeplab_s", dict(span=64), "63 and 65"),
        ("axial_deeplab_s", dict(output_stride=8), "16 or 32"),
        ("axial_deeplab_s", dict(drop_path=1.0), "drop_path must be at least 0 and below 1"),
        ("full_axial_resnet_s", dict(width=0.375), "try 0.25 or 0.5"),
        ("panoptic_deeplab_xception_71", dict(output_stride=4), "16 or 32"),
        ("attended_resnet_50_1111", dict(mechanism="0000"), "setting = '0000': expected four bits, '0001' to"),
        ("attended_resnet_50_1111", dict(mechanism="dynamics"), "expected four bits .*did you mean 'dynamic'"),
        ("attended_resnet_50_1111", dict(spatial="3x3"), "spatial = '3x3': expected one of"),
        ("axial_deeplab_s", dict(widht=1), "no argument 'widht' .did you mean 'width'"),
        ("panoptic_deeplab_resnet_50_aspp", dict(aspp_dropout=1.0), "aspp_dropout must be at least 0"),
        ("faster_rcnn_resnet_nano", dict(output_stride=16), "output_stride must be 32 for a feature pyramid: got 16"),
        ("faster_rcnn_resnet_nano", dict(frozen_stages=5), "frozen_stages must be from -1 to 4: got 5"),
        ("transformer_nano", dict(memory="dynamic"), "memory = 'dynamic': expected four bits"),
        ("transformer_nano", dict(decoder="dynamics"), "did you mean 'dynamic'"),
        ("transformer_nano", dict(positions="sinus"), "did you mean 'sinusoid'"),
    ],
)
def test_what_cannot_be_built_says_so(name, changes, words):
    """An unknown name or an invalid argument raises InputError, whose message says what is wrong."""
    with pytest.raises(InputError, match=words):
        build_model(name, CLASSES, **changes)


def test_an_image_below_the_output_stride_says_the_least_size():
    """An image of 15x64 pixels is refused at output stride 16."""
    with pytest.raises(InputError, match="height 15: 'axial_deeplab_nano' takes at least its output stride, 16"):
        trace("axial_deeplab_nano", CLASSES, 15, 64)


def test_an_axis_up_to_the_span_is_seen_whole_by_a_binding():
    """On maps of 17x17 with span 17, a query sees 8 keys on each side, or 16 with `whole_up_to_span`.

    The config records the option in `arguments`. A model without attention refuses the option.
    """
    configs = [ModelConfig("axial_deeplab_nano", whole_up_to_span=choice) for choice in (False, True)]
    models = [config.build(CLASSES, (65, 65), changes={**ONE_EACH, "span": 17}) for config in configs]
    assert configs[0].arguments == {} and configs[1].arguments == {"whole_up_to_span": True}
    reaches = [{layer.spec.windows(tf.zeros([1, 17, 17, 1])).reach for layer in attention_layers(m)} for m in models]
    assert reaches == [{8}, {16}]
    with pytest.raises(InputError, match="'resnet_nano' has no argument 'whole_up_to_span'"):
        ModelConfig("resnet_nano", whole_up_to_span=True).build(CLASSES, (65, 65))


def attention_layers(model):
    return [layer for layer in model.submodules if isinstance(layer, Attention)]


def test_stochastic_depth():
    """At rate 0.25 an image of ones becomes all 0 or all 4/3, with mean 1. Over the blocks, rates rise linearly."""
    x = tf.ones([4000, 1, 1, 3])
    y = (x * drop_images(x, 0.25)).numpy()
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)} and (y[..., :1] == y).all()
    assert abs(y.mean() - 1) < 0.05
    model = build_model("axial_deeplab_nano", CLASSES, drop_path=0.5)
    rates = [stage[0].drop_path for stage in model.backbone.stages]
    np.testing.assert_allclose(rates, [0, 1 / 6, 1 / 3, 0.5])


# === Output stride 16 ===


@pytest.mark.parametrize("stride,strides,rates", [(16, [1, 1, 1], [1, 2, 2]), (32, [2, 1, 1], [1, 1, 1])])
def test_the_last_stage_of_a_resnet_is_atrous(stride, strides, rates):
    """At output stride 16, dilation replaces the stride in the 3x3 convolutions of the last stage."""
    convs = [block.middle.conv for block in ConvResNet(ConvResNetOptions(stride, width=0.25)).stages[3]]
    assert [conv.strides[0] for conv in convs] == strides and [conv.dilation_rate[0] for conv in convs] == rates


@pytest.mark.filterwarnings("ignore:a photo of")  # with an invalid `table_photo`, position tables may be small
def test_arguments_of_a_wrong_type_are_one_line():
    """With the value 'x' or [1, 'a'] for an argument, the model is built or InputError has one line."""
    refused = 0
    for argument in find_variant("axial_resnet_nano").parameters():
        for value in ("x", [1, "a"]):
            config = ModelConfig("axial_resnet_nano", arguments={argument: value})
            try:
                config.build(3, (64, 64))
            except InputError as error:
                refused += 1
                assert "\n" not in str(error), (argument, value)
    assert refused > 10
    with pytest.raises(InputError, match=r"'axial_resnet_nano': heads = 'x{180,200}\.\.\.: expected int"):
        ModelConfig("axial_resnet_nano", arguments={"heads": "x" * 300}).build(3, (64, 64))


def test_a_decoder_has_the_same_weights_at_output_stride_8():
    """Weights have the same names and shapes as at stride 16, and the ASPP's rates double. Logits keep stride 4."""
    shapes, rates = [], []
    for stride in (16, 8):
        model = build_model("attended_deeplab_nano", CLASSES, output_stride=stride, aspp=32)
        outputs = model(tf.zeros([1, 65, 65, 3]))
        shapes.append([(weight.name, weight.shape) for weight in model.weights])
        rates.append([conv.depthwise.conv.dilation_rate[0] for conv in model.semantic_decoder.context.atrous])
        assert outputs[SEMANTIC].shape == (1, 17, 17, CLASSES)
    assert shapes[0] == shapes[1] and rates == [[6, 12, 18], [12, 24, 36]]


@pytest.mark.slow  # builds two networks of 71 layers
def test_a_network_that_is_trained_at_output_stride_16_can_be_used_at_8():
    """Every second pixel of the maps at stride 8 equals the maps at stride 16, because dilation replaces strides."""
    coarse, fine = (Xception71(BackboneOptions(stride)) for stride in (16, 8))
    images = tf.random.stateless_uniform([1, 65, 97, 3], [0, 0], -1, 1)
    expected = coarse(images)
    fine(images)
    for target, weight in zip(fine.weights, coarse.weights, strict=True):
        target.assign(weight)
    actual = fine(images)
    assert actual["res4"].shape[1:3] == actual["res5"].shape[1:3] == (9, 13)
    for level, x in actual.items():
        x = x[:, ::2, ::2] if level in ("res4", "res5") else x
        assert relative_error(x, expected[level]) < 1e-5, level
