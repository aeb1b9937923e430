"""Trains a task from its first to its last step: loops, reports, checkpoints, evaluations and stops."""

import contextlib
import dataclasses
import faulthandler
import os
import sys
import typing

import orbit
import tensorflow as tf
import tf_keras as keras

from axial.data.tfrecord import is_labelled
from axial.errors import InputError
from axial.io.check import Checked, Count, Name, Natural, NonNegative, Positive
from axial.io.show import plain, progress, say, working
from axial.io.write import make_folder, output_folder
from axial.layers.device import is_compiled, on_cpu
from axial.training.continuing import check_continues, check_names, hyperparameters, keep_settings
from axial.training.evaluating import Evaluations
from axial.training.monitor import Profile, Status, StopRequests, for_people, show_hangs, write_scalar
from axial.training.optimizers import Schedule
from axial.training.saving import Saver
from axial.training.strategy import check_partitions, is_chief, name_lost_workers, total_over_workers
from axial.training.train_step import TrainStep
from axial.weights import restore
from axial.weights.checkpoint import refused, remove_unfinished, traces


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Checked):
    """Hyperparameters and intervals of a training, apart from its task and its optimizer.

    Attributes:
        steps: number of steps of the whole training; 0 writes a run that has the weights of init_checkpoint.
        batch: global batch size, in images or source tokens.
        accumulate: gradient accumulation steps. Each replica splits its batch into this many micro-batches and computes
            them one after the other, to save memory. The averaged gradients equal the whole batch's, except that a
            batch norm sees one micro-batch at a time (experiments/results/checks.md has the difference). For a
            detector, an extra forward pass first counts the boxes of all micro-batches, which adds a third to the work.
        partitions: cores per replica (model parallelism over the image). Each TPU core of a replica holds some of the
            rows of each image, for models that do not fit one core.
        seed: seed of the initial weights, the order of the examples, augmentation and dropout.
        precision: 'float32' or 'mixed_bfloat16'.
        clip_norm: largest global norm of the gradients. Larger gradients are scaled down to this norm. 0 never clips.
        steps_per_loop: steps between two reports of the mean losses, and largest number of steps in a device loop.
        seconds_per_loop: target duration in seconds of a loop of steps, after which the host checks for a request to
            stop. A preempted machine stops after about 30 seconds.
        hang_seconds: seconds after which a loop counts as hanging, and every thread's stack goes to standard error.
        checkpoint_interval: steps between checkpoints.
        eval_interval: steps between evaluations; 0 for none.
        keep: number of latest checkpoints to keep. The best one (see `PanopticTask.main_score`) is kept too.
        init_checkpoint: weights that a new run starts from: a checkpoint, a run, a safetensors file or the name of a
            shipped model (see `initialize`); None for random weights.
        random_frozen: whether frozen weights of a new run may stay random if no checkpoint has these weights (see
            `check_frozen`).
        jit_compile: whether XLA compiles the step: 'yes', 'no', or 'auto' for a GPU only. A TPU always compiles.

    Raises:
        InputError: an argument has the wrong type or is out of range.
    """

    steps: Natural
    batch: Count
    accumulate: Count = 1
    partitions: Count = 1
    seed: Natural = 0
    precision: typing.Literal["float32", "mixed_bfloat16"] = "float32"
    clip_norm: NonNegative = 0.0
    steps_per_loop: Count = 100
    seconds_per_loop: Positive = 5.0
    hang_seconds: Positive = 1800.0
    checkpoint_interval: Count = 1000
    eval_interval: Natural = 5000
    keep: Count = 5
    init_checkpoint: Name | None = None
    random_frozen: bool = False
    jit_compile: typing.Literal["auto", "yes", "no"] = "auto"

    def is_compiled(self):
        """Whether XLA compiles the step on this machine."""
        return is_compiled(self.jit_compile)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of a training that are not in its configuration and do not change its weights.

    Attributes:
        strategy: `tf.distribute` strategy.
        when_ready: function without arguments that is called after the checkpoint is restored, before the first step.
        profile: (first, last) step of a trace for TensorBoard's profiler; None for no trace.
        service: `Service` that makes the batches; None to make them in this process. See `axial.data.service`.
        change: hyperparameters that may differ from the resumed run's.
    """

    strategy: tf.distribute.Strategy = dataclasses.field(default_factory=tf.distribute.get_strategy)
    when_ready: typing.Callable | None = None
    profile: tuple[int, int] | None = None
    service: typing.Any = None
    change: typing.Sequence[str] = ()


def train(task, model_dir, optimizer, config, options=None):
    """Trains a task up to step `config.steps`. It resumes from the latest checkpoint in `model_dir` if there is one.

    The folder keeps the run's `hyperparameters`. A resumed training must use the same ones.

    With several workers (see `make_strategy`), each worker calls this function. The chief writes into `model_dir`,
    which all workers must be able to read.

    Args:
        task: a `Task`.
        model_dir: folder of checkpoints, summaries, status and scores.
        optimizer: `Rule`, such as `RAdamLookahead`.
        config: `TrainingConfig`.
        options: `RunOptions`; the default uses the strategy of the current scope.

    Returns:
        dict of the last evaluation's scores; empty without an evaluation.

    Raises:
        InputError: the batch does not divide equally over the replicas; a split has no label; the run's hyperparameters
            differ; the checkpoint belongs to another model; the run has no whole checkpoint; no checkpoint has the
            frozen weights; the checkpoint cannot be written.
        Preempted: SIGTERM, SIGINT or a notice of maintenance came, and a checkpoint was saved; or another worker has
            stopped.
        NonFiniteError: a loss or gradient is not finite. The message names the first such tensors. Training stops at
            that step, and weights, optimizer and moving statistics keep their values from before that step.
    """
    options = options or RunOptions()
    strategy = options.strategy
    check_batch(config, strategy.num_replicas_in_sync, row=task.row)
    check_partitions(config.partitions, strategy)
    keras.mixed_precision.set_global_policy(config.precision)
    settings = hyperparameters(task, optimizer, config)
    check_names(options.change, settings)
    latest = restore.latest_checkpoint(model_dir)
    if latest:
        check_continues(model_dir, settings, options.change)
    elif left := traces(model_dir):
        what = f"has {left[0]} of an earlier training, but no checkpoint from which it could go on"
        raise InputError(f"{model_dir}: {what}; copy the run again, or choose another --model_dir")
    if config.eval_interval:
        task.eval_dataset()  # refuses a missing split before the model is built
    for split in (task.data.train_split, task.data.eval_split)[: 2 if config.eval_interval else 1]:
        if not is_labelled(task.data_dir, split):
            raise InputError(f"{task.data_dir}: no photo of {split!r} has a label to learn from or to score")
    make_folder(model_dir)
    # A symbolic link that leads out of the run's folder is refused before the run writes any file.
    for name in ("best", ".evaluating"):
        output_folder(model_dir, name, "--model_dir")
    with name_lost_workers(strategy, model_dir):
        start = restore.find_weights(config.init_checkpoint)[0] if config.init_checkpoint and not latest else None
        with strategy.scope():
            keras.utils.set_random_seed(config.seed)
            model = task.build_model()
            tf.random.set_seed(None)  # a global seed would also change the order of the data
            optimizer = optimizer.build(model.trainable_variables)
        check_loop(task, model, config, strategy)
        loop = TrainStep(task, model, optimizer, config, strategy=strategy, service=options.service)
        return _run(loop, model_dir, latest, start=start, settings=settings, options=options)


def _run(loop, model_dir, latest, *, start, settings, options):
    """Restores a run and trains it to its end. Returns the dict of the last evaluation's scores."""
    # === Restore ===
    checkpoint = _restored(loop, latest, start)
    config, strategy, optimizer = loop.config, loop.strategy, loop.optimizer
    first = step = int(optimizer.iterations.numpy())
    scores, length, bar, folder = {}, 1, None, model_dir if is_chief(strategy) else None
    if folder:
        _begin(folder, settings, step if latest else None, options)
    summaries = orbit.utils.SummaryManager(folder, write_scalar, optimizer.iterations)
    saver, evaluations = Saver(checkpoint, model_dir, config.keep, strategy), Evaluations(loop, model_dir)
    with (
        Profile(folder, options.profile) as trace,
        Status(folder, config.steps, config.batch, step) as status,
        StopRequests() as requests,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(faulthandler.cancel_dump_traceback_later)
        while True:
            show_hangs(config.hang_seconds)
            trace.at(step)
            # === Evaluate: if an evaluation is due after this step and was not finished before a resume ===
            if evaluations.is_due(step) and (step > first or not evaluations.is_done(step)):
                status.write("evaluating", step)
                scores = evaluations.run(step, requests, summaries.summary_writer)
                if scores:
                    _tell(bar, f"step {step}: {loop.task.evaluator.brief(scores)}")
            if step >= config.steps:
                break

            # === Run steps: a loop ends at the next interval, or earlier to answer requests to stop in time ===
            report = _next(config, step, config.steps_per_loop, config.eval_interval)
            end = trace.bound(step, min(report, _next(config, step, config.checkpoint_interval), step + length))
            with working("compiling the first step") if step == first and folder else contextlib.nullcontext():
                seconds, waited = loop.run(end - step)
            if step > first:  # the first loop is one step and includes the compilation
                status.add_loop(end - step, seconds, waited)
                length = _length(config, length, seconds / (end - step))
                bar.update(end - bar.n)
            else:
                bar = progress(None, "train", initial=end, total=config.steps, unit="step", disable=not folder)
                stack.enter_context(bar)
            status.write("training", step := end)

            # === Report ===
            if step == report:
                means = loop.take_means()
                with for_people("summaries"):
                    summaries.write_summaries({**means, **status.speed()})
                    summaries.flush()
                bar.set_postfix(loss=f"{means['total']:.3g}", refresh=False)

            # === Save and stop ===
            if step % config.checkpoint_interval == 0 or evaluations.is_due(step):
                saver.save(step)
            if total_over_workers(strategy, bool(requests.reason)):
                saver.save(step)
                requests.stop(step)
        if first < step or not latest:
            saver.save(step)
    return scores


def _tell(bar, text):
    """Prints a line on standard error, above the progress bar if there is one."""
    bar.write(plain(text), sys.stderr) if bar else say(plain(text), error=True)


def _begin(model_dir, settings, step, options):
    """Calls `when_ready`, writes the run's settings, and removes checkpoints that a kill left half written."""
    if options.when_ready:
        options.when_ready()
    keep_settings(model_dir, settings, step)
    for path in (model_dir, os.path.join(model_dir, "best")):
        remove_unfinished(path)


def _next(config, step, *intervals):
    """The next step that is a multiple of one of the intervals, or the last step."""
    return min([config.steps, *((step // n + 1) * n for n in intervals if n)])


def _length(config, length, seconds):
    """Number of steps of the next loop, at most twice this loop's `length`. `seconds` is this loop's time per step."""
    return int(min(max(config.seconds_per_loop / seconds, 1), 2 * length, config.steps_per_loop))


def check_batch(config, replicas, row=1):
    """Raises InputError unless the global batch divides equally into replicas and micro-batches.

    Args:
        config: `TrainingConfig`.
        replicas: number of replicas.
        row: number of tokens in a row of text, as a batch of text is split into whole rows; 1 for images.
    """
    if config.batch % replicas:
        raise InputError(f"batch {config.batch} cannot be shared by {replicas} replicas")
    replica_batch = config.batch // replicas // row
    if replica_batch % config.accumulate:
        unit = "batch" if row == 1 else f"rows of {row} tokens"
        where = f"TrainingConfig.accumulate = {config.accumulate}"
        raise InputError(f"{where}: does not divide {replica_batch}, a replica's {unit}")


def check_loop(task, model, config, strategy):
    """Raises InputError for several cores per replica with TPU kernels, and for XLA on several CPU replicas."""
    # `task.model` is a `ModelConfig`. The losses use its backend even if no layer of the model has a backend.
    users = (task.model, *model.submodules)
    if config.partitions > 1 and any(getattr(user, "backend", "") == "kernel" for user in users):
        where = f"TrainingConfig.partitions = {config.partitions}"
        raise InputError(f"{where}: TPU kernels cannot split an image; bind ModelConfig.backend = 'auto' too")
    if config.is_compiled() and strategy.num_replicas_in_sync > 1 and on_cpu():
        raise InputError(f"TrainingConfig.jit_compile = {config.jit_compile!r}: XLA cannot sum over replicas on CPUs")


def _restored(loop, latest, start):
    """`tf.train.Checkpoint` of model, optimizer and averages, restored or initialised.

    Args:
        loop: `TrainStep`.
        latest: prefix of the run's latest checkpoint; None for a new run.
        start: path of the weights that a new run starts from, as `find_weights` returns it; None for random weights.
    """
    model, optimizer, config = loop.model, loop.optimizer, loop.config
    # `restore_model` depends on these keyword names.
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, averages=optimizer.averages)
    if latest:
        restore.check_fits(model, latest)
        with refused(latest, "cannot be restored"):
            if _restored_slots(checkpoint, optimizer, latest):
                return checkpoint
    elif start:
        say(*restore.initialize(model, start, loop.task.model, config.random_frozen).splitlines(), error=True)
    elif not config.random_frozen:
        restore.check_frozen(model, loop.task.model)
    for average, weight in zip(optimizer.averages, model.trainable_variables):
        average.assign(weight)
    return checkpoint


def _restored_slots(checkpoint, optimizer, latest):
    """Restores model and optimizer. Returns False if another optimizer wrote the slots, which then start anew."""
    stored, step = restore.stored_optimizer(latest)
    slots = restore.slot_names(variable.name for variable in optimizer.variables)
    if stored == slots:
        checkpoint.restore(latest)
        if not isinstance(rate := optimizer.rule.learning_rate, Schedule):  # restore has set the checkpoint's rate
            optimizer.learning_rate.assign(rate)
        return True
    say(f"{latest}: has the slots {stored} of another optimizer; {slots} begin at step {step}", error=True)
    tf.train.Checkpoint(model=checkpoint.model).read(latest).expect_partial()
    optimizer.iterations.assign(step)
    optimizer.first_step.assign(step)
    return False
