"""The TPU kernels, interpreted by jax on a CPU, compared with the float64 oracle and the form for XLA."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from axial.layers import device
from axial.layers.attention import backend, xla
from axial.layers.attention.folded import FoldedAttention
from axial.layers.attention.reference import TERMS
from axial.layers.attention.spec import AttentionSpec
from axial.layers.attention.tpu import layer as kernel_layer
from axial.layers.attention.tpu import programs, shear
from axial.layers.attention.windows import AxisNeighborhood, SquareNeighborhood
from axial.layers.axial_attention import AxialAttention
from axial.layers.batch_norm import BatchNormConfig
from tests import oracles
from tests.conftest import outputs_and_gradients, randomize, relative_error
from tests.layers.attention.test_shear import roll
from tests.layers.test_axial_attention import HEADS, make, oracle_weights, same_weights


@pytest.fixture
def calls(monkeypatch):
    """Pretends that there is a TPU and interprets its kernels. Returns the list of their calls."""
    made, kernels = [], kernel_layer.project_and_attend

    def interpreted(*args, **kwargs):
        made.append(args)
        return kernels(*args, **kwargs, interpret=True)

    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    monkeypatch.setattr(kernel_layer, "project_and_attend", interpreted)
    monkeypatch.setattr(shear.pltpu, "roll", roll)
    return made


@pytest.mark.parametrize("rows,length,span", [(3, 7, None), (2, 1, None), (2, 9, 5), (1, 37, 21)])
def test_a_layer_matches_the_oracle(calls, rows, length, span):
    layer = make(span=span, backend="kernel")
    x = np.random.default_rng(length).normal(size=[rows, 1, length, 4]).astype(np.float32)
    layer(x)
    randomize(layer)
    calls.clear()
    wanted, _ = oracles.axial_attention(x[:, 0], oracle_weights(layer), HEADS, span, TERMS, layer.norm.epsilon, True)
    assert relative_error(layer(x, training=True)[:, 0], wanted) < 1e-4
    assert len(calls) == 1


@pytest.mark.parametrize("length,seen,served", [(7, None, True), (9, None, True), (10, 9, True)])
def test_an_axis_up_to_the_span_is_served(calls, length, seen, served):
    check_whole_up_to(calls, length, span=9, seen=seen, served=served)


@pytest.mark.slow
@pytest.mark.parametrize("length,seen,served", [(64, None, True), (65, None, False), (66, 65, True)])
def test_a_reach_of_64_is_left_to_the_form_for_xla(calls, length, seen, served):
    check_whole_up_to(calls, length, span=65, seen=seen, served=served)


def check_whole_up_to(calls, length, *, span, seen, served):
    """A layer that sees an axis up to its span whole agrees with the oracle, by the kernels where they can serve."""
    layer = make(span=span, whole_up_to_span=True, backend="kernel")
    x = np.random.default_rng(length).normal(size=[2, 1, length, 4]).astype(np.float32)
    layer(x)
    randomize(layer)
    calls.clear()
    wanted, _ = oracles.axial_attention(x[:, 0], oracle_weights(layer), HEADS, seen, TERMS, layer.norm.epsilon, True)
    assert relative_error(layer(x, training=True)[:, 0], wanted) < 1e-4
    assert len(calls) == served


CASES = [
    # height, width, axis, span, heads, key and value channels of a head
    (3, 20, "width", None, 2, 8, 16),
    (20, 3, "height", None, 2, 4, 8),
    (2, 65, "width", 65, 1, 32, 64),
    pytest.param((65, 2, "height", 65, 3, 48, 96), marks=pytest.mark.slow),  # groups of several registers
    (130, 1, "height", 21, 3, 64, 64),  # 3 heads of 64 channels are a register and a half
    (2, 64, "width", None, 2, 8, 16),  # pixels that fill whole programs
    pytest.param((1, 257, "width", 65, 4, 128, 32), marks=pytest.mark.slow),
    pytest.param((1, 300, "width", 127, 2, 8, 16), marks=pytest.mark.slow),  # the largest reach
    pytest.param((7, 7, "height", 5, 8, 4, 8), marks=pytest.mark.slow),  # lines that are much shorter than a window
    (1, 625, "width", 5, 1, 8, 16),  # several programs
]


def step(function, dtype, height, width, axis, span, heads, depth, value_depth):
    """The output, and the gradients of x, the kernel, the gammas of all norms and the tables."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return tf.constant(rng.normal(size=shape) / 3, tf.float32)

    channels = heads * (2 * depth + value_depth)
    x, kernel = normal(2, height, width, 24), normal(24, channels)
    gammas = normal(channels) + 1.0, normal(3, heads), normal(2, heads * value_depth)
    tables = {name: normal(101, d) for name, d in (("query", depth), ("key", depth), ("value", value_depth))}
    cotangent = normal(2, height, width, heads * value_depth)
    neighborhood = AxisNeighborhood(axis, span)
    spec = AttentionSpec(neighborhood, heads * depth, heads * value_depth, heads)
    windows = neighborhood.windows(height, width)
    pairs = 2.0 * windows.rows * windows.pairs

    def affine(gamma, sums):
        mean, square = tf.unstack(sums / (2 * height * width))
        scale = gamma * tf.math.rsqrt(square - mean * mean + 0.1)
        return tf.stack([scale, 0.1 - mean * scale])

    def output_affines(sums):
        return tf.stack([affine(*pair) for pair in zip(tf.unstack(gammas[2]), tf.unstack(sums))])

    def logit_scales(sums):
        mean, square = tf.unstack(sums / pairs, axis=2)
        return gammas[1] * tf.math.rsqrt(square - mean * mean + 0.1)

    sources = [x, kernel, *gammas, *tables.values()]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        inputs = tf.cast(x, dtype), tf.cast(kernel, dtype)
        norms = dict(
            qkv_affine=functools.partial(affine, gammas[0]), logit_scales=logit_scales, output_affines=output_affines
        )
        y = function(*inputs, spec, tables, windows=windows, **norms)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * cotangent)
    return [tf.cast(tf.convert_to_tensor(y), tf.float32) for y in [y, *tape.gradient(loss, sources)]]


