"""Compiles a step for a TPU slice with the TPU's own compiler, on a machine without a TPU.

The compiler is part of libtpu. This module calls it through a private interface of jax, so the extra `analysis` pins
exact versions. No other module but gpu.py uses private interfaces of jax. Estimated cycles come from the compiler's
cost model. They serve to compare programs, and are not measured times. The cost model does not cover Pallas kernels.
The cycles of a kernel are the number of instruction bundles that it runs.
"""

import dataclasses
import functools
import glob
import multiprocessing.pool
import os
import re
import signal
import tempfile
import threading
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.compiler.xla.experimental import xla_sharding
from tensorflow.python.distribute import distribute_lib, one_device_strategy

import hlo
import schedules
from axial.errors import InputError, pip_install
from axial.layers import device
from axial.training.processes import end_with
from hlo import KERNEL

HINTS = ("Assume", "ShapeAssertion")  # prefixes of custom calls that compute nothing
DEFAULT_SLICE = "v5e:1x1"
CPU = "cpu"  # given as a slice: XLA compiles for a CPU, with the layer forms that accelerators use
MEGACORE = ("v4", "v5p")  # generations in which two cores are one device
# GiB of a device's memory that libtpu lets a program use.
USABLE_GIB = {"v2": 7.48, "v3": 15.48, "v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.24}
SCHEDULE = "final_bundles"  # part of the names of the files to which libtpu writes a kernel's instruction bundles


# === A slice's step, traced on a CPU ===


class _Extended(one_device_strategy.OneDeviceExtended):
    def __init__(self, strategy, replicas):
        super().__init__(strategy, "/device:CPU:0")
        self._replicas = replicas

    @property
    def _num_replicas_in_sync(self):
        return self._replicas

    def _use_merge_call(self):
        return False

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        def reduce(tensor):
            group = [list(range(self._replicas))]
            total = gen_xla_ops.xla_all_reduce(tf.convert_to_tensor(tensor), group, "Add", "CrossReplica")
            return total / self._replicas if reduce_op in (tf.distribute.ReduceOp.MEAN, "MEAN") else total

        return tf.nest.map_structure(reduce, value)


class SliceStrategy(distribute_lib.Strategy):
    """Strategy that traces one of `replicas` replicas. Its all-reduces become XLA's all-reduces over all replicas."""

    def __init__(self, replicas):
        super().__init__(_Extended(self, replicas))

    def experimental_split_to_logical_devices(self, tensor, partition_dimensions):
        """Returns the tensor, partitioned over the devices of a replica, like `tf.distribute.TPUStrategy`."""
        parts = np.arange(np.prod(partition_dimensions)).reshape(partition_dimensions)
        return xla_sharding.tile(tensor, parts, use_sharding_op=True)


def forms(slice_name=DEFAULT_SLICE):
    """Returns a context in which layers take the forms for a slice or, for `CPU`, the forms for any accelerator."""
    if slice_name == CPU:
        return device.portable()
    generation = int(re.search(r"\d+", slice_name)[0])
    return mock.patch.multiple(device, on_cpu=lambda: False, has_tpu=lambda: True, tpu_generation=lambda: generation)


def trace(function, specs, slice_name=DEFAULT_SLICE):
    """Traces a function of tensors. Args: see `lower`.

    Returns:
        (function of the name of an XLA stage, like 'hlo_serialized', that returns the module of this stage; list of the
        captured handles of variables and constants). A module's inputs are the tensors, then the captures. Its results
        are the function's results, then the variables that the function assigns.
    """
    _prepare()
    compiled = tf.function(
        lambda *tensors: function(*tf.nest.pack_sequence_as(specs, tensors)), autograph=False, jit_compile=True
    )
    flat = tf.nest.flatten(specs)
    with forms(slice_name):
        stage = compiled.experimental_get_compiler_ir(*flat)
        return stage, compiled.get_concrete_function(*flat).captured_inputs


def lower(function, specs, slice_name=DEFAULT_SLICE):
    """Returns the serialised HLO module of a function of tensors. The variables that the function uses become inputs.

    Args:
        function: function of tensors.
        specs: `tf.TensorSpec`s of the tensors.
        slice_name: like 'v5e:4x4'; kernels depend on the TPU's generation.
    """
    stage, _ = trace(function, specs, slice_name)
    return for_compiler(stage("hlo_serialized"))


def for_compiler(raw):
    """Converts a serialised HLO module of `trace` to the form that `compile_for` takes."""
    module = hlo.parse(raw)
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "copy":  # XLA copies aliased outputs, and StableHLO has no copy
                instruction.opcode = "reshape"
    return module.SerializeToString()


# === The compiler ===


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Memory and costs of a program on one device, as the compiler reports them.

    Attributes:
        fits: whether the program fits the device's memory. If not, only `used` and `limit` have values.
        used, limit: bytes of memory needed and available; `limit` is None if it is unknown.
        cycles: estimated cycles of a run.
        by_op, by_part: dict from each opcode, or each part of the model, to its `Cost`, most expensive first.
        padding: fraction of the results' bytes that is padding to whole memory tiles; see `hlo.padding_share`.
        all_reduced, all_reduces: total bytes and number of all-reduces across replicas.
        custom_calls: targets of TensorFlow's custom calls that the compiler kept, except Pallas kernels.
        program: the optimised program, a serialised `HloModuleProto`.
        kernels: dict from the name of each instruction that calls a Pallas kernel to its `schedules.count`.
    """

    fits: bool
    used: int
    limit: int | None
    cycles: int = 0
    by_op: dict = dataclasses.field(default_factory=dict)
    by_part: dict = dataclasses.field(default_factory=dict)
    padding: float = 0.0
    all_reduced: int = 0
    all_reduces: int = 0
    custom_calls: tuple = ()
    program: bytes = b""
    kernels: dict = dataclasses.field(default_factory=dict)


def compile_for(lowered, slice_name, level="O1", *, partitions=1):
    """Compiles a lowered module for all devices of a slice. Returns a `Compiled`.

    Args:
        lowered: module of `lower`.
        slice_name: like 'v5e:4x4'.
        level: optimisation level, 'O0' to 'O3'. None is the compiler's default, which takes ten times as long.
        partitions: cores per replica; see `TrainingConfig.partitions`.

    Raises:
        InputError: jax or libtpu is not installed, libtpu does not know the slice, or libtpu wrote no readable schedule
            of a kernel.
        MemoryError: the compiler was killed.
    """
    used, limit, program, kernels = alone(_compiled, lowered, slice_name, level, partitions)
    usable = USABLE_GIB.get(slice_name.partition(":")[0])
    limit = limit or (usable and int(usable * 2**30))
    if program is None or (limit and used > limit):
        return Compiled(False, used, limit)
    left = custom_calls(program) & custom_calls(lowered) - {KERNEL}  # the compiler adds custom calls of its own
    serialised, program = program, hlo.parse(program)
    by_op, by_part = hlo.costs(program, {name: counts["bundles"] for name, counts in kernels.items()})
    sums = hlo.all_reduces(program, partitions)
    return Compiled(
        fits=True,
        used=used,
        limit=limit,
        cycles=sum(cost.cycles for cost in by_op.values()),
        by_op=by_op,
        by_part=by_part,
        padding=hlo.padding_share(program),
        all_reduced=sum(sums),
        all_reduces=len(sums),
        custom_calls=tuple(sorted(left)),
        program=serialised,
        kernels=kernels,
    )


def custom_calls(module):
    """Returns the set of targets of the custom calls in a serialised module. A target is a routine outside XLA."""
    targets = {call.custom_call_target for call in hlo.custom_calls(hlo.parse(module))}
    return {target for target in targets if not target.startswith(HINTS)}


def alone(function, *arguments):
    """Runs a function in a separate process, which frees its memory at its end and has its own settings of libtpu.

    TensorFlow takes up to 4 GB to lower a step, and the compiler up to 20 GB to compile it.

    Raises:
        MemoryError: the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    # A pool would wait forever if its process were killed while it sends the result, when its memory is at its peak.
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(writer, os.getpid(), function, arguments))
    process.start()
    writer.close()  # then the pipe closes when the process ends
    try:
        result, error = reader.recv()
    except (EOFError, OSError):  # OSError if the process ends while it sends
        raise MemoryError("the process that lowers or compiles was killed; a large step takes it up to 20 GB") from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
    if error:
        raise error
    return result


