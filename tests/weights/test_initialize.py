"""`initialize` from classifiers, moving averages and converted weights, and its errors."""

import ast

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.models.registry import ModelConfig, build_model, find_variant
from axial.training.optimizers import NesterovMomentum
from axial.weights import convert
from axial.weights.interchange import read_safetensors
from axial.weights.names import weight_names
from axial.weights.restore import check_frozen, find_weights, initialize, restore_model
from tests.conftest import GOLDEN, randomize, relative_error

CLASSIFIER, SEGMENTER = "axial_resnet_nano_deeplab_stem", "axial_deeplab_nano"


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """Prefix of a checkpoint of a classifier, with random weights and other random moving averages."""
    model = built(CLASSIFIER, 3)
    optimizer = NesterovMomentum(0.1, average=0.9).build(model.trainable_variables)
    randomize(model)
    rng = np.random.default_rng(1)
    for average in optimizer.averages:
        average.assign(rng.normal(0, 0.5, average.shape))
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, averages=optimizer.averages)
    return checkpoint.save(str(tmp_path_factory.mktemp("classified") / "ckpt"))


def built(name, classes=11, **arguments):
    """A registered model, built for images of 33x33 pixels."""
    model = build_model(name, classes, **arguments)
    model(tf.zeros([1, 33, 33, 3]))
    return model


def test_shipped_weights_start_a_training_of_other_classes():
    """All weights except the last semantic layer come from the shipped file. Another batch norm epsilon is refused."""
    model = built(SEGMENTER)
    before = model.get_weights()
    (file,) = find_weights("nuclei")
    first, taken, reshaped = initialize(model, "nuclei", ModelConfig(SEGMENTER)).splitlines()
    assert first == f"init_checkpoint: {file}" and f"of {len(before)} weights" in taken
    assert "of another shape" in reshaped and reshaped.endswith("semantic_head/logits")
    _, arrays = read_safetensors(file)
    for old, (name, weight) in zip(before, weight_names(model).items(), strict=True):
        expected = old if name.startswith("semantic_head/logits") else arrays[name]
        np.testing.assert_array_equal(weight, expected, name)
    wrong = ModelConfig(SEGMENTER, norm=BatchNormConfig(epsilon=1e-5))
    with pytest.raises(InputError, match="these weights need --gin_binding=.BatchNormConfig.epsilon = 0.001"):
        initialize(built(SEGMENTER), file, wrong)


def test_a_moved_backbone_has_the_features_of_the_classifiers_averages(classified):
    """'res1' to 'res4' are bit-identical. The message lists the weights taken, left out, and left random."""
    classifier = built(CLASSIFIER, 3)
    restore_model(classifier, classified)
    model = built(SEGMENTER, output_stride=16)
    lines = initialize(model, classified).splitlines()
    images = tf.random.stateless_uniform([2, 33, 65, 3], [0, 0], -1, 1)
    expected, actual = classifier.backbone(images), model.backbone(images)
    for name in ("res1", "res2", "res3", "res4"):
        np.testing.assert_array_equal(actual[name], expected[name], name)
    assert lines[0] == f"init_checkpoint: {classified}, moving averages"
    count = len(model.backbone.weights)
    assert f"{count} of {len(model.weights)} weights" in lines[1] and lines[1].endswith(": backbone")
    assert lines[2] == "  left       2 weights: logits"
    heads = "center_head, instance_decoder, offset_head, semantic_decoder, semantic_head"
    assert lines[3] == f"  unmatched  {len(model.weights) - count} weights that start random: {heads}"
    assert len(lines) == 4


def test_a_backbone_that_does_not_match_is_refused(classified):
    """The model has a second block in its last stage. So the checkpoint has under 70 % of its parameters."""
    words = r"has 6\d\.\d % of the backbone's parameters, at least 90 % are expected; it lacks.* backbone/stages/3/1$"
    with pytest.raises(InputError, match=words):
        initialize(built(SEGMENTER, repeats=(1, 1, 1, 2)), classified)


def test_converted_weights(tmp_path):
    """The error names the arguments that a model needs. With them, features equal the classifier's bit for bit."""
    converted = str(tmp_path / "weights")
    conversion, _ = convert.convert("csrhddlam", str(GOLDEN / "pt_checkpoint_tiny.pth"), converted)
    classifier = conversion.build()
    norm = BatchNormConfig(0.9, 1e-5, unbiased=True)
    config = ModelConfig("axial_deeplab_s", norm=norm)
    with pytest.raises(InputError, match=r"safetensors: these weights need .*'pixels': 'torchvision'") as caught:
        initialize(None, converted, config)
    text = str(caught.value).partition("ModelConfig.arguments = ")[2].removesuffix('"')
    arguments = {**ast.literal_eval(text), "output_stride": 32, "decoder_width": 0.125}
    model = build_model("axial_deeplab_s", 11, norm, **arguments)
    model(tf.zeros([1, 33, 33, 3]))
    initialize(model, converted, ModelConfig("axial_deeplab_s", norm=norm, arguments=arguments))
    images = tf.random.stateless_uniform([1, 65, 33, 3], [0, 0], -1, 1)
    for name, expected in classifier.backbone(images).items():
        np.testing.assert_array_equal(model.backbone(images)[name], expected)
    wrong = ModelConfig("axial_deeplab_s", BatchNormConfig(epsilon=0.5), arguments=arguments)
    with pytest.raises(InputError, match='these weights need --gin_binding="BatchNormConfig.epsilon = 1e-05"'):
        initialize(model, converted, wrong)


