"""The optimizers and their learning rate schedules: of segmentation, of classification, and of translation."""

import contextlib
import dataclasses
import functools
import inspect
import math
import numbers
import re
import types
import typing

import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.io.check import BelowOne, Checked, Count, Fraction, Name, Natural, NonNegative, Positive, check_arguments

NO_DECAY = re.compile(r"(gamma|beta|bias)(:\d+)?$")
TABLE = re.compile(r"_table(:\d+)?$")  # of positions


def arguments(built, leave=()):
    """dict of the arguments that an object was made with, which are its attributes, but for some names."""
    names = [name for name in inspect.signature(type(built)).parameters if name not in leave]
    return {name: getattr(built, name) for name in names}


class _Stoppable(keras.optimizers.Optimizer):
    """An optimizer whose steps change nothing while it is stopped. A subclass makes its slots and a step's scalars.

    A variable's attribute `learning_rate_factor` multiplies its learning rate: its whole update, weight decay included.

    Attributes:
        is_stopped: function without arguments that returns a bool tensor. While it is true, `apply_gradients` changes
            nothing: no weight, no slot, not the number of steps. The gradients must be finite even then.
        first_step: the step at which the slots began: 0, or where a resumed training took another optimizer. What
            depends on the age of the slots counts from there.

    Raises:
        InputError: a learning rate that is neither a schedule nor a finite number from 0.
    """

    def __init__(self, learning_rate, **kwargs):
        super().__init__(**kwargs)
        schedule = isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule)
        number = isinstance(learning_rate, numbers.Real) and not isinstance(learning_rate, bool)
        if not schedule and not (number and 0 <= learning_rate <= 1e30):  # as NonNegative
            name = f"{type(self).__name__}.learning_rate"
            raise InputError(f"{name} = {learning_rate!r}: expected a number >= 0 or a schedule, like @WarmupPoly()")
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.is_stopped = functools.partial(tf.constant, False)

    def build(self, variables):
        super().build(variables)
        if not getattr(self, "_built", False):
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self.first_step = tf.Variable(0, trainable=False, name="first_step", dtype=tf.int64, aggregation=first)
            self._add_slots(variables)
            factors = {self._var_key(v): getattr(v, "learning_rate_factor", 1.0) for v in variables}
            # A checkpoint would list a plain dict as a part of the optimizer.
            self._factors = types.MappingProxyType(factors)
            self._built = True

    def _slots(self, variables, *names):
        """Of each name, a list of variables of zeros like some."""
        return [[self.add_variable_from_reference(variable, name) for variable in variables] for name in names]

    def _distributed_apply_gradients_fn(self, distribution, grads_and_vars, **kwargs):
        stopped = self.is_stopped()
        scalars, found = self._scalars(stopped), {}
        for factor in self._factors.values():  # once for a step and a factor, not once for each variable
            if factor not in found:
                found[factor] = {k: factor * x if k in ("lr", "decay") else x for k, x in scalars.items()}
        self._now = types.MappingProxyType(found)
        super()._distributed_apply_gradients_fn(distribution, grads_and_vars, **kwargs)
        self.iterations.assign_sub(tf.cast(stopped, self.iterations.dtype))

    def _of(self, variable):
        """(the index of a variable's slots, the scalars of its update)."""
        key = self._var_key(variable)
        return self._index_dict[key], self._now[self._factors[key]]

    def get_config(self):
        own = arguments(self, leave=("learning_rate", "name", "kwargs"))
        rate = self._serialize_hyperparameter(self._learning_rate)
        return {**super().get_config(), **own, "learning_rate": rate}


def _apply_adam(variable, moments, gradient, now):
    """Moves a variable and its two moments by TensorFlow's fused kernel, with a step's scalars."""
    first, second = moments
    scalars = {name: now[name] for name in ("lr", "epsilon", "beta1", "beta2", "beta1_power", "beta2_power")}
    return tf.raw_ops.ResourceApplyAdam(var=variable.handle, m=first.handle, v=second.handle, grad=gradient, **scalars)


