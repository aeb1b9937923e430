"""What all kernels share: how pixels are cut into windows, and how a kernel reads them.

The lines of all images follow each other in an array of pixels [P, .]. A window is 128 of them, of whatever lines
(`shear.py`). A program has `WINDOWS` windows, and the halo around them.

Letters of the shapes: P pixels, H heads, D query and key channels of a head, E value channels of a head, C channels of
a group of heads; see also `shear.py`.

Heads lie side by side in the lanes, in the order of the projection. A group is the heads that fill whole registers of
128 lanes. A product over 128 lanes costs as much as one over 32. So a product reads the whole group, and one operand is
zero outside the head's own lanes (`only`). The other operand serves all heads of the group.

An array x holds q, k and v of the pixels before their batch norm, each in whole registers. `affine` [2, .] holds the
factors and the summands of the batch norm, for four groups of lanes: q times the scale of the content term, q, k, v.
"""

import dataclasses
import itertools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from axial.layers.attention.tpu.shear import LANES, SUBLANES, Shear, iota, join, pad_rows, up

# Bytes that a kernel of attention may use; a v5e has 128 MiB. More than other kernels (`pallas.FAST_MEMORY`): the
# projection of XL's last stage and its gradient take 48 MiB of it.
FAST_MEMORY = 100 * 2**20
# Times the bytes of a number, what the largest kernel takes of it for a channel of q, k or v: in bfloat16, 23 MiB for
# 2,048 channels.
CHANNEL_FACTOR = 6 * 2**10
WINDOWS = 2  # of a program
ROWS = WINDOWS * LANES  # pixels of a program
REACH = LANES // 2 - 1  # the largest |offset|: a query sees 127 keys at most


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How pixels are cut for the kernels, and how they read them.

    Attributes:
        lines: number of lines.
        length: pixels of a line.
        reach: largest visible |offset|.
        heads, depth, value_depth: H, D, E.
        dtype: dtype of the operands of products.
        strided: see `Shear`.
    """

    lines: int
    length: int
    reach: int
    heads: int
    depth: int
    value_depth: int
    dtype: str
    strided: bool = True

    @property
    def pixels(self):
        return self.lines * self.length

    @property
    def halo(self):
        """Keys before and after a window: the reach, in a part of a window that holds whole tiles."""
        return min(halo for halo in (SUBLANES, 2 * SUBLANES, 4 * SUBLANES) if halo >= self.reach)

    @property
    def shear(self):
        return Shear(self.halo, self.strided)

    @property
    def sizes(self):
        """Channels of q, k and v."""
        return [self.heads * depth for depth in (self.depth, self.depth, self.value_depth)]

    @property
    def lanes(self):
        """Slices of q, k and v among the lanes of x."""
        ends = [0, *itertools.accumulate(up(size, LANES) for size in self.sizes)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    @property
    def channels(self):
        """Lanes of x."""
        return self.lanes[-1].stop

    def cast(self, x):
        return x.astype(self.dtype)

    def flops(self, products):
        """Of a program, for the compiler: of products that fill a map for each head."""
        return 2 * WINDOWS * self.heads * products * LANES**3

    # === Heads ===

    def group(self, head, depth):
        """Two slices: the registers of a head's group among all lanes, and the head's lanes in the group."""
        size = math.lcm(LANES, depth)
        first = head * depth % size
        start = head * depth - first
        return slice(start, min(start + size, up(self.heads * depth, LANES))), slice(first, first + depth)

    def ends_group(self, head, depth):
        """Whether a head is the last one of its group."""
        return head == self.heads - 1 or self.group(head, depth)[0] != self.group(head + 1, depth)[0]

    # === Visible pairs of a window ===

    def _bounds(self, first):
        """Least and largest visible offset [1, L] of the queries from pixel `first` on. Beyond the last, none is."""
        position = lax.rem(first, self.length) + iota((1, LANES), 1)
        if self.length >= LANES:
            position = jnp.where(position >= self.length, position - self.length, position)
        else:
            lines = jnp.floor((position.astype(jnp.float32) + 0.5) * (1 / self.length))
            position -= self.length * lines.astype(jnp.int32)
        most = jnp.minimum(self.reach, self.length - 1 - position)
        return -jnp.minimum(self.reach, position), jnp.where(first + iota((1, LANES), 1) < self.pixels, most, -LANES)

    def visible(self, first):
        """bool [S, L] of the window from pixel `first` on."""
        least, most = self._bounds(first)
        shape, half = (LANES, LANES), LANES // 2
        offset = ((iota(shape, 0) - iota(shape, 1) + half) & (LANES - 1)) - half
        return (offset >= least) & (offset <= most)

    def counted(self, first):
        """float32 [128, J]: 1 where a pixel sees one at that offset, in the order of `OFFSETS`."""
        least, most = self._bounds(first)
        shape, half = (LANES, LANES), LANES // 2
        offset = ((iota(shape, 0) + half) & (LANES - 1)) - half
        return jnp.transpose(((offset >= least) & (offset <= most)).astype(jnp.float32))

    def inside(self, first, rows):
        """bool [rows, 1]: which of the rows from pixel `first` on are pixels."""
        pixel = first + iota((rows, 1), 0)
        return (pixel >= 0) & (pixel < self.pixels)


# === Pixels of a program ===


@dataclasses.dataclass(frozen=True)
class Normalized:
    """Refs of the normalised pixels of a program, in fast memory.

    Attributes:
        content: [WINDOWS, lanes of q, 128]: the queries of the content term, pixels in the lanes.
        q: [pixels, .].
        k, v: [pixels and halo, .]. v is None in kernels that do not read it.
    """

    content: object
    q: object
    k: object
    v: object = None

    @classmethod
    def scratch(cls, tiling, values=True):
        """[(shape, dtype)] of the refs, for `Operands`."""
        q, k, v = (x.stop - x.start for x in tiling.lanes)
        keys = ROWS + 2 * tiling.halo
        shapes = [(WINDOWS, q, LANES), (ROWS, q), (keys, k), *[(keys, v)] * values]
        return [(shape, tiling.dtype) for shape in shapes]

    def fill(self, tiling, x, affine, first):
        """Normalises the pixels. What is no pixel becomes 0.

        Args:
            tiling: `Tiling`.
            x: three refs, before the batch norm: the pixels before the program's own, of which the last ones are its
                halo; its own; the halo after them.
            affine: ref.
            first: the program's first pixel.
        """
        (q, k, v), halo, (before, x, after) = tiling.lanes, tiling.halo, x
        parts = [(self.k, k), *([(self.v, v)] if self.v is not None else [])]

        def norm(x, start, lanes, shift):
            at = slice(lanes.start + shift, lanes.stop + shift)  # of affine
            y = x.astype(jnp.float32) * affine[0:1, at] + affine[1:2, at]
            return jnp.where(tiling.inside(start, len(x)), y, 0.0)

        def keys(ref, rows, start, at):
            for target, lanes in parts:
                target[at, :] = tiling.cast(norm(ref[rows, lanes], start, lanes, q.stop))

        keys(before, slice(before.shape[0] - halo, None), first - halo, slice(0, halo))
        keys(after, slice(None), first + ROWS, slice(ROWS + halo, None))

        def window(i, _):
            rows, start = window_rows(i), first + i * LANES
            queries = x[rows, q]
            self.content[i] = tiling.cast(jnp.transpose(norm(queries, start, q, 0)))
            self.q[rows, :] = tiling.cast(norm(queries, start, q, q.stop))
            keys(x, rows, start, pl.ds(pl.multiple_of(i * LANES + halo, halo), LANES))
            return 0

        lax.fori_loop(0, WINDOWS, window, 0)


def window_rows(i, more=0):
    """Rows of window i among the pixels of a program, or with `more` rows its keys among those with a halo."""
    return pl.ds(pl.multiple_of(i * LANES, LANES), LANES + more)


class Group:
    """The operands of the logits of a group of heads in a window.

    Args:
        tiling: `Tiling`.
        pixels: `Normalized`.
        tables: refs of the tables of the query and the key term, [C, J].
        window: number of the window.
        lanes: slice of the group.

    Attributes:
        content: the queries of the content term, [C, L].
        q, k: [L, C], [M, C].
        tables: of the group.
    """

    def __init__(self, tiling, pixels, tables, *, window, lanes):
        self.tiling = tiling
        self.content, self.q = pixels.content[window, lanes], pixels.q[window_rows(window), lanes]
        self.k = pixels.k[window_rows(window, 2 * tiling.halo), lanes]
        self.tables = [table[lanes] for table in tables]


class Gradient:
    """The gradient of the x that a kernel reads as `Normalized`. The kernel is `delayed` (`Programs`).

    The scratch `total` sums the gradient of the normalised pixels. Its lanes are those of affine, its rows the pixels
    of the program before, of the program itself, and of the halo after them. The program before gets the last part of
    its gradient from this one, which then finishes it.

    Args:
        tiling, place: `Tiling` and `Place`.
        x, affine: refs: the pixels of the program before, and the norm.
        d_x, d_affine: refs of their gradients.
        total: scratch.
        more: ref of another gradient of x, or None.
    """

    def __init__(self, tiling, program, *, x, affine, d_x, d_affine, total, more=None):
        self.tiling, self.program, self.total = tiling, program, total
        self.refs = x, affine, d_x, d_affine, more
        pl.when(program.opens)(lambda: clear(total, d_affine))

    @classmethod
    def scratch(cls, tiling, lanes):
        """[(shape, dtype)] of `total`, for `Operands`. `lanes`: number of those of affine that the kernel uses."""
        return [((2 * ROWS + tiling.halo, lanes), jnp.float32)]

    def add(self, window, operand, lanes, d):
        """Adds to the gradient of a window.

        Args:
            window: its number.
            part: 0 to 3, of the four groups of lanes of affine.
            lanes: slice within q, k or v.
            d: gradient of the queries [128, .], or of the keys [M, .].
        """
        q, k, v = self.tiling.lanes
        start = (0, q.stop, q.stop + k.start, q.stop + v.start)[operand] + lanes.start
        first = ROWS + window * LANES - (self.tiling.halo if len(d) > LANES else 0)
        rows = pl.ds(pl.multiple_of(first, SUBLANES), len(d))
        self.total[rows, start : start + d.shape[1]] += d

    def finish(self):
        """Writes the gradient of the program before, and makes room for the next one."""
        tiling, total = self.tiling, self.total
        x, affine, d_x, d_affine, more = self.refs
        q = tiling.lanes[0].stop

        @pl.when(self.program.finishes)
        def _():
            for start, first in itertools.product(range(0, d_x.shape[1], LANES), range(0, ROWS, LANES)):
                lanes, rows = slice(start, start + LANES), slice(first, first + LANES)
                inside = tiling.inside(self.program.first - ROWS + first, LANES)
                value = jnp.where(inside, x[rows, lanes].astype(jnp.float32), 0.0)
                d = jnp.zeros_like(value) if more is None else more[rows, lanes].astype(jnp.float32)
                for column in [start, start + q] if start < q else [start + q]:
                    at = slice(column, column + LANES)
                    y = total[rows, at]
                    d_affine[0:1, at] += jnp.sum(y * value, 0, keepdims=True)
                    d_affine[1:2, at] += jnp.sum(y, 0, keepdims=True)
                    d += y * affine[0:1, at]
                d_x[rows, lanes] = d.astype(d_x.dtype)

        kept = ROWS + tiling.halo
        total[:kept] = total[ROWS:]
        total[kept:] = jnp.zeros_like(total[kept:])


def only(x, lanes):
    """x [., C], zero outside a head's own lanes."""
    lane = iota((1, x.shape[1]), 1)
    return jnp.where((lane >= lanes.start) & (lane < lanes.stop), x, jnp.zeros((), x.dtype))