def test_weights_of_nothing_like_it_are_refused(tmp_path):
    """A checkpoint with a single scalar, which fits no weight, is refused."""
    foreign = tf.train.Checkpoint(v=tf.Variable(1.0)).save(str(tmp_path / "foreign"))
    with pytest.raises(InputError, match="none of its weights fits the model"):
        initialize(built(SEGMENTER), foreign)


# === Detectors and CCNet start from a plain classifier ===

TINY = dict(repeats=(1, 1, 1, 1), width=0.25, heads=2, context=16, pyramid_width=32, head_width=64)
BOXES = dict(pre_nms=(60, 40), proposals=(40, 20), sampled=16, detections=10)


def tiny(name, classes=3, **changes):
    """A built model with reduced numbers of channels and blocks."""
    taken = {key: value for key, value in {**TINY, **BOXES}.items() if key in find_variant(name).parameters()}
    return built(name, classes, **taken | changes)


def saved(model, folder):
    """Sets random weights in a model and saves a checkpoint. Returns its prefix."""
    randomize(model)
    return tf.train.Checkpoint(model=model).save(str(folder / "ckpt"))


def test_all_of_the_plain_classifiers_backbone_arrives(tmp_path):
    """All backbone weights are taken bit for bit. New modules start as the identity, so 'res1' to 'res3' are equal."""
    name = "ccnet_resnet_50_0010_deformable"
    classifier, model = tiny("resnet_50_deeplab_stem"), tiny(name, 5)
    lines = initialize(model, saved(classifier, tmp_path)).splitlines()
    assert {w.numpy().tobytes() for w in classifier.backbone.weights} <= {
        w.numpy().tobytes() for w in model.backbone.weights
    }
    images = tf.random.stateless_uniform([1, 64, 96, 3], [0, 0], -1, 1)
    expected, actual = classifier.backbone(images), model.backbone(images)
    for level in ("res1", "res2", "res3"):  # after res3, CCNet's strides differ
        assert relative_error(actual[level], expected[level]) <= 1e-5, level
    (new,) = [line for line in lines if line.startswith("  new  ")]
    assert "middle/conv/offset_kernel" in new and "middle/attended" in new
    assert not [line for line in lines if "backbone" in line and line not in (lines[1], new)]


def test_a_module_is_taken_whole_or_not_at_all(tmp_path):
    """A classifier of type 0010 lacks the query weights of a detector of type 1111, so the module takes no weights.

    With the classifier's gamma, random queries would change the features.
    """
    model = tiny("faster_rcnn_attended_resnet_50_1111")
    weights = {weight.name: weight.numpy() for weight in model.weights if "attended" in weight.name}
    lines = initialize(model, saved(tiny("attended_resnet_50_0010"), tmp_path)).splitlines()
    assert f"  new        {len(weights)} weights" in lines[3]
    for weight in model.weights:
        if weight.name in weights:
            np.testing.assert_array_equal(weight, weights[weight.name], weight.name)


def test_frozen_weights_need_a_checkpoint_that_has_them(tmp_path):
    """Weights of frozen layers and frozen statistics may not stay random, unless `random_frozen` allows it."""
    name, words = "faster_rcnn_attended_resnet_50_0010", "frozen weights would stay random, such as "
    model, moving = tiny(name), ModelConfig(name)
    config = ModelConfig(name, norm=BatchNormConfig(frozen=True))
    with pytest.raises(InputError, match=f"init_checkpoint = None: .* {words}'faster_rcnn/backbone/stem/conv/kernel'"):
        check_frozen(model, moving)
    with pytest.raises(InputError, match=r"expected a checkpoint .*, or TrainingConfig.random_frozen = True$"):
        check_frozen(model, config)
    check_frozen(tiny(name, frozen_stages=-1), moving)
    before = [w.numpy() for w in model.weights]
    other = saved(tiny("resnet_50_deeplab_stem"), tmp_path)
    with pytest.raises(InputError, match=f"'{other}': .* {words}'faster_rcnn/backbone/stem/conv/kernel'"):
        initialize(model, other, config, random_frozen=False)
    for weight, value in zip(model.weights, before):
        np.testing.assert_array_equal(weight, value)
    assert initialize(model, other, config)
    assert initialize(model, saved(tiny("resnet_50"), tmp_path), config, random_frozen=False)
