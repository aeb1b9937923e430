"""The verbs of axial-analyze that measure: benchmark, input."""

import functools
import os

from absl import flags

from axial.chips import CHIPS
from axial.cli.checks import check_recipe
from axial.io.show import print_table, say, working

FLAGS = flags.FLAGS


def finish(result):
    """Writes --json if it is given."""
    from axial.io.write import write_json

    if FLAGS.json:
        write_json(FLAGS.json, result)


def report(line):
    """Prints a line on what is done, which is no result."""
    say(line, error=True)


def run_benchmark(_):
    suites = {"axial": _run_axial, "study": _run_study, "runtime": _run_runtime}
    with working(f"measuring the suite {FLAGS.suite} on this machine: minutes"):
        suites[FLAGS.suite]()


def _run_axial():
    from axial.paper.benchmark import benchmark

    result = benchmark(FLAGS.quick, report)
    rows = []
    for work, forms in result["works"].items():
        for form, measure in forms.items():
            quartiles = " - ".join(f"{s:.4f}" for s in measure["quartiles_s"])
            peak = f"{measure['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in measure else ""
            rows.append((work, form, f"{measure['median_s']:.4f}", quartiles, peak))
    print_table(("work", "form", "median s", "quartiles", "peak GB"), rows, title=result["machine"])
    say(*(f"{key}: {value:.2f}" for key, value in result["ratios"].items()))
    finish({**result, **result["ratios"]})


def _run_study():
    from axial.paper.study_speed import benchmark

    result = benchmark(FLAGS.quick, report)
    rows = []
    for work, forms in result["works"].items():
        for form, measure in forms.items():
            peak = f"{measure['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in measure else ""
            rows.append((work, form, f"{measure['median_s']:.4f}", peak))
    print_table(("work", "form", "median s", "peak GB"), rows, title=result["machine"])
    say(*(f"{key}: {value:.2f}" for key, value in result["ratios"].items()))
    for place, settings in result.get("peak_bytes_of_settings", {}).items():
        say(" ".join([f"{place}:", *(f"{setting} {peak / 1e9:.2f} GB" for setting, peak in settings.items())]))
    finish(result)


def _run_runtime():
    """Table 8 of Axial-DeepLab: each model's time, and how many times that of ResNet-101 it is, here and there."""
    from axial.paper.benchmark import runtime

    result = runtime(FLAGS.quick, report)
    header, rows = ("row", "model", "ms", "by ResNet-101", "published ms, V100", "by ResNet-101"), []
    base = result["works"]["ResNet-101"]
    for name, own in result["works"].items():
        ours, theirs = (f"{own[key] / base[key]:.2f}" for key in ("median_s", "published_v100_ms"))
        rows.append((name, own["model"], f"{1000 * own['median_s']:.1f}", ours, own["published_v100_ms"], theirs))
    print_table(header, rows, title=result["machine"])
    finish(result)


def recipe():
    """(task, training, optimizer) of the gin flags."""
    return builder()()


def builder():
    """Function of nothing that builds the recipe of the gin flags, in a process without the flags too."""
    return functools.partial(_build, FLAGS.gin_file, FLAGS.gin_binding, FLAGS.data_dir)


def _build(files, bindings, data_dir):
    """(task, training, optimizer) of a recipe; of the sample photos where it has no data."""
    from axial import configuration
    from axial.data.converters.coco import sample_data_dir

    configuration.load(files, bindings)
    return configuration.build(data_dir=data_dir or sample_data_dir())


def run_input(_):
    step_seconds = _step_seconds()
    check_recipe()

    with working(f"measuring the stages of the input of {' '.join(FLAGS.gin_file)}, and a step of its model: minutes"):
        from axial.analysis import input_speed
        from axial.data.streams import name_damaged_records

        task, training, _ = recipe()
        unit = "tokens" if task.evaluation.takes == "text" else "images"
        with name_damaged_records(task.data_dir, task.data.train_split):
            result = input_speed.measure(task, FLAGS.quick, report)
    for stage, speed in result.items():
        say(f"{stage:32s} {speed:10.1f} {unit}/s")
    if step_seconds:
        batch = FLAGS.batch or training.batch
        of_step = dict(batch=batch, step_seconds=step_seconds, cores=FLAGS.cores or os.cpu_count())
        result["demand"] = input_speed.demand(task, result["pipeline"], **of_step)
        say(*input_speed.demand_lines(result["demand"], **of_step, unit=unit))
    finish(result)


def _step_seconds():
    """The time of a step: --step_seconds, or --cycles by the clock of --slice's chip; None if neither is given."""
    from axial.errors import InputError, nearest

    if FLAGS.cycles and FLAGS.step_seconds:
        raise InputError("--cycles, --step_seconds: one of them is the time of a step, not both")
    if not FLAGS.cycles:
        return FLAGS.step_seconds
    chip = FLAGS.slice.partition(":")[0]
    if chip not in CHIPS:
        raise InputError(
            f"--slice={FLAGS.slice}: no clock of {chip} is known{nearest(chip, CHIPS)}: {', '.join(CHIPS)}"
        )
    return FLAGS.cycles / CHIPS[chip].clock
