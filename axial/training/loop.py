"""The training steps of a task, as loops of orbit that run without the host."""

import contextlib
import functools
import time

import orbit
import tensorflow as tf
import tf_keras as keras

from axial.data.streams import name_damaged_records
from axial.errors import InputError, NonFiniteError
from axial.layers import random
from axial.layers.batch_norm import all_reduce_sums
from axial.layers.device import is_compiled, on_cpu
from axial.layers.recompute import statistics_kept
from axial.tasks.base import whole_batch
from axial.training.strategy import total_over_workers, workers


class Loop(orbit.StandardTrainer):
    """Runs training steps of one task: losses, gradients and update. Reports the means of the losses over a loop.

    Args:
        task, model, optimizer, config, strategy: see `axial.training.trainer.train`.
    """

    def __init__(self, task, model, optimizer, config, strategy):
        super().__init__(None, orbit.StandardTrainerOptions(use_tf_while_loop=True, use_tf_function=True))
        self.task, self.model, self.optimizer = task, model, optimizer
        self.config, self.strategy = config, strategy
        self.compiled = is_compiled(config.jit_compile)
        self.waited = tf.Variable(0.0, False, dtype=tf.float64)  # seconds, for the next batch
        with strategy.scope():
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self.bad_step = tf.Variable(-1, False, dtype=tf.int64, aggregation=first)
            names = (*task.loss_names, "gradient_norm")
            self.sums = {name: keras.metrics.Mean(name, dtype=tf.float32) for name in names}
        optimizer.is_stopped = self.is_stopped

    def run(self, count):
        """Runs `count` steps.

        Returns:
            the seconds that they took, of several workers a mean; those of them in which they waited for their input.

        Raises:
            InputError: a damaged record.
            NonFiniteError: a loss or gradient is not finite.
        """
        before, started = self.waited.numpy(), time.perf_counter()
        with name_damaged_records(self.task.data_dir, self.task.data.train_split):
            self.train(tf.constant(count, tf.int32))
        seconds = total_over_workers(self.strategy, time.perf_counter() - started) / workers(self.strategy)
        return seconds, float(self.waited.numpy() - before)

    def is_stopped(self):
        """Whether the loss or a gradient of a step was not finite. From that step on nothing changes."""
        return self.bad_step >= 0

    def create_train_loop_fn(self):
        """Orbit's loop, which also ends after a step that is not finite."""
        # On a TPU, reading the variable would make the host wait for every step. So there the loop runs to its end, and
        # the steps that are left change nothing.
        on_tpu = isinstance(self.strategy, tf.distribute.TPUStrategy)
        train_step = self.train_step
        if not on_tpu:
            # A function of its own. In the graph of a loop TensorFlow chooses between two gradients of the maximum pool
            # by the order of addresses, and they round in different ways.
            train_step = tf.function(train_step, autograph=False, experimental_attributes={"_noinline": True})

        @tf.function(autograph=False)
        def loop(iterator, num_steps):
            def goes_on(i):
                return i < num_steps if on_tpu else (i < num_steps) & ~self.is_stopped()

            def step(i):
                with tf.name_scope(""):
                    train_step(iterator)
                return (i + 1,)

            tf.while_loop(goes_on, step, (tf.zeros_like(num_steps),), parallel_iterations=1)

        return loop

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator):
        started = tf.timestamp()
        batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            self.waited.assign_add(tf.timestamp() - started)
        if not self.compiled:
            self.strategy.run(self.replica_step, (batch,))
        elif self.strategy.num_replicas_in_sync == 1:
            self.strategy.run(_compiled(self.replica_step), (batch,))
        else:  # a compiled function of a replica cannot assign variables of which all replicas hold one value
            found = self.strategy.run(_compiled(self.replica_gradients), (batch,))
            self.strategy.run(self.replica_update, found)

    @tf.autograph.experimental.do_not_convert
    def replica_step(self, batch):
        """One step of one replica."""
        self.replica_update(*self.replica_gradients(batch))

    @tf.autograph.experimental.do_not_convert
    def replica_gradients(self, batch):
        """What `replica_update` takes, from the batch of one replica. Updates the moving statistics."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        batch = self._split_rows(batch)
        statistics = [tf.convert_to_tensor(v) for v in self.model.non_trainable_variables]
        losses, gradients = self._accumulated(batch, self.optimizer.iterations, replica)
        with tf.name_scope("gradient_sum"):
            gradients = all_reduce_sums(*gradients)
            (total,) = all_reduce_sums(losses["total"])
        return losses, gradients, total, statistics

    @tf.autograph.experimental.do_not_convert
    def replica_update(self, losses, gradients, total, statistics):
        """Updates the weights, unless the loss or a gradient is not finite, and the means of the losses on one replica.

        Args:
            losses: of this replica.
            gradients, total: gradients and loss of the whole batch.
            statistics: the moving statistics before the step. A step that is not finite brings them back.
        """
        with tf.name_scope("optimizer"):
            step, norm = self.optimizer.iterations, tf.linalg.global_norm(gradients)
            if self.config.clip_norm:
                gradients, _ = tf.clip_by_global_norm(gradients, self.config.clip_norm, norm)
            finite = tf.math.is_finite(total + norm)
            self.bad_step.assign(tf.where(finite | self.is_stopped(), self.bad_step, step))
            stopped = self.is_stopped()
            for variable, before in zip(self.model.non_trainable_variables, statistics, strict=True):
                variable.assign(tf.where(stopped, before, variable))
            gradients = [tf.where(stopped, tf.zeros([], g.dtype), g) for g in gradients]
            pairs = zip(gradients, self.model.trainable_variables)
            self.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
        with tf.name_scope("metrics"):
            for name, value in {**losses, "gradient_norm": norm}.items():
                self.sums[name].update_state(value)

    def _split_rows(self, batch):
        """The batch, whose maps are cut into rows for the devices of this replica."""
        parts = self.config.partitions
        if parts == 1:
            return batch

        def split(x):
            if x.shape.rank < 3:  # no map
                return x
            return self.strategy.experimental_split_to_logical_devices(x, [1, parts] + [1] * (x.shape.rank - 2))

        return {name: split(x) for name, x in batch.items()}

    def _accumulated(self, batch, step, replica):
        """Means of the losses and gradients over the parts of a replica's batch."""
        count = self.config.accumulate
        split = {name: tf.split(x, count) for name, x in batch.items()}
        parts = [{name: x[i] for name, x in split.items()} for i in range(count)]
        whole = self._whole(parts, step, replica)

        def compute(i, part):
            return self._gradients(part, step * count + i, replica, whole=whole)

        total = _added(compute, parts)
        return tf.nest.map_structure(lambda x: x / count, total) if count > 1 else total

    def _whole(self, parts, step, replica):
        """`whole_batch` of the counts that the losses divide by; None for losses that need none, or find it themselves.

        The counts of a detector depend on the boxes that it proposes, so its parts are computed once more, without
        gradients. A batch that is not split has none of this. Losses in branches cannot add up over replicas, so their
        counts come first.
        """
        if not self.task.counted or (len(parts) == 1 and not self.task.branched):
            return None

        def compute(i, part):
            with random.seeded(self.config.seed, step * len(parts) + i, replica), statistics_kept():
                return self.task.counts(self.model, part)

        return whole_batch(_added(compute, parts), len(parts))

    def _gradients(self, batch, step, replica, *, whole=None):
        """(dict of losses, list of this replica's share of the gradients)."""

        def compute(batch):
            with tf.GradientTape() as tape:
                losses = self.task.losses(self.model, batch, whole)
                share = losses["total"] / self.strategy.num_replicas_in_sync
            gradients = tape.gradient(share, self.model.trainable_variables)
            return losses, [tf.convert_to_tensor(gradient) for gradient in gradients]

        with random.seeded(self.config.seed, step, replica):
            return self.task.by_shape(compute, batch)

    def take_means(self):
        """dict of the means since the last call, and the learning rate."""
        means = {name: float(metric.result()) for name, metric in self.sums.items()}
        for metric in self.sums.values():
            metric.reset_states()
        return {**means, "learning_rate": float(self.optimizer.learning_rate.numpy())}

    def train_loop_end(self):
        """If a step was not finite, repeats it and raises NonFiniteError with the names of the first such tensors."""
        step = int(self.bad_step.numpy())
        if step < 0:
            return
        try:
            names = self._repeat(step)
        except (MemoryError, tf.errors.ResourceExhaustedError):
            names = ["not known, there is not enough memory to repeat the step"]
        raise NonFiniteError(f"step {step}: the loss or a gradient is not finite; first: {', '.join(names)}")

    def _repeat(self, step):
        """`first_non_finite` of a step, part by part as memory held it. Of several hosts it sees the first one's."""
        config, replicas = self.config, self.strategy.num_replicas_in_sync
        context = tf.distribute.InputContext(1, 0, replicas)
        batches = iter(self.task.train_dataset(config.batch, config.seed, step, context))
        for replica in range(replicas):
            batch = next(batches)
            for i in range(config.accumulate):
                part = {name: tf.split(x, config.accumulate)[i] for name, x in batch.items()}
                with random.seeded(config.seed, step * config.accumulate + i, replica):
                    names = self.task.by_shape(lambda part: first_non_finite(self.task, self.model, part), part)
                if names:
                    return names
        return ["none when the step is repeated operation by operation"]


