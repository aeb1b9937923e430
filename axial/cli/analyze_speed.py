"""The verb input of axial-analyze: how fast the input pipeline of a recipe is."""

import functools
import os

from absl import flags

from axial.chips import CHIPS
from axial.cli.checks import check_recipe
from axial.cli.pages import finish, report
from axial.io.show import say, working

FLAGS = flags.FLAGS


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
