"""The layout of a window's maps, and the operations that convert to it.

A window has 128 queries. Their keys are the pixels of the window and the `halo` pixels on either side. A query sees
fewer than 128 consecutive keys. So a map is [128 slots, 128 queries]. The slot of a key is its index modulo 128, so no
two keys of a query have the same slot. Most slots hold a key of the window. For the last queries, the first slots hold
keys after the window. For the first queries, the last slots hold keys before it (`Shear.fold`, `Shear.unfold`).

The relative term of a query, q_l . r_{m-l}, starts as a product of a band of the table with all queries, [offsets,
queries]. A band has only the offsets in reach, in ascending order. Vector instructions move column l down by l rows,
which turns rows of offsets into rows of slots (`Shear.to_slots`, `Shear.to_band`).

The relative term of a key starts as a product of all keys with the whole table, [keys, offsets]. The lane of an offset
is the offset modulo 128. A v5e rotates row i to the right by i lanes in one operation (`Shear.rotate`,
`Shear.unrotate`), which turns lanes of offsets into lanes of queries.

Letters of the shapes: S slots, L queries, M keys of a window and its halo, J lanes of offsets, B rows of a
band. S, L and J are 128.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # lanes of a register
ROWS = 8  # rows of a float32 register
SUBLANES = 16  # rows of a bfloat16 tile
OFFSETS = (np.arange(LANES) + LANES // 2) % LANES - LANES // 2  # the offset of each lane of a product with a table


def up(n, unit):
    """n rounded up to a multiple of `unit`."""
    return -(-n // unit) * unit


def iota(shape, axis):
    """int32 array of a shape that holds the index along an axis."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def join(parts):
    """Arrays, concatenated along the rows."""
    return jnp.concatenate(parts, 0) if len(parts) > 1 else parts[0]


def dot(a, b):
    """The matrix product a b in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def dot_turned(a, b):
    """The matrix product a b^T in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def pad_rows(x, rows):
    """x with zero rows at the end."""
    if x.shape[0] == rows:
        return x
    return jnp.concatenate([x, jnp.zeros((rows - x.shape[0], x.shape[1]), x.dtype)], 0)


def turn_over(x):
    """float32 x^T of x [R, C]. Zeros pad R to whole registers."""
    return jnp.transpose(pad_rows(x.astype(jnp.float32), up(x.shape[0], LANES)))


def _registers(x):
    """list of the registers [8, 128] of float32 x [R, 128]."""
    return [x[start : start + ROWS] for start in range(0, len(x), ROWS)]


def _rows_of(x, rows):
    """The entries of a register x [8, 128] at the given rows int32 [8, 128], in the same lanes."""
    return jnp.take_along_axis(x, rows, 0, mode="promise_in_bounds")


