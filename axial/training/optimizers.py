"""Optimizers and learning rate schedules for segmentation, classification, detection and translation."""

import contextlib
import dataclasses
import numbers
import re
import typing

import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError
from axial.io.check import BelowOne, Checked, Count, Fraction, Natural, NonNegative, Positive

NO_DECAY = re.compile(r"(gamma|beta|bias)(:\d+)?$")
ADAM = "lr", "epsilon", "beta1", "beta2", "beta1_power", "beta2_power"  # scalar inputs of TensorFlow's fused kernel
TABLE = re.compile(r"_table(:\d+)?$")  # position tables


class Optimizer(keras.optimizers.Optimizer):
    """Updates variables by a `Rule`. From the first step with a loss or gradient that is not finite, nothing changes.

    A variable's attribute `learning_rate_factor` multiplies its learning rate, and so its whole update, including
    weight decay.

    Args:
        rule: `Rule`.
        variables: the variables to update.

    Attributes:
        averages: moving averages of the variables, in the same order; empty if the rule has none.
        bad_step: the first step whose loss or gradients were not finite, or -1.
        first_step: the step at which the slots started: 0, or the step at which a resumed training changed the
            optimizer. Bias corrections and similar terms count from this step.
    """

    def __init__(self, rule, variables):
        super().__init__(type(rule).__name__, weight_decay=None)
        self.rule, self._learning_rate = rule, self._build_learning_rate(rule.learning_rate)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.first_step = tf.Variable(0, False, name="first_step", dtype=tf.int64, aggregation=first)
        self.bad_step = tf.Variable(-1, False, name="bad_step", dtype=tf.int64, aggregation=first)
        self._build_index_dict(variables)
        for name in rule.slots:
            for variable in variables:
                self.add_variable_from_reference(variable, name)
        averaged_variables = variables if rule.average else ()
        self.averages = [self.add_variable_from_reference(v, "average", initial_value=v) for v in averaged_variables]
        self._built = True

    def is_stopped(self):
        """Whether a step's loss or gradients were not finite: a bool tensor."""
        return self.bad_step >= 0

    def apply(self, gradients, variables, finite=True):
        """Applies one step in the context of a replica.

        Args:
            gradients: gradients of all variables, in their order, summed over all replicas.
            variables: the variables that the constructor got.
            finite: bool tensor, whether loss and gradients are finite.
        """
        self.bad_step.assign(tf.where(finite | self.is_stopped(), self.bad_step, self.iterations))
        stopped = self.is_stopped()
        gradients = [tf.where(stopped, tf.zeros([], g.dtype), g) for g in gradients]
        self.apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=True)

    def _distributed_apply_gradients_fn(self, distribution, grads_and_vars):
        """One step in the cross-replica context, which Keras calls."""
        stopped, count, now = self.is_stopped(), len(grads_and_vars), {}
        scalars = self.rule.scalars(self.iterations - self.first_step, tf.identity(self.learning_rate), stopped)
        for i, (gradient, variable) in enumerate(grads_and_vars):
            factor = getattr(variable, "learning_rate_factor", 1.0)
            if factor not in now:  # variables with the same factor share their scalars
                now[factor] = {k: factor * x if k in ("lr", "decay") else x for k, x in scalars.items()}
            slots, decays = self._variables[i + 1 :: count], self.rule.decays(variable.name)
            arguments = gradient, slots, now[factor], decays
            distribution.extended.update(variable, self.rule.move, args=arguments, group=False)
        return self.iterations.assign_add(tf.cast(~stopped, self.iterations.dtype))


