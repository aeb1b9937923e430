"""Measures compiled steps on this machine's GPU, or exports them for a machine that has jax alone.

%s                      seconds, memory, shares of the GPU's speed (an hour)
%s --quick              small programs, on a CPU too
%s --export=FOLDER --programs=pair_65x129,axial_deeplab_s_train_1
                        the same programs and a script that times them with jax alone, on another machine
%s --export=FOLDER --gin_file=nuclei/axial_deeplab_nano.gin --data_dir=DATA
                        a recipe's training step and its batches, which that script trains for any time
"""

import functools
import sys

from absl import flags

import gpu_programs
from axial import statements
from axial.cli import app
from axial.cli.analyze import build_recipe
from axial.errors import InputError
from axial.io.show import counted, print_table, say, working
from axial.io.write import write_json

FLAGS = flags.FLAGS
report = functools.partial(say, error=True)
OF_TRAINING = ("gin_file", "gin_binding", "data_dir", "batches")

flags.DEFINE_string("export", None, "new folder for programs, which another machine runs.")
flags.DEFINE_list("programs", [], "names of programs, in place of all.")
flags.DEFINE_bool("quick", False, "small programs.")
flags.DEFINE_string("json", None, "file for every number, in plain units.")
flags.DEFINE_multi_string("gin_file", [], "the recipe whose training step is exported.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings over the recipe.")
flags.DEFINE_string("data_dir", None, "what axial-convert wrote; the sample photos by default.")
flags.DEFINE_integer("batches", 64, "of photos that are written for a training.", lower_bound=1, upper_bound=2**16)


def _check():
    """Raises InputError for flags that do not go together, and for unknown programs."""
    app.refuse_without("export", OF_TRAINING)
    app.refuse_beside("export", ("json",))
    if FLAGS["gin_file"].present:
        app.refuse_beside("gin_file", ("programs", "quick"))
    else:
        app.refuse_without("gin_file", OF_TRAINING[1:])
    gpu_programs.find_programs(FLAGS.programs, FLAGS.quick)


def _main(_):
    _check()
    if FLAGS.export:
        _export()
        return
    import gpu_measures

    app.silence_xla()
    if not FLAGS.quick and not gpu_measures.gpu():
        raise InputError(
            "TensorFlow finds no GPU on this machine; --quick measures small programs without one, and "
            "--export=FOLDER writes the programs for a machine that has one"
        )
    programs = gpu_programs.find_programs(FLAGS.programs, FLAGS.quick)
    with working(f"measuring {counted(len(programs), 'compiled program')} on this machine: minutes each"):
        result = gpu_measures.measure_all(programs, FLAGS.quick, report, keep=_keep)
    _print(result)


def _keep(result):
    """Writes --json."""
    if FLAGS.json:
        write_json(FLAGS.json, result)


def _print(result):
    """Prints the table of `measure_all`."""
    header = ("program", "median ms", "least ms", "peak GiB", "of bandwidth", "of products", "compile s")
    rows = []
    for name, found in result["programs"].items():
        if "failed" in found:
            rows.append((name, found["failed"], *[""] * 5))
            continue
        peak = f"{found['peak_bytes'] / 2**30:.2f}" if found["peak_bytes"] else "-"
        times = f"{1000 * found['median_s']:.3f}", f"{1000 * found['least_s']:.3f}"
        shares = f"{found['of_bandwidth']:.1%}", f"{found['of_products']:.1%}"
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
    from axial.io.write import make_folder, try_new_folder

    try_new_folder("export", FLAGS.export)
    if FLAGS["gin_file"].present:
        recipe = statements.check(FLAGS.gin_file, FLAGS.gin_binding)
        if not recipe.value(recipe.task(), "data_dir"):
            app.flag("data_dir")
    check_installed("--export wants", "analysis", "jax")

    import gpu_export
    from tpu_compile import alone

    folder = FLAGS.export.rstrip("/")
    if FLAGS["gin_file"].present:
        what = f"the training step of {' '.join(FLAGS.gin_file)}, {FLAGS.batches} batches"
        build = functools.partial(build_recipe, FLAGS.gin_file, FLAGS.gin_binding, FLAGS.data_dir)
        tasks = [(what, gpu_export.write_training, (folder, build, FLAGS.batches))]
    else:
        programs = gpu_programs.find_programs(FLAGS.programs, FLAGS.quick)
        tasks = [(program.name, gpu_export.write_program, (folder, program)) for program in programs]
    make_folder(folder)
    gpu_export.write_script(folder)
    entries = []
    for i, (name, write, arguments) in enumerate(tasks):
        with working(f"{name}: {i + 1} of {len(tasks)}, lowering"):
            entries.append(alone(write, *arguments))
        gpu_export.write_list(folder, entries)  # after each, as all of them take long
        entry = entries[-1]
        calls = f", custom calls: {', '.join(entry['custom_calls'])}" if entry["custom_calls"] else ""
        size = f"{entry['bytes'] / 2**20:.2f} MiB"
        say(f"{entry['name']}: {counted(len(entry['inputs']), 'input')}, {size}{calls}")
    say(f"on a machine with a GPU and jax: python {folder}/{gpu_export.SCRIPT} --help")


if __name__ == "__main__":
    app.run(_main, sys.modules[__name__])
