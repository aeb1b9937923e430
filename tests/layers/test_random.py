"""Random numbers in a train step: reproducible, uniform and independent, also in compiled programs."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from axial.layers import random
from tests.conftest import jit_values

SIZE = 4096


def draws(seed, step, replica, number=3):
    """Draws [number, SIZE] random numbers. For the same key, XLA's numbers differ from those without XLA."""
    with random.seeded(seed, step, replica):
        return tf.stack([random.uniform([SIZE]) for _ in range(number)])


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def drawn(request):
    """`draws`, plain or compiled, as a function of an int32 seed, an int64 step and an int32 replica."""
    if request.param not in jit_values():
        pytest.skip("this TensorFlow has no XLA for CPUs")

    def draw(seed, step, replica):
        compute = tf.function(lambda *key: draws(seed, *key), autograph=False, jit_compile=request.param)
        return compute(tf.constant(step, tf.int64), tf.constant(replica)).numpy()

    return draw


def test_the_seed_the_step_and_the_replica_decide_independent_numbers(drawn):
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**31 - 1, 2**31, 2047)]
    numbers = np.concatenate([drawn(*key) for key in keys])
    np.testing.assert_array_equal(drawn(*keys[0]), numbers[:3])
    assert numbers.min() >= 0 and numbers.max() < 1
    np.testing.assert_allclose(numbers.mean(1), 1 / 2, atol=5 * 12**-0.5 * SIZE**-0.5)
    np.testing.assert_allclose(numbers.std(1), 12**-0.5, atol=0.01)
    for (i, a), (j, b) in itertools.combinations(enumerate(numbers), 2):
        for shift in (0, 1, 4):  # Philox makes four numbers at once
            other = np.roll(b, shift)
            assert abs(np.corrcoef(a, other)[0, 1]) < 5 * SIZE**-0.5, (i, j, shift)
