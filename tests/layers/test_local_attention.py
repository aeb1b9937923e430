"""Local 2-D attention, compared with a float64 oracle."""

import numpy as np
import pytest

from axial.layers.attention.layer import LocalAttention
from axial.layers.batch_norm import BatchNormConfig
from tests import oracles
from tests.conftest import BACKENDS, built, relative_error
from tests.layers.test_axial_attention import check_steps, folded_copy, oracle_weights, step

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
    # images, height, width, span, whether it is position-sensitive, whether it has batch norms
    (2, 5, 7, 3, True, True),
    (1, 5, 3, 7, True, True),  # several blocks along the height. The width is smaller than the window
    (2, 1, 1, 7, True, True),
    (1, 6, 5, 11, True, True),  # a window that extends beyond the neighbouring blocks of 4 pixels
    (1, 9, 5, 7, False, False),
]


@pytest.mark.parametrize(
    "case,dtype,tolerance", [*((c, "float64", 1e-9) for c in CASES), (CASES[0], "float32", TOLERANCE)], ids=str
)
def test_matches_the_oracle(case, dtype, tolerance):
    """The outputs of every backend and of folded layers equal the oracle's."""
    images, height, width, span, sensitive, batch_norm = case
    rng = np.random.default_rng(height * 10 + width)
    x = rng.normal(size=[images, height, width, 3]).astype(dtype)
    layers = [make(span, sensitive, batch_norm, backend, dtype=dtype) for backend in BACKENDS]
    for layer in layers:
        built(layer, x)
        assert relative_error(folded_copy(layer, x)(x), layer(x)) < tolerance
    w, terms = oracle_weights(layers[0]), layers[0].spec.options.terms
    for training in (False, True):
        options = dict(terms=terms, epsilon=1e-3, training=training, batch_norm=batch_norm)
        expected = oracles.local_attention(x, w, HEADS, span, **options)
        for layer in layers:
            assert relative_error(layer(x, training=training), expected) < tolerance, layer.spec.options.backend
    *fast, plain = layers
    for layer in fast:
        check_steps(step(layer, x), step(plain, x), 10 * tolerance)
