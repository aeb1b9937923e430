"""The verb input of axial-analyze: how fast the input pipeline of a recipe is."""

import functools
import os

from absl import flags

from axial.cli import flags as declared
from axial.cli.checks import check_recipe
from axial.cli.flags import Flag, Flags
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


class Input(Flags):
    gin_file = declared.GIN_FILE.but(default=("sample/overfit.gin",))
    gin_binding = declared.GIN_BINDING
    data_dir = declared.DATA_DIR
    batch = declared.BATCH
    step_seconds = Flag(float, "time of a training step of the slice.", least=1e-6)
    cores = Flag(int, "CPU cores of a host or worker; by default this machine's.", least=1)
    json = declared.JSON
    quick = Flag(bool, "fewer works and rounds.", False)


def run_input(given: Input):
    check_recipe()

    with working(f"measuring the stages of the input of {' '.join(given.gin_file)}, and a step of its model: minutes"):
        from axial.analysis import input_speed
        from axial.data.streams import name_damaged_records

        task, training, _ = recipe()
        unit = "tokens" if task.evaluation.takes == "text" else "images"
        with name_damaged_records(task.data_dir, task.data.train_split):
            result = input_speed.measure(task, given.quick, report)
    for stage, speed in result.items():
        say(f"{stage:32s} {speed:10.1f} {unit}/s")
    if seconds := given.step_seconds:
        of_step = dict(batch=given.batch or training.batch, step_seconds=seconds, cores=given.cores or os.cpu_count())
        result["demand"] = input_speed.demand(task, result["pipeline"], **of_step)
        say(*input_speed.demand_lines(result["demand"], **of_step, unit=unit))
    finish(result)