def _answer(writer, parent, function, arguments):
    """Runs a function in the separate process, and sends (result, None) or (None, exception)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    # Without this thread, the compiler would outlive its parent for minutes, with gigabytes of memory.
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    try:
        writer.send((function(*arguments), None))
    except Exception as error:
        writer.send((None, multiprocessing.pool.ExceptionWithTraceback(error, error.__traceback__)))


def _compiled(lowered, slice_name, level, partitions):
    """Compiles a module in this process; see `compile_for`.

    Returns:
        (bytes used, bytes available or None, program, result of `kernel_counts`). The program is None if it does not
        fit.
    """
    if KERNEL.encode() in lowered:
        _schedules()
    try:
        executable = compiler(lowered, slice_name, level, partitions)()
    except Exception as error:  # jax's error class is private too
        if not (sizes := refused_sizes(str(error))):
            raise
        return *sizes, None, {}
    memory = executable.get_compiled_memory_stats()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    used += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    program = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    kernels = [call for call in hlo.custom_calls(hlo.parse(program)) if call.custom_call_target == KERNEL]
    return used, None, program, kernel_counts(kernels, _schedules().name) if kernels else {}


def refused_sizes(text):
    """Returns [bytes needed, bytes available] from the compiler's out-of-memory message; None for other messages."""
    size = r"\(?([\d.]+)([KMG]?)\)?"
    match = re.search(rf"(?:Used|temporaries) {size} (?:of|exceeds available HBM) {size}", text)
    if not match:
        return None
    number, unit, limit, limit_unit = match.groups()
    return [int(float(n) * 1024 ** " KMG".index(u or " ")) for n, u in ((number, unit), (limit, limit_unit))]