class RAdamLookahead(_Stoppable):
    """Rectified Adam (Liu et al., ICLR 2020) inside Lookahead (Zhang et al., NeurIPS 2019).

    With t the step, m and v Adam's moments, rho_inf = 2 / (1 - beta_2) - 1 and
    rho_t = rho_inf - 2 t beta_2^t / (1 - beta_2^t): the update is

        r_t m_hat / (sqrt(v_hat) + epsilon)   if rho_t > 4, else m_hat,
        r_t^2 = (rho_t - 4)(rho_t - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho_t).

    Every `sync_period` steps the slow weights move `slow_step` of the way to the fast ones, and the fast ones start
    again from there.

    Args:
        learning_rate: number or schedule.
        beta_1, beta_2, epsilon: of Adam.
        sync_period, slow_step: of Lookahead.
        decay: decoupled weight decay, scaled by the learning rate. Batch norms, biases and position tables have none.
    """

    def __init__(
        self,
        learning_rate: typing.Any = 1e-3,
        beta_1: BelowOne = 0.9,
        beta_2: BelowOne = 0.999,
        epsilon: Positive = 1e-7,
        sync_period: Count = 5,
        slow_step: Fraction = 0.5,
        decay: NonNegative = 0.0,
        name: Name = "RAdamLookahead",
        **kwargs,
    ):
        super().__init__(learning_rate, name=name, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.sync_period, self.slow_step, self.decay = sync_period, slow_step, decay
        check_arguments(self)

    def _add_slots(self, variables):
        self._first, self._second, self._slow = self._slots(variables, "first", "second", "slow")

    def _scalars(self, stopped):
        """The scalars of this step, which the updates of all variables share."""
        number = self.iterations - self.first_step + 1
        step = tf.cast(number, tf.float64)  # rho is a small difference of large numbers
        power_1, power_2 = self.beta_1**step, self.beta_2**step
        rho_inf = 2 / (1 - self.beta_2) - 1
        rho = rho_inf - 2 * step * power_2 / (1 - power_2)
        ratio = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        # TensorFlow's fused kernel moves a variable by lr m / (sqrt(v) + epsilon). The first steps use the plain m_hat.
        # An epsilon far above sqrt(v), and an lr that is larger by the same factor, give it.
        root = tf.sqrt(1 - power_2)
        huge = 1e12
        rate = tf.cast(self.learning_rate, tf.float64) / (1 - power_1)
        rectified = rate * tf.sqrt(tf.maximum(ratio, 0.0)) * root
        moves = tf.where(stopped, 0.0, 1.0)
        sync = (number % self.sync_period == 0) & ~stopped
        return {
            "lr": moves * tf.cast(tf.where(rho > 4, rectified, rate * huge), tf.float32),
            "epsilon": tf.cast(tf.where(rho > 4, self.epsilon * root, huge), tf.float32),
            "decay": moves * self.decay * self.learning_rate,
            "beta1_power": tf.zeros([]),  # the rate has the corrections
            "beta2_power": tf.zeros([]),
            "beta1": tf.where(stopped, 1.0, self.beta_1),
            "beta2": tf.where(stopped, 1.0, self.beta_2),
            "sync": sync,
            "slow": tf.where(sync, self.slow_step, 0.0),
            "first": tf.where((number == 1) & ~stopped, 1.0, 0.0),
        }

    def update_step(self, gradient, variable):
        index, now = self._of(variable)
        slow = self._slow[index]
        start = tf.convert_to_tensor(variable)
        with tf.control_dependencies([start]):
            adam = _apply_adam(variable, (self._first[index], self._second[index]), gradient, now)
        with tf.control_dependencies([adam]):
            fast = variable.read_value()
        if self.decay and not NO_DECAY.search(variable.name) and not TABLE.search(variable.name):
            fast -= now["decay"] * start
        # Weights may have been loaded after the slots were made, so the first step copies them to the slow weights.
        held = slow.assign_add(now["first"] * (start - slow))
        held = slow.assign_add(now["slow"] * (fast - held))
        variable.assign(tf.where(now["sync"], held, fast))


class NesterovMomentum(_Stoppable):
    """Gradient descent with Nesterov's or plain momentum, and a moving average of the weights.

    With g the gradient plus decay x weight: v <- momentum v - rate g, and the weight moves by momentum v - rate g, or
    with plain momentum by v. At step t the average moves to the weight by 1 - min(average, (1 + t) / (10 + t)), as
    TensorFlow's ExponentialMovingAverage does with num_updates.

    Args:
        learning_rate: number or schedule.
        momentum: of the velocity v.
        decay: factor of the squared weights in the loss, halved. Batch norms and biases have none.
        average: decay of the moving average of the weights; 0 for none. Evaluations and exports use the average.
        nesterov: False for plain momentum.
        decay_tables: whether the decay is of position tables too.

    Attributes:
        averages: the moving averages, in the order of the variables that it was built for; empty without any.
    """

    def __init__(
        self,
        learning_rate: typing.Any = 0.1,
        momentum: BelowOne = 0.9,
        decay: NonNegative = 0.0,
        average: BelowOne = 0.0,
        nesterov: bool = True,
        decay_tables: bool = False,
        name: Name = "NesterovMomentum",
        **kwargs,
    ):
        super().__init__(learning_rate, name=name, **kwargs)
        self.momentum, self.decay, self.average, self.nesterov = momentum, decay, average, nesterov
        self.decay_tables, self.averages = decay_tables, []
        check_arguments(self)

    def _add_slots(self, variables):
        (self._velocities,) = self._slots(variables, "velocity")
        if self.average:
            self.averages = [self.add_variable_from_reference(v, "average", initial_value=v) for v in variables]

    def _scalars(self, stopped):
        """The scalars of this step, which the updates of all variables share."""
        moves, step = tf.where(stopped, 0.0, 1.0), tf.cast(self.iterations - self.first_step, tf.float32)
        kept = tf.where(step == 0, 0.0, tf.minimum(self.average, (2 + step) / (11 + step)))  # weights may be loaded
        return {
            "lr": moves * self.learning_rate,
            "velocity": tf.where(stopped, 1.0, self.momentum),
            "ahead": moves * (self.momentum if self.nesterov else 1.0),
            "average": moves * (1 - kept),
        }

    def update_step(self, gradient, variable):
        index, now = self._of(variable)
        decays = self.decay_tables if TABLE.search(variable.name) else not NO_DECAY.search(variable.name)
        if self.decay and decays:
            gradient += self.decay * variable
        move = now["lr"] * gradient
        velocity = self._velocities[index].assign(now["velocity"] * self._velocities[index] - move)
        weight = variable.assign_add(now["ahead"] * velocity - (move if self.nesterov else 0.0))
        if self.average:
            average = self.averages[index]
            average.assign_add(now["average"] * (weight - average))


class Adam(_Stoppable):
    """Adam (Kingma and Ba, ICLR 2015), with the values of Vaswani et al., NeurIPS 2017, Sec. 5.3.

    With m and v the moments at step t, a weight moves by -rate sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) +
    epsilon), the form at the end of Kingma and Ba's Sec. 2.

    Args:
        learning_rate: number or schedule.
        beta_1, beta_2: of the moments.
        epsilon: see above.
    """

    def __init__(
        self,
        learning_rate: typing.Any = 1e-3,
        beta_1: BelowOne = 0.9,
        beta_2: BelowOne = 0.98,
        epsilon: Positive = 1e-9,
        name: Name = "Adam",
        **kwargs,
    ):
        super().__init__(learning_rate, name=name, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        check_arguments(self)

    def _add_slots(self, variables):
        self._first, self._second = self._slots(variables, "first", "second")

    def _scalars(self, stopped):
        """The scalars of this step, which the updates of all variables share."""
        step = tf.cast(self.iterations - self.first_step + 1, tf.float32)
        return {
            "lr": tf.where(stopped, 0.0, self.learning_rate),
            "beta1_power": self.beta_1**step,
            "beta2_power": self.beta_2**step,
            "epsilon": self.epsilon,
            "beta1": tf.where(stopped, 1.0, self.beta_1),
            "beta2": tf.where(stopped, 1.0, self.beta_2),
        }

    def update_step(self, gradient, variable):
        index, now = self._of(variable)
        _apply_adam(variable, (self._first[index], self._second[index]), gradient, now)


@contextlib.contextmanager
def averaged(optimizer, variables):
    """Within this context, the variables that an optimizer was built for have their moving averages as values.

    Nothing changes if the optimizer keeps no averages.
    """
    pairs = list(zip(variables, getattr(optimizer, "averages", ())))
    held = [tf.identity(variable) for variable, _ in pairs]
    for variable, average in pairs:
        variable.assign(average.read_value())
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, held):
            variable.assign(value)


class _Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that is a function of the step and of the arguments that it was made with."""

    def get_config(self):
        return arguments(self)

    def ramp(self, step, start=0.0):
        """The share of the peak in the warm-up: a line from `start`, at step 0, to 1."""
        return start + (1 - start) * tf.minimum(step / self.warmup, 1.0) if self.warmup else 1.0


@dataclasses.dataclass(eq=False)
class WarmupPoly(Checked, _Schedule):
    """A learning rate of peak x (1 - step / steps)^power, times a ramp from 0 to 1 over the first `warmup` steps.

    Args:
        peak: learning rate without warm-up and decay.
        steps: steps of the whole training.
        warmup: steps of the warm-up.
        power: power of the decay.

    Raises:
        InputError: an argument of another type, or out of range.
    """

    peak: NonNegative = 1e-3
    steps: Count = 200_000
    warmup: Natural = 2_000
    power: NonNegative = 0.9

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        left = tf.clip_by_value(1 - step / self.steps, 0.0, 1.0)
        return self.peak * self.ramp(step + 1) * left**self.power


@dataclasses.dataclass(eq=False)
class WarmupCosine(Checked, _Schedule):
    """A learning rate that rises from 0 to `peak` over `warmup` steps, and falls to 0 as half a cosine after them.

    Args:
        peak: the largest learning rate.
        steps: steps of the whole training.
        warmup: steps of the warm-up.

    Raises:
        InputError: an argument of another type, or out of range.
    """

    peak: NonNegative = 0.4
    steps: Count = 162_760
    warmup: Natural = 12_520

    def __post_init__(self):
        super().__post_init__()
        if self.warmup >= self.steps:
            raise InputError(f"WarmupCosine.warmup = {self.warmup}: expected fewer than {self.steps}, the steps")

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        share = tf.clip_by_value((step - self.warmup) / (self.steps - self.warmup), 0.0, 1.0)
        return self.peak * self.ramp(step + 1) * (1 + tf.cos(math.pi * share)) / 2


@dataclasses.dataclass(eq=False)
class WarmupSteps(Checked, _Schedule):
    """A learning rate that falls by `factor` at some steps, after a linear rise.

    Args:
        peak: the largest learning rate.
        drops: steps at which it falls, in rising order.
        factor: what it is multiplied by at each of them.
        warmup: steps of the rise.
        start: share of the peak at which the rise begins.

    Raises:
        InputError: an argument of another type, or out of range.
    """

    peak: NonNegative = 0.02
    drops: tuple[Count, ...] = (58640, 80630)
    factor: Fraction = 0.1
    warmup: Natural = 500
    start: Fraction = 1 / 3

    def __post_init__(self):
        super().__post_init__()
        if list(self.drops) != sorted(set(self.drops)):
            raise InputError(f"WarmupSteps.drops = {self.drops}: expected steps in rising order")

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        passed = tf.add_n([tf.cast(step >= drop, tf.float32) for drop in self.drops]) if self.drops else 0.0
        return self.peak * self.ramp(step, self.start) * self.factor**passed


@dataclasses.dataclass(eq=False)
class WarmupInverseSqrt(Checked, _Schedule):
    """A learning rate that rises from 0 to `peak` over `warmup` steps, and falls as 1 / sqrt(step) after them.

    Vaswani et al., NeurIPS 2017, Eq. 3, where the peak is 1 / sqrt(channels x warmup).

    Args:
        peak: the largest learning rate.
        warmup: steps of the warm-up.

    Raises:
        InputError: an argument of another type, or out of range.
    """

    peak: NonNegative = 7e-4
    warmup: Count = 4000

    def __call__(self, step):
        share = (tf.cast(step, tf.float32) + 1) / self.warmup
        return self.peak * tf.minimum(share, tf.math.rsqrt(share))


OPTIMIZERS = RAdamLookahead, NesterovMomentum, Adam
SCHEDULES = WarmupPoly, WarmupCosine, WarmupSteps, WarmupInverseSqrt
