"""The outputs of naive forms equal the outputs of the study's mechanisms, and the measurements run."""

import pytest
import tensorflow as tf
import tf_keras as keras

import layers
import study_speed
import tpu_compile
from tests.conftest import randomize, relative_error


@pytest.mark.parametrize("naive,ours", [("naive_1111", "1111"), ("deformable_naive", "deformable")])
def test_a_naive_form_computes_the_same(naive, ours):
    x = tf.random.stateless_normal([1, 4, 5, 16], [0, 1])
    made = [study_speed.make_layer(form, 16) for form in (naive, ours)]
    for layer in made:
        layer.build(x.shape)
        randomize(layer)
    assert relative_error(made[0](x), made[1](x)) < 1e-4


@pytest.mark.parametrize("form", ["1111", "deformable"])
def test_a_training_step_has_no_call_without_a_tpu_kernel(form):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        step = layers.layer_step(study_speed.make_layer(form, 32), (1, 9, 7, 32))
        assert not tpu_compile.custom_calls(tpu_compile.lower(*step))
    finally:
        keras.mixed_precision.set_global_policy("float32")
