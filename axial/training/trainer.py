"""The training of a task from its first to its last step: loops, reports, checkpoints, evaluations and stops."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import time
import typing

import msgspec
import orbit
import tensorflow as tf
import tf_keras as keras

from axial.data.streams import name_damaged_records
from axial.data.tfrecord import fingerprint, is_labelled, read_manifest
from axial.errors import InputError, NonFiniteError, Preempted
from axial.evaluation.loop import write_scalar
from axial.evaluation.split_run import SplitRun
from axial.io import schemas
from axial.io.check import Count, Name, Natural, NonNegative, Positive, checked
from axial.io.read import first_line, read_json
from axial.io.show import plain, progress, say
from axial.io.write import file_digest, make_folder, output_folder, remove_folder
from axial.training.continuing import check_continues, check_names, keep_settings, trained_with
from axial.training.loop import Loop
from axial.training.monitor import LoopLength, Profile, Status, StopRequests, Watchdog, for_people
from axial.training.optimizers import averaged
from axial.training.saving import Saver, save_json
from axial.training.strategy import (
    LOST,
    check_partitions,
    has_other_hosts,
    has_workers,
    is_chief,
    set_precision,
    total_over_workers,
)
from axial.weights.checkpoint import remove_unfinished, traces
from axial.weights.restore import (
    check_fits,
    check_frozen,
    find_weights,
    initialize,
    latest_checkpoint,
    refuse_what_cannot_be_restored,
    slot_names,
    stored_optimizer,
)


@checked
@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long and how a task is trained.

    Attributes:
        steps: steps of the whole training; 0 makes a run of the weights of init_checkpoint as they are.
        batch: images in a step, over all replicas; of text, tokens of sources and as many of targets.
        accumulate: parts of each replica's images that are computed one after the other, to save memory. Their
            gradients are averaged: those of the whole batch, but for batch norms, which see a part at a time
            (experiments/RESULTS.md has the difference). A detector counts the boxes of all parts first, for a third
            more work.
        partitions: TPU cores that share each image, a part of its rows each, for models that do not fit one.
        seed: decides the initial weights, the order of the photos, augmentation and dropout.
        precision: 'float32' or 'mixed_bfloat16'.
        clip_norm: largest norm of all gradients together; those of a larger one are scaled down to it. 0 for none.
        steps_per_loop: steps between two reports of the mean losses. At most so many run without a return to the host.
        seconds_per_loop: after so many seconds the host looks for a request to stop, at the end of the running step. A
            preempted machine has about 30 seconds in all.
        hang_seconds: if no loop ends for so many seconds, the stack of every thread goes to standard error.
        checkpoint_interval: steps between checkpoints.
        eval_interval: steps between evaluations; 0 for none.
        keep: number of latest checkpoints to keep. The best one (see `PanopticTask.main_score`) is kept too.
        init_checkpoint: weights that a new run starts from: a checkpoint, a run, a safetensors file or the name of a
            shipped model (see `initialize`); None for random weights.
        random_frozen: whether a new run may have frozen weights that no checkpoint gives (see `check_frozen`).
        jit_compile: whether XLA compiles the step: 'yes', 'no', or 'auto' for a GPU only. A TPU always compiles.

    Raises:
        InputError: an argument of another type, or out of range.
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


def train(task, model_dir, optimizer, config, *, strategy=None, when_ready=None, profile=None, service=None, change=()):
    """Trains a task up to step `config.steps`. It resumes from the latest checkpoint in `model_dir`, if there is one.

    The folder keeps what the run is trained with (`trained_with`). A resumed training goes on with the same.

    Several workers (see `make_strategy`) all call it. The first of them writes into `model_dir`, which all can read.

    Args:
        task: a `Task`.
        model_dir: folder of checkpoints, summaries, status and scores.
        optimizer: `RAdamLookahead`, made under the strategy's scope.
        config: `TrainingConfig`.
        strategy: `tf.distribute` strategy.
        when_ready: function without arguments. It is called before the first step, after the checkpoint is restored.
        profile: (first, last) steps of a trace for TensorBoard's profiler; None for no trace.
        service: `Service` that makes the batches; None for this process. See `axial.data.service`.
        change: names of `trained_with` whose values may be others than those of the run that is resumed.

    Returns:
        dict of the last evaluation's scores; empty without an evaluation.

    Raises:
        InputError: a batch that cannot be shared equally by the replicas; a split without any label; a run that is
            trained with something else; a checkpoint of another model; a run without a whole checkpoint; frozen weights
            that no checkpoint gives; a file system that takes no checkpoint.
        Preempted: on SIGTERM, SIGINT or a notice of maintenance, after a checkpoint was saved; or another worker has
            stopped.
        NonFiniteError: a loss or gradient is not finite. The message names the first such tensors. Training stops at
            that step and leaves weights, optimizer and moving statistics as they were before it.
    """
    strategy = strategy or tf.distribute.get_strategy()
    check_batch(config, strategy.num_replicas_in_sync, row=task.row)
    check_partitions(config.partitions, strategy)
    set_precision(config.precision)
    settings = trained_with(task, optimizer, config)
    check_names(change, settings)
    latest = latest_checkpoint(model_dir)
    if latest:
        check_continues(model_dir, settings, change)
    elif left := traces(model_dir):
        raise InputError(
            f"{model_dir}: has {left[0]} of an earlier training, but no checkpoint from which it could go on; copy the "
            "run again, or choose another --model_dir"
        )
    if config.eval_interval:
        task.eval_dataset()  # names a split that does not exist before the model is built
    for split in (task.data.train_split, task.data.eval_split)[: 2 if config.eval_interval else 1]:
        if not is_labelled(task.data_dir, split):
            raise InputError(f"{task.data_dir}: no photo of {split!r} has a label to learn from or to score")
    make_folder(model_dir)
    best_dir = output_folder(model_dir, "best", "--model_dir")
    with _name_lost_workers(model_dir, has_other_hosts(strategy)):
        start = find_weights(config.init_checkpoint)[0] if config.init_checkpoint and not latest else None
        with strategy.scope():
            keras.utils.set_random_seed(config.seed)
            model = task.build_model()
            tf.random.set_seed(None)  # a global seed would change the order of the data
            optimizer.build(model.trainable_variables)
        loop = Loop(task, model, optimizer, config=config, strategy=strategy)
        checkpoint = _restored(loop, latest, start)
        if is_chief(strategy):
            if when_ready:
                when_ready()
            keep_settings(model_dir, settings, int(optimizer.iterations.numpy()) if latest else None)
            for folder in (model_dir, best_dir):
                remove_unfinished(folder)
        first_step = int(optimizer.iterations.numpy())
        served = {"service": service} if service else {}
        loop.train_dataset = strategy.distribute_datasets_from_function(
            lambda context: task.train_dataset(config.batch, config.seed, first_step, context, **served)
        )
        with contextlib.closing(_Run(loop, checkpoint, model_dir, profile)) as run:
            return run.train(resumed=bool(latest))


def check_batch(config, replicas, row=1):
    """Raises InputError unless the replicas can share a batch equally, in equal parts.

    Args:
        config: `TrainingConfig`.
        replicas: how many there are.
        row: of text, the tokens of a row: a batch is divided into rows. 1 for images.
    """
    if config.batch % replicas:
        raise InputError(f"batch {config.batch} cannot be shared by {replicas} replicas")
    share = config.batch // replicas // row
    if share % config.accumulate:
        unit = "batch" if row == 1 else f"rows of {row} tokens"
        raise InputError(
            f"TrainingConfig.accumulate = {config.accumulate}: does not divide {share}, a replica's {unit}"
        )


def _restored(loop, latest, start):
    """`tf.train.Checkpoint` of all that a resumed training needs, restored.

    Args:
        loop: `Loop`.
        latest: prefix of the run's latest checkpoint, or None.
        start: the weights that a run without one begins with, of `find_weights`; None for random ones.
    """
    model, optimizer = loop.model, loop.optimizer
    averages = {"averages": optimizer.averages} if getattr(optimizer, "averages", None) else {}
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, **averages)  # `restore_model` looks for `model`
    if latest:
        check_fits(model, latest)
        with refuse_what_cannot_be_restored(latest):
            _restore(checkpoint, optimizer, latest)
    elif start:
        say(*initialize(model, start, loop.task.model, loop.config.random_frozen).splitlines(), error=True)
        _begin_averages(optimizer, model)
    elif not loop.config.random_frozen:
        check_frozen(model, loop.task.model)
    return checkpoint


def _restore(checkpoint, optimizer, latest):
    """Restores all, but the slots of another optimizer: they mean something else. Ours begin at this step."""
    stored, step = stored_optimizer(latest)
    slots = slot_names(variable.name for variable in optimizer.variables)
    if stored == slots:
        rate = optimizer._learning_rate  # a number is a variable, which the checkpoint has too
        value = rate.numpy() if hasattr(rate, "assign") else None
        checkpoint.restore(latest)
        if value is not None:
            rate.assign(value)
        return
    say(f"{latest}: has the slots {stored} of another optimizer; {slots} begin at step {step}", error=True)
    tf.train.Checkpoint(model=checkpoint.model).read(latest).expect_partial()
    optimizer.iterations.assign(step)
    optimizer.first_step.assign(step)
    _begin_averages(optimizer, checkpoint.model)


def _begin_averages(optimizer, model):
    for average, weight in zip(getattr(optimizer, "averages", ()), model.trainable_variables):
        average.assign(weight)


@contextlib.contextmanager
def _name_lost_workers(model_dir, others=True):
    """Preempted in place of what TensorFlow raises when another worker, or another host of the TPU, has stopped.

    Without `others`, the file system or the device has given up a request.
    """
    try:
        yield
    except LOST as error:
        reason = first_line(error.message.split("aborted by:")[-1])[:150]
        what, where = ("another worker has stopped", " on all of them") if others else ("a request was aborted", "")
        again = f"start the same command again{where}: it goes on from the last checkpoint in {model_dir}"
        raise Preempted(f"{what} ({reason}); {again}") from None


COMPILING = "compiling the first step"


class _Run:
    """A training from its first to its last step: loops, reports, checkpoints and evaluations.

    Args:
        loop: `Loop` with its data.
        checkpoint: `tf.train.Checkpoint` of all that a resumed training needs.
        model_dir, profile: see `train`.
    """

    def __init__(self, loop, checkpoint, model_dir, profile):
        self.loop, self.config, self.strategy = loop, loop.config, loop.strategy
        self.step, self.scores = int(loop.optimizer.iterations.numpy()), {}
        folder = model_dir if is_chief(self.strategy) else None
        self.status = Status(folder, self.config.steps, self.config.batch)
        self.profile, self.watchdog = Profile(folder, profile), Watchdog(self.config.hang_seconds)
        self.summaries = orbit.utils.SummaryManager(folder, write_scalar, loop.optimizer.iterations)
        self.saver = Saver(checkpoint, model_dir, self.config.keep, self.strategy)
        self.evaluation = _Evaluation(loop, model_dir) if self.config.eval_interval else None
        self.length = LoopLength(self.config.steps_per_loop, self.config.seconds_per_loop)

    def train(self, resumed):
        """Runs all steps that are left. Returns the scores of the last evaluation."""
        self._first = first = self.step
        steps = dict(total=self.config.steps, initial=self.step, unit="step")
        bar = progress(None, "train", **steps, disable=not is_chief(self.strategy))
        with StopRequests() as self.requests, bar as self.progress, self.watchdog:
            # A kill may have interrupted an evaluation.
            if self.evaluation and self._is_evaluated() and not self.evaluation.is_done(self.step):
                self._evaluate()
            if self.step < self.config.steps:
                self.progress.set_postfix_str(COMPILING)
            while self.step < self.config.steps:
                self._until(self._next_report())
                if self.evaluation and self._is_evaluated():
                    self.save()
                    self._evaluate()
            if first < self.step or not resumed:
                self.save()
        self.status.write("done", self.step)
        return self.scores

    def _is_evaluated(self):
        """Whether the training evaluates after this step."""
        return self.step > 0 and (self.step % self.config.eval_interval == 0 or self.step == self.config.steps)

    def _next_report(self):
        """The next step at which the means of the losses are written."""
        return self._next_multiple(self.config.steps_per_loop, self.config.eval_interval)

    def _next_multiple(self, *intervals):
        """The next step that is a multiple of one of the intervals, or the last step."""
        return min([self.config.steps, *((self.step // n + 1) * n for n in intervals if n)])

    def _until(self, report):
        """Runs loops up to the step `report`. Saves checkpoints on the way, and stops if that is asked for."""
        self.loop.reset_means()
        while self.step < report:
            checkpoint = self._next_multiple(self.config.checkpoint_interval)
            target = self.profile.bound(self.step, min(report, checkpoint, self.step + self.length.steps))
            self._run_loop(target - self.step)
            if self.step == report:
                means = self.loop.means()
                with for_people("summaries"):
                    self.summaries.write_summaries({**means, **self.status.speed()})
                    self.summaries.flush()
                self.progress.set_postfix(loss=f"{means['total']:.3g}", refresh=False)
            self._show()
            if self.step % self.config.checkpoint_interval == 0:
                self.save()
            self._stop_if_asked()

    def _show(self):
        """Advances the bar. Its speed is that of the steps after the first loop, which compiles."""
        bar = self.progress
        if bar.n > self._first:
            bar.update(self.step - bar.n)
            return
        if bar.postfix == COMPILING:  # no loss has taken its place
            bar.set_postfix_str("", refresh=False)
        bar.initial = bar.n = bar.last_print_n = self.step
        bar.unpause()

    def _run_loop(self, count):
        self.profile.before(self.step)
        started = time.perf_counter()
        try:
            with name_damaged_records(self.loop.task.data_dir, self.loop.task.data.train_split):
                waited = self.loop.run(count)
        except NonFiniteError:
            self.status.write("failed", self.step)
            raise
        self.step += count
        seconds = total_over_workers(self.strategy, time.perf_counter() - started)
        seconds /= self.strategy.extended._num_workers if has_workers(self.strategy) else 1
        self.status.add_loop(count, seconds, waited)
        self.length.add_loop(count, seconds)
        self.profile.after(self.step)
        self.status.write("training", self.step)
        self.watchdog.reset()

    def _stop_if_asked(self):
        """Saves and raises Preempted if this process, or another worker, was asked to stop."""
        if total_over_workers(self.strategy, bool(self.requests.reason)):
            self.save()
            self._stop()

    def _stop(self):
        self.status.write("preempted", self.step)
        reason = self.requests.reason or "a request to another worker"
        raise Preempted(f"{reason}: saved at step {self.step}; the same command resumes")

    def save(self):
        self.saver.save(self.step)
        self.watchdog.reset()

    def _evaluate(self):
        self.status.write("evaluating", self.step)
        # The chief resets the watchdog at each photo. The others wait for it, as long as that takes.
        waits = contextlib.nullcontext() if is_chief(self.strategy) else self.watchdog.paused()
        with averaged(self.loop.optimizer, self.loop.model.trainable_variables), waits:
            self.scores = self.evaluation.run(self.step, self._watch_evaluation, self.summaries.summary_writer)
        if self.scores:
            self.progress.write(plain(f"step {self.step}: {self.loop.task.evaluation.brief(self.scores)}"), sys.stderr)
        self.watchdog.reset()

    def _watch_evaluation(self):
        """Raises Preempted if this process was asked to stop. A resumed run scores the photos that are left."""
        self.watchdog.reset()
        if self.requests.reason:
            self._stop()

    def close(self):
        self.profile.close()
        self.saver.close()
        if self.evaluation:
            self.evaluation.saver.close()


class _Evaluation:
    """Evaluates during training: writes summaries and pictures, and saves the best checkpoint so far.

    Of several workers the chief evaluates, and the others wait for it.

    Args:
        loop: `Loop`.
        model_dir: see `train`.
    """

    PICTURES = 4

    def __init__(self, loop, model_dir):
        self.task, self.strategy = loop.task, loop.strategy
        self.predictions = self.task.predictions(loop.model, loop.strategy)
        best_dir = output_folder(model_dir, "best", "--model_dir")
        self.saver = Saver(tf.train.Checkpoint(model=loop.model), best_dir, 1, loop.strategy)
        self.scores_path = os.path.join(best_dir, "scores.json")
        self.model_dir, self.done_path = model_dir, os.path.join(model_dir, "evaluated.json")
        self.state_dir = output_folder(model_dir, ".evaluating", "--model_dir")  # is there while an evaluation runs
        task, split = loop.task, loop.task.data.eval_split
        of_scores = {"data": fingerprint(task.data_dir, split), "canvas": task.canvas, **task.settings()}
        self.identity = json.loads(msgspec.json.encode(of_scores))  # as the files have it

    def is_done(self, step):
        """Whether the evaluation of this step, or a later one, was finished."""

        def of_chief():
            found = self._read(self.done_path)
            return found is not None and found.step >= step

        return self._decided(of_chief)

    def run(self, step, watch, writer=tf.summary.create_noop_writer):
        """Evaluates. Returns the scores; of several workers only to the chief.

        Args:
            step: of the training.
            watch: function without arguments that is called after each photo.
            writer: function without arguments that returns a writer of summaries.
        """
        scores = self._scores(step, watch, writer) if is_chief(self.strategy) else {}
        if self._decided(lambda: not self._best() >= self.task.main_score(scores)):
            self.saver.save(step)
            if scores:
                save_json(self.scores_path, {"step": step, "evaluation": self.identity, **scores})
        if scores:
            save_json(self.done_path, {"step": step, "evaluation": self.identity})
            with contextlib.suppress(OSError, tf.errors.OpError):
                remove_folder(self.state_dir)
        return scores

    def _decided(self, of_chief):
        """What a function without arguments returns to the chief, for every worker."""
        return bool(total_over_workers(self.strategy, is_chief(self.strategy) and of_chief()))

    def _scores(self, step, watch, writer):
        pictures = []

        def draw(example, table):
            watch()
            if len(pictures) < self.PICTURES:
                pictures.append(None)
                with for_people("a picture"):
                    pictures[-1] = self.task.picture(example, table)

        task, split = self.task, self.task.data.eval_split
        index = os.path.join(self.model_dir, f"ckpt-{step}.index")  # it holds a checksum of every tensor
        weights = file_digest(index)[1] if tf.io.gfile.exists(index) else None
        about = dict(state_dir=self.state_dir, identity={"step": step, "weights": weights, **self.identity})
        about["guard"] = functools.partial(for_people, "the state of the evaluation")
        about["interval"] = 120  # as a stop writes the state too
        with name_damaged_records(task.data_dir, split):
            try:
                run = SplitRun(task.evaluation, task.spec, split, **about)
            except InputError:  # that of another step or training, or damaged
                remove_folder(self.state_dir)
                run = SplitRun(task.evaluation, task.spec, split, **about)
            total = read_manifest(task.data_dir, split)["examples"]
            scores = run.run(self._examples, self.predictions, total, draw)
        with for_people("summaries of the evaluation"), writer().as_default():
            for name, value in self.task.evaluation.summaries(scores).items():
                write_scalar(f"eval/{name}", value, step)
            for i, picture in enumerate(pictures):
                if picture is not None:
                    tf.summary.image(f"photo_truth_prediction/{i}", picture[None], step)
        return scores

    def _examples(self, shard, skip):
        return self.task.eval_dataset(shard=shard, skip=skip)

    def _read(self, path):
        """`Evaluated` of a file, or None: there is no such file, or it is of other data or another way to evaluate."""
        found = read_json(path, schemas.Evaluated)[1] if tf.io.gfile.exists(path) else None
        return found if found and found.evaluation in (None, self.identity) else None

    def _best(self):
        if not self._read(self.scores_path):
            return -math.inf
        scores = msgspec.to_builtins(read_json(self.scores_path, self.task.best_scores)[1])
        best = self.task.main_score(scores)
        return -math.inf if best is None else best
