"""Seconds and memory of compiled steps on this machine's GPU, as shares of what the GPU itself can do.

XLA compiles each of `gpu_programs.PROGRAMS`. Two programs measure the GPU: the product of two large matrices gives its
multiply-adds a second, and the scaling of a large array its bytes a second.
"""

import gc
import os
import statistics
import sys
import time

import tensorflow as tf
import tf_keras as keras

from axial.analysis.multiply_adds import count_multiply_adds, total
from axial.analysis.step_cost import FORWARD_AND_BACKWARD
from axial.io.read import first_line
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair
from axial.models.registry import build_model, find_variant
from benchmark import training_function

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "tpu"))
import hlo

ROUNDS = 5
HALF_A_SECOND = 0.5  # of a round
SIDE = 257  # of images that build a model; its weights do not depend on larger ones

# === Steps ===


def _layer(program):
    """What a program runs, not built. In inference a model's batch norms are folded."""
    norm = BatchNormConfig() if program.training else None
    if not program.model:
        channels = program.images[3]
        return AxialPair(channels // 2, channels, norm, name="pair")
    changes = {} if program.recompute == "none" else {"recompute": program.recompute}
    return build_model(program.model, find_variant(program.model).classes, norm, **changes)


def make_step(program):
    """(function of images, `tf.TensorSpec` of them) of a `Program`, whose weights are made.

    In training the function returns a loss and its gradients, otherwise the outputs, as a list.
    """
    _, height, width, channels = program.images
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layer = _layer(program)
    layer(tf.zeros([1, min(height, SIDE), min(width, SIDE), channels]))
    keras.mixed_precision.set_global_policy("float32")
    spec = tf.TensorSpec(program.images, tf.float32 if program.model else tf.bfloat16)
    if program.training:
        return training_function(layer, input_gradient=not program.model), spec
    return lambda images: tf.nest.flatten(layer(images)), spec


def multiply_adds(program):
    """Multiply-adds of a program that its equations need; of a training step three times those of its forward pass."""
    with tf.Graph().as_default() as graph:
        images = tf.compat.v1.placeholder(tf.float32, program.images)
        tf.autograph.experimental.do_not_convert(_layer(program))(images)
    return (FORWARD_AND_BACKWARD if program.training else 1) * total(count_multiply_adds(graph))


# === Measures ===


def gpu():
    """Name of TensorFlow's first GPU; None without one."""
    devices = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(devices[0]).get("device_name", "GPU") if devices else None


def _seconds(function, inputs, rounds=ROUNDS):
    """(seconds of a first call, which compiles; seconds of a call in each round)."""

    def run(count):
        started = time.perf_counter()
        for _ in range(count):
            function(*inputs)
        tf.test.experimental.sync_devices()
        return (time.perf_counter() - started) / count

    first, again = run(1), run(1)
    if gpu():
        tf.config.experimental.reset_memory_stats("GPU:0")
    count = max(1, min(50, int(HALF_A_SECOND / again)))
    return first, [run(count) for _ in range(rounds)]


def _compiled(function):
    return tf.function(function, autograph=False, jit_compile=True)


def limits(quick=False):
    """dict of 'multiply_adds' and 'bytes' a second that this device reaches.

    Args:
        quick: whether matrices and array are so small that a CPU takes no time for them.
    """
    side, count = (256, 2**20) if quick else (8192, 2**28)
    matrix = tf.cast(tf.random.stateless_normal([side, side], [0, 0]), tf.bfloat16)
    _, product = _seconds(_compiled(tf.matmul), [matrix, matrix])
    _, scaling = _seconds(_compiled(lambda x: 1.5 * x), [tf.zeros([count])])
    return {"multiply_adds": side**3 / min(product), "bytes": 8 * count / min(scaling)}  # it reads and writes 4 each


def measure(program, reached):
    """dict of one program's measures.

    Args:
        program: `Program`.
        reached: of `limits`.

    Returns:
        'median_s', 'least_s' and 'runs' of a step, 'compile_s' of its first call, 'peak_bytes' (None without a GPU),
        'multiply_adds' that it needs and 'bytes' that the compiled program moves, and what share of the device's they
        are in 'median_s': 'of_products' and 'of_bandwidth'. A program that does not compile or run has 'failed' alone,
        a line that says why.
    """
    try:
        function, spec = make_step(program)
        compiled = _compiled(function)
        images = tf.cast(tf.random.stateless_normal(spec.shape, [0, 0]), spec.dtype)
        first, seconds = _seconds(compiled, [images])
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"] if gpu() else None
        moved = _moved(compiled, spec)
    except (tf.errors.OpError, MemoryError) as error:
        return {"failed": first_line(error)}
    median, needed = statistics.median(seconds), multiply_adds(program)
    return {
        "median_s": median,
        "least_s": min(seconds),
        "runs": len(seconds),
        "compile_s": first,
        "peak_bytes": peak,
        "multiply_adds": needed,
        "bytes": moved,
        "of_products": needed / median / reached["multiply_adds"],
        "of_bandwidth": moved / median / reached["bytes"],
    }


def _moved(compiled, spec):
    """Bytes that the operations of the compiled program read and write. XLA compiles the program once more."""
    module = compiled.experimental_get_compiler_ir(spec)(stage="optimized_hlo_serialized")
    return sum(cost.bytes for cost in hlo.costs(hlo.parse(module))[0].values())


def measure_all(programs, quick=False, report=lambda line: None, keep=lambda result: None):
    """dict of 'device', 'tensorflow', 'limits' and 'programs' (name -> `measure`).

    Args:
        programs: `Program`s.
        quick: see `limits`.
        report: function of a line on what is done.
        keep: function of the dict so far, which is called after each program.
    """
    report("measuring products and memory of this device")
    result = {"device": gpu() or "CPU", "tensorflow": tf.__version__, "limits": limits(quick), "programs": {}}
    for i, program in enumerate(programs):
        report(f"{program.name}: {i + 1} of {len(programs)}, compiling and measuring")
        found = result["programs"][program.name] = measure(program, result["limits"])
        took = found.get("failed") or f"{1000 * found['median_s']:.3f} ms"
        report(f"{program.name}: {took}")
        keep(result)
        gc.collect()  # a traced function and its variables hold each other
    return result
