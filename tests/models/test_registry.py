"""Every registered model passes one harness."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.analysis.counts import abstract_model, count_parameters
from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.models.panoptic_deeplab import CENTER, OFFSET, SEMANTIC
from axial.models.registry import VARIANTS, build_model
from conftest import relative_error

CLASSES = 19
SMALL = ("axial_deeplab_nano", "axial_deeplab_w025")  # the others take minutes

# Millions, from the published tables by way of an analytic count.
PARAMETERS = {
    "axial_deeplab_s": 12.119,
    "axial_deeplab_m": 25.895,
    "axial_deeplab_l": 44.890,
    "axial_deeplab_xl": 173.044,
    "axial_deeplab_l_os32": 45.225,
}


def some(quick):
    """Every variant; those not in `quick` are slow."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS]


@pytest.mark.parametrize("name", some(PARAMETERS))
def test_counts(name):
    counts = count_parameters(abstract_model(name, CLASSES))
    assert sum(counts.parts.values()) == counts.counted
    if name in PARAMETERS:
        assert f"{counts.counted / 1e6:.3f}" == f"{PARAMETERS[name]:.3f}"


@pytest.mark.parametrize("name", some(SMALL))
def test_harness(name):
    """Finite forward, a gradient for every weight, eager = graph, both precisions."""
    size = 65
    images = tf.random.uniform([2, size, size, 3], -1, 1, seed=0)
    # Without momentum one training step leaves statistics that inference can use.
    model = build_model(name, CLASSES, BatchNormConfig(momentum=0.0))
    model(images)
    for weight in model.weights:  # zero would stop the gradient of what is below it
        if weight.name.endswith("expand/norm/gamma:0"):
            weight.assign(tf.ones_like(weight))
    step = tf.function(lambda x: _loss_and_gradients(model, x), autograph=False)
    outputs, gradients = step(images)
    assert {k: v.shape[1:] for k, v in outputs.items()} == {
        SEMANTIC: (17, 17, CLASSES),
        CENTER: (17, 17, 1),
        OFFSET: (17, 17, 2),
    }
    for value in outputs.values():
        assert np.isfinite(value).all()
    for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
        assert gradient is not None, weight.name
        gradient = tf.convert_to_tensor(gradient).numpy()
        assert np.isfinite(gradient).all(), weight.name
        # The offset of a height layer is taken away by the width layer's batch norm.
        if not ("height/" in weight.name and weight.name.endswith("output_norm/beta:0")):
            assert np.abs(gradient).max() > 0, weight.name
    eager, graph = model(images), tf.function(model, autograph=False)(images)
    for key in eager:
        assert relative_error(graph[key], eager[key]) < 1e-4
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    half = build_model(name, CLASSES)
    for value in half(images).values():
        assert value.dtype == tf.float32 and np.isfinite(value).all()


def _loss_and_gradients(model, images):
    with tf.GradientTape() as tape:
        outputs = model(images, training=True)
        loss = tf.add_n([tf.reduce_mean(tf.square(v - 1)) for v in outputs.values()])
    return outputs, tape.gradient(loss, model.trainable_weights)


def test_jit_equals_eager():
    images = tf.random.uniform([1, 33, 33, 3], -1, 1, seed=0)
    model = build_model("axial_deeplab_nano", CLASSES)
    eager = model(images)
    compiled = tf.function(model, autograph=False, jit_compile=True)(images)
    for key in eager:
        assert relative_error(compiled[key], eager[key]) < 1e-4


def test_any_image_size():
    model = build_model("axial_deeplab_nano", CLASSES)
    for size in ((33, 65), (64, 48), (1, 1)):
        rows, columns = (-(-side // 4) for side in size)
        assert model(tf.zeros([1, *size, 3]))[SEMANTIC].shape == (1, rows, columns, CLASSES)


@pytest.mark.parametrize(
    "name,changes,words",
    [
        ("axial_deeplab_z", {}, "did you mean 'axial_deeplab_"),
        ("axial_deeplab_s", dict(width=0.3), "heads do not divide"),
        ("axial_deeplab_s", dict(span=64), "63 and 65"),
        ("axial_deeplab_s", dict(output_stride=8), "16 or 32"),
        ("axial_deeplab_s", dict(widht=1), "widht"),
    ],
)
def test_what_cannot_be_built_says_so(name, changes, words):
    with pytest.raises(InputError, match=words):
        build_model(name, CLASSES, **changes)