def plain(x, kernel, spec, tables, *, windows, qkv_affine, logit_scales, output_affines):
    """What `project_and_attend` computes, by the form that the kernels replace."""
    x = tf.cast(tf.tensordot(x, kernel, 1), tf.float32)
    affine = qkv_affine(tf.stack([tf.reduce_sum(x, [0, 1, 2]), tf.reduce_sum(x * x, [0, 1, 2])]))
    x = tf.cast(x * affine[0] + affine[1], kernel.dtype)

    def scales(sums):
        return dict(zip(TERMS, tf.unstack(logit_scales(sums))))

    q, k, v = tf.split(x, spec.sizes, 3)
    outputs = xla.attend(q, k, v, tables, windows=windows, scales=scales, heads=spec.heads)
    outputs = [tf.cast(y, tf.float32) for y in outputs]
    affines = output_affines(tf.stack([[tf.reduce_sum(z, [0, 1, 2]) for z in (y, y * y)] for y in outputs]))
    return sum(y * scale + shift for y, (scale, shift) in zip(outputs, map(tf.unstack, tf.unstack(affines))))


kernels = functools.partial(kernel_layer.project_and_attend, interpret=True)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_plain_form(monkeypatch, case):
    monkeypatch.setattr(shear.pltpu, "roll", roll)
    for ours, theirs in zip(step(kernels, tf.float32, *case), step(plain, tf.float32, *case), strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("width", [300, pytest.param(500, marks=pytest.mark.slow)])
def test_two_cores_share_the_programs(monkeypatch, width):
    """An odd and an even number of programs."""
    monkeypatch.setattr(shear.pltpu, "roll", roll)
    monkeypatch.setattr(programs, "SHARED", 2)
    case = 1, width, "width", 9, 1, 8, 16
    for ours, theirs in zip(step(kernels, tf.float32, *case), step(plain, tf.float32, *case), strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_bfloat16_is_as_near_as_the_plain_form(monkeypatch):
    monkeypatch.setattr(shear.pltpu, "roll", roll)
    case = CASES[2]
    wanted = step(plain, tf.float32, *case)

    def errors(found):
        return [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]

    ours, theirs = (errors(step(form, tf.bfloat16, *case)) for form in (kernels, plain))
    assert max(ours) < 0.05 and np.mean(ours) < 1.5 * np.mean(theirs)


def test_a_step_holds_seven_kernels_and_no_map(monkeypatch):
    """The step is traced for a TPU on any machine, because jax only lowers the kernels."""
    layer = AxialAttention(64, 128, "width", heads=8, backend="kernel")
    layer(tf.zeros([2, 1, 40, 16]))
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "on_tpu", lambda: True)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True))
        return tape.gradient(loss, layer.trainable_weights)

    operations = run.get_concrete_function(tf.TensorSpec([2, 2, 40, 16])).graph.get_operations()
    modules = [op for op in operations if op.type == "XlaCallModule"]
    assert [op.get_attr("platforms") for op in modules] == [[b"TPU"]] * 7
    assert not any(op.type == "Softmax" for op in operations)


