"""Models work in a user's tf_keras program: saving and loading, `fit`, frozen backbones, unknown sizes."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.models import VARIANTS, build_model
from axial.weights.restore import Features
from tests import keras_programs
from tests.conftest import randomize, relative_error, two_replicas
from tests.layers.test_layers_in_keras import LAYERS, model_of

ONE_EACH = dict(repeats=(1, 1, 1, 1), width=0.25, heads=4)
SIZES = (33, 33), (49, 65)
# dict from model names to changed arguments. Every kind of head and of backbone occurs.
MODELS = {
    "resnet_nano": dict(repeats=(1, 0, 0, 0)),
    "axial_resnet_nano": {},
    "attention_resnet": ONE_EACH,
    "panoptic_deeplab_resnet_nano": {},
    "ccnet_nano_0010_deformable": {},
    "faster_rcnn_resnet_nano": {},
    "transformer_nano_deformable": {},
    "axial_deeplab_s_axial_decoder": ONE_EACH,
    "xception_71": {},
}
LEARNING = [name for name in MODELS if name not in ("resnet_nano", "faster_rcnn_resnet_nano")]


def built(name):
    """(model with random weights, built for the first of `SIZES`; list of random inputs, one for each of `SIZES`)."""
    model = build_model(name, 5, **MODELS[name])
    examples = [keras_programs.draw(VARIANTS[name].model.signature(size, batch=2)) for size in SIZES]
    model(examples[0])
    randomize(model)
    for weight in model.weights:  # smaller weights, so that outputs do not saturate
        if weight.shape.rank > 1:
            weight.assign(weight * min(1, weight.shape.num_elements() ** -0.25))
    return model, examples


QUICK = [("resnet_nano", "keras"), ("AxialAttention", "saved_model"), ("DecoderLayer", "checkpoint")]
EVERY = [(name, kind) for name in (*MODELS, *LAYERS) for kind in keras_programs.FORMATS]


def saved(name):
    """(model, list of inputs) for the name of a model or a layer."""
    if name in MODELS:
        return built(name)
    model, x = model_of(name)
    randomize(model)
    return model, [x]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["few", "every"])
def test_saved_and_loaded_in_a_fresh_process(cases, tmp_path):
    """The loaded model has the saved weights and outputs. It also takes inputs of another size."""
    assert keras_programs.faults_in_a_fresh_process(tmp_path, cases, saved) == dict.fromkeys(cases, "")


def functional(name):
    """(functional model without dropout, random inputs of batch size 4). The loss sums the outputs' mean squares."""
    variant = VARIANTS[name]
    changes = {**MODELS[name], **{argument: 0.0 for argument in variant.parameters() if "dropout" in argument}}
    specs = variant.model.signature(SIZES[0], batch=4)
    inputs = tf.nest.map_structure(lambda spec: keras.Input(spec.shape[1:], dtype=spec.dtype), specs)
    outputs = tf.nest.flatten(build_model(name, 5, **changes)(inputs))
    model = keras.Model(inputs, outputs)
    model.add_loss(tf.add_n([tf.reduce_mean(tf.square(y)) for y in outputs]))
    return model, keras_programs.draw(specs)


def train(model, x):
    """Makes one step of `fit` and returns its loss."""
    model.compile("sgd")
    return model.fit(x, batch_size=4, verbose=0).history["loss"][0]


@pytest.mark.parametrize("name", ["resnet_nano", *(pytest.param(name, marks=pytest.mark.slow) for name in LEARNING)])
def test_trains_on_two_replicas_as_on_one(name):
    """A step of `fit` changes most weights. Its loss is the same on two replicas as on one, up to 1e-3."""
    model, x = functional(name)
    before = model.get_weights()
    loss = train(model, x)
    moved = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert np.isfinite(loss) and np.mean(moved) > 0.5
    with two_replicas().scope():
        twin, _ = functional(name)
        twin.set_weights(before)
        assert relative_error(train(twin, x), loss) < 1e-3


def test_unknown_sizes():
    """A convolutional classifier takes [None, None, 3] and has the same output. Other models raise a one-line error."""
    photo = keras.Input([None, None, 3])
    model, examples = built("resnet_nano")
    free = keras.Model(photo, model(photo))
    for x in examples:
        assert relative_error(free(x)["logits"], model(x)["logits"]) < 1e-5
    sentence = dict.fromkeys(("source", "target"), keras.Input([None], dtype="int32"))
    # Models that attend, resize or crop need static sizes.
    for name in ("axial_resnet_nano", "panoptic_deeplab_resnet_nano", "faster_rcnn_resnet_nano", "transformer_nano"):
        with pytest.raises(InputError, match="^[^\n]*static[^\n]*$"):
            build_model(name, 5)(sentence if "transformer" in name else photo)


def test_a_classifier_on_a_frozen_backbone_comes_back(tmp_path):
    """`fit` changes no weight of the frozen backbone. The .keras file restores all weights and the optimizer state."""
    photo = keras.Input([33, 33, 3])
    backbone = Features(build_model("resnet_nano", 5).backbone)
    backbone.trainable = False
    pooled = keras.layers.GlobalAveragePooling2D()(backbone(photo)["res5"])
    model = keras.Model(photo, keras.layers.Dense(5)(pooled))
    before = backbone.get_weights()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(keras_programs.draw(tf.TensorSpec([4, 33, 33, 3])), np.arange(4), verbose=0)
    model.save(tmp_path / "model.keras")
    twin = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in (
        (backbone.get_weights(), before),
        (twin.get_weights(), model.get_weights()),
        (twin.optimizer.variables, model.optimizer.variables),
    ):
        for actual, expected in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(actual, expected)
