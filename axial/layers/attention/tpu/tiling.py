"""The common base of all kernels: how pixels are cut into windows, and how a kernel reads them.

An array of pixels [P, .] holds the lines of all images one after the other. A window is 128 consecutive pixels, which
may cover several lines (`shear.py`). A program computes `WINDOWS` windows and reads the halo around them.

Letters of the shapes: P pixels, H heads, D query and key channels per head, E value channels per head, C channels of
a group of heads, and a dot for an axis whose size the text names; see also `shear.py`.

The heads lie side by side in the lanes, in the order of the projection. A group is the heads that fill whole registers
of 128 lanes. A product over 128 lanes costs as much as a product over 32. So a product reads the whole group, and one
operand is zero outside the lanes of its head (`only`). All heads of the group share the other operand.

The array x holds q, k and v of the pixels before their batch norm, each in whole registers. `affine` [2, .] holds the
scale and the shift of the batch norm for four operands: q times the scale of the content term, q, k, and v.
"""

import dataclasses
import itertools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axial.layers.attention.tpu.shear import LANES, SUBLANES, Shear, iota, join, pad_rows, up

# Bytes of fast memory that an attention kernel may use; a v5e has 128 MiB. Other kernels may use less memory
# (`pallas.FAST_MEMORY`), but the projection of XL's last stage and the projection's gradient need 48 MiB.
FAST_MEMORY = 100 * 2**20
# Upper bound on how many numbers the largest kernel holds per channel of q, k and v. In bfloat16, 2,048 channels take
# 23 MiB.
CHANNEL_FACTOR = 6 * 2**10
WINDOWS = 2  # number of windows of a program
ROWS = WINDOWS * LANES  # number of pixels of a program
REACH = LANES // 2 - 1  # the largest |offset|: a query sees at most 127 keys


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the pixels are cut into windows, and how the kernels read them.

    Attributes:
        lines: number of lines.
        length: number of pixels in a line.
        reach: largest visible |offset|.
        heads, depth, value_depth: H, D, E.
        dtype: dtype of the operands of matrix products.
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
        """Number of keys before and after a window: the reach, rounded up to whole tiles that divide a window."""
        return min(halo for halo in (SUBLANES, 2 * SUBLANES, 4 * SUBLANES) if halo >= self.reach)

    @property
    def shear(self):
        return Shear(self.halo, self.strided)

    @property
    def sizes(self):
        """The numbers of channels of q, k and v."""
        return [self.heads * depth for depth in (self.depth, self.depth, self.value_depth)]

    @property
    def lanes(self):
        """Slices of the lanes of q, k and v in x."""
        ends = [0, *itertools.accumulate(up(size, LANES) for size in self.sizes)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    @property
    def channels(self):
        """Number of lanes of x."""
        return self.lanes[-1].stop

    def cast(self, x):
        return x.astype(self.dtype)

    def flops(self, products):
        """FLOPs of a program with `products` matrix products per head, each as large as a map."""
        return 2 * WINDOWS * self.heads * products * LANES**3

    # === Heads ===

    def group(self, head, depth):
        """Two slices: the lanes of a head's group among all lanes, and the lanes of the head within the group."""
        size = math.lcm(LANES, depth)
        first = head * depth % size
        start = head * depth - first
        return slice(start, min(start + size, up(self.heads * depth, LANES))), slice(first, first + depth)

    def ends_group(self, head, depth):
        """Whether a head is the last head of its group."""
        return head == self.heads - 1 or self.group(head, depth)[0] != self.group(head + 1, depth)[0]

    # === Visible pairs of a window ===

    def _bounds(self, first):
        """Smallest and largest visible offset [1, L] of the queries from pixel `first` on. Padding sees no offset."""
        position = lax.rem(first, self.length) + iota((1, LANES), 1)
        if self.length >= LANES:
            position = jnp.where(position >= self.length, position - self.length, position)
        else:
            lines = jnp.floor((position.astype(jnp.float32) + 0.5) * (1 / self.length))
            position -= self.length * lines.astype(jnp.int32)
        most = jnp.minimum(self.reach, self.length - 1 - position)
        return -jnp.minimum(self.reach, position), jnp.where(first + iota((1, LANES), 1) < self.pixels, most, -LANES)

    def counted(self, first):
        """float32 [128, L]: 1 where a query sees its key at an offset, in the order of a band (`Shear.band`)."""
        least, most = self._bounds(first)
        offset = iota((LANES, LANES), 0) - self.halo
        return ((offset >= least) & (offset <= most)).astype(jnp.float32)

    def visible(self, first):
        """float32 [S, L]: 1 at the visible pairs of the window that starts at pixel `first`."""
        return self.shear.to_slots(self.counted(first))

    def inside(self, first, rows):
        """bool [rows, 1]: which of the rows that start at pixel `first` are pixels and not padding."""
        pixel = first + iota((rows, 1), 0)
        return (pixel >= 0) & (pixel < self.pixels)


# === Pixels of a program ===


@dataclasses.dataclass(frozen=True)
class Normalized:
    """Refs of a program's pixels after the batch norm of q, k and v, in fast memory.

    Attributes:
        content, q: [WINDOWS, lanes of q, 128]: the queries of the content term, and of the query term, with the pixels
            in the lanes.
        k, v: [pixels and halo, lanes of k or v]. v is None in kernels that do not read it.
    """

    content: object
    q: object
    k: object
    v: object = None

    @classmethod
    def scratch(cls, tiling, values=True):
        """list of (shape, dtype) of the refs, for `Operands`."""
        q, k, v = (x.stop - x.start for x in tiling.lanes)
        keys = ROWS + 2 * tiling.halo
        shapes = [(WINDOWS, q, LANES)] * 2 + [(keys, k), *[(keys, v)] * values]
        return [(shape, tiling.dtype) for shape in shapes]

    def fill(self, tiling, x, affine, first):
        """Applies the batch norm to the pixels, and zeroes rows that are not pixels.

        Args:
            tiling: `Tiling`.
            x: three refs of pixels before the batch norm: the pixels before the program's pixels, which end with the
                halo; the program's pixels; the halo after them.
            affine: ref of the batch norm of x.
            first: index of the program's first pixel.
        """
        (q, k, v), halo, (before, x, after) = tiling.lanes, tiling.halo, x
        parts = [(self.k, k), *([(self.v, v)] if self.v is not None else [])]

        def norm(x, start, lanes, shift):
            at = slice(lanes.start + shift, lanes.stop + shift)  # lanes of affine
            y = x.astype(jnp.float32) * affine[0:1, at] + affine[1:2, at]
            return jnp.where(tiling.inside(start, len(x)), y, 0.0)

        def keys(ref, rows, start, at):
            for target, lanes in parts:
                target[at, :] = tiling.cast(norm(ref[rows, lanes], start, lanes, q.stop))

        keys(before, slice(before.shape[0] - halo, None), first - halo, slice(0, halo))
        keys(after, slice(None), first + ROWS, slice(ROWS + halo, None))

        def window(i, _):
            rows, start = window_rows(i), first + i * LANES
            for ref, shift in ((self.content, 0), (self.q, q.stop)):
                ref[i] = tiling.cast(jnp.transpose(norm(x[rows, q], start, q, shift)))
            keys(x, rows, start, pl.ds(pl.multiple_of(i * LANES + halo, halo), LANES))
            return 0

        lax.fori_loop(0, WINDOWS, window, 0)


def window_rows(i, more=0):
    """Slice of the rows of window i and of `more` further rows. With more = 2 halos, the rows are the window's keys."""
    return pl.ds(pl.multiple_of(i * LANES, LANES), LANES + more)


class Group:
    """The operands of the logits of a group of heads in a window.

    Args:
        tiling: `Tiling`.
        pixels: `Normalized`.
        tables: refs of the tables of the query term [B, lanes of q] and of the key term [lanes of q, J].
        window: index of the window.
        lanes: slice of the group's lanes.

    Attributes:
        content, q: the queries of the content term and of the query term, [C, L].
        k: [M, C].
        tables: the tables of the group, [B, C] and [C, J].
    """

    def __init__(self, tiling, pixels, tables, *, window, lanes):
        self.tiling = tiling
        self.content, self.q = pixels.content[window, lanes], pixels.q[window, lanes]
        self.k = pixels.k[window_rows(window, 2 * tiling.halo), lanes]
        self.tables = tables[0][:, lanes], tables[1][lanes]


class Gradient:
    """The gradient of the x that a kernel reads as `Normalized`. The kernel is `delayed` (see `Programs`).

    The scratch `total` sums the gradient of the normalised pixels. Its lanes are the lanes of affine. Its rows are the
    pixels of the previous program, the pixels of the running program, and the halo after these pixels. The running
    program adds the last terms to the gradient of the previous program's pixels, and then writes this gradient.

    Args:
        tiling, program: `Tiling` and `Program`.
        x, affine: refs of the previous program's pixels and of their batch norm.
        d_x, d_affine: refs of the gradients of x and of affine.
        total: ref of the scratch.
        more: ref of another gradient of x, or None.
    """

    def __init__(self, tiling, program, *, x, affine, d_x, d_affine, total, more=None):
        self.tiling, self.program, self.total = tiling, program, total
        self.refs = x, affine, d_x, d_affine, more
        pl.when(program.opens)(lambda: clear(total, d_affine))

    @classmethod
    def scratch(cls, tiling, lanes, tables):
        """list of (shape, dtype) of `total` and of the sums of the tables' gradients, for `Operands`.

        Args:
            tiling: `Tiling`.
            lanes: number of affine's lanes that the kernel uses.
            tables: shapes of the tables.
        """
        return [(shape, jnp.float32) for shape in ((2 * ROWS + tiling.halo, lanes), *tables)]

    def add(self, window, operand, lanes, d):
        """Adds to the gradient of a window.

        Args:
            window: index of the window.
            operand: 0 to 3, one of the four operands of affine.
            lanes: slice of lanes within q, k or v.
            d: gradient of the queries [128, .], or of the keys [M, .].
        """
        q, k, v = self.tiling.lanes
        start = (0, q.stop, q.stop + k.start, q.stop + v.start)[operand] + lanes.start
        first = ROWS + window * LANES - (self.tiling.halo if len(d) > LANES else 0)
        rows = pl.ds(pl.multiple_of(first, SUBLANES), len(d))
        self.total[rows, start : start + d.shape[1]] += d

    def finish(self):
        """Writes the gradient of the previous program's pixels, and shifts `total` for the next program."""
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
    """x [., C] with zeros outside `lanes`, the lanes of a head."""
    lane = iota((1, x.shape[1]), 1)
    kept = jnp.where((lane >= lanes.start) & (lane < lanes.stop), jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return pltpu.bitcast(pltpu.bitcast(x, jnp.uint32) & kept, x.dtype)


def clear(*refs):
    """Sets refs to zero."""
    for ref in refs:
        ref[...] = jnp.zeros_like(ref)


# === Helpers of kernels ===

GANG = 2  # number of heads that advance together


def run_in_step(generators):
    """Runs generators in gangs of `GANG`. Each gang is one step behind the previous gang.

    While one gang waits for matrix products, another gang transposes its maps.
    """
    running, waiting = [], iter(generators)
    while (gang := list(itertools.islice(waiting, GANG))) or running:
        running.append(gang)
        # The last gang goes first, so that its products start before an earlier gang waits for its own products.
        for gang in reversed(running):
            gang[:] = [x for x in gang if next(x, StopIteration) is not StopIteration]
        running = [gang for gang in running if gang]


def run_windows(tiling, program, pixels, window_steps, *, around, affine):
    """Runs all heads of a program, window by window, if the program has pixels.

    Args:
        tiling: `Tiling`.
        program: `Program`.
        pixels: `Normalized`, which this function fills first.
        window_steps: function from the index of a window to a function from a head to a generator; see `run_in_step`.
        around: refs of x for `Normalized.fill`.
        affine: ref of the batch norm of x.
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


def chunks(size):
    """Slices of `size` lanes, each so small that registers hold its products."""
    return [slice(i, min(i + 2 * LANES, size)) for i in range(0, size, 2 * LANES)]


def whole_registers(parts):
    """Arrays [., 128], concatenated along the rows, with zero rows at the end to fill registers."""
    x = join(parts)
    return pad_rows(x, up(len(x), LANES))
