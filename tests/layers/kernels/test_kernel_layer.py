"""The TPU kernels, interpreted by jax on a processor, against the float64 oracle and XLA's form."""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf
from test_shear import turn

import oracles
from axial.errors import InputError
from axial.layers import attend_xla, device
from axial.layers.attend import TERMS
from axial.layers.axial_attention import AxialAttention
from axial.layers.kernels import layer as kernel_layer
from axial.layers.kernels import shear
from axial.layers.windows import SquareWindows, Windows
from conftest import randomize, relative_error
from test_axial_attention import HEADS, make, oracle_weights


@pytest.fixture
def calls(monkeypatch):
    """A TPU whose kernels are computed here; what they were called with."""
    made, kernels = [], kernel_layer.attend

    def interpreted(*args):
        made.append(args)
        return kernels(*args, interpret=True)

    monkeypatch.setattr(device, "on_processor", lambda: False)
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    monkeypatch.setattr(kernel_layer, "attend", interpreted)
    return made


@pytest.mark.parametrize("rows,length,span", [(3, 7, None), (2, 1, None), (2, 9, 5), (1, 37, 21)])
def test_a_layer_matches_the_oracle(monkeypatch, calls, rows, length, span):
    if length > 7:
        monkeypatch.setattr(shear, "_turn", turn)
    layer = make(span=span)
    layer.softmax = "kernel"
    x = np.random.default_rng(length).normal(size=[rows, 1, length, 4]).astype(np.float32)
    layer(x)
    randomize(layer)
    wanted, _ = oracles.axial_attention(x[:, 0], oracle_weights(layer), HEADS, span, TERMS, layer.norm.epsilon, True)
    assert relative_error(layer(x, training=True)[:, 0], wanted) < 1e-4
    assert len(calls) == 1


CASES = [
    # height, width, axis, span, heads, key and value channels of a head
    (3, 20, "width", None, 2, 8, 16),
    (20, 3, "height", None, 2, 4, 8),
    (2, 65, "width", 65, 1, 32, 64),  # one window, where not every key is in reach
    (65, 2, "height", None, 3, 48, 96),  # groups of several registers
    (1, 129, "width", None, 4, 32, 64),
    (1, 258, "width", None, 1, 32, 64),
    (140, 1, "height", 21, 2, 8, 16),  # windows
    (1, 257, "width", 65, 4, 128, 32),
    (1, 625, "width", 5, 1, 8, 16),  # the projection's parts reach further than the windows
]