@dataclasses.dataclass(frozen=True)
class Shear:
    """Conversions between the layouts of a window.

    Attributes:
        halo: number of keys before a window, and after it: 16, 32 or 64.
        strided: whether the TPU rotates each row by a different distance in one operation, and gathers rows within a
            register. A v5e can, a v4 cannot.
    """

    halo: int
    strided: bool = True

    @property
    def keys(self):
        """Number of keys of a window, halo included."""
        return LANES + 2 * self.halo

    def rotate(self, x):
        """float32 x [128, 128] with row i rotated to the right by i lanes.

        The rows are slots. Lanes of offsets query - key become lanes of queries.
        """
        if self.strided:
            return pltpu.roll(x, 0, 1, stride=1, stride_axis=0)
        return join([self._rotate_by_bits(y, i * ROWS) for i, y in enumerate(_registers(x))])

    @property
    def band(self):
        """The offset of each row of a band, ascending. The offsets in reach are among them."""
        return np.arange(-self.halo, min(self.halo + SUBLANES, LANES - self.halo))

    def to_slots(self, x):
        """float32 [B, L] -> [S, L]: moves column l down by l rows. Slots beyond the band get other finite numbers.

        Args:
            x: float32. It may have the rows of further offsets, up to 128 rows in all.
        """
        parts, first = _registers(x), self.halo // ROWS
        parts += [None] * (LANES // ROWS - len(parts))
        return join(self._move(parts[first:] + parts[:first], 1))

    def to_band(self, x):
        """float32 [S, L] -> [B, L]: moves column l up by l rows."""
        parts, last = self._move(_registers(x), -1), -self.halo // ROWS
        return join((parts[last:] + parts[:last])[: len(self.band) // ROWS])

    def _move(self, parts, sign):
        """Moves column l of 16 registers [8, 128] by l rows, cyclically: down if `sign` is 1, up if it is -1.

        Vector instructions move rows within a register, and then select whole registers for each bit of the distance.
        A register may be None; then its numbers do not matter.
        """
        row, lane = (iota((ROWS, LANES), axis) for axis in (0, 1))
        source = row - sign * lane
        if self.strided:
            parts = [y if y is None else _rows_of(y, source & (ROWS - 1)) for y in parts]
        else:  # a v4 cannot gather rows
            for bit in (1, 2, 4):
                mask, by = lane & bit != 0, sign * bit % ROWS
                parts = [y if y is None else jnp.where(mask, pltpu.roll(y, by, 0), y) for y in parts]
        for bit in (1, 2, 4, 8)[::sign]:
            mask, others = source & (bit * ROWS) != 0, parts[bit:] + parts[:bit]
            pairs = zip(parts, others, strict=True)
            parts = [y if z is None else z if y is None else jnp.where(mask, z, y) for y, z in pairs]
        return parts

    def unrotate(self, x):
        """float32 x [128, 128] with row i rotated to the left by i lanes.

        A v5e rotates to the right only. So the eight rows of each register are reversed. Then each row rotates to the
        right by one lane more than the row before.
        """
        parts = enumerate(_registers(x))
        if not self.strided:
            return join([self._rotate_by_bits(y, i * ROWS, -1) for i, y in parts])
        reverse = ROWS - 1 - iota((ROWS, LANES), 0)
        pairs = ((LANES - ROWS + 1 - i * ROWS, _rows_of(y, reverse)) for i, y in parts)
        return join([_rows_of(pltpu.roll(y, by, 1, stride=1, stride_axis=0), reverse) for by, y in pairs])

    def _rotate_by_bits(self, x, by, sign=1):
        """A register x [8, 128] with row i rotated to the right by i + `by` lanes; to the left if `sign` is -1."""
        x, row = pltpu.roll(x, sign * by % LANES, 1), iota((ROWS, LANES), 0)
        for bit in (1, 2, 4):
            x = jnp.where(row & bit != 0, pltpu.roll(x, sign * bit % LANES, 1), x)
        return x

    def _split(self, rotated):
        """Two masks, bool [halo, 128], of the first and the last `halo` slots.

        The first mask is True where a slot holds a key after the window, and the second where it holds a key before the
        window. A query sees the offsets -64 to 63, and exactly one offset belongs to each slot.

        Args:
            rotated: whether the lanes are offsets query - key. Otherwise they are queries.
        """
        first, lane = (iota((self.halo, LANES), axis) for axis in (0, 1))
        last = first + LANES - self.halo
        first_lanes, last_lanes = ((lane + slot) & (LANES - 1) if rotated else lane for slot in (first, last))
        return first_lanes - first > LANES // 2, last_lanes - last <= -LANES // 2

    def fold(self, x, rotated=False):
        """[M, .] -> [S, .]. For the lanes see `_split`."""
        after, before = self._split(rotated)
        halo, end = self.halo, LANES + self.halo
        first = jnp.where(after, x[end:], x[halo : 2 * halo])
        last = jnp.where(before, x[:halo], x[LANES:end])
        return join([first, *self._between(x[halo:end]), last])

    def unfold(self, x, rotated=False):
        """[S, .] -> [M, .], zero for keys in no slot. For the lanes see `_split`."""
        first_mask, last_mask = self._split(rotated)
        first, last, zero = x[: self.halo], x[LANES - self.halo :], jnp.zeros((), x.dtype)
        inner = jnp.where(first_mask, zero, first), *self._between(x), jnp.where(last_mask, zero, last)
        return join([jnp.where(last_mask, last, zero), *inner, jnp.where(first_mask, first, zero)])

    def _between(self, x):
        """list with the rows of the slots that hold only keys of the window; empty if there are none."""
        return [x[self.halo : LANES - self.halo]] if self.halo < LANES // 2 else []
