"""Models in a user's own tf_keras program: saved and loaded, cloned, trained by `fit`, frozen, of unknown sizes."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.layers.conv import Conv
from axial.models import VARIANTS, build_model
from axial.models.resnet import ResNet, resnet
from axial.weights.loading import Features
from tests import keras_programs
from tests.conftest import randomize, relative_error, two_replicas

ONE_EACH = dict(repeats=(1, 1, 1, 1), width=0.25, heads=4)
SIZES = (33, 33), (49, 65)
# A model of each head and of each backbone, and what its builder changes.
MODELS = {
    "resnet_nano": {},
    "axial_resnet_nano": {},
    "attention_resnet": ONE_EACH,
    "panoptic_deeplab_resnet_nano": {},
    "ccnet_nano_0010_deformable": {},
    "faster_rcnn_resnet_nano": {},
    "transformer_nano_deformable": {},
    "axial_deeplab_s_axial_decoder": ONE_EACH,
    "xception_71": {},
}
OTHERS = {name: {} for name in VARIANTS if "nano" in name and name not in MODELS} | {
    "full_axial_resnet_s": dict(repeats=(1, 1, 1, 1)),
    "full_attention_resnet": ONE_EACH,
    "axial_resnet_26_s": ONE_EACH,
    "axial_swidernet_1_1_1": dict(ONE_EACH, decoder_width=0.25),
    "max_s_backbone_gelu": dict(ONE_EACH, decoder_width=0.25),
    "panoptic_deeplab_ps_attention_aspp": ONE_EACH,
}
SLOW = {"xception_71", "axial_deeplab_s_axial_decoder", *OTHERS}
# The formats for which tf_keras walks a model in its own way. The others are tried on every model by a slow test.
QUICK = ("weights", "keras")


def some(models, quick=lambda name: name not in SLOW):
    return [name if quick(name) else pytest.param(name, marks=pytest.mark.slow) for name in models]


def built(name):
    """(model that is built for the first of `SIZES`, inputs of each of them)."""
    model = build_model(name, 5, **{**MODELS, **OTHERS}[name])
    examples = [keras_programs.draw(VARIANTS[name].head.signature(size, batch=2)) for size in SIZES]
    model(examples[0])
    randomize(model)
    for weight in model.weights:  # so that no output saturates
        if weight.shape.rank > 1:
            weight.assign(weight * min(1, weight.shape.num_elements() ** -0.25))
    return model, examples


CASES = [
    (name, kind)
    for name in MODELS
    for kind in keras_programs.FORMATS
    if name not in SLOW and (kind in QUICK or name == "resnet_nano")
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return keras_programs.faults_in_a_fresh_process(tmp_path_factory.mktemp("models"), CASES, built)


@pytest.mark.parametrize("name,kind", CASES)
def test_saved_and_loaded_in_a_fresh_process(name, kind, faults):
    """The loaded model has every weight, and takes other sizes than the one it was saved with."""
    assert faults[name, kind] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_every_format_in_a_fresh_process(name, tmp_path):
    cases = [(name, kind) for kind in keras_programs.FORMATS]
    assert keras_programs.faults_in_a_fresh_process(tmp_path, cases, built) == dict.fromkeys(cases, "")


@pytest.mark.parametrize("name", some(MODELS))
def test_cloned(name):
    model, (x, _) = built(name)
    twin = keras.models.clone_model(model)
    twin(x)
    twin.set_weights(model.get_weights())
    for ours, theirs in zip(tf.nest.flatten(twin(x)), tf.nest.flatten(model(x)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def functional(name):
    """(functional model of a user, four inputs). Its loss is the mean square of its outputs; it has no dropout."""
    variant = VARIANTS[name]
    changes = {**{**MODELS, **OTHERS}[name], **{part: 0.0 for part in variant.parameters() if "dropout" in part}}
    specs, options = {"x": variant.head.signature(SIZES[0], batch=4)}, ()
    if variant.task == "detection":  # learns from objects that it is given; what it finds has no gradient
        specs["truth"] = {"boxes": tf.TensorSpec([4, 3, 4]), "classes": tf.TensorSpec([4, 3], tf.int32)}
        options = ("truth",)
    inputs = tf.nest.map_structure(lambda spec: keras.Input(spec.shape[1:], dtype=spec.dtype), specs)
    found = build_model(name, 5, **changes)(inputs["x"], **{option: inputs[option] for option in options})
    outputs = [y for y in tf.nest.flatten(found) if y.dtype.is_floating]
    model = keras.Model(inputs, outputs)
    model.add_loss(tf.add_n([tf.reduce_mean(tf.square(y)) for y in outputs]))
    x = keras_programs.draw(specs)
    if options:
        x["truth"]["boxes"] = np.tile(np.float32([[2, 3, 20, 30], [0, 0, 9, 9], [-1, -1, -1, -1]]), [4, 1, 1])
        x["truth"]["classes"] = np.tile(np.int32([1, 2, -1]), [4, 1])
    return model, x


def train(model, x):
    """A step of `fit`. Returns its loss."""
    model.compile("sgd")
    return model.fit(x, batch_size=4, verbose=0).history["loss"][0]


@pytest.mark.parametrize("name", some(MODELS, lambda name: name == "resnet_nano"))
def test_trains_in_bfloat16_and_on_two_replicas(name):
    model, x = functional(name)
    before = model.get_weights()
    loss = train(model, x)
    moved = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert np.isfinite(loss) and np.mean(moved) > 0.5
    with two_replicas().scope():
        twin, _ = functional(name)
        twin.set_weights(before)
        drawn = VARIANTS[name].task == "detection"  # the boxes that a detector learns from are drawn anew
        assert relative_error(train(twin, x), loss) < (0.05 if drawn else 1e-3)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    twin, _ = functional(name)
    twin.set_weights(before)
    assert {y.dtype for y in twin.outputs} == {tf.float32}  # as logits, scores and boxes are under every policy
    # Logits of 71 rounded layers differ by 15 %, and the loss has their squares.
    assert relative_error(train(twin, x), loss) < (0.5 if name == "xception_71" else 0.05)


@pytest.mark.parametrize("name", ["resnet_nano", "axial_resnet_nano"])
def test_a_frozen_backbone_keeps_its_weights(name):
    backbone = Features(build_model(name, 5).backbone)
    backbone.trainable = False
    photo = keras.Input([33, 33, 3])
    pooled = keras.layers.GlobalAveragePooling2D()(backbone(photo)["res5"])
    model = keras.Model(photo, keras.layers.Dense(5)(pooled))
    before = [w.numpy() for w in backbone.weights]
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(keras_programs.draw(tf.TensorSpec([4, 33, 33, 3])), np.arange(4), verbose=0)
    moved = [w.name for w, old in zip(backbone.weights, before, strict=True) if not np.array_equal(w, old)]
    assert moved == []


@pytest.mark.parametrize("name", some(MODELS))
def test_unknown_sizes(name):
    """A convolutional classifier computes the same; one line of each other model refuses them."""
    model, examples = built(name)
    spec = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), examples[0])
    inputs = tf.nest.map_structure(
        lambda s: keras.Input([None] * (2 if s.shape.rank == 4 else 1) + s.shape[3:].as_list(), dtype=s.dtype), spec
    )
    if name not in ("resnet_nano", "xception_71"):  # what attends, resizes or crops needs static sizes
        with pytest.raises(InputError, match="^[^\n]*static[^\n]*$"):
            model(inputs)
    else:
        free = keras.Model(inputs, model(inputs))
        for x in examples:
            for ours, theirs in zip(tf.nest.flatten(free(x)), tf.nest.flatten(model(x)), strict=True):
                assert relative_error(ours, theirs) < 1e-5


@pytest.mark.slow
def test_features_and_a_fine_tuned_classifier_come_back(tmp_path):
    """`.keras` of a functional model with a backbone of ours in it, its optimizer included."""
    photo = keras.Input([33, 33, 3])
    features = Features(build_model("axial_resnet_nano", 5).backbone)
    pooled = keras.layers.GlobalAveragePooling2D()(features(photo)["res5"])
    model = keras.Model(photo, keras.layers.Dense(5)(pooled))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = keras_programs.draw(tf.TensorSpec([4, 33, 33, 3])), np.arange(4)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    twin = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(twin.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(twin.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_backbone_of_a_users_own_blocks_is_refused_in_one_line(tmp_path):
    """A function has no config. Its weights alone can be saved, every one of them."""

    def block(filters, strides, name, **options):
        return Conv(4 * filters, 3, None, strides, name=name)

    photo = keras.Input([33, 33, 3])

    def model():
        backbone = ResNet(Conv(8, 3, None, 2), block, filters=2, repeats=(1, 2, 1, 1), name="own")
        return keras.Model(photo, backbone(photo)["res5"])

    first, second = model(), model()
    with pytest.raises(InputError, match="^ResNet 'own': argument 'block' is a function, which has no config"):
        first.save(tmp_path / "model.keras")
    first.save_weights(tmp_path / "own.weights.h5")
    second.load_weights(tmp_path / "own.weights.h5")
    for ours, theirs in zip(second.get_weights(), first.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_backbone_is_described_by_the_function_that_made_it():
    config = resnet(width=0.25, repeats=(1, 1, 1, 1)).get_config()
    assert config["maker"] == "axial.models.resnet.resnet" and config["repeats"] == [1, 1, 1, 1]
    assert ResNet.from_config(config).get_config() == config
