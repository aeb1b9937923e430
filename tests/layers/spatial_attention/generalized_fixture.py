"""Layers of generalised attention with random weights, and their oracle."""

import numpy as np

from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from study_oracles import GeneralizedAttention as Oracle

QUICK = ("0001", "0010", "0011", "0110", "1000", "1111")


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
