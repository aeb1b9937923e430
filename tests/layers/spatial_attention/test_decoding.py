"""Generalised attention a token at a time, compared with all tokens at once."""

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.spatial_attention.generalized_attention import TEXT
from tests.layers.spatial_attention.generalized_fixture import make


@pytest.mark.parametrize(
    "setting,options",
    [("0010", {}), *(("1111", more) for more in ({}, {"window": 3}, {"key_stride": 2}))],
    ids=str,
)
def test_cached_decoding_equals_full_decoding(setting, options):
    layer, x = make(setting, [2, 5, 8], causal=True, **options, **TEXT)
    cache, positions, full = layer.new_cache(2, 5), layer.positions(5), layer(x)
    for i in range(5):
        y, cache = layer.step(x[:, i : i + 1], i if i % 2 else tf.constant(i), cache, positions)
        np.testing.assert_allclose(y[:, 0], full[:, i], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="index = 5: expected fewer tokens than the 5 of the cache"):
        layer.step(x[:, :1], 5, cache, positions)
