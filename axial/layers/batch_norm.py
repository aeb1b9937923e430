"""Batch normalisation (Ioffe & Szegedy, 2015), one layer for convolutions and for attention."""

import dataclasses
import functools
import math

import tensorflow as tf

from axial.errors import InputError
from axial.io.check import BelowOne, Checked, Natural, Positive
from axial.layers.configured import Initializer, Layer
from axial.layers.precision import wide, widen
from axial.layers.rematerialisation import are_statistics_kept


@dataclasses.dataclass(frozen=True)
class BatchNormConfig(Checked):
    """The options of all batch norms of a model.

    Attributes:
        momentum: weight of the old moving statistics in each update (1 - momentum in PyTorch).
        epsilon: constant added to the variance before the square root.
        unbiased: whether the moving variance averages the unbiased batch variance, as in PyTorch and in TensorFlow's
            fused op. DeepLab2's attention layers average the biased one. The outputs in training are the same.
        group: number of replicas that share statistics, a divisor of the number of replicas; 0 for all replicas.
        frozen: whether training uses the moving statistics and does not update them.
    """

    momentum: BelowOne = 0.99
    epsilon: Positive = 1e-3
    unbiased: bool = False
    group: Natural = 0
    frozen: bool = False


Norm = BatchNormConfig | None  # None for a layer with folded batch norms


def all_reduce_sums(*values, group=0):
    """Sums each tensor over the replicas of the current strategy. The sums are differentiable.

    Args:
        group: number of neighbouring replicas that share a sum; 0 for all replicas.

    Raises:
        InputError: `group` does not divide the number of replicas.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return values
    groups, rest = divmod(context.num_replicas_in_sync, group or context.num_replicas_in_sync)
    if rest:
        raise InputError(f"BatchNormConfig.group = {group}: does not divide {context.num_replicas_in_sync} replicas")
    total = tf.distribute.ReduceOp.SUM
    if groups == 1:
        return context.all_reduce(total, list(values))
    # All replicas reduce a tensor with one row per group, because not every strategy can reduce within groups.
    group_index = context.replica_id_in_sync_group // group
    rows = [tf.tensordot(tf.one_hot(group_index, groups, dtype=x.dtype), x, 0) for x in values]
    return [tf.gather(x, group_index) for x in context.all_reduce(total, rows)]


def combine(mean, variance, count, *, group=0):
    """(mean, biased variance, count) over all replicas, from this replica's statistics. The results are differentiable.

    The means are summed first, then the variances and the squared distances of the means from the global mean (Chan,
    Golub and LeVeque, 1979). Sums of squares would round away a variance that is far below the square of the mean.

    Args:
        group: see `all_reduce_sums`.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return mean, variance, count
    sums, total = all_reduce_sums(mean * count, count, group=group)
    total = tf.maximum(total, 1.0)  # the sum is 0 if no replica has an image
    together = sums / total
    # The global mean minimises the sum of the squared distances, so the gradient through the global mean is zero.
    apart = tf.square(mean - tf.stop_gradient(together))
    (squares,) = all_reduce_sums((variance + apart) * count, group=group)
    return together, squares / total, total


def add_norm_weights(layer, shape, dtype, gamma="ones", beta=False):
    """Adds gamma, optionally beta, and the moving mean and variance to a layer with a `config`. Returns these weights.

    Without groups all replicas have equal moving statistics. So a read across replicas takes the first replica's
    values, because an average of equal numbers could be rounded.
    """
    aggregation = tf.VariableAggregation.MEAN if layer.config.group else tf.VariableAggregation.ONLY_FIRST_REPLICA
    on_read = tf.VariableSynchronization.ON_READ
    add = functools.partial(layer.add_weight, shape=shape, dtype=dtype, experimental_autocast=False)
    weights = [add("gamma", initializer=gamma), *([add("beta", initializer="zeros")] if beta else [])]
    moving = functools.partial(add, trainable=False, synchronization=on_read, aggregation=aggregation)
    return [*weights, moving("moving_mean", initializer="zeros"), moving("moving_variance", initializer="ones")]


def global_scale(norm, mean, variance, count):
    """(mean, scale) over all replicas, from this replica's statistics. Updates the moving statistics of `norm`."""
    mean, variance, count = combine(mean, variance, count, group=norm.config.group)
    update_moving(norm.config, norm.moving_mean, norm.moving_variance, mean=mean, variance=variance, count=count)
    return mean, norm.gamma * tf.math.rsqrt(variance + norm.config.epsilon)


def global_scale_from_sums(norm, total, squares, count):
    """`global_scale` of `count` numbers, from their sum `total` and the sum of their squares `squares`."""
    mean, square = (x / tf.maximum(count, 1.0) for x in (total, squares))  # a replica may have no image
    return global_scale(norm, mean, tf.maximum(square - mean * mean, 0.0), count)