def check_loop(task, model, config, strategy):
    """Raises InputError if cores share an image and the TPU kernels are used, or if several CPUs shall compile."""
    # The loss has the backend of `ModelConfig`, which not all models take.
    users = (task.model, *model.submodules)
    if config.partitions > 1 and any(getattr(user, "backend", "") == "kernel" for user in users):
        raise InputError(
            f"TrainingConfig.partitions = {config.partitions}: the TPU kernels do not share an image; bind "
            "ModelConfig.backend = 'auto' too"
        )
    if is_compiled(config.jit_compile) and strategy.num_replicas_in_sync > 1 and on_cpu():
        raise InputError(
            f"TrainingConfig.jit_compile = {config.jit_compile!r}: XLA sums over no replicas on CPUs; bind 'auto'"
        )


def _compiled(function):
    return tf.function(function, autograph=False, jit_compile=True)


def _added(compute, parts):
    """The sum of compute(i, part) over the parts, one after the other, so that memory holds one part."""
    total = None
    for i, part in enumerate(parts):
        with tf.control_dependencies(tf.nest.flatten(total or ())):
            part = {name: tf.identity(x) for name, x in part.items()}
        found = compute(i, part)
        total = found if total is None else tf.nest.map_structure(tf.add, total, found)
    return total


# === A step that is not finite ===


def first_non_finite(task, model, batch, count=5):
    """Names of the first `count` tensors that are not finite, in the order of their computation; [] if all are.

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
    with contextlib.ExitStack() as after:
        for variable, before in statistics:
            after.callback(variable.assign, before)
        for layer in layers:
            after.callback(setattr, layer, "call", layer.call)
            layer.call = functools.partial(_watched, layer, layer.call, look)
        with tf.GradientTape() as tape:
            losses = task.losses(model, batch)
    for name, value in losses.items():
        look(f"loss {name}", value)
    variables = model.trainable_variables
    for variable, gradient in zip(variables, tape.gradient(losses["total"], variables)):
        look(f"gradient of {variable.name}", tf.convert_to_tensor(gradient))
    return names[:count]


def _watched(layer, call, look, *args, **kwargs):
    output = call(*args, **kwargs)
    look(f"output of {layer.name_scope().rstrip('/') or layer.name}", output)
    return output
