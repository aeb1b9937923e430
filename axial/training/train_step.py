"""The train step of a task. On a TPU, orbit runs several steps as one loop, without the host in between."""

import time
import unittest.mock

import orbit
import tensorflow as tf
import tf_keras as keras

from axial.data.streams import name_damaged_records
from axial.errors import NonFiniteError
from axial.layers import device, random
from axial.layers.batch_norm import all_reduce_sums
from axial.layers.rematerialisation import statistics_kept
from axial.tasks.base import whole_batch
from axial.training.strategy import total_over_workers, workers


def _set_passes(on):
    """Turns those graph passes of TensorFlow on or off that make a step on a CPU neither faster nor smaller."""
    passes = ("constant_folding", "layout_optimizer", "remapping")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(passes, on))


class TrainStep(orbit.StandardTrainer):
    """Runs the train steps of one task: losses, gradients and update. Averages the losses between two reports.

    Args:
        task, config, strategy: see `axial.training.trainer.train`.
        model: the task's model.
        optimizer: `Optimizer` of the model's weights.
        service: see `RunOptions`.
    """

    def __init__(self, task, model, optimizer, config, strategy, *, service=None):
        super().__init__(None)
        self.task, self.model, self.optimizer = task, model, optimizer
        self.config, self.strategy, self.service = config, strategy, service
        self.waited = tf.Variable(0.0, False, dtype=tf.float64)  # seconds of waiting for batches
        with strategy.scope():
            names = (*task.loss_names, "gradient_norm")
            self.sums = {name: keras.metrics.Mean(name, dtype=tf.float32) for name in names}

    @property
    def train_dataset(self):
        """The distributed batches from the optimizer's current step on. orbit reads this property at its first loop."""
        config, step = self.config, int(self.optimizer.iterations.numpy())
        return self.strategy.distribute_datasets_from_function(
            lambda context: self.task.train_dataset(config.batch, config.seed, step, context, service=self.service)
        )

    def run(self, count):
        """Runs `count` steps.

        Returns:
            (seconds, waited): the duration, averaged over workers, and the time of waiting for batches, in seconds.

        Raises:
            InputError: a record is damaged.
            NonFiniteError: a loss or gradient is not finite.
        """
        before, started = self.waited.numpy(), time.perf_counter()
        with name_damaged_records(self.task.data_dir, self.task.data.train_split):
            self.train(tf.constant(count, tf.int32))
        seconds = total_over_workers(self.strategy, time.perf_counter() - started) / workers(self.strategy)
        return seconds, float(self.waited.numpy() - before)

    def create_train_loop_fn(self):
        """The function of (iterator, count) that runs `count` steps: on a TPU one function on the device.

        Elsewhere each step is a call of its own. TensorFlow needs a third more time to optimise the graph of a loop. In
        such a graph, memory addresses would also decide which of two max pooling gradients TensorFlow takes, and the
        two round differently.
        """
        if isinstance(self.strategy, tf.distribute.TPUStrategy):
            return super().create_train_loop_fn()
        step = tf.function(self.train_step, autograph=False)

        def run_steps(iterator, count):
            concrete = step.get_concrete_function(iterator)
            _set_passes(not device.on_cpu())
            try:
                for _ in range(count):
                    concrete(iterator)
            finally:
                _set_passes(True)

        return run_steps

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator):
        started = tf.timestamp()
        batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            self.waited.assign_add(tf.timestamp() - started)
        if not self.config.is_compiled():
            self.strategy.run(self.replica_step, (batch,))
        elif self.strategy.num_replicas_in_sync == 1:
            self.strategy.run(device.compiled(self.replica_step), (batch,))
        else:  # a compiled function of one replica cannot assign mirrored variables
            update = self.strategy.run(device.compiled(self.replica_gradients), (batch,))
            self.strategy.run(self.replica_update, update)

    def replica_step(self, batch):
        """One step of one replica."""
        self.replica_update(*self.replica_gradients(batch))

    def replica_gradients(self, batch):
        """The arguments of `replica_update`, from the batch of one replica. Also updates the moving statistics."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        batch = _split_rows(batch, self.config.partitions, self.strategy)
        statistics = [tf.convert_to_tensor(v) for v in self.model.non_trainable_variables]
        losses, gradients = self._accumulated(batch, self.optimizer.iterations, replica)
        with tf.name_scope("gradient_sum"):
            gradients = all_reduce_sums(*gradients)
            (total,) = all_reduce_sums(losses["total"])
        return losses, gradients, total, statistics

    def replica_update(self, losses, gradients, total, statistics):
        """Updates the weights on one replica if loss and gradients are finite, and adds the losses to their means.

        Args:
            losses: dict of this replica's losses.
            gradients, total: gradients and loss of the global batch.
            statistics: the moving statistics before the step. A step that is not finite restores these.
        """
        with tf.name_scope("optimizer"):
            norm = tf.linalg.global_norm(gradients)
            if self.config.clip_norm:
                gradients, _ = tf.clip_by_global_norm(gradients, self.config.clip_norm, norm)
            self.optimizer.apply(gradients, self.model.trainable_variables, tf.math.is_finite(total + norm))
            stopped = self.optimizer.is_stopped()
            for variable, before in zip(self.model.non_trainable_variables, statistics, strict=True):
                variable.assign(tf.where(stopped, before, variable))
        with tf.name_scope("metrics"):
            for name, value in {**losses, "gradient_norm": norm}.items():
                self.sums[name].update_state(value)

    def _accumulated(self, batch, step, replica):
        """Mean losses and gradients over the micro-batches of a replica's batch.

        Some losses divide by counts over the global batch, so these counts are computed first. A detector's counts
        depend on its proposals, so an extra forward pass computes the counts. A single micro-batch needs no counts,
        unless its losses are computed in branches (`by_shape`), in which sums over replicas are not possible.
        """
        count, whole = self.config.accumulate, None
        split = {name: tf.split(x, count) for name, x in batch.items()}
        micro_batches = [{name: x[i] for name, x in split.items()} for i in range(count)]

        def counts(i, micro_batch):
            with random.seeded(self.config.seed, step * count + i, replica), statistics_kept():
                return self.task.counts(self.model, micro_batch)

        if self.task.counted and (count > 1 or self.task.branched):
            whole = whole_batch(_added(counts, micro_batches), count)
        total = _added(lambda i, x: self._gradients(x, step * count + i, replica, whole), micro_batches)
        return tf.nest.map_structure(lambda x: x / count, total) if count > 1 else total

    def _gradients(self, batch, step, replica, whole):
        """(dict of this replica's losses, list of the gradients of this replica's share of the global mean loss)."""

        def compute(batch):
            with tf.GradientTape() as tape:
                losses = self.task.losses(self.model, batch, whole)
                replica_loss = losses["total"] / self.strategy.num_replicas_in_sync
            gradients = tape.gradient(replica_loss, self.model.trainable_variables)
            return losses, [tf.convert_to_tensor(gradient) for gradient in gradients]

        with random.seeded(self.config.seed, step, replica):
            return self.task.by_shape(compute, batch)

    def take_means(self):
        """dict of the mean losses since the last call, and the learning rate."""
        means = {name: float(metric.result()) for name, metric in self.sums.items()}
        for metric in self.sums.values():
            metric.reset_states()
        return {**means, "learning_rate": float(self.optimizer.learning_rate.numpy())}

    def train_loop_end(self):
        """If a step was not finite, repeats it and raises NonFiniteError with the names of the first bad tensors."""
        if (step := int(self.optimizer.bad_step.numpy())) < 0:
            return
        try:
            names = _repeat(self.task, self.model, self.config, step, replicas=self.strategy.num_replicas_in_sync)
        except (MemoryError, tf.errors.ResourceExhaustedError):
            names = ["not known, there is not enough memory to repeat the step"]
        raise NonFiniteError(f"step {step}: the loss or a gradient is not finite; first: {', '.join(names)}")


def _split_rows(batch, partitions, strategy):
    """The batch of a replica, whose images and maps are split by rows over the replica's devices."""

    def split(x):
        if partitions == 1 or x.shape.rank < 3:  # not an image or a map
            return x
        return strategy.experimental_split_to_logical_devices(x, [1, partitions] + [1] * (x.shape.rank - 2))

    return {name: split(x) for name, x in batch.items()}