class BatchNorm(Layer):
    """Normalises each channel by its mean and variance over all replicas, or over a group of replicas.

    Keras' layer is either fused or synchronised, and the two variants have different moving variances. This layer uses
    the fused op on one replica and synchronised statistics on several. `config.unbiased` decides the moving variance in
    both cases. Statistics are float32 under every policy except float64. A layer that is not trainable runs as in
    inference.

    Args:
        config: `BatchNormConfig`.
        gamma_initializer: initializer of gamma. With 'zeros' the output starts at zero, for a residual branch.

    Shapes:
        - x: [..., C]
        - output: [..., C]

    Examples:
        >>> from axial.layers import BatchNorm, BatchNormConfig
        >>> x = tf.ones([2, 9, 7, 16])
        >>> y = BatchNorm(BatchNormConfig())(x)
    """

    def __init__(self, config: BatchNormConfig, gamma_initializer: Initializer = "ones", **kwargs):
        super().__init__(**kwargs)
        self.config = config
        self.gamma_initializer = gamma_initializer

    def build(self, shape: tf.TensorShape) -> None:
        self.gamma, self.beta, self.moving_mean, self.moving_variance = add_norm_weights(
            self, [shape[-1]], wide(self.compute_dtype), self.gamma_initializer, beta=True
        )
        super().build(shape)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        training = training and self.trainable and not self.config.frozen
        if training and (tf.distribute.get_strategy().num_replicas_in_sync > 1 or x.dtype == tf.float64):
            return self._by_batch(x)
        if x.dtype == tf.float64:  # the fused op does not support float64
            scale, shift = self.folded()
            return x * scale + shift
        maps = x if x.shape.rank == 4 else tf.reshape(x, [1, 1, -1, x.shape[-1]])
        empty = tf.zeros([0])
        gamma, count = self.gamma, _count(x) if training else 0.0
        if training and not x.shape[0]:  # without images, the gradient would be NaN under XLA
            gamma = tf.where(count > 0, gamma, tf.stop_gradient(gamma))
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=maps,
            scale=gamma,
            offset=self.beta,
            mean=empty if training else self.moving_mean,
            variance=empty if training else self.moving_variance,
            epsilon=self.config.epsilon,
            is_training=bool(training),
        )
        if training:
            # The op returns the unbiased variance, and `update_moving` expects the biased one.
            variance = variance * (count - 1) / tf.maximum(count, 1.0)
            moving = self.moving_mean, self.moving_variance
            update_moving(self.config, *moving, mean=mean, variance=variance, count=count)
        return tf.reshape(y, tf.shape(x)) if x.shape.rank != 4 else y

    def _by_batch(self, x):
        axes = list(range(x.shape.rank - 1))
        # The first pixel is subtracted before the statistics are computed. Squares of the original values would round
        # away a variance that is far below the square of the mean. Without images, the first pixel counts as zero.
        origin = tf.stop_gradient(tf.reduce_sum(widen(x[(slice(1),) * len(axes)]), axes))
        distance, count = widen(x) - origin, _count(x)
        mean, square = (tf.reduce_sum(a, axes) / tf.maximum(count, 1.0) for a in (distance, distance * distance))
        variance = tf.maximum(square - mean * mean, 0.0)
        mean, scale = global_scale(self, origin + mean, variance, count)
        return tf.cast(distance * scale + (self.beta - (mean - origin) * scale), x.dtype)

    def affine(self, total: tf.Tensor, squares: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """(scale, shift), [C] each, of the batch norm in training. Updates the moving statistics.

        Args:
            total, squares: sums of x and of x^2 on this replica, [C].
            count: number of values in each sum.
        """
        mean, scale = global_scale_from_sums(self, total, squares, count)
        return scale, self.beta - mean * scale

    def folded(self) -> tuple[tf.Tensor, tf.Tensor]:
        """(scale, shift), [C] each, of the batch norm in inference."""
        scale = self.gamma * tf.math.rsqrt(self.moving_variance + self.config.epsilon)
        return scale, self.beta - self.moving_mean * scale


class LogitNorm(Layer):
    """The scales [terms, H] by which batch norms multiply logits: gamma / sqrt(variance + epsilon).

    Softmax ignores the mean and the beta of a batch norm. The layer still stores the moving mean, because other
    implementations use it.

    Args:
        shape: [number of logit terms, number of heads].
        config: `BatchNormConfig`.
    """

    def __init__(self, shape, config, name=None):
        super().__init__(name=name)
        self.shape, self.config = shape, config

    def build(self, shape):
        self.gamma, self.moving_mean, self.moving_variance = add_norm_weights(self, self.shape, self.dtype)
        super().build(shape)

    def stored_scales(self):
        """The scales in inference, from the moving variance."""
        return self.gamma * tf.math.rsqrt(self.moving_variance + self.config.epsilon)

    def call(self, sums, pairs):
        """The scales in training. Updates the moving statistics.

        Args:
            sums: [terms, H, 2], sums of the logits and of their squares on this replica.
            pairs: number of logits in each sum.
        """
        return global_scale_from_sums(self, *tf.unstack(sums, axis=2), count=pairs)[1]


@dataclasses.dataclass(frozen=True)
class BatchScales:
    """The scales of logits in training, from the statistics of the batch.

    Attributes:
        norm: `LogitNorm`.
        pairs: number of logits in each sum.
    """

    norm: LogitNorm
    pairs: tf.Tensor

    def from_sums(self, sums):
        """The scales [terms, H]; see `LogitNorm.call`."""
        return self.norm(sums, self.pairs)


def _count(x):
    """The number of elements per channel of x, a float."""
    if x.shape.is_fully_defined():
        return tf.constant(math.prod(x.shape[:-1]), wide(x.dtype))
    return tf.cast(tf.reduce_prod(tf.shape(x)[:-1]), wide(x.dtype))


def update_moving(config, moving_mean, moving_variance, *, mean, variance, count):
    """Updates the moving statistics with the mean and biased variance of `count` numbers, which may be 0."""
    if are_statistics_kept():
        return
    if config.unbiased:
        variance = variance * count / tf.maximum(count - 1, 1.0)
    for moving, batch in ((moving_mean, mean), (moving_variance, variance)):
        if not tf.get_static_value(count):
            batch = tf.where(count > 0, batch, moving)
        moving.assign_sub((moving - tf.stop_gradient(batch)) * (1 - config.momentum))
