"""The grid of a kernel: which pixels each program computes, and which arrays it reads and writes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axial.layers.attention.tpu.tiling import FAST_MEMORY, LANES, ROWS
from axial.layers.tpu.pallas import compiler_params

CORES = 2  # cores of a v4 or v5p chip, which is one device; on other chips the split has no effect
SHARED = 32  # smallest number of programs that are split over cores


class Programs:
    """The programs of a kernel, and the pixels of each.

    A core runs its programs one after the other. A `delayed` program writes the results of the previous program (see
    `Gradient`), so a core runs one program more. If delayed programs are split over cores, each core first runs the
    last program of the previous core, because this program adds to the gradient of the core's first pixels. The
    previous core writes the other results of this program.

    Args:
        tiling: `Tiling`.
        delayed: whether each program writes the results of the previous program.

    Attributes:
        count: number of programs.
        cores: number of cores.
        each: number of programs whose results a core writes.
        lead: number of programs that a core runs before the programs whose results it writes.
        steps: number of programs that a core runs.
    """

    def __init__(self, tiling, delayed=False):
        self.tiling, self.delayed, self.count = tiling, delayed, -(-tiling.pixels // ROWS)
        self.cores = CORES if self.count >= SHARED else 1
        self.each = -(-self.count // self.cores)
        self.lead = int(delayed and self.cores > 1)
        self.steps = self.each + self.lead + delayed

    def number(self, core, step):
        """Index of a program among all programs."""
        return core * self.each + step - self.lead

    def rows(self, shape, *, late=0, written=False):
        """`pl.BlockSpec` of the pixels of a program, or of the program that is `late` programs earlier.

        Args:
            shape: (rows, lanes).
            late: number of programs by which the program with these pixels is earlier than the running program.
            written: whether the core writes the pixels. A core must not write the pixels of another core.
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
        """The running `Program`. A kernel calls this outside of conditions and loops."""
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
    """The state of a running program, as scalars.

    Attributes:
        first: index of the program's first pixel.
        exists: whether the program has pixels.
        opens: whether the program is the first program of its core.
        begins, ends: whether the program is the first, or the last, of its core's programs whose results count.
        finishes: whether its core writes the results of the previous program, if the programs are delayed.
    """

    first: object
    exists: object
    opens: object
    begins: object
    ends: object
    finishes: object


@dataclasses.dataclass(frozen=True)
class Operands:
    """The inputs and outputs of a kernel, in the order of its refs.

    Attributes:
        scalars: arrays in scalar memory.
        around: list of (array of pixels, lanes). A program reads the first `lanes` lanes of the pixels before its own
            pixels, of its own pixels and of the pixels after them, as three refs for `Normalized.fill`.
        blocks: arrays of pixels. A program reads its own pixels.
        before: list of (array of pixels, lanes). A program reads the pixels of the previous program. The first outputs
            overwrite these arrays.
        small: matrices that every program reads whole.
        outputs: shapes of further outputs, which are arrays of pixels.
        sums: shapes of output matrices that are summed over the programs.
        scratch: list of (shape, dtype) in fast memory.
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
    """Runs all programs of a kernel.

    The programs are split over cores, and each core has its own sums. This function adds up the sums of the cores.

    Args:
        kernel: function of the tiling, the `Program`, and refs in the order of `Operands`.
        tiling: `Tiling`.
        interpret: whether jax interprets the kernel on a CPU.
        operands: `Operands`.
        delayed: see `Programs`.
        flops: FLOPs of one program, for the compiler.
        exponentials: whether a program computes an exponential for each pair.

    Returns:
        list of the outputs that overwrite `before`, the further outputs, and the sums.
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
    # Pallas gives an array two buffers by default. A matrix that all programs share needs only one.
    fixed = functools.partial(pl.BlockSpec, pipeline_mode=pl.Buffered(1))
    arrays += operands.small
    specs += [fixed(x.shape, lambda core, step: (0, 0)) for x in operands.small]
    written = [*operands.before, *((x, x.shape[1]) for x in operands.outputs)]
    times = 2 + tiling.halo / ROWS if delayed else 1 + 2 * tiling.halo / ROWS  # how often `around` is read
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands.blocks, *operands.small, *operands.sums))
    for count, pixels in ((times, operands.around), (1, operands.before), (1, written)):
        moved += sum(int(count * tiling.pixels * lanes) * x.dtype.itemsize for x, lanes in pixels)
    core_sums = [float_shape(programs.cores, *x.shape) for x in operands.sums]
    results = pl.pallas_call(
        lambda *refs: kernel(tiling, programs.current(), *refs),
        name=kernel.__name__.strip("_"),
        grid=(programs.cores, programs.steps),
        in_specs=[*(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in scalars), *specs],
        out_specs=[
            *(programs.rows((ROWS, lanes), late=int(delayed), written=True) for _, lanes in written),
            *(fixed((None, *x.shape), lambda core, step: (core, 0, 0)) for x in operands.sums),
        ],
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in written), *core_sums],
        scratch_shapes=[pltpu.VMEM(shape, jnp.dtype(dtype)) for shape, dtype in operands.scratch],
        input_output_aliases=aliases,
        compiler_params=compiler_params("parallel", "arbitrary", memory=FAST_MEMORY),
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