class Rule(Checked):
    """An optimizer's update rule, with the hyperparameters that a recipe sets.

    A subclass defines two methods. `scalars(step, rate, stopped)` returns a dict of scalars that the updates of all
    variables share. Its arguments are the number of earlier steps (int64), the learning rate, and whether the step must
    change nothing; all gradients are then zero. `move(variable, gradient, slots, now, decays)` updates a variable and
    its slots. `now` is the dict of scalars, with 'lr' and 'decay' multiplied by the variable's learning rate factor.
    `decays` is whether the variable has weight decay.

    Attributes:
        learning_rate: number or schedule.
        slots: names of the slot variables of each variable.
        average: decay of the moving average of each variable, which is a further slot; 0 for no averages.

    Raises:
        InputError: the learning rate is neither a schedule nor a finite number >= 0.
    """

    slots = ()
    average = 0.0

    def __post_init__(self):
        super().__post_init__()
        rate = self.learning_rate
        number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
        if not isinstance(rate, Schedule) and not (number and 0 <= rate <= 1e30):  # as in `NonNegative`
            name = f"{type(self).__name__}.learning_rate"
            raise InputError(f"{name} = {rate!r}: expected a number >= 0 or a schedule, like @WarmupPoly()")

    def build(self, variables):
        """The `Optimizer` of some variables. The strategy's scope must be active."""
        return Optimizer(self, variables)

    def decays(self, name):
        """Whether the variable called `name` has weight decay."""
        return not NO_DECAY.search(name) and not TABLE.search(name)


@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba, ICLR 2015), with the default betas and epsilon of Vaswani et al., NeurIPS 2017, Sec. 5.3.

    m and v are the moments at step t. The update of a weight is -rate sqrt(1 - beta_2^t) / (1 - beta_1^t) m /
    (sqrt(v) + epsilon), the form at the end of Kingma and Ba's Sec. 2.

    Args:
        learning_rate: number or schedule.
        beta_1, beta_2: decay rates of the first and the second moment.
        epsilon: number that is added to the denominator; see above.
    """

    learning_rate: typing.Any = 1e-3
    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.98
    epsilon: Positive = 1e-9
    slots = "first", "second"

    def scalars(self, step, rate, stopped):
        step = tf.cast(step + 1, tf.float32)
        return {
            "lr": tf.where(stopped, 0.0, rate),
            "beta1_power": self.beta_1**step,
            "beta2_power": self.beta_2**step,
            "epsilon": self.epsilon,
            "beta1": tf.where(stopped, 1.0, self.beta_1),
            "beta2": tf.where(stopped, 1.0, self.beta_2),
        }

    def move(self, variable, gradient, slots, now, decays):
        """Updates the variable and its two moments by TensorFlow's fused kernel."""
        var, first, second = (one.handle for one in (variable, *slots))
        return tf.raw_ops.ResourceApplyAdam(var=var, m=first, v=second, grad=gradient, **{k: now[k] for k in ADAM})


