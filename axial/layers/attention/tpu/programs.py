"""How the programs of a kernel run: which pixels each of them has, and what it reads and writes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axial.layers.attention.tpu.tiling import FAST_MEMORY, LANES, ROWS

CORES = 2  # of a v4 or v5p chip, which compile as one device; other chips ignore how programs are shared out
SHARED = 32  # programs of a kernel, at least, that the cores share out


class Programs:
    """The programs of a kernel, and which pixels each of them has.

    The programs of a core follow each other. Those that are `delayed` write the results of the program before (see
    `Gradient`), so a core has one more of them. Where cores share them out, each core also computes the last program of
    the core before it, which adds to the gradient of its first pixels, and leaves the rest of it to that core.

    Args:
        tiling: `Tiling`.
        delayed: whether each program writes the results of the one before.

    Attributes:
        count: number of programs.
        cores: number of cores.
        each: number of programs whose results a core writes.
        lead: number of programs that come before those.
        steps: number of programs of a core.
    """

    def __init__(self, tiling, delayed=False):
        self.tiling, self.delayed, self.count = tiling, delayed, -(-tiling.pixels // ROWS)
        self.cores = CORES if self.count >= SHARED else 1
        self.each = -(-self.count // self.cores)
        self.lead = int(delayed and self.cores > 1)
        self.steps = self.each + self.lead + delayed

    def number(self, core, step):
        """Number of a program among all."""
        return core * self.each + step - self.lead

    def rows(self, shape, *, late=0, written=False):
        """`pl.BlockSpec` of the pixels of a program, or of the one `late` programs before.

        Args:
            shape: (rows, lanes).
            written: whether the core writes them. It must not touch those of another core.
        """

        def index(core, step):
            first, end = 0, self.count
            if written:
                first, end = core * self.each, jnp.minimum((core + 1) * self.each, end)
            return jnp.clip(self.number(core, step) - late, first, end - 1), 0

        return pl.BlockSpec(shape, index)

    def halo(self, lanes, after):
        """`pl.BlockSpec` of the halo before or after the pixels of a program."""
        size = self.tiling.halo
        parts, last = ROWS // size, -(-self.tiling.pixels // size) - 1

        def index(core, step):
            number = self.number(core, step)
            return jnp.clip((number + 1) * parts if after else number * parts - 1, 0, last), 0

        return pl.BlockSpec((size, lanes), index)

    def current(self):
        """The `Place` of the program that runs. Call it in a kernel, outside of conditions and loops."""
        core, step = pl.program_id(0), pl.program_id(1)
        number = self.number(core, step)
        return Program(
            first=number * ROWS,
            exists=(number >= 0) & (number < self.count),
            opens=step == 0,
            begins=step == self.lead,
            ends=step == self.lead + self.each - 1,
            finishes=(step > self.lead) & (number <= self.count),
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program knows of itself, as scalars.

    Attributes:
        first: its first pixel.
        exists: whether it has pixels.
        opens: whether it is the first one of its core.
        begins, ends: whether it is the first, or the last, whose results count.
        finishes: of a delayed program: whether the core writes the results of the one before.
    """

    first: object
    exists: object
    opens: object
    begins: object
    ends: object
    finishes: object


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a kernel reads and writes, in the order of its refs.

    Attributes:
        scalars: arrays that are read number by number.
        around: [(array, lanes)]: the first lanes of an array of pixels. A program reads the pixels before its own, its
            own, and those after them: three refs, for `Normalized.fill`.
        own: arrays of pixels, of which a program reads its own.
        before: [(array, lanes)], of which a program reads those of the program before. The result takes its place.
        small: matrices that every program has whole.
        outputs: shapes of further arrays of pixels.
        sums: shapes of matrices that are summed over the programs.
        scratch: [(shape, dtype)] of fast memory.
    """

    scalars: list = ()
    around: list = ()
    blocks: list = ()
    before: list = ()
    small: list = ()
    outputs: list = ()
    sums: list = ()
    scratch: list = ()


def run_programs(kernel, tiling, interpret, operands, *, delayed=False, flops=0, exponentials=False):
    """Runs a kernel in all its programs.

    The programs are shared out over cores, each of which has its own sums; they are added up here.

    Args:
        kernel: function of the tiling, the `Place` of the program, and refs in the order of `Operands`.
        tiling: `Tiling`.
        interpret: whether jax computes it on a CPU.
        operands: `Operands`.
        delayed: see `Programs`.
        flops: of one program, for the compiler.
        exponentials: whether it has one for each pair.

    Returns:
        list of the outputs, the results in the place of `before` first, and of the sums.
    """
    programs = Programs(tiling, delayed)
    scalars, arrays, specs = list(operands.scalars), [], []
    for x, lanes in operands.around:
        before = programs.rows((ROWS, lanes), late=1) if delayed else programs.halo(lanes, after=False)
        arrays += [x] * 3
        specs += [before, programs.rows((ROWS, lanes)), programs.halo(lanes, after=True)]
    arrays += operands.blocks
    specs += [programs.rows((ROWS, x.shape[1])) for x in operands.blocks]
    aliases = {len(scalars) + len(arrays) + i: i for i in range(len(operands.before))}
    arrays += [x for x, _ in operands.before]
    specs += [programs.rows((ROWS, lanes), late=1) for _, lanes in operands.before]
    # What the programs do not move has one buffer, not two.
    fixed = functools.partial(pl.BlockSpec, pipeline_mode=pl.Buffered(1))
    arrays += operands.small
    specs += [fixed(x.shape, lambda core, step: (0, 0)) for x in operands.small]
    written = [*operands.before, *((x, x.shape[1]) for x in operands.outputs)]
    times = 2 + tiling.halo / ROWS if delayed else 1 + 2 * tiling.halo / ROWS  # that `around` is read
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands.blocks, *operands.small, *operands.sums))
    for count, pixels in ((times, operands.around), (1, operands.before), (1, written)):
        moved += sum(int(count * tiling.pixels * lanes) * x.dtype.itemsize for x, lanes in pixels)
    results = pl.pallas_call(
        lambda *refs: kernel(tiling, programs.current(), *refs),
        name=kernel.__name__.strip("_"),
        grid=(programs.cores, programs.steps),
        in_specs=[*(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in scalars), *specs],
        out_specs=[
            *(programs.rows((ROWS, lanes), late=int(delayed), written=True) for _, lanes in written),
            *(fixed((None, *x.shape), lambda core, step: (core, 0, 0)) for x in operands.sums),
        ],
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in written),
            *(float_shape(programs.cores, *x.shape) for x in operands.sums),
        ],
        scratch_shapes=[pltpu.VMEM(shape, jnp.dtype(dtype)) for shape, dtype in operands.scratch],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=FAST_MEMORY
        ),
        cost_estimate=pl.CostEstimate(
            flops=programs.cores * programs.steps * flops,
            transcendentals=programs.cores * programs.steps * exponentials * ROWS * tiling.heads * LANES,
            bytes_accessed=moved,
        ),
        interpret=interpret,
    )(*scalars, *arrays)
    split = len(written)
    return [*results[:split], *(jnp.sum(x, 0) for x in results[split:])]


def float_shape(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)