def step(function, dtype, height, width, axis, span, heads, depth, value_depth):
    """Outputs, their sums, and gradients for x, the kernel, tables and the gammas of the inner norms."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return tf.constant(rng.normal(size=shape) / 3, tf.float32)

    channels = heads * (2 * depth + value_depth)
    x, kernel = normal(2, height, width, 24), normal(24, channels)
    gammas = normal(channels) + 1.0, normal(3, heads)
    tables = {name: normal(101, d) for name, d in (("query", depth), ("key", depth), ("value", value_depth))}
    cotangents = [normal(2, height, width, heads * value_depth) for _ in range(2)]
    cotangents.append(normal(2, 2, heads * value_depth) / (height * width))
    windows = Windows(height, width, axis, span)
    pairs = 2.0 * windows.rows * windows.pairs

    def normalise(sums):
        mean, square = tf.unstack(sums / (2 * height * width))
        scale = gammas[0] * tf.math.rsqrt(square - mean * mean + 0.1)
        return tf.stack([scale, 0.1 - mean * scale])

    def logit_scales(sums):
        mean, square = tf.unstack(sums / pairs, axis=2)
        return gammas[1] * tf.math.rsqrt(square - mean * mean + 0.1)

    sources = [x, kernel, *gammas, *tables.values()]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        inputs = tf.cast(x, dtype), tf.cast(kernel, dtype)
        outputs = function(*inputs, heads, heads * value_depth, tables, windows, normalise, logit_scales)
        loss = tf.add_n([tf.reduce_sum(tf.cast(y, tf.float32) * d) for y, d in zip(outputs, cotangents, strict=True)])
    return [tf.cast(tf.convert_to_tensor(y), tf.float32) for y in [*outputs, *tape.gradient(loss, sources)]]


def plain(x, kernel, heads, value_channels, tables, windows, normalise, logit_scales):
    """The same by the form that the kernels stand in for."""
    x = tf.cast(tf.tensordot(x, kernel, 1), tf.float32)
    affine = normalise(tf.stack([tf.reduce_sum(x, [0, 1, 2]), tf.reduce_sum(x * x, [0, 1, 2])]))
    x = tf.cast(x * affine[0] + affine[1], kernel.dtype)
    keys = (x.shape[3] - value_channels) // 2

    def scales(sums):
        return dict(zip(TERMS, tf.unstack(logit_scales(sums))))

    q, k, v = tf.split(x, [keys, keys, value_channels], 3)
    outputs = attend_xla.attend(q, k, v, heads, tables, windows, scales, TERMS, "keep")
    sums = [[tf.reduce_sum(z, [0, 1, 2]) for z in (y, y * y)] for y in (tf.cast(y, tf.float32) for y in outputs)]
    return [*outputs, tf.convert_to_tensor(sums)]


kernels = functools.partial(kernel_layer.attend, interpret=True)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_plain_form(monkeypatch, case):
    monkeypatch.setattr(shear, "_turn", turn)
    for ours, theirs in zip(step(kernels, tf.float32, *case), step(plain, tf.float32, *case), strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_bfloat16_is_as_near_as_the_plain_form(monkeypatch):
    monkeypatch.setattr(shear, "_turn", turn)
    case = CASES[6]
    wanted = step(plain, tf.float32, *case)

    def errors(found):
        return [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]

    ours, theirs = (errors(step(form, tf.bfloat16, *case)) for form in (kernels, plain))
    assert max(ours) < 0.05 and np.mean(ours) < 1.5 * np.mean(theirs)


def test_a_step_holds_six_kernels_and_no_map(monkeypatch):
    """Traced for a TPU, on whatever this machine has: jax lowers them."""
    layer = AxialAttention(64, 128, "width", heads=8, softmax="kernel")
    layer(tf.zeros([2, 1, 40, 16]))
    monkeypatch.setattr(device, "on_processor", lambda: False)
    monkeypatch.setattr(device, "on_tpu", lambda: True)

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True))
        return tape.gradient(loss, layer.trainable_weights)

    operations = run.get_concrete_function(tf.TensorSpec([2, 2, 40, 16])).graph.get_operations()
    modules = [op for op in operations if op.type == "XlaCallModule"]
    assert [op.get_attr("platforms") for op in modules] == [[b"TPU"]] * 6
    assert not any(op.type == "Softmax" for op in operations)


@pytest.mark.parametrize(
    "batch,heads,terms,windows",
    [
        (None, 2, TERMS, Windows(3, 9, "width")),  # not known how many images
        (2, 2, TERMS[:2], Windows(3, 9, "width")),
        (2, 2, TERMS, SquareWindows(3, 9, 3)),
        (2, 6, TERMS, Windows(3, 9, "width")),  # 6 x 32 channels are a register and a half
        (2, 2, TERMS, Windows(3, 400, "width")),
    ],
)
def test_what_the_kernels_cannot_is_left_to_the_plain_form(batch, heads, terms, windows):
    x = tf.TensorSpec([batch, windows.height, windows.width, 16])
    tables = dict.fromkeys([*terms[1:], "value"])
    assert not kernel_layer.can_attend(x, tf.zeros([16, heads * 96]), heads, heads * 32, tables, windows, terms)


@pytest.mark.parametrize("terms,training", [(TERMS, True), (TERMS[:2], True), (TERMS, False)])
def test_a_layer_falls_back(calls, terms, training):
    """The same numbers, with kernels where they serve and without where they do not, as in inference."""
    x = tf.random.stateless_normal([2, 3, 9, 8], [0, 1])
    layer = make(terms)
    layer(x)
    randomize(layer)
    wanted = layer(x, training=training)
    layer.softmax = "kernel"
    assert relative_error(layer(x, training=training), wanted) < 1e-5
    assert len(calls) == (terms == TERMS and training)


def test_without_jax_one_line_says_what_to_install(calls, monkeypatch):
    layer = make()
    layer.softmax = "kernel"
    monkeypatch.setitem(sys.modules, "axial.layers.kernels.layer", None)
    monkeypatch.delattr("axial.layers.kernels.layer")
    with pytest.raises(InputError, match=r"memory = 'kernel' wants pip install 'axial\[kernel\]'"):
        layer(tf.zeros([1, 2, 5, 4]), training=True)


def test_an_unknown_softmax_is_named():
    with pytest.raises(ValueError, match="softmax must be one of .* got 'kernels'"):
        AxialAttention(4, 8, "width", heads=2, softmax="kernels")(tf.zeros([1, 2, 5, 4]))
