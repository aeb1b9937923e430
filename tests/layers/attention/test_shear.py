"""The shearing of the TPU kernels, compared with plain indexing."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from axial.layers.attention.tpu import shear


def turn(x):
    """`_turn` by indexing. For long rows, jax takes minutes to compile its interpretation of the TPU's operation."""
    row, lane = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])
    return jnp.take_along_axis(x, (lane - row) % x.shape[1], 1)


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_row_l_turns_right_by_l(rows):
    x = np.random.default_rng(0).normal(size=[rows, 128]).astype(np.float32)

    def kernel(x, y):
        y[...] = shear._turn(x[...])

    turned = pl.pallas_call(kernel, out_shape=jnp.zeros_like(x), interpret=True)(x)
    np.testing.assert_array_equal(turned, np.stack([np.roll(row, i) for i, row in enumerate(x)]))
    np.testing.assert_array_equal(turned, turn(x))


@pytest.mark.parametrize("rows,columns", [(5, 7), (16, 128), (130, 40), (40, 130), (129, 129), (260, 300)])
def test_shear_goes_there_and_back(monkeypatch, rows, columns):
    monkeypatch.setattr(shear, "_turn", turn)
    of = shear.Shear(rows, columns)
    rng = np.random.default_rng(0)
    offset = np.arange(columns) - np.arange(rows)[:, None]
    of_offset = rng.normal(size=[rows, 2 * 600]).astype(np.float32)
    wanted = of_offset[np.arange(rows)[:, None], offset + 600]
    products = np.zeros([of.height, len(of.forward)], np.float32)
    products[:rows] = of_offset[:, of.forward + 600]
    np.testing.assert_array_equal(of.to_map(jnp.asarray(products))[:rows, :columns], wanted)

    maps = np.zeros([of.height, of.width], np.float32)
    maps[:rows, :columns] = wanted
    back = np.asarray(of.to_offsets(jnp.asarray(maps[::-1])))[::-1][:rows]
    seen = np.zeros_like(of_offset)
    np.put_along_axis(seen, offset + 600, wanted, 1)
    np.testing.assert_array_equal(back, seen[:, of.backward + 600])