@dataclasses.dataclass(frozen=True)
class RAdamLookahead(Adam):
    """Rectified Adam (Liu et al., ICLR 2020) inside Lookahead (Zhang et al., NeurIPS 2019).

    t is the step, m_hat and v_hat are Adam's bias-corrected moments, rho_inf = 2 / (1 - beta_2) - 1, and
    rho_t = rho_inf - 2 t beta_2^t / (1 - beta_2^t). The update is the learning rate times

        r_t m_hat / (sqrt(v_hat) + epsilon)   if rho_t > 4, else m_hat,
        r_t^2 = (rho_t - 4)(rho_t - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho_t).

    Every `sync_period` steps the slow weights move by the fraction `slow_step` towards the fast weights, and the fast
    weights restart from the slow weights.

    Args:
        learning_rate: number or schedule.
        beta_1, beta_2, epsilon: Adam's decay rates of the moments, and its epsilon.
        sync_period, slow_step: Lookahead's number of steps between two synchronisations, and its step size.
        decay: decoupled weight decay, scaled by the learning rate. Batch norms, biases and position tables have none.
    """

    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7
    sync_period: Count = 5
    slow_step: Fraction = 0.5
    decay: NonNegative = 0.0
    slots = "first", "second", "slow"

    def scalars(self, step, rate, stopped):
        number = step + 1
        step = tf.cast(number, tf.float64)  # rho is a small difference of large numbers
        power_1, power_2 = self.beta_1**step, self.beta_2**step
        rho_inf = 2 / (1 - self.beta_2) - 1
        rho = rho_inf - 2 * step * power_2 / (1 - power_2)
        ratio = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        # TensorFlow's fused kernel updates by lr m / (sqrt(v) + epsilon). The first steps need the plain m_hat instead.
        # An epsilon far above sqrt(v) makes the denominator constant, and an lr larger by that constant cancels it.
        root = tf.sqrt(1 - power_2)
        huge = 1e12
        plain = tf.cast(rate, tf.float64) / (1 - power_1)
        rectified = plain * tf.sqrt(tf.maximum(ratio, 0.0)) * root
        moves = tf.where(stopped, 0.0, 1.0)
        sync = (number % self.sync_period == 0) & ~stopped
        return {
            "lr": moves * tf.cast(tf.where(rho > 4, rectified, plain * huge), tf.float32),
            "epsilon": tf.cast(tf.where(rho > 4, self.epsilon * root, huge), tf.float32),
            "decay": moves * self.decay * rate,
            "beta1_power": tf.zeros([]),  # 'lr' holds the bias corrections
            "beta2_power": tf.zeros([]),
            "beta1": tf.where(stopped, 1.0, self.beta_1),
            "beta2": tf.where(stopped, 1.0, self.beta_2),
            "sync": sync,
            "slow": tf.where(sync, self.slow_step, 0.0),
            "first": tf.where((number == 1) & ~stopped, 1.0, 0.0),
        }

    def move(self, variable, gradient, slots, now, decays):
        *moments, slow = slots
        start = tf.convert_to_tensor(variable)
        with tf.control_dependencies([start]):
            adam = super().move(variable, gradient, moments, now, decays=decays)
        with tf.control_dependencies([adam]):
            fast = variable.read_value()
        if self.decay and decays:
            fast -= now["decay"] * start
        # Weights may have been loaded after the slots were made, so the first step copies them to the slow weights.
        held = tf.convert_to_tensor(slow)
        held += now["first"] * (start - held)
        held += now["slow"] * (fast - held)
        slow.assign(held)
        variable.assign(tf.where(now["sync"], held, fast))


@dataclasses.dataclass(frozen=True)
class NesterovMomentum(Rule):
    """Gradient descent with Nesterov's or plain momentum, and a moving average of the weights.

    g is the gradient plus decay x weight, and v <- momentum v - rate g. The update of the weight is momentum v -
    rate g, or v with plain momentum. At step t the average moves towards the weight by the fraction 1 - min(average,
    (1 + t) / (10 + t)), like TensorFlow's ExponentialMovingAverage with num_updates.

    Args:
        learning_rate: number or schedule.
        momentum: decay rate of the velocity v.
        decay: L2 weight decay: the loss has decay / 2 times the squared weights. Batch norms and biases have none.
        average: decay of the moving average of the weights; 0 for none. Evaluations and exports use the average.
        nesterov: whether the momentum is Nesterov's; False for plain momentum.
        decay_tables: whether position tables have weight decay too.
    """

    learning_rate: typing.Any = 0.1
    momentum: BelowOne = 0.9
    decay: NonNegative = 0.0
    average: BelowOne = 0.0
    nesterov: bool = True
    decay_tables: bool = False
    slots = ("velocity",)

    def decays(self, name):
        return self.decay_tables if TABLE.search(name) else super().decays(name)

    def scalars(self, step, rate, stopped):
        moves, step = tf.where(stopped, 0.0, 1.0), tf.cast(step, tf.float32)
        # Step 0 overwrites the averages, as weights may have been loaded after the averages were made.
        kept = tf.where(step == 0, 0.0, tf.minimum(self.average, (2 + step) / (11 + step)))
        return {
            "lr": moves * rate,
            "velocity": tf.where(stopped, 1.0, self.momentum),
            "ahead": moves * (self.momentum if self.nesterov else 1.0),
            "average": moves * (1 - kept),
        }

    def move(self, variable, gradient, slots, now, decays):
        velocity, *averages = slots
        if self.decay and decays:
            gradient += self.decay * variable
        moved = now["lr"] * gradient
        velocity = velocity.assign(now["velocity"] * velocity - moved)
        weight = variable.assign_add(now["ahead"] * velocity - (moved if self.nesterov else 0.0))
        for average in averages:
            average.assign_add(now["average"] * (weight - average))