@pytest.mark.parametrize(
    "batch,heads,terms,neighborhood,width",
    [
        (None, 2, TERMS, AxisNeighborhood("width"), 9),  # the number of images is unknown
        (2, 2, TERMS[:2], AxisNeighborhood("width"), 9),
        (2, 2, TERMS, SquareNeighborhood(3), 9),
        (2, 2, TERMS, AxisNeighborhood("width"), 65),  # a reach of 64
        (2, 2, TERMS, AxisNeighborhood("width", 129), 200),
    ],
)
def test_the_kernels_refuse_what_they_cannot_compute(batch, heads, terms, neighborhood, width):
    spec = AttentionSpec(neighborhood, heads * 32, heads * 32, heads, terms=terms)
    x = tf.TensorSpec([batch, 3, width, 16])
    assert not kernel_layer.can_serve(x, tf.zeros([16, heads * 96]), spec, neighborhood.windows(3, width))


@pytest.mark.parametrize(
    "generation,channels,dtype,fits",
    [
        (4, 1024, tf.bfloat16, True),
        (4, 1024, tf.float32, False),
        (4, 2048, tf.bfloat16, False),
        (5, 2048, tf.float32, True),
    ],
)
def test_a_v4_has_less_fast_memory(monkeypatch, generation, channels, dtype, fits):
    monkeypatch.setattr(device, "tpu_generation", lambda: generation)
    neighborhood = AxisNeighborhood("width", 65)
    spec = AttentionSpec(neighborhood, channels // 4, channels // 2, 8)
    x, kernel = tf.TensorSpec([2, 3, 65, 64], dtype), tf.zeros([64, channels])
    assert kernel_layer.can_serve(x, kernel, spec, neighborhood.windows(3, 65)) == fits


@pytest.mark.parametrize("terms", [TERMS, TERMS[:2]])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_falls_back(calls, terms, training):
    """The numbers are the same whether the kernels run or not."""
    x = tf.random.stateless_normal([2, 3, 9, 8], [0, 1])
    plain_layer, layer = make(terms), make(terms, backend="kernel")
    plain_layer(x), layer(x)
    randomize(plain_layer)
    same_weights(layer, plain_layer)
    calls.clear()
    assert relative_error(layer(x, training=training), plain_layer(x, training=training)) < 1e-5
    assert len(calls) == (terms == TERMS)


def test_gradients_with_frozen_statistics(calls):
    """As in the backbone of a detector."""
    x = tf.random.stateless_normal([2, 3, 9, 8], [0, 1])
    layers = [make(norm=BatchNormConfig(frozen=True), backend=name) for name in ("auto", "kernel")]
    found = []
    for layer in layers:
        layer(x)
        randomize(layer)
        calls.clear()
        found.append(outputs_and_gradients(layer, x))
        assert len(calls) == (layer is layers[1])
    for ours, wanted in zip(*found, strict=True):
        assert relative_error(ours, wanted) < 2e-4


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_folded_layer_matches(calls, dtype):
    layer = make(backend="kernel")
    x = tf.random.stateless_normal([2, 3, 9, 8], [0, 1])
    layer(x)
    randomize(layer)
    wanted, folded = layer(x), FoldedAttention(layer.spec, "kernel", dtype=dtype)
    folded(x)
    for weight, value in zip(folded.weights, layer.folded_weights(), strict=True):
        weight.assign(value)
    calls.clear()
    assert relative_error(tf.cast(folded(x), tf.float32), wanted) < (1e-5 if dtype == "float32" else 0.02)
    assert len(calls) == 1


def test_inference_holds_two_kernels(monkeypatch):
    layer = AxialAttention(64, 128, "width", heads=8, backend="kernel")
    layer(tf.zeros([2, 1, 40, 16]))
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    run = tf.function(layer, autograph=False).get_concrete_function(tf.TensorSpec([2, 2, 40, 16]))
    assert [op.type for op in run.graph.get_operations()].count("XlaCallModule") == 2


def test_without_jax_training_goes_on(calls, monkeypatch):
    layer = make(backend="kernel")
    monkeypatch.setattr(backend, "has_kernels", lambda: False)
    assert layer(tf.zeros([1, 2, 5, 4]), training=True).shape == [1, 2, 5, 6]
    assert not calls
