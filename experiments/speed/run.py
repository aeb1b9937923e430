"""Times the programs in this file's folder on a GPU, or trains one of them. It needs only jax and numpy.

gpu.py --export=FOLDER writes the programs and this file.

    python run.py time --csv=times.csv                  a line for each program, in the order of importance
    python run.py time --programs=pair_65x129,axial_deeplab_s_train_1 --budget=120
    python run.py train NAME --minutes=10 --weights=weights.safetensors --csv=losses.csv

`time` compiles several programs at once, for at most three quarters of --budget, and then times the programs that are
compiled. A line names each program that does not compile or needs too much memory. --cache=FOLDER keeps compiled
programs for the next call.

After compilation, `train` measures the time of a step and chooses as many steps as the minutes allow. The learning rate
depends on the number of steps, which must exceed the recipe's warm-up. The batches come from NAME.batches.npz, in a new
random order in each epoch.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import functools
import hashlib
import json
import lzma
import os
import statistics
import sys
import time

import jax
import jax.export
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
COMPILING = 0.75  # fraction of the budget for compilation
ROUNDS, SECONDS = 5, 0.5  # number of timed rounds of a program, and the approximate seconds of a round
MOST = 50  # largest number of steps in a round
THREADS = 4  # programs that compile at the same time
REPORT = 100  # largest number of steps between two lines that a training prints
LATE = 1.2  # a training ends after this multiple of its minutes, even if steps remain
GIB = 2**30
COLUMNS = (
    *("program", "ms", "least_ms", "compile_s", "memory_gib", "temporary_gib", "peak_gib", "of_bandwidth"),
    *("of_products", "gigabytes", "giga_multiply_adds", "finite", "compiling_beside", "device", "jax", "failed"),
)


# === Programs ===


def read_programs(folder):
    """Returns a dict from the name of each program to its entry in programs.json."""
    with open(os.path.join(folder, "programs.json")) as file:
        return {program["name"]: program for program in json.load(file)["programs"]}


def compile_program(folder, program):
    """Returns (compiled program, seconds of compilation). A variable and its next value share their memory.

    jax has no function that loads StableHLO which jax did not export. So this function exports a stand-in with the same
    inputs and outputs, and replaces the stand-in's module by the program's module.
    """
    started = time.monotonic()
    with lzma.open(os.path.join(folder, program["file"])) as file:
        module = file.read()

    def shapes(of):
        return [jax.ShapeDtypeStruct(tuple(x["shape"]), jax.numpy.dtype(x["dtype"])) for x in program[of]]

    def zeros(*_):
        return tuple(jax.numpy.zeros(x.shape, x.dtype) for x in shapes("outputs"))

    stand_in = jax.export.export(jax.jit(zeros, keep_unused=True))(*shapes("inputs"))
    exported = dataclasses.replace(stand_in, mlir_module_serialized=module)
    variables = [i for i, given in enumerate(program["inputs"]) if given["output"] is not None]
    compiled = jax.jit(exported.call, donate_argnums=variables).lower(*shapes("inputs")).compile()
    seconds = time.monotonic() - started
    say(f"{program['name']}: compiled in {seconds:.1f} s")
    return compiled, seconds


def fill(given, generator):
    """Returns the array of an input: stored values, a constant, or normal random numbers.

    `given` is the input's entry in programs.json. It has the mean and standard deviation of the random numbers.
    """
    shape, dtype, how = given["shape"], jax.numpy.dtype(given["dtype"]), given["fill"]
    if "normal" in how:
        return generator.normal(*how["normal"], shape).astype(dtype)
    return np.broadcast_to(np.asarray(how["values"]), shape).astype(dtype)


def next_inputs(program, inputs, outputs):
    """Returns the inputs of the next call: `inputs` with the updated variables from `outputs`."""
    indices = [given["output"] for given in program["inputs"]]
    return [value if index is None else outputs[index] for value, index in zip(inputs, indices)]


# === Timing ===


def measure_limits(device):
    """Returns (bytes / s, multiply-adds / s) of a device, measured with a large array and a large matrix product."""
    side, count = (256, 2**20) if device.platform == "cpu" else (8192, 2**28)
    array = jax.numpy.zeros([count], "float32")
    matrix = jax.random.normal(jax.random.key(0), [side, side], "bfloat16")
    least = []
    for function, *inputs in ((jax.jit(lambda x: 1.5 * x), array), (jax.jit(jax.numpy.matmul), matrix, matrix)):
        seconds = []
        for _ in range(1 + ROUNDS):
            started = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            seconds.append(time.perf_counter() - started)
        least.append(min(seconds[1:]))  # the first call compiles
    return 8 * count / least[0], side**3 / least[1]


def measure(program, compiled, until):
    """Measures a compiled program. Returns a dict of its times, its memory and whether its outputs are finite.

    No round but the first begins after `until`, a value of time.monotonic().
    """
    generator = np.random.default_rng(0)
    inputs = [jax.device_put(fill(given, generator)) for given in program["inputs"]]
    outputs = None

    def turn(count):
        nonlocal inputs, outputs
        started = time.perf_counter()
        for _ in range(count):
            outputs = compiled(*inputs)
            inputs = next_inputs(program, inputs, outputs)
        jax.block_until_ready(outputs)
        return (time.perf_counter() - started) / count

    turn(1)
    once = turn(1)
    count, seconds = max(1, min(MOST, int(SECONDS / once))), []
    while len(seconds) < ROUNDS and (not seconds or time.monotonic() < until):
        seconds.append(turn(count))
    memory, moved = compiled.memory_analysis(), (compiled.cost_analysis() or {}).get("bytes accessed")
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "ms": 1000 * statistics.median(seconds),
        "least_ms": 1000 * min(seconds),
        "memory_gib": (whole + memory.temp_size_in_bytes) / GIB,
        "temporary_gib": memory.temp_size_in_bytes / GIB,
        "gigabytes": moved and moved / 1e9,
        "giga_multiply_adds": program["multiply_adds"] and program["multiply_adds"] / 1e9,
        "finite": all(np.isfinite(np.asarray(x, np.float32)).all() for x in outputs),
    }


def time_programs(folder, programs, budget, path=None):
    """Times programs, prints a line for each program, and writes the rows to a CSV file. Returns the rows.

    Args:
        folder: folder of programs.json.
        programs: dict from the name of each program to its entry in programs.json.
        budget: seconds for compilation and timing.
        path: path of the CSV file; None to write no file.
    """
    until = time.monotonic() + budget
    device = jax.devices()[0]
    about = {"device": device.device_kind, "jax": jax.__version__}
    bandwidth, products = measure_limits(device)
    reached = f"{bandwidth / 1e9:.0f} GB/s, {products / 1e9:.0f} G multiply-adds/s"
    say(f"{device.device_kind}, jax {jax.__version__}: {reached}")
    rows, compiling = [], concurrent.futures.ThreadPoolExecutor(THREADS)
    tasks = {name: compiling.submit(compile_program, folder, program) for name, program in programs.items()}
    concurrent.futures.wait(tasks.values(), timeout=COMPILING * budget)
    for task in tasks.values():
        task.cancel()  # has no effect on programs that are compiling
    for name, task in tasks.items():
        beside = sum(other.running() for other in tasks.values())
        row = dict.fromkeys(COLUMNS) | {"program": name, "compiling_beside": beside} | about
        try:
            if not task.done() or task.cancelled():
                raise TimeoutError("not compiled in time")
            if time.monotonic() > until:
                raise TimeoutError("compiled, and no time was left")
            compiled, row["compile_s"] = task.result()
            row |= measure(programs[name], compiled, until)
            row["of_bandwidth"] = row["gigabytes"] and 1e12 * row["gigabytes"] / row["ms"] / bandwidth
            row["of_products"] = row["giga_multiply_adds"] and 1e12 * row["giga_multiply_adds"] / row["ms"] / products
            row["peak_gib"] = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / GIB or None
        except Exception as error:  # out of memory, or refused by the compiler: the other programs are still timed
            row["failed"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        tasks[name] = concurrent.futures.Future()  # frees the memory of the program
        rows.append(row)
        say(shown(row))
        if path:
            write_rows(path, COLUMNS, rows)
    return rows


def shown(row):
    """Returns a row as a line of text. An unknown fraction is '-'."""
    if row["failed"]:
        return f"{row['program']}: {row['failed']}"
    bandwidth, products = (f"{row[x]:.1%}" if row[x] else "-" for x in ("of_bandwidth", "of_products"))
    return (
        f"{row['program']}: {row['ms']:.3f} ms (least {row['least_ms']:.3f}), {row['memory_gib']:.2f} GiB "
        f"({row['temporary_gib']:.2f} of temporaries), {bandwidth} of the bandwidth, {products} of the products, "
        f"compiled in {row['compile_s']:.1f} s"
        + (f", timed beside {row['compiling_beside']} that compile" if row["compiling_beside"] else "")
        + ("" if row["finite"] else ", NOT FINITE")
    )


def write_rows(path, header, rows):
    """Writes dicts as the rows of a CSV file. The file appears only when it is complete."""
    with open(f"{path}.part", "w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(f"{path}.part", path)


say = functools.partial(print, flush=True)


# === Training ===


def read_batches(folder, program):
    """Returns (list of batches, function that unpacks a batch to the inputs' dtypes and value range).

    A batch is a list of arrays in the order of the program's inputs.
    """
    names = program["trains"]["names"]
    with np.load(os.path.join(folder, program["trains"]["batches"])) as file:
        arrays = {key: file[key] for key in file.files}
    count = 1 + max(int(key.split("/")[0]) for key in arrays)

    @jax.jit
    def unpack(batch):
        return [
            x.astype(given["dtype"]) * jax.numpy.asarray(given.get("factor", 1), given["dtype"])
            + jax.numpy.asarray(given.get("offset", 0), given["dtype"])
            for x, given in zip(batch, program["inputs"])
        ]

    return [[arrays[f"{i}/{name}"] for name in names] for i in range(count)], unpack


def train(folder, name, *, minutes=None, steps=None, path, csv_path=None):
    """Trains with an exported train step. Writes the weights as safetensors, and the losses as a CSV file.

    Args:
        folder: folder of programs.json.
        name: name of an exported train step.
        minutes: minutes of training, excluding compilation and reading.
        steps: number of steps, used if `minutes` is None.
        path: path of the new .safetensors file.
        csv_path: path of a CSV file of mean losses, a row for at most `REPORT` steps; None to write no file.

    Returns:
        list of dicts, the rows of the CSV file.

    Raises:
        SystemExit: a loss or gradient is not finite, or the steps do not exceed the warm-up.
    """
    program = read_programs(folder)[name]
    about, generator = program["trains"], np.random.default_rng(0)
    given, losses = len(about["names"]), about["losses"]
    batches, unpack = read_batches(folder, program)
    say(f"{name}: {len(batches)} batches")
    compiled, _ = compile_program(folder, program)
    state = [jax.device_put(fill(x, generator)) for x in program["inputs"][given:]]
    rows, waiting, order, done, latest = [], [], [], 0, float("inf")
    started = time.monotonic()

    def run(count):
        """Runs `count` steps. Returns the mean seconds of a step."""
        nonlocal state, done, order
        begun = time.monotonic()
        for _ in range(count):
            order = order or generator.permutation(len(batches)).tolist()
            inputs = [*unpack(batches[order.pop()]), *state]
            outputs = compiled(*inputs)
            state = next_inputs(program, inputs, outputs)[given:]
            waiting.append(outputs[: len(losses) + 1])
        done += count
        jax.block_until_ready(state)
        return (time.monotonic() - begun) / count

    if minutes:
        run(3)
        each, latest = run(10), started + LATE * 60 * minutes
        steps = max(done + 1, done + int((started + 60 * minutes - time.monotonic()) / each))
        say(f"{name}: {1000 * each:.2f} ms a step, {steps} steps in all")
    if steps <= about["warmup"]:
        raise SystemExit(f"{name}: its warm-up alone has {about['warmup']} steps; give more --minutes or --steps")
    index = about["total_steps"] - given
    state[index] = jax.device_put(np.full_like(np.asarray(state[index]), steps))
    every = max(1, min(REPORT, steps // 20))
    while done < steps and time.monotonic() < latest:
        run(min(every - done % every, steps - done))
        means = np.asarray([[float(x) for x in values[:-1]] for values in waiting]).mean(0)
        bad_step = int(waiting[-1][-1])
        waiting.clear()
        rows.append({"step": done, "seconds": round(time.monotonic() - started, 2), **dict(zip(losses, means))})
        say(" ".join(f"{key}={value:.4g}" for key, value in rows[-1].items()))
        if csv_path:
            write_rows(csv_path, ("step", "seconds", *losses), rows)
        if bad_step >= 0 or not np.isfinite(means).all():  # after a bad step, the program changes no weight
            what = f"a loss or a gradient is not finite after {bad_step if bad_step >= 0 else done} steps"
            raise SystemExit(f"{name}: {what}; no weights are written")
    write_weights(path, program, state)
    say(f"{name}: {done} steps in {time.monotonic() - started:.0f} s: {path}")
    return rows


def write_weights(path, program, state):
    """Writes the weights as a safetensors file that axial reads: a JSON header, then the arrays."""
    given = program["inputs"][len(program["trains"]["names"]) :]
    named = sorted((x["weight"], np.asarray(value, "<f4")) for x, value in zip(given, state) if x["weight"])
    digest, header, at = hashlib.sha256(), {}, 0
    for name, array in named:
        digest.update(json.dumps([name, array.shape]).encode())
        digest.update(np.ascontiguousarray(array).data)
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    card = {**program["trains"]["card"], "weights": digest.hexdigest()}
    text = json.dumps({"__metadata__": {"axial": json.dumps(card)}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{path}.part", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in named:
            file.write(np.ascontiguousarray(array).tobytes())
    os.replace(f"{path}.part", path)


# === Command line ===


def main():
    """Runs the command. Exit code 2 means wrong arguments, and exit code 1 that no program could be timed."""
    about, usage = __doc__.split("\n\n", 1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, epilog=usage, formatter_class=raw)
    verbs = parser.add_subparsers(dest="verb", required=True)
    timing, training = verbs.add_parser("time", help="times programs"), verbs.add_parser("train", help="trains one")
    timing.add_argument("--programs", help="names, separated by commas; by default all")
    timing.add_argument("--budget", type=float, default=270, help="seconds for compilation and timing")
    training.add_argument("programs", metavar="name")
    length = training.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="length of the training, without compilation")
    length.add_argument("--steps", type=int, help="number of steps, in place of --minutes")
    training.add_argument("--weights", required=True, help="new .safetensors file")
    for verb in (timing, training):
        verb.add_argument("--csv", help="CSV file for the rows")
        verb.add_argument("--cache", help="folder that keeps compiled programs")
    given, programs = parser.parse_args(), read_programs(HERE)
    fitting = [name for name in programs if given.verb == "time" or "trains" in programs[name]]
    names = given.programs.split(",") if given.programs else fitting
    for name in set(names) - set(fitting):
        parser.error(f"{name}: no such program to {given.verb}: {', '.join(fitting) or 'none is here'}")
    if given.verb == "train" and os.path.lexists(given.weights):
        parser.error(f"{given.weights}: exists; it is never overwritten, choose another")
    jax.config.update("jax_enable_x64", True)  # step numbers are int64
    if given.cache:
        jax.config.update("jax_compilation_cache_dir", given.cache)
    if given.verb == "time":
        rows = time_programs(HERE, {name: programs[name] for name in names}, given.budget, given.csv)
        return int(all(row["failed"] for row in rows))
    train(HERE, given.programs, minutes=given.minutes, steps=given.steps, path=given.weights, csv_path=given.csv)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # ends threads that may still be compiling
