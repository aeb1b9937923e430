"""Percentile levels of photos with more than 8 bits equal levels by their definition."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axial.data.levels import DEPTH, PERCENTILES, eight_bits


@settings(deadline=None, derandomize=True, max_examples=60)
@given(data=st.data())
def test_percentiles_equal_their_definition(data):
    """The oracle sorts the finite values. An affine change of the values changes levels only by rounding."""
    kind = data.draw(st.sampled_from(["u2", "i2", "i4", "u4", "f4", ">u2"]))
    random, size = np.random.default_rng(data.draw(st.integers(0, 99))), data.draw(st.tuples(*[st.integers(1, 60)] * 2))
    values = (random.normal(300, 40, size) ** data.draw(st.sampled_from([0.5, 1, 1.5]))).astype(kind)
    if kind == "f4":
        values[random.random(size) < data.draw(st.sampled_from([0, 0.2, 1]))] = random.choice([np.nan, np.inf, -np.inf])
    ordered = sorted(float(x) for x in values.flat if np.isfinite(x)) or [0.0]
    rank = min(math.isqrt(len(ordered)) // 4 + 1, (len(ordered) - 1) // 2)
    low, high = ordered[rank], ordered[-1 - rank]
    if low == high:
        low, high = ordered[0], ordered[-1]
    pairs = [pair for row in values for pair in itertools.pairwise(row) if np.isfinite(pair).all()]
    differences = sorted(abs(float(b) - float(a)) for a, b in pairs) or [0.0]
    span = max(high - low, 20 * differences[len(differences) // 2])
    clipped = [low if np.isnan(x) else min(max(float(x), low), high) for x in values.flat]
    wanted = [math.floor(255 * (x - low) / (span or 1) + 0.5) for x in clipped]
    np.testing.assert_array_equal(eight_bits(values, "percentiles", band=1000).flat, wanted)
    changed = eight_bits(values.astype(np.float64) * 1.7 - 30, "percentiles")
    assert np.abs(changed.ravel().astype(int) - wanted).max() <= 1


def test_bright_spots_decide_but_neither_hot_pixels_nor_noise():
    ground = np.random.default_rng(0).normal(100, 5, [1024, 1024]).astype(np.uint16)
    spots = ground.copy()
    spots[50:68, 50:68] = 3000  # one nucleus
    hot = spots.copy()
    hot[3:1000:50, 3:1000:90] = 65535
    plain, found = (eight_bits(x, "percentiles") for x in (spots, hot))
    assert plain[60, 60] == 255 and plain[spots < 200].max() < 15
    assert np.abs(plain.astype(int) - found)[spots == hot].max() <= 1
    assert eight_bits(ground, "percentiles").max() < 100  # noise without a nucleus
    assert not eight_bits(np.full([5, 5], 700, np.uint16), "percentiles").any()


@pytest.mark.parametrize(
    "largest,divisor", [(255, 1), (256, 4), (1023, 4), (1024, 16), (4096, 64), (16384, 256), (65535, 256)]
)
def test_the_older_rule_divides_by_the_depth(largest, divisor):
    values = np.array([[0, largest // 2, largest]], np.uint16)
    np.testing.assert_array_equal(eight_bits(values, DEPTH), values // divisor)


def test_few_values_have_percentiles_too():
    """Of three values, the percentiles are the second; the extremes replace them."""
    assert eight_bits(np.array([[0, 5000, 10000]], np.uint16), PERCENTILES).tolist()[0][0] == 0
    assert eight_bits(np.array([[7, 7, 7]], np.uint16), PERCENTILES).tolist() == [[0, 0, 0]]


def test_a_hot_pixel_on_a_constant_background_is_bright():
    values = np.full([100, 100], 300, np.uint16)
    values[5, 5] = 40_000
    assert eight_bits(values, PERCENTILES)[5].tolist() == [0] * 5 + [255] + [0] * 94


def test_the_darkest_and_the_brightest_of_four_values_are_cut():
    values = np.array([0, 1000, 60_000, 65_000], np.uint16)
    assert eight_bits(values[:, None], PERCENTILES).ravel().tolist() == [0, 0, 255, 255]
