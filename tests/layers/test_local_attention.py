"""Local 2-D attention, compared with its float64 definition."""

import numpy as np
import pytest
import tensorflow as tf

from axial.analysis.multiply_adds import count_multiply_adds
from axial.layers.attention.windows import SquareWindows
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.local_attention import LocalAttention
from tests import oracles
from tests.conftest import randomize, relative_error
from tests.layers.test_axial_attention import oracle_weights

HEADS = 2
TOLERANCE = 1e-4


def make(span=3, position_sensitive=True, batch_norm=True, backend="auto", **options):
    return LocalAttention(
        2 * HEADS,
        3 * HEADS,
        HEADS,
        span,
        position_sensitive=position_sensitive,
        batch_norm=batch_norm,
        norm=BatchNormConfig(epsilon=1e-3),
        backend=backend,
        name="attention",
        **options,
    )


CASES = [
    # images, height, width, span, position-sensitive, batch norm
    (2, 5, 7, 3, True, True),
    (1, 9, 6, 7, True, True),  # blocks on one axis, smaller than the window on the other
    (2, 1, 1, 7, True, True),
    (1, 1, 9, 5, True, True),
    (2, 3, 2, 7, True, True),  # smaller than the window
    (1, 8, 8, 5, True, True),  # whole blocks
    (1, 5, 5, 1, True, True),  # a query sees only itself
    (1, 7, 5, 11, True, True),  # reaches farther than a block of 4
    (2, 5, 6, 3, False, True),
    (1, 9, 5, 7, False, False),
    (2, 2, 5, 3, True, False),
]


@pytest.mark.parametrize(
    "case,dtype,tolerance",
    [*((c, "float32", TOLERANCE) for c in CASES), *((c, "float64", 1e-10) for c in (CASES[0], *CASES[-3:]))],
    ids=str,
)
def test_matches_the_oracle(backend, case, dtype, tolerance):
    images, height, width, span, sensitive, batch_norm = case
    rng = np.random.default_rng(height * 10 + width)
    x = rng.normal(size=[images, height, width, 3]).astype(dtype)
    layer = make(span, sensitive, batch_norm, backend, dtype=dtype)
    layer(x)
    randomize(layer)
    w = oracle_weights(layer)
    for training in (False, True):
        wanted = oracles.local_attention(x, w, HEADS, span, layer.spec.terms, 1e-3, training, batch_norm)
        assert relative_error(layer(x, training=training), wanted) < tolerance


@pytest.mark.parametrize("sensitive,batch_norm", [(True, True), (False, False)])
def test_gradients_match_the_oracle(backend, sensitive, batch_norm):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[1, 5, 3, 2]).astype(np.float32)
    cotangent = rng.normal(size=[1, 5, 3, 3 * HEADS])
    layer = make(3, sensitive, batch_norm, backend)
    layer(x)
    randomize(layer)
    inputs = {"x": x.astype(np.float64), **oracle_weights(layer)}

    def loss():
        w = {k: v for k, v in inputs.items() if k != "x"}
        y = oracles.local_attention(inputs["x"], w, HEADS, 3, layer.spec.terms, 1e-3, True, batch_norm)
        return (y * cotangent).sum()

    variables = {
        "x": tf.Variable(x),
        "kernel": layer.kernel,
        **{f"{name}_table": table for name, table in layer.tables.items()},
    }
    if batch_norm:
        variables["qkv_gamma"] = layer.qkv_norm.gamma
        variables["logit_gamma"] = layer.logit_norm.gamma
    with tf.GradientTape() as tape:
        y = layer(variables["x"].value(), training=True)
        value = tf.reduce_sum(tf.cast(y, tf.float64) * cotangent)
    gradients = tape.gradient(value, variables)
    for name, gradient in gradients.items():
        gradient = tf.convert_to_tensor(gradient).numpy().reshape(-1)
        entries = range(0, inputs[name].size, max(1, inputs[name].size // 6))
        wanted = oracles.numeric_gradient(loss, inputs[name], entries=entries)
        scale = max(np.abs(gradient).max(), 1e-3)
        for entry, number in wanted.items():
            assert abs(gradient[entry] - number) < 1e-3 * scale, (name, entry)


@pytest.mark.parametrize("sensitive,batch_norm", [(True, True), (False, True), (False, False)])
def test_folded_layer_is_the_same(sensitive, batch_norm):
    x = tf.random.normal([2, 9, 6, 3], seed=0)
    layer = make(7, sensitive, batch_norm)
    layer(x)
    randomize(layer)
    folded = layer.folded()
    wanted = layer(x)
    folded(x)
    for weight, value in zip(folded.weights, layer.folded_weights(), strict=True):
        weight.assign(value)
    assert relative_error(folded(x), wanted) < 1e-5


def test_windows_are_never_copied_pixel_by_pixel():
    """No tensor of keys or values is nearly as large as span^2 x channels x pixels."""
    layer = LocalAttention(24, 24, heads=2, span=7, position_sensitive=True)
    step = tf.function(lambda x: layer(x, training=True), autograph=False)
    graph = step.get_concrete_function(tf.TensorSpec([1, 64, 64, 24])).graph
    windows = 49 * 24 * 64 * 64
    largest = max(
        t.shape.num_elements() or 0
        for op in graph.get_operations()
        for t in op.outputs
        if t.shape.is_fully_defined() and t.shape.rank and t.shape[-1] in (12, 24)
    )
    assert largest < windows / 5


def test_counts_the_window_not_the_block():
    layer = LocalAttention(16, 16, heads=2, span=7, position_sensitive=True)
    step = tf.function(layer, autograph=False)
    graph = step.get_concrete_function(tf.TensorSpec([1, 10, 21, 16])).graph
    products = [p for p in count_multiply_adds(graph) if p.needed != p.computed]
    assert round(sum(p.needed for p in products)) == 5 * 49 * 16 * 10 * 21
    windows = SquareWindows(10, 21, 7)
    assert sum(p.computed for p in products) == 5 * 8 * 2 * windows.blocks * windows.queries * windows.keys


def test_bad_arguments_say_so():
    with pytest.raises(ValueError, match="nearest are 5 and 7"):
        make(span=6)
    with pytest.raises(ValueError, match="must divide"):
        LocalAttention(6, 8, heads=4)
