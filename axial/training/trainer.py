"""The training loop of a task, built on orbit. Only this module imports orbit."""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
import typing

import msgspec
import orbit
import tensorflow as tf
import tf_keras as keras
from tqdm import tqdm

from axial.data.streams import name_damaged_records
from axial.errors import InputError, NonFiniteError, Preempted
from axial.evaluation.loop import evaluate, write_scalar
from axial.io import schemas
from axial.io.check import Count, Name, Natural, checked
from axial.io.read import read_json
from axial.io.write import write_json
from axial.layers import random
from axial.layers.batch_norm import all_reduce_sums
from axial.training.optimizers import averaged
from axial.training.strategy import set_precision
from axial.weights.restore import (
    check_fits,
    initialize,
    latest_checkpoint,
    refuse_what_cannot_be_restored,
    remove_unfinished,
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
            (experiments/RESULTS.md has the difference).
        seed: decides the initial weights, the order of the photos, augmentation and dropout.
        precision: 'float32' or 'mixed_bfloat16'.
        steps_per_loop: steps between two returns to the host.
        checkpoint_interval: steps between checkpoints.
        eval_interval: steps between evaluations; 0 for none.
        keep: number of latest checkpoints to keep. The best one (see `PanopticTask.main_score`) is kept too.
        init_checkpoint: checkpoint whose weights a new run starts from (see `initialize`); None for random weights.

    Raises:
        InputError: an argument of another type, or out of range.
    """

    steps: Natural
    batch: Count
    accumulate: Count = 1
    seed: Natural = 0
    precision: typing.Literal["float32", "mixed_bfloat16"] = "float32"
    steps_per_loop: Count = 100
    checkpoint_interval: Count = 1000
    eval_interval: Natural = 5000
    keep: Count = 5
    init_checkpoint: Name | None = None


def train(task, model_dir, optimizer, config, *, strategy=None, when_ready=None, service=None):
    """Trains a task up to step `config.steps`. It resumes from the latest checkpoint in `model_dir`, if there is one.

    Args:
        task: `PanopticTask`.
        model_dir: folder of checkpoints, summaries and scores.
        optimizer: `RAdamLookahead`, made under the strategy's scope.
        config: `TrainingConfig`.
        strategy: `tf.distribute` strategy.
        when_ready: function without arguments. It is called before the first step, after the checkpoint is restored.
        service: `Service` that makes the batches; None for this process. See `axial.data.service`.

    Returns:
        dict of the last evaluation's scores; empty without an evaluation.

    Raises:
        InputError: a batch that cannot be shared equally by the replicas; a checkpoint of another model.
        Preempted: on SIGTERM or SIGINT, after a checkpoint was saved.
        NonFiniteError: a loss or gradient is not finite. The message names the first such tensors. Training stops at
            that step and leaves weights, optimizer and moving statistics as they were before it.
    """
    strategy = strategy or tf.distribute.get_strategy()
    if config.batch % strategy.num_replicas_in_sync:
        raise InputError(f"batch {config.batch} cannot be shared by {strategy.num_replicas_in_sync} replicas")
    if config.batch // strategy.num_replicas_in_sync % config.accumulate:
        share = config.batch // strategy.num_replicas_in_sync
        raise InputError(f"TrainingConfig.accumulate = {config.accumulate}: does not divide {share}, a replica's batch")
    set_precision(config.precision)
    tf.io.gfile.makedirs(model_dir)
    with strategy.scope():
        keras.utils.set_random_seed(config.seed)
        model = task.build_model()
        tf.random.set_seed(None)  # a global seed would change the order of the data
        optimizer.build(model.trainable_variables)
        loop = Loop(task, model, optimizer, config=config, strategy=strategy)
    latest_checkpoint(model_dir)  # names a damaged list of checkpoints
    averages = {"averages": optimizer.averages} if getattr(optimizer, "averages", None) else {}
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model, optimizer=optimizer, **averages),  # `restore_model` looks for this name
        model_dir,
        max_to_keep=config.keep,
        step_counter=optimizer.iterations,
        checkpoint_interval=config.checkpoint_interval,
    )
    if manager.latest_checkpoint:
        check_fits(model, manager.latest_checkpoint)
    elif config.init_checkpoint:
        print(initialize(model, config.init_checkpoint, task.model), file=sys.stderr)
        for average, weight in zip(averages.get("averages", ()), model.trainable_variables):
            average.assign(weight)
    with _quiet(), refuse_what_cannot_be_restored(manager.latest_checkpoint):
        controller = orbit.Controller(
            trainer=loop,
            strategy=strategy,
            global_step=optimizer.iterations,
            steps_per_loop=config.steps_per_loop,
            checkpoint_manager=manager,  # orbit restores the latest checkpoint here
            summary_manager=orbit.utils.SummaryManager(model_dir, write_scalar, optimizer.iterations),
        )
    if when_ready:
        when_ready()
    for folder in (model_dir, os.path.join(model_dir, "best")):
        remove_unfinished(folder)
    first_step = int(optimizer.iterations.numpy())
    served = {"service": service} if service else {}
    loop.train_dataset = strategy.distribute_datasets_from_function(
        lambda context: task.train_dataset(config.batch, config.seed, first_step, context, **served)
    )
    evaluation = _Evaluation(task, model, model_dir, strategy) if config.eval_interval else None
    scores = {}
    bar = dict(total=config.steps, initial=first_step, unit="step", desc="train")
    with _Signals() as signals, _quiet(), tqdm(**bar) as progress:
        controller.train_actions = (lambda output: _show(progress, output, optimizer),)

        def evaluate_now():
            weights = averaged(optimizer, model.trainable_variables)
            with controller.summary_manager.summary_writer().as_default(), weights:
                scores = evaluation.run(step)
            progress.write(f"step {step}: {task.kind.brief(scores)}", sys.stderr)
            return scores

        step = first_step
        if evaluation and _is_due(step, config) and not evaluation.is_done(step):  # a kill has interrupted it
            scores = evaluate_now()
        while step < config.steps:
            target = _next_multiple(step, config.steps_per_loop, config.steps)
            if evaluation:
                target = min(target, _next_multiple(step, config.eval_interval, config.steps))
            with name_damaged_records(task.data_dir, task.data.train_split):
                controller.train(target, checkpoint_at_completion=False)
            step = target
            signals.raise_if_any(controller)
            if evaluation and _is_due(step, config):
                controller.save_checkpoint()
                scores = evaluate_now()
        if first_step < config.steps or not manager.latest_checkpoint:
            controller.save_checkpoint()
    return scores


def _is_due(step, config):
    """Whether the training evaluates after this step."""
    return step > 0 and (step % config.eval_interval == 0 or step == config.steps)


def _next_multiple(step, interval, last):
    """The step at which a loop ends: the next multiple of `interval`, or `last` if that comes first."""
    return min((step // interval + 1) * interval, last)


@contextlib.contextmanager
def _quiet():
    """Keeps orbit from printing to standard output."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


class Loop(orbit.StandardTrainer):
    """Runs training steps of one task: losses, gradients and update. Reports the means of the losses over a loop.

    Args:
        task, model, optimizer, config, strategy: see `train`.
    """

    def __init__(self, task, model, optimizer, config, strategy):
        super().__init__(None, orbit.StandardTrainerOptions(use_tf_while_loop=True, use_tf_function=True))
        self.task, self.model, self.optimizer = task, model, optimizer
        self.config, self.strategy = config, strategy
        self.by_shape = getattr(task, "by_shape", _one_shape)  # batches of some tasks have one of several shapes
        self.bad_step = tf.Variable(-1, False, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        optimizer.is_stopped = self.is_stopped
        names = (*task.loss_names, "gradient_norm")
        self.metrics = {name: keras.metrics.Mean(name, dtype=tf.float32) for name in names}

    def is_stopped(self):
        """Whether the loss or a gradient of a step was not finite. From that step on nothing changes."""
        return self.bad_step >= 0

    def create_train_loop_fn(self):
        """Orbit's loop, which also ends after a step that is not finite."""
        # On a TPU, reading the variable would make the host wait for every step. So there the loop runs to its end, and
        # the steps that are left change nothing.
        looks = not isinstance(self.strategy, tf.distribute.TPUStrategy)

        @tf.function(autograph=False)
        def loop(iterator, num_steps):
            def goes_on(i):
                return (i < num_steps) & ~self.is_stopped() if looks else i < num_steps

            def step(i):
                with tf.name_scope(""):
                    self.train_step(iterator)
                return (i + 1,)

            tf.while_loop(goes_on, step, (tf.zeros_like(num_steps),), parallel_iterations=1)

        return loop

    def train_loop_begin(self):
        self.started, self.first_step = time.perf_counter(), int(self.optimizer.iterations.numpy())
        for metric in self.metrics.values():
            metric.reset_states()

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator):
        self.strategy.run(self.replica_step, (next(iterator),))

    @tf.autograph.experimental.do_not_convert
    def replica_step(self, batch):
        """One step of one replica."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        step = self.optimizer.iterations
        statistics = [(v, tf.convert_to_tensor(v)) for v in self.model.non_trainable_variables]
        losses, gradients = self._accumulated(batch, step, replica)
        variables = self.model.trainable_variables
        gradients = all_reduce_sums(*gradients)
        norm = tf.linalg.global_norm(gradients)
        (total,) = all_reduce_sums(losses["total"])
        finite = tf.math.is_finite(total + norm)
        self.bad_step.assign(tf.where(finite | self.is_stopped(), self.bad_step, step))
        stopped = self.is_stopped()
        for variable, before in statistics:
            variable.assign(tf.where(stopped, before, variable))
        gradients = [tf.where(stopped, tf.zeros([], g.dtype), g) for g in gradients]
        self.optimizer.apply_gradients(zip(gradients, variables), skip_gradients_aggregation=True)
        for name, value in {**losses, "gradient_norm": norm}.items():
            self.metrics[name].update_state(value)

    def _accumulated(self, batch, step, replica):
        """Means of the losses and gradients over the parts of a replica's batch."""
        count, total = self.config.accumulate, None
        parts = {name: tf.split(x, count) for name, x in batch.items()}
        for i in range(count):
            # One after the other, so that memory holds one part.
            with tf.control_dependencies(tf.nest.flatten(total or ())):
                part = {name: tf.identity(x[i]) for name, x in parts.items()}
            found = self._gradients(part, step * count + i, replica)
            total = found if total is None else tf.nest.map_structure(tf.add, total, found)
        return tf.nest.map_structure(lambda x: x / count, total) if count > 1 else total

    def _gradients(self, batch, step, replica):
        """(dict of losses, list of this replica's share of the gradients)."""

        def compute(batch):
            with tf.GradientTape() as tape:
                losses = self.task.losses(self.model, batch)
                share = losses["total"] / self.strategy.num_replicas_in_sync
            gradients = tape.gradient(share, self.model.trainable_variables)
            return losses, [tf.convert_to_tensor(gradient) for gradient in gradients]

        with random.seeded(self.config.seed, step, replica):
            return self.by_shape(compute, batch)

    def train_loop_end(self):
        self._raise_if_stopped()
        steps = int(self.optimizer.iterations.numpy()) - self.first_step
        output = {name: float(metric.result()) for name, metric in self.metrics.items()}
        output["learning_rate"] = float(self.optimizer.learning_rate.numpy())
        output["images_per_second"] = steps * self.config.batch / (time.perf_counter() - self.started)
        return output

    def _raise_if_stopped(self):
        """If a step was not finite, repeats it and raises NonFiniteError with the names of the first such tensors."""
        step = int(self.bad_step.numpy())
        if step < 0:
            return
        batch = next(iter(self.task.train_dataset(self.config.batch, self.config.seed, step)))
        with random.seeded(self.config.seed, step, 0):
            names = self.by_shape(lambda part: first_non_finite(self.task, self.model, part), batch)
        raise NonFiniteError(f"step {step}: the loss or a gradient is not finite; first: {', '.join(names)}")


def _one_shape(compute, batch):
    return compute(batch)


# === Between loops ===


def first_non_finite(task, model, batch, count=5):
    """Names of the first `count` tensors that are not finite, in the order of their computation.

    Weights come first, then inputs, outputs of layers, losses and gradients. The model is left as it was.
    """
    names = []

    def look(name, value):
        for tensor in tf.nest.flatten(value):
            if not (tf.is_tensor(tensor) and tensor.dtype.is_floating):
                continue
            if name not in names and not bool(tf.reduce_all(tf.math.is_finite(tensor))):
                names.append(name)

    for weight in model.weights:
        look(f"weight {weight.name}", tf.convert_to_tensor(weight))
    for name, value in batch.items():
        look(f"input {name}", value)
    statistics = [(v, tf.convert_to_tensor(v)) for v in model.non_trainable_variables]
    layers = [m for m in model.submodules if isinstance(m, keras.layers.Layer)]
    calls = {}
    try:
        for layer in layers:
            calls[layer] = layer.call
            layer.call = _watched(layer, look)
        with tf.GradientTape() as tape:
            losses = task.losses(model, batch)
    finally:
        for layer, call in calls.items():
            layer.call = call
        for variable, before in statistics:
            variable.assign(before)
    for name, value in losses.items():
        look(f"loss {name}", value)
    variables = model.trainable_variables
    for variable, gradient in zip(variables, tape.gradient(losses["total"], variables)):
        look(f"gradient of {variable.name}", tf.convert_to_tensor(gradient))
    return names[:count] or ["none when the step is repeated"]


def _watched(layer, look):
    call = layer.call

    def watched(*args, **kwargs):
        output = call(*args, **kwargs)
        look(f"output of {layer.name_scope().rstrip('/') or layer.name}", output)
        return output

    return watched


def _show(progress, output, optimizer):
    progress.set_postfix(loss=f"{output['total']:.3g}", img_s=f"{output['images_per_second']:.3g}", refresh=False)
    progress.update(int(optimizer.iterations.numpy()) - progress.n)
    progress.refresh()


class _Signals:
    """After a SIGTERM or SIGINT, saves a checkpoint and raises `Preempted` at the end of the running loop."""

    def __enter__(self):
        self.received = None
        self.old = {s: signal.signal(s, self._receive) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _receive(self, number, _):
        self.received = number

    def raise_if_any(self, controller):
        if self.received:
            controller.save_checkpoint()
            step = int(controller.global_step.numpy())
            raise Preempted(f"{signal.Signals(self.received).name}: saved at step {step}; the same command resumes")

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler)


class _Evaluation:
    """Evaluates during training: writes summaries and pictures, and saves the best checkpoint so far."""

    PICTURES = 4

    def __init__(self, task, model, model_dir, strategy):
        task.eval_dataset()  # names a split that does not exist before the training begins
        self.task, self.model_dir = task, model_dir
        self.predictions = task.predictions(model, strategy)
        self.checkpoint = tf.train.Checkpoint(model=model)
        self.best_dir = os.path.join(model_dir, "best")
        self.scores_path = os.path.join(self.best_dir, "scores.json")
        self.done_path = os.path.join(model_dir, "evaluated.json")

    def is_done(self, step):
        """Whether the evaluation of this step, or a later one, was finished."""
        if not tf.io.gfile.exists(self.done_path):
            return False
        return read_json(self.done_path, schemas.Evaluated)[1].step >= step

    def run(self, step):
        pictures = []

        def draw(example, table):
            if len(pictures) < self.PICTURES:
                pictures.append(self.task.picture(example, table))

        scores = evaluate(self.task.eval_dataset(), self.predictions, self.task.scores(), watch=draw)
        for name, value in self.task.kind.summaries(scores).items():
            write_scalar(f"eval/{name}", value, step)
        for i, picture in enumerate(pictures):
            tf.summary.image(f"photo_truth_prediction/{i}", picture[None], step)
        if not self._best() >= self.task.main_score(scores):
            manager = tf.train.CheckpointManager(self.checkpoint, self.best_dir, max_to_keep=1)
            manager.save(checkpoint_number=step)
            write_json(self.scores_path, {"step": step, **scores})
        write_json(self.done_path, {"step": step})
        return scores

    def _best(self):
        if not tf.io.gfile.exists(self.scores_path):
            return -math.inf
        scores = msgspec.to_builtins(read_json(self.scores_path, self.task.best_scores)[1])
        best = self.task.main_score(scores)
        return -math.inf if best is None else best
