"""Trains a model. The same command resumes from the last checkpoint.

%s --model_dir=RUN                                   learns to find cell nuclei, in ten minutes of two cores
%s --gin_file=imagenet/axial_resnet_s_deeplab_stem.gin --data_dir=IMAGENET --model_dir=START --strategy=tpu
%s --gin_file=coco/axial_deeplab_s.gin --gin_binding="INIT = 'START'" \\
    --data_dir=DATA --model_dir=RUN --strategy=tpu

A resumed run keeps the data, model, losses and optimizer that it began with. axial-train refuses others, unless
--change names them:
%s --model_dir=RUN --gin_binding="BATCH = 4" --change=batch
"""

import contextlib
import functools
import os
import re
import sys

from absl import flags

from axial import statements
from axial.cli import app
from axial.cli.checks import check_recipe
from axial.errors import InputError
from axial.io.gfile import check_plain
from axial.io.loopback import LISTEN, host_and_port, keep_local
from axial.io.show import say, working

FLAGS = flags.FLAGS

flags.DEFINE_multi_string(
    "gin_file",
    ["nuclei/demo.gin"],
    "gin files, on disk or of experiments/; a later one overrides.",
)
flags.DEFINE_multi_string("gin_binding", [], "gin bindings, like 'TrainingConfig.steps = 100'.")
flags.DEFINE_string(
    "model_dir", None, "folder of checkpoints, summaries and scores; a run resumes from the checkpoints there."
)
flags.DEFINE_string(
    "data_dir",
    None,
    "what axial-convert wrote; nuclei/demo.gin and the recipes of sample/ and tiny/ have photos of their own.",
)
flags.DEFINE_list(
    "change", [], "settings that a resumed run may go on with, though it began with others, like batch,learning_rate."
)
flags.DEFINE_enum("strategy", "default", ["default", "mirrored", "tpu"], "devices to train on.")
flags.DEFINE_string("tpu", "local", "with --strategy=tpu: 'local' on a TPU VM, a TPU's name, or grpc://HOST:PORT.")
flags.DEFINE_string(
    "data_service", None, "grpc://HOST:PORT of a dispatcher, whose workers prepare the photos; see axial-data-service."
)
flags.DEFINE_string("profile", None, "first and last step of a trace for TensorBoard's profiler, like 100:110.")
flags.DEFINE_integer(
    "profiler_port", None, "port where TensorBoard may ask for a trace at any time.", lower_bound=1, upper_bound=65535
)
flags.DEFINE_enum(**LISTEN)


def _main(_):
    model_dir, profile = app.flag("model_dir"), _profile_steps()
    check_plain(model_dir)
    app.refuse_without("profiler_port", ("listen",))
    if FLAGS.data_service:
        host_and_port("data_service", FLAGS.data_service)
    statements.check_continued(model_dir)
    statements.check_change(FLAGS.change)
    check_recipe(needs_data=True)

    from axial import configuration
    from axial.data.objects import objects_of, read_objects
    from axial.io.lock import locked
    from axial.io.write import retried, write_json
    from axial.training.strategy import is_chief, make_strategy
    from axial.training.trainer import train
    from axial.weights.interchange import make_card
    from axial.weights.loading import RUN_CARD

    app.silence_xla()
    configuration.load(FLAGS.gin_file, FLAGS.gin_binding)
    strategy = make_strategy(FLAGS.strategy, FLAGS.tpu, configuration.query("TrainingConfig.partitions", 1))
    if FLAGS.profiler_port:
        _start_profiler()
    with strategy.scope():
        data_dir = FLAGS.data_dir or configuration.own_data_dir() or app.flag("data_dir")
        task, training, optimizer = configuration.build(data_dir=data_dir)

    def save():
        task.objects = None if "data" in FLAGS.change else read_objects(model_dir)
        if task.instances and "panoptic" in task.labels and not task.objects:
            with working("measuring the objects of the training photos"):
                task.objects = objects_of(data_dir, task.data.train_split)
        configuration.save(model_dir, task.spec, task.objects)
        write_json(
            os.path.join(model_dir, RUN_CARD),
            make_card(
                *(task.model, task.spec, task.canvas),
                photo_scale=task.photo_scale,
                num_classes=task.num_classes,
            ),
        )

    _warn_of_a_long_step(task, training, strategy)
    own = locked(model_dir, "model_dir") if is_chief(strategy) else contextlib.nullcontext()
    with own, data_service(model_dir, strategy) as service:
        train(
            task,
            model_dir,
            optimizer,
            training,
            strategy=strategy,
            when_ready=functools.partial(retried, model_dir, save),
            profile=profile,
            service=service,
            change=FLAGS.change,
        )
    if is_chief(strategy):
        _say_what_is_next(model_dir)


def _say_what_is_next(model_dir):
    """Prints what a training has made, and the commands that use it."""
    import shlex

    from axial.weights.restore import find_checkpoint, latest_checkpoint

    latest, best = latest_checkpoint(model_dir), find_checkpoint(model_dir)
    chosen = "" if best == latest else f"; the best one of its evaluations: {best}"
    run = shlex.quote(model_dir)
    say(
        f"trained: {latest}{chosen}",
        f"To score it: axial-evaluate --model_dir={run}",
        f"To export it: axial-export --model_dir={run} --output_dir=EXPORT",
    )


def _warn_of_a_long_step(task, training, strategy):
    """Says in one line that a step does not suit this device. Who has TPUs or several workers has chosen them."""
    from axial.analysis import own_data, step_cost
    from axial.statements import experiments_dir
    from axial.training.strategy import cluster_workers

    if FLAGS.strategy == "tpu" or cluster_workers() > 1:
        return
    steps = step_cost.read_steps(os.path.join(experiments_dir(), "steps.csv"))
    if task.model.name in steps:
        step = steps[task.model.name]
        if said := step_cost.long_step(step, task.data.crop, training, strategy.num_replicas_in_sync):
            say(f"{said}; for one CPU or GPU there is {own_data.RECIPE} (see axial-convert check)", error=True)


def _start_profiler():
    """Starts the server that TensorBoard asks for traces. Raises InputError."""
    import tensorflow as tf

    tf.profiler.experimental.server.start(FLAGS.profiler_port)
    if FLAGS.listen == "loopback":
        keep_local(FLAGS.profiler_port)


def _profile_steps():
    """(first, last) of --profile, or None. Raises InputError."""

    found = re.fullmatch(r"(\d+):(\d+)", FLAGS.profile or "")
    steps = tuple(map(int, found.groups())) if found else (0, 0)
    if FLAGS.profile and not 1 <= steps[0] <= steps[1]:
        raise InputError(f"--profile={FLAGS.profile}: expected the first and the last step, like 100:110")
    return steps if FLAGS.profile else None


@contextlib.contextmanager
def data_service(model_dir, strategy):
    """Yields the `Service` of --data_service, or None. At the end prints which of its examples arrived."""
    if not FLAGS.data_service:
        yield None
        return
    from axial.data.service import arrival_lines, connect, random_job
    from axial.io.write import output_folder
    from axial.training.strategy import is_chief, total_over_workers

    folder = output_folder(model_dir, "arrivals", "--model_dir")
    job = total_over_workers(strategy, random_job() if is_chief(strategy) else 0)
    service = connect(FLAGS.data_service, folder, int(job))
    try:
        yield service
    finally:
        with contextlib.suppress(InputError):  # it ended before the first batch
            say(*arrival_lines(folder), error=True)


def main():
    app.run(_main, sys.modules[__name__], writes=("model_dir",))
