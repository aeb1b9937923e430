"""Helpers for tests of spatial attention: comparison with oracles, execution modes, and the memory of a step."""

import functools

import numpy as np
import tensorflow as tf

from tests.conftest import jit_values, relative_error


def name_of(weight):
    return weight.name.split("/")[-1].split(":")[0]


def randomized(layer, shape, seed=0):
    """Builds a layer for an input shape and sets random weights. Returns (layer, random input)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape).astype(layer.dtype)
    layer.build(x.shape)
    for weight in layer.weights:
        weight.assign(rng.normal(0, 0.4, weight.shape))
    return layer, x


def check_oracle(run, inputs, oracle, tolerance, weights=()):
    """Checks outputs, and compares gradients with difference quotients of the oracle along a random direction.

    Args:
        run: function that takes `inputs` as keyword arguments and returns the output.
        inputs: dict from names to arrays.
        oracle: function of the inputs and the weights, which are float64 keyword arguments.
        tolerance: relative to the largest output. The tolerance of derivatives is ten times as large, at least 1e-6.
        weights: variables that `run` depends on.
    """
    inputs = {name: tf.constant(array) for name, array in inputs.items()}
    sources = inputs | {name_of(weight): weight for weight in weights}
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = run(**inputs)
    rng, arrays = np.random.default_rng(1), {name: np.asarray(x, np.float64) for name, x in sources.items()}
    upstream = rng.normal(size=y.shape)
    gradients = tape.gradient(y, sources, tf.constant(upstream, y.dtype), unconnected_gradients="zero")
    assert relative_error(y, oracle(**arrays)) < tolerance
    for name, gradient in gradients.items():
        way = rng.normal(size=gradient.shape)
        above, below = (oracle(**arrays | {name: arrays[name] + by * way}) for by in (1e-6, -1e-6))
        slope = ((above - below) * upstream).sum() / 2e-6
        error = abs((np.asarray(gradient, np.float64) * way).sum() - slope)
        assert error < max(10 * tolerance, 1e-6) * max(abs(slope), 1.0), name


def check_layer(layer, x, oracle, tolerance, *, key_mask=None, **inputs):
    """Calls `check_oracle` for a built layer and an oracle with the arguments `layer` and `key_mask`."""

    def run(**inputs):
        return layer(inputs.pop("x"), key_mask=key_mask, **inputs)

    oracle = functools.partial(oracle, layer=layer, key_mask=key_mask)
    check_oracle(run, {"x": x, **inputs}, oracle, tolerance, layer.trainable_weights)


def check_everywhere(layer, x, folder):
    """Asserts that a layer has equal outputs and gradients eagerly, in a graph and by XLA. Also checks a SavedModel."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return [y, *tape.gradient(y, [x, *layer.trainable_weights], y)]

    eager, x = step(tf.constant(x)), tf.constant(x)
    any_batch = [tf.TensorSpec([None, *x.shape[1:]])]
    for jit in jit_values():
        signature = None if jit else any_batch
        traced = tf.function(step, autograph=False, jit_compile=jit, input_signature=signature)
        for a, b in zip(traced(x), eager, strict=True):
            assert relative_error(a, b) < 1e-4
    module = tf.Module()
    module.layer = layer
    module.run = tf.function(layer, autograph=False, input_signature=any_batch)
    tf.saved_model.save(module, str(folder))
    loaded = tf.saved_model.load(str(folder))  # the variable keeps the loaded weights alive
    assert relative_error(loaded.run(x), eager[0]) < 1e-5


def largest_tensor(layer, shape):
    """Number of elements of the largest tensor in a train step of a built layer."""

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return tape.gradient(y, [x, *layer.trainable_weights])

    sizes, graphs = [], [step.get_concrete_function(tf.TensorSpec(shape)).graph]
    while graphs:
        graph = graphs.pop()
        graphs += [function.graph for function in graph._functions.values() if hasattr(function, "graph")]
        shapes = [t.shape for op in graph.get_operations() for t in op.outputs]
        sizes += [shape.num_elements() for shape in shapes if shape.is_fully_defined()]
    return max(sizes)
