"""Layers of generalised attention with random weights, and their oracle."""

import numpy as np
import tensorflow as tf

from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from tests.conftest import jit_values, relative_error
from tests.study_oracles import GeneralizedAttention as Oracle


def name_of(weight):
    return weight.name.split("/")[-1].split(":")[0]


def make(setting, shape, seed=0, **options):
    """A layer with random weights, and its input."""
    rng = np.random.default_rng(seed)
    layer = GeneralizedAttention(setting, **{"heads": 2, **options})
    x = rng.normal(size=shape).astype(np.float32)
    layer.build(x.shape)
    for weight in layer.weights:
        weight.assign(rng.normal(0, 0.4, weight.shape))
    return layer, x


def oracle_of(layer):
    return Oracle(
        layer.setting,
        layer.heads,
        layer.axes,
        stride=layer.key_stride,
        reach=layer.reach,
        scaled=layer.scaled,
        wavelength=layer.wavelength,
    )


def wanted_of(layer, x, upstream, keys=None, key_mask=None):
    """(y, gradients by name) of the oracle, for maps or sequences."""

    def as_map(a):
        return a[:, :, None] if layer.axes == 1 and a is not None else a

    w = {name_of(weight): weight.numpy().astype(np.float64) for weight in layer.weights}
    y, gradients = oracle_of(layer).run(as_map(x), w, as_map(upstream), as_map(keys), as_map(key_mask))
    if layer.axes == 1:
        y = y[:, :, 0]
        gradients |= {name: gradients[name][:, :, 0] for name in ("x", "keys") if name in gradients}
    return y, gradients


def check_everywhere(layer, x, folder):
    """Outputs and gradients of a built layer are equal eager, in a graph and by XLA, and outputs of its SavedModel."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return [y, *tape.gradient(y, [x, *layer.trainable_weights], y)]

    eager, x = step(tf.constant(x)), tf.constant(x)
    for jit in jit_values():
        for a, b in zip(tf.function(step, autograph=False, jit_compile=jit)(x), eager, strict=True):
            assert relative_error(a, b) < 1e-4
    module = tf.Module()
    module.layer = layer
    module.run = tf.function(layer, autograph=False, input_signature=[tf.TensorSpec([None, *x.shape[1:]])])
    tf.saved_model.save(module, str(folder))
    loaded = tf.saved_model.load(str(folder))  # holds the weights of its function
    assert relative_error(loaded.run(x), eager[0]) < 1e-5


def largest_tensor(layer, shape):
    """Numbers of the largest tensor of a training step of a layer that is built."""

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