@contextlib.contextmanager
def averaged(optimizer, variables):
    """A context in which an optimizer's variables hold their moving averages.

    The context changes nothing if the optimizer keeps no averages.
    """
    pairs = list(zip(variables, optimizer.averages))
    held = [tf.identity(variable) for variable, _ in pairs]
    for variable, average in pairs:
        variable.assign(average.read_value())
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, held):
            variable.assign(value)


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate as a function of the step, with the warm-up that all schedules share."""

    def ramp(self, step, start=0.0):
        """A fraction of the peak learning rate, which rises linearly from `start` at step 0 to 1 at step `warmup`."""
        return start + (1 - start) * tf.minimum(step / self.warmup, 1.0) if self.warmup else 1.0


@dataclasses.dataclass(eq=False)
class WarmupPoly(Checked, Schedule):
    """The learning rate peak x (1 - step / steps)^power, times a ramp from 0 to 1 over the first `warmup` steps.

    Args:
        peak: learning rate before the decay.
        steps: steps of the whole training.
        warmup: steps of the warm-up.
        power: power of the decay.

    Raises:
        InputError: an argument has the wrong type or is out of range.
    """

    peak: NonNegative = 1e-3
    steps: Count = 200_000
    warmup: Natural = 2_000
    power: NonNegative = 0.9

    def __call__(self, step):
        decay = keras.optimizers.schedules.PolynomialDecay(self.peak, self.steps, 0.0, self.power)
        return self.ramp(tf.cast(step, tf.float32) + 1) * decay(step)


@dataclasses.dataclass(eq=False)
class WarmupCosine(Checked, Schedule):
    """A learning rate that rises from 0 to `peak` over `warmup` steps, and then falls to 0 along half a cosine.

    Args:
        peak: the largest learning rate.
        steps: steps of the whole training.
        warmup: steps of the warm-up.

    Raises:
        InputError: an argument has the wrong type or is out of range.
    """

    peak: NonNegative = 0.4
    steps: Count = 162_760
    warmup: Natural = 12_520

    def __post_init__(self):
        super().__post_init__()
        if self.warmup >= self.steps:
            raise InputError(f"WarmupCosine.warmup = {self.warmup}: expected fewer than {self.steps}, the steps")

    def __call__(self, step):
        decay = keras.optimizers.schedules.CosineDecay(self.peak, self.steps - self.warmup)
        return self.ramp(tf.cast(step, tf.float32) + 1) * decay(tf.maximum(step - self.warmup, 0))


@dataclasses.dataclass(eq=False)
class WarmupSteps(Checked, Schedule):
    """A learning rate that rises linearly to `peak`, and is multiplied by `factor` at each step of `drops`.

    Args:
        peak: the largest learning rate.
        drops: steps at which the rate falls, in rising order.
        factor: number that multiplies the rate at each step of `drops`.
        warmup: steps of the warm-up.
        start: fraction of the peak at step 0.

    Raises:
        InputError: an argument has the wrong type or is out of range.
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
class WarmupInverseSqrt(Checked, Schedule):
    """A learning rate that rises from 0 to `peak` over `warmup` steps, and then falls as 1 / sqrt(step).

    This is Eq. 3 of Vaswani et al., NeurIPS 2017, whose peak is 1 / sqrt(channels x warmup).

    Args:
        peak: the largest learning rate.
        warmup: steps of the warm-up.

    Raises:
        InputError: an argument has the wrong type or is out of range.
    """

    peak: NonNegative = 7e-4
    warmup: Count = 4000

    def __call__(self, step):
        progress = (tf.cast(step, tf.float32) + 1) / self.warmup
        return self.peak * tf.minimum(progress, tf.math.rsqrt(progress))


OPTIMIZERS = RAdamLookahead, NesterovMomentum, Adam
SCHEDULES = WarmupPoly, WarmupCosine, WarmupSteps, WarmupInverseSqrt