def _added(compute, micro_batches):
    """The sum of compute(i, micro_batch) over the micro-batches. These run in sequence, so memory holds only one."""
    total = None
    for i, micro_batch in enumerate(micro_batches):
        with tf.control_dependencies(tf.nest.flatten(total or ())):
            micro_batch = {name: tf.identity(x) for name, x in micro_batch.items()}
        terms = compute(i, micro_batch)
        total = terms if total is None else tf.nest.map_structure(tf.add, total, terms)
    return total


# === A step that is not finite ===


def _repeat(task, model, config, step, replicas):
    """The result of `first_non_finite` for a repeated step. Only the first host's batches are read."""
    batches = iter(task.train_dataset(config.batch, config.seed, step, tf.distribute.InputContext(1, 0, replicas)))
    for replica in range(replicas):
        batch = next(batches)
        for i in range(config.accumulate):
            micro_batch = {name: tf.split(x, config.accumulate)[i] for name, x in batch.items()}
            with random.seeded(config.seed, step * config.accumulate + i, replica):
                names = task.by_shape(lambda x: first_non_finite(task, model, x), micro_batch)
            if names:
                return names
    return ["none when the step is repeated operation by operation"]


def first_non_finite(task, model, batch, count=5):
    """Names of the first `count` tensors that are not finite, in the order of their computation; [] if all are finite.

    Weights come first, then inputs, outputs of layers, losses and gradients. The call does not change the model.
    """
    names, call = [], keras.layers.Layer.__call__

    def look(name, value):
        for tensor in tf.nest.flatten(value):
            floats = tf.is_tensor(tensor) and tensor.dtype.is_floating
            if floats and name not in names and not bool(tf.reduce_all(tf.math.is_finite(tensor))):
                names.append(name)

    def watched(layer, *args, **kwargs):
        output = call(layer, *args, **kwargs)
        look(f"output of {layer.name_scope().rstrip('/') or layer.name}", output)
        return output

    for weight in model.weights:
        look(f"weight {weight.name}", tf.convert_to_tensor(weight))
    for name, value in batch.items():
        look(f"input {name}", value)
    statistics = [(v, tf.convert_to_tensor(v)) for v in model.non_trainable_variables]
    with unittest.mock.patch.object(keras.layers.Layer, "__call__", watched), tf.GradientTape() as tape:
        losses = task.losses(model, batch)
    for variable, before in statistics:
        variable.assign(before)
    for name, value in losses.items():
        look(f"loss {name}", value)
    variables = model.trainable_variables
    for variable, gradient in zip(variables, tape.gradient(losses["total"], variables)):
        look(f"gradient of {variable.name}", tf.convert_to_tensor(gradient))
    return names[:count]
