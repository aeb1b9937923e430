"""From products with a table to maps of a TPU kernel, and back: columns of offsets to columns of keys.

A relative term s = q_l . r_{m-l} is a product of all q with the whole table, [L, offsets], of which row l is wanted
from another column on. The chip turns row l of a tile by l lanes in one operation, so that a map is two neighbouring
tiles turned, with a mask between them (`Shear`). The other way, from a map to offsets, row l turns left by l, which
the chip cannot: there the rows are in reverse, so that the row before it turns right by one less.

Letters of the shapes: L queries and M keys of a map.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 16  # of a tile of bfloat16


def up(n, unit):
    """n in whole units."""
    return -(-n // unit) * unit


def tiles(x):
    """Of 128 lanes each."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def join(parts, axis):
    """One array of some, which may be one."""
    return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def dot(a, b):
    """float32 a b."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def dot_turned(a, b):
    """float32 a b^T."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _reversed_tiles(height):
    """Starts and lengths of the tiles of [height, .], the last first."""
    return [(i, min(LANES, height - i)) for i in reversed(range(0, height, LANES))]


def reverse(x, height, flip):
    """float32: the first `height` rows of x in reverse; x has whole tiles of 128, and `flip` reverses one of them."""
    return join([dot(flip[LANES - n :], x[i : i + LANES]) for i, n in _reversed_tiles(height)], 0)


def reverse_turned(x, height, flip):
    """`reverse` of x^T."""
    return join([dot_turned(flip[LANES - n :], x[:, i : i + LANES]) for i, n in _reversed_tiles(height)], 0)


@dataclasses.dataclass(frozen=True)
class Shear:
    """Between maps [rows, columns] and products [rows, offsets], an offset being column - row.

    Attributes:
        height, width: rows and columns in whole tiles.
        forward: the offset of each column of the products that `to_map` takes.
        backward: the offset of each column of what `to_offsets` returns.
    """

    rows: int
    columns: int

    @property
    def height(self):
        return up(self.rows, SUBLANES)

    @property
    def width(self):
        return up(self.columns, LANES)

    @property
    def _shift(self):
        return up(self.rows - 1, LANES)

    @property
    def forward(self):
        return np.arange(up(self.columns + self._shift, LANES)) - self._shift

    @property
    def backward(self):
        return np.arange(up(self.height - 1 + self.columns, LANES)) - (self.height - 1)

    def _blocks(self, x):
        """Of each 128 rows, their number, their tiles turned and where a lane is below its row."""
        for start in range(0, x.shape[0], LANES):
            block = x[start : start + LANES]
            row, lane = (lax.broadcasted_iota(jnp.int32, (block.shape[0], LANES), axis) for axis in (0, 1))
            yield start // LANES, [_turn(tile) for tile in tiles(block)], lane < row

    def to_map(self, x):
        """float32 [height, forward] -> [height, width]."""
        blocks, shift = [], self._shift // LANES
        for number, turned, below in self._blocks(x):

            def tile(i):
                return turned[min(max(i, 0), len(turned) - 1)]  # beyond: of rows or columns that are padding

            first = shift - number
            numbers = range(self.width // LANES)
            blocks.append(join([jnp.where(below, tile(i + first - 1), tile(i + first)) for i in numbers], 1))
        return join(blocks, 0)

    def to_offsets(self, x):
        """float32 [height, width], its rows in reverse -> [height, backward], the same."""
        blocks, last = [], self.width // LANES - 1
        for number, turned, below in self._blocks(x):
            zero = jnp.zeros_like(turned[0])

            def tile(i):
                return turned[i] if 0 <= i <= last else zero

            numbers = range(len(self.backward) // LANES)
            blocks.append(join([jnp.where(below, tile(i - number - 1), tile(i - number)) for i in numbers], 1))
        return join(blocks, 0)


def _turn(x):
    """Row l of [rows <= 128, 128] turned right by l."""
    return pltpu.roll(x, 0, 1, stride=1, stride_axis=0)
