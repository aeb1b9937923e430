"""The verb gpu of axial-analyze: compiled steps on a GPU, and their export for a machine that has jax alone."""

import contextlib

from absl import flags

from axial.cli import app
from axial.cli.analyze_speed import builder, finish, report
from axial.cli.checks import check_recipe
from axial.io.show import counted, print_table, say, working

FLAGS = flags.FLAGS
OF_TRAINING = ("gin_file", "gin_binding", "data_dir", "batches")
TAKES = (*OF_TRAINING, "programs", "export", "quick", "json")


def check_gpu():
    """Raises InputError for flags that do not go together, and for unknown programs."""
    from axial.errors import InputError
    from axial.paper.gpu_programs import find_programs

    app.refuse_without("export", OF_TRAINING)
    app.refuse_beside("export", ("json",))
    if FLAGS["gin_file"].present:
        app.refuse_beside("gin_file", ("programs", "quick"))
        return
    for name in OF_TRAINING:
        if FLAGS[name].present:
            raise InputError(f"--{name} needs --gin_file")
    find_programs(FLAGS.programs, FLAGS.quick)


def run_gpu(_):
    if FLAGS.export:
        _export()
        return
    from axial.paper import gpu
    from axial.paper.gpu_programs import find_programs

    app.silence_xla()
    if not FLAGS.quick and not gpu.gpu():
        from axial.errors import InputError

        raise InputError(
            "gpu: TensorFlow finds no GPU on this machine; --quick measures small programs without one, and "
            "--export=FOLDER writes the programs for a machine that has one"
        )
    programs = find_programs(FLAGS.programs, FLAGS.quick)
    with working(f"measuring {counted(len(programs), 'compiled program')} on this machine: minutes each"):
        result = gpu.measure_all(programs, FLAGS.quick, report, keep=_keep)
    _print(result)
    finish(result)


def _keep(result):
    """Writes --json while the measures go on, as they may end early."""
    with contextlib.suppress(OSError):  # `finish` says it at the end
        finish(result)


def _print(result):
    """Prints the table of `gpu.measure_all`."""

    def share(value):
        return "-" if value is None else f"{value:.1%}"

    header = ("program", "median ms", "least ms", "peak GiB", "of bandwidth", "of products", "compile s")
    rows = []
    for name, found in result["programs"].items():
        if "failed" in found:
            rows.append((name, found["failed"], *[""] * 5))
            continue
        peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.2f}"
        times = f"{1000 * found['median_s']:.3f}", f"{1000 * found['least_s']:.3f}"
        shares = share(found["of_bandwidth"]), share(found["of_products"])
        rows.append((name, *times, peak, *shares, f"{found['compile_s']:.1f}"))
    reached = result["limits"]
    title = (
        f"{result['device']}, TensorFlow {result['tensorflow']}: {reached['bytes'] / 1e9:.0f} GB/s, "
        f"{reached['multiply_adds'] / 1e9:.0f} G multiply-adds/s"
    )
    print_table(header, rows, title=title)


# === Export ===


def _export():
    """Writes programs, run.py and programs.json to --export."""
    from axial.errors import check_installed
    from axial.io.write import make_folder, remove_empty, try_new_folder
    from axial.paper.gpu_programs import find_programs

    try_new_folder("export", FLAGS.export)
    if FLAGS["gin_file"].present:
        check_recipe(needs_data=True)
    check_installed("axial-analyze gpu --export wants", "analysis", "jax")

    from axial.paper import gpu_export
    from axial.tpu_compiler.compile import alone

    folder = FLAGS.export.rstrip("/")
    if FLAGS["gin_file"].present:
        what = f"the training step of {' '.join(FLAGS.gin_file)}, {FLAGS.batches} batches"
        tasks = [(what, gpu_export.write_training, (folder, builder(), FLAGS.batches))]
    else:
        programs = find_programs(FLAGS.programs, FLAGS.quick)
        tasks = [(program.name, gpu_export.write_program, (folder, program)) for program in programs]
    made, entries = make_folder(folder), []
    for i, (name, write, arguments) in enumerate(tasks):
        try:
            with working(f"{name}: {i + 1} of {len(tasks)}, lowering"):
                entries.append(alone(write, *arguments))
        finally:
            remove_empty(made)  # if the first one failed
        gpu_export.write_script(folder)
        gpu_export.write_list(folder, entries)  # after each, as all of them take long
        calls = f", custom calls: {', '.join(entries[-1]['custom_calls'])}" if entries[-1]["custom_calls"] else ""
        size = f"{entries[-1]['bytes'] / 2**20:.2f} MiB"
        say(f"{entries[-1]['name']}: {counted(len(entries[-1]['inputs']), 'input')}, {size}{calls}")
    say(f"on a machine with a GPU and jax: python {folder}/{gpu_export.SCRIPT} --help")
