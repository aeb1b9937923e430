"""The choice of attention's backend on each device, and the memory of each backend."""

import importlib.metadata
import importlib.util

import pytest
import tensorflow as tf

from axial.io import metadata
from axial.layers import device
from axial.layers.attention import cpu
from axial.layers.attention import layer as layers
from axial.layers.attention.layer import AxialAttention
from tests.conftest import built, relative_error
from tests.layers.spatial_attention.mechanism_fixture import largest_tensor
from tests.layers.test_axial_attention import HEADS, check_steps, make, same_weights, step

FAST = ("cpu", "xla")


@pytest.mark.parametrize(
    "backend,on_cpu,on_tpu,can,form",
    [
        ("auto", True, False, True, "cpu"),
        ("auto", False, True, True, "xla"),  # TPU kernels are never the default
        ("kernel", False, True, True, "kernel"),
        ("kernel", False, True, False, "xla"),
        ("kernel", False, True, None, "xla"),  # jax is missing
        ("kernel", False, False, True, "xla"),  # on a GPU
        ("kernel", True, False, True, "cpu"),
        ("cpu", False, True, True, "cpu"),
        ("reference", False, True, True, "reference"),
    ],
)
def test_choose(monkeypatch, backend, on_cpu, on_tpu, can, form):
    monkeypatch.setattr(device, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(device, "on_tpu", lambda: on_tpu)
    monkeypatch.setattr(device, "has_kernels", lambda: can is not None)
    assert device.choose(backend, lambda: can) == form


@pytest.mark.parametrize(
    "ours,theirs,attribute,generation",
    [("", "", "", None), ("", "v5litepod-16", "v4-32", 5), ("v6e", "v5litepod-16", "", 6), ("other", "", "", None)],
)
def test_generation_of_the_tpu(monkeypatch, ours, theirs, attribute, generation):
    for name, value in (("AXIAL_TPU", ours), ("TPU_ACCELERATOR_TYPE", theirs)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(metadata, "tpu_environment", lambda: {"ACCELERATOR_TYPE": attribute})
    assert device.tpu_generation.__wrapped__() == generation


@pytest.mark.parametrize(
    "jax,libtpu,tpu,words",
    [
        (True, None, None, None),
        (True, "0.0.24", 4, None),
        (True, "0.0.14", 5, "libtpu 0.0.14 is too old"),
        (False, None, 5, "jax is not installed"),
        (True, None, 3, "a TPU v3 is too old"),
    ],
)
def test_a_warning_says_what_the_kernels_lack(monkeypatch, capsys, jax, libtpu, tpu, words):
    def version(name):
        if not libtpu:
            raise importlib.metadata.PackageNotFoundError(name)
        return libtpu

    monkeypatch.setattr(device, "tpu_generation", lambda: tpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if jax else None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    has_kernels = device.has_kernels.__wrapped__()
    assert has_kernels == (words is None)
    said = capsys.readouterr().err
    assert words in said if words else not said


@pytest.mark.parametrize("backend", FAST)
def test_local_span_makes_no_tensor_of_length_times_length(backend):
    """The size of every tensor of the forward and the backward pass is linear in the length of the axis."""
    layer, length, span = make(span=9, backend=backend), 512, 9
    layer(tf.zeros([1, 1, length, 4]))
    largest = largest_tensor(layer, [1, 1, length, 4])
    block = 16 + span - 1
    assert largest <= HEADS * length * block * 1.2 and largest < length * length


@pytest.mark.parametrize(
    "backend,axis,span,size,chunks,recompute",
    [
        ("cpu", "height", None, (20, 20), 3, "softmax"),
        ("cpu", "height", 3, (40, 40), 3, "none"),
        ("xla", "width", None, (64, 6), 1, "softmax"),  # 2 x 64 lines: separate axes for lines and heads
    ],
)
def test_chunks_and_recomputing_change_nothing(monkeypatch, backend, axis, span, size, chunks, recompute):
    """A train step has the same outputs and gradients in chunks and with rematerialisation of the attention weights."""
    options = dict(heads=2, span=span, max_distance=9, backend=backend)
    layer, again = (AxialAttention(16, 32, axis, recompute=r, **options) for r in ("none", recompute))
    images = 3 if backend == "cpu" else 2
    x = tf.random.stateless_normal([images, *size, 8], [0, 1])
    built(layer, x), again(x)
    same_weights(again, layer)

    def traced(layer, chunk_bytes):
        monkeypatch.setattr(cpu, "CHUNK_BYTES", chunk_bytes)
        function = tf.function(lambda: step(layer, x), autograph=False)
        graph = function.get_concrete_function().graph
        return function(), sum(op.type in ("Softmax", "Exp") for op in graph.get_operations())

    expected, whole = traced(layer, 2**40)
    actual, many = traced(again, 2**8)
    assert whole == 1 and many == chunks * (2 if recompute == "softmax" else 1)
    check_steps(actual, expected, 1e-4)


def test_short_products_on_a_tpu_change_nothing(monkeypatch):
    """On a TPU, `xla.py` computes maps of few channels as sums of products, not as matrix products."""
    layer, x = make(span=5, backend="xla"), tf.random.stateless_normal([1, 3, 9, 4], [0, 1])
    expected = step(layer, x)
    monkeypatch.setattr(device, "on_tpu", lambda: True)
    check_steps(step(layer, x), expected, 1e-4)


@pytest.mark.parametrize("backend,span,value", [("cpu", None, True), ("xla", 5, True)])
def test_large_maps_are_made_in_chunks(monkeypatch, backend, span, value):
    """Inference in chunks has the same output. No tensor is as large as the attention logits of all lines."""
    x = tf.random.stateless_normal([2, 40, 7, 12], [0, 1])
    layer = built(AxialAttention(16, 32, "height", heads=4, span=span, value_position=value, backend=backend), x)
    whole = layer(x)
    monkeypatch.setattr(layers, "LARGEST_CPU_MAP" if backend == "cpu" else "LARGEST_MAP", 20000)
    call = tf.function(layer, autograph=False)
    assert relative_error(call(x), whole) < 1e-6
    graph = call.get_concrete_function(x).graph
    graphs = [graph, *(f.graph for f in graph._functions.values() if hasattr(f, "graph"))]
    assert any(op.type in ("While", "StatelessWhile") for op in graph.get_operations())
    rows, pairs = 14 * 4, 40 * 40 if span is None else 40 * 24
    shapes = [t.shape for g in graphs for op in g.get_operations() for t in op.outputs]
    assert max(s.num_elements() or 0 for s in shapes if s.is_fully_defined()) < rows * pairs