def clear(*refs):
    """Zeroes refs."""
    for ref in refs:
        ref[...] = jnp.zeros_like(ref)


# === Parts of kernels ===

GANG = 2  # heads that run in step


def run_in_step(generators):
    """Runs generators, some at a time, each gang a step behind the one before it.

    While one gang waits for products, another one turns its maps.
    """
    running, waiting = [], iter(generators)
    while True:
        gang = list(itertools.islice(waiting, GANG))
        running += [gang] if gang else []
        if not running:
            return
        # The last gang goes first: its products begin before the one ahead of it waits for its own.
        for gang in reversed(running):
            gang[:] = [x for x in gang if next(x, StopIteration) is not StopIteration]
        running = [gang for gang in running if gang]


def run_windows(tiling, program, pixels, window_steps, *, around, affine):
    """Runs a program's heads, window after window, where the program has pixels.

    Args:
        tiling: `Tiling`.
        place: `Place` of the program.
        pixels: `Normalized`, which is filled first.
        of_window: function of the number of a window that returns a function from a head to a generator; see
            `run_in_step`.
        around: refs of x for `Normalized.fill`.
        affine: ref of their batch norm.
    """

    def run(window, _):
        run_in_step(map(window_steps(window), range(tiling.heads)))
        return 0

    @pl.when(program.exists)
    def _():
        pixels.fill(tiling, around, affine, program.first)
        lax.fori_loop(0, WINDOWS, run, 0)


def add_to_row(ref, row, x):
    """Adds the column sums of x to a row of a ref."""
    ref[row : row + 1] += jnp.sum(x, 0, keepdims=True)


def flip_matrix(tiling):
    """A matrix that reverses 128 rows."""
    return jnp.eye(LANES, dtype=tiling.dtype)[::-1]


def chunks(size):
    """Slices of `size` lanes, each small enough for the registers to hold its products."""
    return [slice(i, min(i + 2 * LANES, size)) for i in range(0, size, 2 * LANES)]


def whole_registers(parts):
    """Arrays [., 128] on top of each other, with zero rows below to fill registers."""
    x = join(parts)
    return pad_rows(x, up(len(x), LANES))
