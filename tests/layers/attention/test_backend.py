"""Which form of attention runs where, and what the forms keep in memory."""

import importlib.metadata
import importlib.util

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers import device
from axial.layers.attention import backend as backends
from axial.layers.attention import cpu
from axial.layers.axial_attention import AxialAttention
from tests.conftest import randomize, relative_error
from tests.layers.test_axial_attention import HEADS, make, same_weights

FAST = ("cpu", "xla")


@pytest.mark.parametrize(
    "backend,on_cpu,on_tpu,can,form",
    [
        ("auto", True, False, True, "cpu"),
        ("auto", False, True, True, "xla"),  # the kernels are never the default
        ("kernel", False, True, True, "kernel"),
        ("kernel", False, True, False, "xla"),
        ("kernel", False, False, True, "xla"),  # a GPU
        ("kernel", True, False, True, "cpu"),
        ("cpu", False, True, True, "cpu"),
        ("xla", True, False, True, "xla"),
        ("reference", False, True, True, "reference"),
    ],
)
def test_choose(monkeypatch, backend, on_cpu, on_tpu, can, form):
    monkeypatch.setattr(device, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(device, "on_tpu", lambda: on_tpu)
    monkeypatch.setattr(backends, "has_kernels", lambda: True)
    assert backends.choose(backend, lambda: can) == form


def test_without_jax_no_kernel_is_imported(monkeypatch):
    def import_jax():
        raise ModuleNotFoundError("No module named 'jax'")

    monkeypatch.setattr(device, "on_tpu", lambda: True)
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(backends, "has_kernels", lambda: False)
    assert backends.choose("kernel", import_jax) == "xla"


@pytest.mark.parametrize(
    "jax,libtpu,tpu,words",
    [
        (True, None, None, None),
        (True, "0.0.24", 4, None),
        (True, "0.0.14", 5, "libtpu 0.0.14 is too old"),
        (True, "2.18.0", 5, "libtpu 2.18.0 is too old"),
        (False, None, 5, "jax is not installed"),
        (True, None, 3, "a TPU v3 is too old"),
    ],
)
def test_a_warning_says_what_the_kernels_lack(monkeypatch, capsys, jax, libtpu, tpu, words):
    def version(name):
        if not libtpu:
            raise importlib.metadata.PackageNotFoundError(name)
        return libtpu

    monkeypatch.setattr(backends.device, "tpu_generation", lambda: tpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if jax else None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = backends.has_kernels.__wrapped__()
    assert found == (words is None)
    said = capsys.readouterr().err
    assert words in said if words else not said


def test_an_unknown_backend_is_named():
    with pytest.raises(InputError, match="backend must be one of auto, .*: got 'kernels' .did you mean 'kernel'"):
        backends.choose("kernels")


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("training", [False, True])
def test_local_span_makes_no_tensor_of_length_times_length(backend, training):
    """Every tensor of the forward and the backward pass stays linear in the length."""
    layer, length, span = make(span=9, backend=backend), 512, 9
    layer(tf.zeros([1, 1, length, 4]))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=training)
        return tape.gradient(y, [x, *layer.trainable_weights])

    graph = step.get_concrete_function(tf.TensorSpec([1, 1, length, 4])).graph
    sizes = [
        output.shape.num_elements()
        for operation in graph.get_operations()
        for output in operation.outputs
        if output.shape.rank is not None and output.shape.is_fully_defined()
    ]
    block = 16 + span - 1
    assert max(sizes) <= HEADS * length * block * 1.2
    assert max(sizes) < length * length


@pytest.mark.parametrize("recompute", ["none", "softmax", "block"])
@pytest.mark.parametrize(
    "axis,span,length,parts",
    [
        ("height", None, 20, 3),
        pytest.param("width", 5, 40, 16, marks=pytest.mark.slow),
        ("height", 3, 40, 3),
        ("width", None, 3, 3),
    ],
)
def test_parts_and_recomputing_change_nothing(monkeypatch, axis, span, length, parts, recompute):
    """Outputs and gradients are the same if a step is computed in parts, and if w is recomputed."""
    layer, again = (
        AxialAttention(16, 32, axis, heads=2, span=span, max_distance=9, backend="cpu", recompute=r)
        for r in ("none", recompute)
    )
    x = tf.random.stateless_normal([3, length, length, 8], [0, 1])
    layer(x), again(x)
    randomize(layer)
    same_weights(again, layer)
    cotangent = tf.random.stateless_normal([3, length, length, 32], [0, 2])

    def step(layer, part_bytes):
        monkeypatch.setattr(cpu, "PART_BYTES", part_bytes)

        def run():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * cotangent)
            return [y, *(tf.convert_to_tensor(g) for g in tape.gradient(loss, [x, *layer.trainable_weights]))]

        function = tf.function(run, autograph=False)
        graph = function.get_concrete_function().graph
        return function(), sum(op.type == "Softmax" for op in graph.get_operations())

    wanted, whole = step(layer, 2**40)
    found, many = step(again, 2**8)
    assert whole == 1 and many == parts * (2 if recompute == "softmax" else 1)
    for a, b in zip(found, wanted):
        assert np.abs(a - b).max() < 1e-5 * max(np.abs(b).max(), np.abs(wanted[1]).max())  # some gradients are zero


