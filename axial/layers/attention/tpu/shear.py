"""From products with a position table to maps, and back: columns of offsets become columns of keys.

A relative term s = q_l . r_{m-l} starts as a product of all q with the whole table, [L, offsets]. Row l of the map
begins at another column of it. A TPU rotates row l of a tile to the right by l lanes in one operation. So a tile of the
map is made of two neighbouring tiles, rotated, with a mask between them (`Shear`).

From a map to offsets, row l must rotate to the left by l, which the chip cannot do. There the rows are in reverse
order, so that each row rotates to the right by one lane less than the row before.

Letters of the shapes: L queries and M keys of a map.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 16  # of a tile of bfloat16


def up(n, unit):
    """n, rounded up to whole units."""
    return -(-n // unit) * unit


def tiles(x):
    """The tiles of x, 128 lanes each."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def join(parts, axis):
    """The parts as one array; a single part as it is."""
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
    """float32: the first `height` rows of x in reverse. x has whole tiles of 128 rows; `flip` reverses one of them."""
    return join([dot(flip[LANES - n :], x[i : i + LANES]) for i, n in _reversed_tiles(height)], 0)


def reverse_turned(x, height, flip):
    """`reverse` of x^T."""
    return join([dot_turned(flip[LANES - n :], x[:, i : i + LANES]) for i, n in _reversed_tiles(height)], 0)


@dataclasses.dataclass(frozen=True)
class Shear:
    """Between maps [rows, columns] and products [rows, offsets], an offset being column - row.

    Attributes:
        height, width: rows and columns in whole tiles.
        forward: offset of each column of a product, as `to_map` takes it.
        backward: offset of each column of a sheared map, as `to_offsets` returns it.
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
        """For each 128 rows: their number, their rotated tiles, and where a lane is below its row."""
        for start in range(0, x.shape[0], LANES):
            block = x[start : start + LANES]
            row, lane = (lax.broadcasted_iota(jnp.int32, (block.shape[0], LANES), axis) for axis in (0, 1))
            yield start // LANES, [_turn(tile) for tile in tiles(block)], lane < row

    def to_map(self, x):
        """float32 [height, forward] -> [height, width]."""
        blocks, shift = [], self._shift // LANES
        for number, turned, below in self._blocks(x):
            first = shift - number
            # Tiles beyond the ends belong to rows or columns that are padding: any tile will do.
            wanted = [min(max(i, 0), len(turned) - 1) for i in range(first - 1, first + self.width // LANES)]
            found = [turned[i] for i in wanted]
            blocks.append(join([jnp.where(below, left, right) for left, right in itertools.pairwise(found)], 1))
        return join(blocks, 0)

    def to_offsets(self, x):
        """float32 [height, width] -> [height, backward], both with their rows in reverse."""
        blocks, count = [], self.width // LANES
        for number, turned, below in self._blocks(x):
            zero = jnp.zeros_like(turned[0])
            wanted = range(-number - 1, len(self.backward) // LANES - number)
            found = [turned[i] if 0 <= i < count else zero for i in wanted]
            blocks.append(join([jnp.where(below, left, right) for left, right in itertools.pairwise(found)], 1))
        return join(blocks, 0)


def _turn(x):
    """Row l of x [rows <= 128, 128], rotated to the right by l."""
    return pltpu.roll(x, 0, 1, stride=1, stride_axis=0)
