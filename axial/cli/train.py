"""Trains a model. The same command resumes from the last checkpoint.

%s --model_dir=RUN                                   learns to segment cell nuclei, in ten minutes on two cores
%s --gin_file=imagenet/axial_resnet_s_deeplab_stem.gin --data_dir=IMAGENET --model_dir=START --strategy=tpu
%s --gin_file=coco/axial_deeplab_s.gin --gin_binding="INIT = 'START'" \\
    --data_dir=DATA --model_dir=RUN --strategy=tpu

A resumed run keeps its data, model, losses and optimizer. axial-train refuses to change one unless --change names it:
%s --model_dir=RUN --gin_binding="BATCH = 4" --change=batch
"""

import contextlib
import functools
import os
import shlex

from axial import recipes
from axial.cli import app, flags
from axial.cli.flags import Flag
from axial.io.gfile import check_plain
from axial.io.lock import locked
from axial.io.loopback import host_and_port, keep_local
from axial.io.show import say, working
from axial.io.write import retried, write_json

_STEPS = flags.matched(r"(\d+):(\d+)", "the first and the last step, like 100:110", lambda i, n: 1 <= i <= n)


class Train(flags.Devices):
    gin_file = flags.GIN_FILE.but(default=("nuclei/demo.gin",))
    gin_binding = flags.GIN_BINDING
    model_dir = flags.MODEL_DIR.but(path=flags.OUT_FOLDER, needed=True)
    data_dir = flags.DATA_DIR
    change = flags.CHANGE
    data_service = Flag(str, "grpc://HOST:PORT of an axial-data-service, whose workers run the input pipeline.")
    profile = Flag(str, "first and last step of a profile for TensorBoard, like 100:110.", read=_STEPS)
    profiler_port = Flag(int, "port at which TensorBoard can request a profile at any time.", least=1, most=65535)
    listen = flags.LISTEN.but(needs="profiler_port")

    def check(self):
        check_plain(self.model_dir)
        if self.data_service:
            host_and_port("data_service", self.data_service)


def _main(given):
    model_dir = given.model_dir
    recipe = recipes.read(given.gin_file, given.gin_binding)
    if not recipe.value(f"{recipe.task()}.data_dir"):
        given.need("data_dir")

    app.import_tensorflow()
    from axial.data.objects import objects_of, read_objects
    from axial.recipes import configuration
    from axial.training.strategy import is_chief, make_strategy
    from axial.training.trainer import RunOptions, train
    from axial.weights.interchange import make_card
    from axial.weights.restore import find_checkpoint, latest_checkpoint
    from axial.weights.source import RUN_CARD

    configuration.bind(recipe)
    strategy = make_strategy(given.strategy, given.tpu, configuration.query("TrainingConfig.partitions", 1))
    if given.profiler_port:
        start_profiler(given.profiler_port, given.listen)
    with strategy.scope():
        data_dir = given.data_dir or configuration.query(f"{recipe.task()}.data_dir", None)
        task, training, optimizer = configuration.build(data_dir=data_dir)

    def save():
        objects = None if "data" in given.change else read_objects(model_dir)
        if task.instances and "panoptic" in task.evaluator.labels and not objects:
            with working("measuring the objects of the training photos"):
                objects = objects_of(data_dir, task.data.train_split)
        configuration.save(model_dir, task.spec, objects)
        card = make_card(task.model, task.num_classes, task.canvas, spec=task.spec, scale=task.scale)
        write_json(os.path.join(model_dir, RUN_CARD), card)

    lock = locked(model_dir, "model_dir") if is_chief(strategy) else contextlib.nullcontext()
    with lock:
        service = data_service(given.data_service, strategy)
        ready = functools.partial(retried, model_dir, save)
        options = RunOptions(strategy, ready, given.profile, service, change=given.change)
        train(task, model_dir, optimizer, training, options=options)
    if is_chief(strategy):  # prints the checkpoints, and the commands that use them
        latest, best = latest_checkpoint(model_dir), find_checkpoint(model_dir)
        chosen = "" if best == latest else f"; the best one of its evaluations: {best}"
        run = shlex.quote(model_dir)
        say(f"trained: {latest}{chosen}", f"To score it: axial-evaluate --model_dir={run}")
        say(f"To export it: axial-export --model_dir={run} --output_dir=EXPORT")


def start_profiler(port, listen):
    """Starts the server from which TensorBoard requests profiles. Raises InputError; see `keep_local`."""
    import tensorflow as tf

    tf.profiler.experimental.server.start(port)
    if listen == "loopback":
        keep_local(port)


def data_service(address, strategy):
    """The `Service` at an address; None without an address."""
    if not address:
        return None
    from axial.data.service import connect, random_job
    from axial.training.strategy import is_chief, total_over_workers

    job = total_over_workers(strategy, random_job() if is_chief(strategy) else 0)
    return connect(address, int(job))


def main():
    app.run({"": (Train, _main)})