def _prepare():
    """Sets the environment variables that jax and libtpu read when they are loaded."""
    defaults = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # has no effect but to silence warnings
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    }
    os.environ.update(defaults | os.environ)


@functools.cache
def _schedules():
    """Makes libtpu write schedules to a folder, and returns the folder. The first call must precede libtpu's loading.

    Only programs with kernels need schedules. Writing them slows some compilations from seconds to minutes.
    """
    folder = tempfile.TemporaryDirectory(prefix="axial-tpu-")
    asked = f"--xla_jf_dump_to={folder.name} --xla_jf_dump_llo_pass_label_regex={SCHEDULE}.*"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {asked}".strip()
    return folder


def compiler(lowered, slice_name, level="O1", partitions=1):
    """Returns a function without arguments that compiles a module by libtpu in this process; see `compile_for`."""
    _prepare()
    try:
        from jax._src import compiler as jax_compiler
        from jax._src import config
        from jax._src.interpreters import mlir
        from jax._src.lib import _jax
        from jax._src.lib.mlir import ir
        from jax.experimental import topologies
    except ImportError as error:
        raise InputError(f"the TPU's compiler wants {pip_install('analysis')} ({error})") from None

    generation, _, shape = slice_name.partition(":")
    options = {"chip_config_name": "megacore"} if generation in MEGACORE else {}
    sides = [int(side) for side in shape.split("x")]
    if np.prod(sides) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=slice_name, **options)
    except Exception as error:
        line = str(error).splitlines()[0]
        raise InputError(f"--slice={slice_name}: libtpu knows no such slice ({line[:150]})") from None
    devices = list(topology.devices)
    with mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(lowered))
    compile_options = jax_compiler.get_compile_options(
        num_replicas=len(devices) // partitions,
        num_partitions=partitions,
        device_assignment=np.array([device.id for device in devices]).reshape(-1, partitions),
        env_options_overrides={"optimization_level": config.EffortLevel[level].value} if level else {},
    )
    executable_devices = _jax.DeviceList(tuple(devices))
    return lambda: devices[0].client.compile(
        module, executable_devices=executable_devices, compile_options=compile_options
    )


def kernel_counts(calls, folder):
    """Returns a dict from the name of each instruction that calls a Pallas kernel to its `schedules.count`.

    libtpu writes a single file for identical kernels.

    Args:
        calls: list of the instructions that call Pallas kernels.
        folder: path of the folder of libtpu's schedules.
    """
    bodies = {call.name: re.search(rb'"body":"([^"]*)"', call.backend_config)[1] for call in calls}
    counts = {}
    for name, body in bodies.items():
        for schedule in glob.glob(os.path.join(folder, f"*-{glob.escape(name)}-[0-9]*-{SCHEDULE}.txt")):
            with open(schedule) as file:
                counts[body] = schedules.count(file.read())
    for call in calls:
        if bodies[call.name] not in counts:
            raise InputError(f"this libtpu wrote no schedule, so no cycles, of the kernel {call.metadata.op_name}")
    return {name: counts[body] for name, body in bodies.items()}


def largest_batch(fits, most=4096):
    """Returns the largest batch, up to `most`, that fits; 0 if none fits.

    The search doubles the batch until it does not fit, and then bisects.

    Args:
        fits: function of a batch that returns whether the batch's program fits.
        most: the largest batch to try.
    """
    good, bad = 0, most + 1
    while bad - good > 1:
        batch = (good + bad) // 2 if bad <= most else min(max(2 * good, 1), most)
        good, bad = (batch, bad) if fits(batch) else (good, batch)
    return good
