"""The TPU kernels of attention, which jax interprets on a CPU, compared with a float64 oracle and with 'xla'."""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from axial.layers import device
from axial.layers.attention.layer import TERMS, AttentionOptions, AttentionSpec, AxialAttention
from axial.layers.attention.tpu import layer as kernel_layer
from axial.layers.attention.tpu import programs, shear
from axial.layers.batch_norm import BatchNormConfig
from tests import oracles
from tests.conftest import built, relative_error
from tests.layers.test_axial_attention import HEADS, check_steps, folded_copy, make, oracle_weights, step


def roll(x, shift, axis, *, stride=0, stride_axis=0):
    """`pltpu.roll`, written with indexing. For long rows, jax takes minutes to compile its own interpretation of it."""
    assert (axis, stride_axis) == (1, 0)
    row, lane = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])
    return jnp.take_along_axis(x, (lane - stride * row - shift) % x.shape[1], 1)


@pytest.fixture
def calls(monkeypatch):
    """Pretends that there is a TPU, whose kernels jax interprets. Returns a list with the arguments of each call."""
    made, kernels = [], kernel_layer.project_and_attend

    def interpreted(*args, **kwargs):
        made.append(args)
        return kernels(*args, **kwargs, interpret=True)

    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    monkeypatch.setattr(kernel_layer, "project_and_attend", interpreted)
    monkeypatch.setattr(shear.pltpu, "roll", roll)
    return made


@pytest.mark.parametrize(
    "length,span,whole,effective_span,served",
    [
        (7, None, False, None, True),
        pytest.param(10, 9, True, 9, True, marks=pytest.mark.slow),
        pytest.param(37, 21, False, 21, True, marks=pytest.mark.slow),
        pytest.param(9, 9, True, None, True, marks=pytest.mark.slow),  # the span covers the whole axis
        pytest.param(65, 65, True, None, False, marks=pytest.mark.slow),  # a reach of 64 is too large
    ],
)
def test_a_layer_matches_the_oracle(calls, length, span, whole, effective_span, served):
    x = np.random.default_rng(length).normal(size=[2, 1, length, 4]).astype(np.float32)
    layer = built(make(span=span, whole_up_to_span=whole, backend="kernel"), x)
    calls.clear()
    options = dict(terms=TERMS, epsilon=layer.norm.epsilon, training=True)
    expected, _ = oracles.axial_attention(x[:, 0], oracle_weights(layer), HEADS, effective_span, **options)
    assert relative_error(layer(x, training=True)[:, 0], expected) < 1e-4
    assert len(calls) == served


def layers_of(case, x, backends=("xla", "kernel"), **options):
    """One layer per backend for a case, all with the same random weights."""
    *_, axis, span, heads, depth, value_depth = case
    options = dict(span=span, max_distance=51, **options)
    layers = [AxialAttention(heads * depth, heads * value_depth, axis, heads, backend=b, **options) for b in backends]
    for layer in layers:
        built(layer, x)
        layer.kernel.assign(layer.kernel / 3)
        for table in layer.tables.values():
            table.assign(table / 3)
    return layers


def images(case):
    return tf.random.stateless_normal([2, *case[:2], 24], [0, 1])


SMALL = 20, 3, "height", None, 2, 4, 8
LARGE = [
    # height, width, axis, span, heads, key and value channels per head
    (2, 65, "width", 65, 1, 32, 64),
    (130, 1, "height", 21, 3, 64, 64),  # 3 heads of 64 channels fill one and a half registers
    (1, 300, "width", 127, 2, 8, 16),  # the largest span that the kernels support
    (7, 7, "height", 5, 8, 4, 8),  # lines are much shorter than a kernel's window
    (1, 625, "width", 5, 1, 8, 16),  # several kernel programs
]


@pytest.mark.parametrize(
    "case,frozen",
    [
        (SMALL, False),
        *(pytest.param(case, frozen, marks=pytest.mark.slow) for case in LARGE for frozen in (False, True)),
    ],
    ids=str,
)
def test_outputs_and_gradients_equal_the_xla_backend(calls, case, frozen):
    """The cases include frozen statistics, as in the backbone of a detector."""
    x = images(case)
    plain, layer = layers_of(case, x, norm=BatchNormConfig(epsilon=0.1, frozen=frozen))
    calls.clear()
    check_steps(step(layer, x), step(plain, x), 2e-4)
    assert len(calls) == 1


@pytest.mark.slow
def test_two_cores_share_an_odd_number_of_programs(calls, monkeypatch):
    monkeypatch.setattr(programs, "SHARED", 2)
    case = 1, 300, "width", 9, 1, 8, 16
    x = images(case)
    plain, layer = layers_of(case, x, norm=BatchNormConfig(epsilon=0.1))
    check_steps(step(layer, x), step(plain, x), 2e-4)


def test_a_step_holds_seven_kernels_and_no_map(monkeypatch):
    """A train step has seven kernels and no softmax op. Any machine can trace it, as jax only lowers the kernels."""
    layer = AxialAttention(64, 128, "width", heads=8, backend="kernel")
    layer(tf.zeros([2, 1, 40, 16]))
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "on_tpu", lambda: True)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True))
        return tape.gradient(loss, layer.trainable_weights)

    def kernels_of(function):
        graph = function.get_concrete_function(tf.TensorSpec([2, 2, 40, 16])).graph
        assert not any(op.type == "Softmax" for op in graph.get_operations())
        return [op.get_attr("platforms") for op in graph.get_operations() if op.type == "XlaCallModule"]

    assert kernels_of(run) == [[b"TPU"]] * 7
    assert kernels_of(tf.function(layer, autograph=False)) == [[b"TPU"]] * 2  # in inference


@pytest.mark.parametrize(
    "batch,terms,axis,span,width",
    [
        (None, TERMS, "width", None, 9),  # unknown batch size
        (2, TERMS[:2], "width", None, 9),
        (2, TERMS, "square", 3, 9),
        (2, TERMS, "width", 129, 200),
    ],
)
def test_the_kernels_refuse_what_they_cannot_compute(batch, terms, axis, span, width):
    spec = AttentionSpec(axis, 64, 64, AttentionOptions(2, span, terms))
    x = tf.TensorSpec([batch, 3, width, 16])
    assert not kernel_layer.can_serve(x, tf.zeros([16, 192]), spec, spec.windows(x))


@pytest.mark.parametrize("generation,channels,dtype,fits", [(4, 1024, tf.float32, False), (5, 2048, tf.float32, True)])
def test_a_v4_has_less_fast_memory(monkeypatch, generation, channels, dtype, fits):
    monkeypatch.setattr(device, "tpu_generation", lambda: generation)
    spec = AttentionSpec("width", channels // 4, channels // 2, AttentionOptions(8, 65))
    x, kernel = tf.TensorSpec([2, 3, 65, 64], dtype), tf.zeros([64, channels])
    assert kernel_layer.can_serve(x, kernel, spec, spec.windows(x)) == fits


@pytest.mark.parametrize("dtype", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_a_folded_layer_matches(calls, dtype):
    x = tf.random.stateless_normal([2, 3, 9, 8], [0, 1])
    layer = built(make(backend="kernel"), x)
    expected, folded = layer(x), folded_copy(layer, x, dtype)
    calls.clear()
    assert relative_error(tf.cast(folded(x), tf.float32), expected) < (1e-5 if dtype == "float32" else 0.02)
    assert len(calls) == 1
