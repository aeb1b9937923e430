"""The moves between the layouts of a window, compared with plain indexing."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from axial.layers.attention.tpu import shear

LANES = 128


def roll(x, shift, axis, *, stride=0, stride_axis=0):
    """`pltpu.roll` by indexing. jax takes minutes to compile its interpretation of the operation for long rows."""
    assert (axis, stride_axis) == (1, 0)
    row, lane = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])
    return jnp.take_along_axis(x, (lane - stride * row - shift) % x.shape[1], 1)


def test_row_i_of_the_operation_rotates_to_the_right_by_i():
    x = normal(16, LANES)

    def kernel(x, y):
        y[...] = shear.pltpu.roll(x[...], 1, 1, stride=1, stride_axis=0)

    rotated = pl.pallas_call(kernel, out_shape=jnp.zeros_like(x), interpret=True)(x)
    np.testing.assert_array_equal(rotated, np.stack([np.roll(row, i + 1) for i, row in enumerate(x)]))
    np.testing.assert_array_equal(rotated, roll(x, 1, 1, stride=1, stride_axis=0))


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("by", [0, 1])
def test_rotate(monkeypatch, by, strided):
    monkeypatch.setattr(shear.pltpu, "roll", roll)
    x = normal(LANES, LANES)
    wanted = np.stack([np.roll(row, i + by) for i, row in enumerate(x)])
    np.testing.assert_array_equal(shear.Shear(16, strided).rotate(jnp.asarray(x), by), wanted)


@pytest.fixture(params=[16, 32, 64])
def layouts(monkeypatch, request):
    """`Shear`, and [S, L]: the key's row among those of the window and its halo, its offset, and whether it is seen."""
    monkeypatch.setattr(shear.pltpu, "roll", roll)
    slot, query = np.arange(LANES)[:, None], np.arange(LANES)
    offset = (slot - query + 64) % LANES - 64
    return shear.Shear(request.param), query + offset + request.param, offset, abs(offset) <= min(request.param, 63)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_fold_and_unfold(layouts):
    of, row, _, seen = layouts
    query = np.broadcast_to(np.arange(LANES), row.shape)
    x = normal(of.keys, LANES)
    maps = np.where(seen, of.fold(jnp.asarray(x)), 0.0)
    np.testing.assert_array_equal(maps[seen], x[row[seen], query[seen]])
    wanted = np.zeros_like(x)
    wanted[row[seen], query[seen]] = maps[seen]
    np.testing.assert_array_equal(of.unfold(jnp.asarray(maps)), wanted)


def test_the_key_term_comes_from_lanes_of_offsets_and_goes_back(layouts):
    """Lane j of a product holds the offset query - key = j modulo 128."""
    of, row, offset, seen = layouts
    product = normal(of.keys, LANES)
    maps = np.where(seen, of.rotate(of.fold(jnp.asarray(product), rotated=True)), 0.0)
    np.testing.assert_array_equal(maps[seen], product[row[seen], -offset[seen] % LANES])
    wanted = np.zeros_like(product)
    wanted[row[seen], -offset[seen] % LANES] = maps[seen]
    back = of.unfold_reversed(of.rotate(jnp.asarray(maps[::-1]), 1))
    np.testing.assert_array_equal(back[::-1], wanted)


def test_the_query_term_comes_from_lanes_of_offsets_and_goes_back(layouts):
    of, _, offset, _ = layouts
    product = normal(LANES, LANES)
    maps = np.asarray(of.rotate(jnp.asarray(product))).T
    query = np.broadcast_to(np.arange(LANES), offset.shape)
    np.testing.assert_array_equal(maps, product[query, offset % LANES])
    back = np.asarray(of.rotate(jnp.asarray(maps.T[::-1]), 1))[::-1]
    np.testing.assert_array_equal(back, product)


def test_reversed_rows(layouts):
    of, *_ = layouts
    x = normal(of.keys, 24)
    flip = jnp.eye(LANES)[::-1]
    np.testing.assert_array_equal(of.reverse_keys(jnp.asarray(x), flip), x[::-1])