@pytest.mark.parametrize("size,span", [((20, 5), None), ((20, 40), 5), ((64, 6), None)])
def test_recomputing_changes_nothing_for_xla(size, span):
    """Outputs and gradients are the same. In the last size 2 x 64 lines make pixels and heads two separate axes."""
    layers = [
        AxialAttention(16, 32, "width", heads=2, span=span, max_distance=9, backend="xla", recompute=r)
        for r in ("none", "softmax")
    ]
    x = tf.random.stateless_normal([2, *size, 8], [0, 1])
    for layer in layers:
        layer(x)
    randomize(layers[0])
    same_weights(layers[1], layers[0])
    cotangent = tf.random.stateless_normal([2, *size, 32], [0, 2])

    def step(layer):
        @tf.function(autograph=False)
        def run():
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) * cotangent)
            return [tf.convert_to_tensor(g) for g in tape.gradient(loss, [x, *layer.trainable_weights])]

        operations = run.get_concrete_function().graph.get_operations()
        return run(), sum(op.type == "Softmax" for op in operations)

    (kept, once), (again, twice) = map(step, layers)
    assert (once, twice) == (1, 2)
    for a, b in zip(again, kept):
        assert np.abs(a - b).max() < 1e-5 * max(np.abs(b).max(), np.abs(kept[1]).max())


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("span,value", [(None, True), (5, True), (None, False)])
def test_large_maps_are_made_in_parts(monkeypatch, span, value, compiled, backend):
    """In inference the output stays the same, and no tensor is as large as the whole map."""
    layer = AxialAttention(16, 32, "height", heads=4, span=span, value_position=value, backend=backend)
    x = tf.random.stateless_normal([2, 40, 7, 12], [0, 1])
    layer(x)
    randomize(layer)

    def compile_():
        return tf.function(layer, autograph=False) if compiled else layer

    whole = compile_()(x)
    monkeypatch.setattr(backends, "LARGEST_MAP", 20000)
    call = compile_()
    assert relative_error(call(x), whole) < 1e-6
    if compiled:
        graph = call.get_concrete_function(x).graph
        graphs = [graph, *(f.graph for f in graph._functions.values() if hasattr(f, "graph"))]
        assert any(op.type in ("While", "StatelessWhile") for op in graph.get_operations())
        rows, pairs = 14 * 4, 40 * 40 if span is None else 40 * 24
        shapes = [t.shape for g in graphs for op in g.get_operations() for t in op.outputs]
        assert max(s.num_elements() or 0 for s in shapes if s.is_fully_defined()) < rows * pairs
