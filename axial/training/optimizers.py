"""The optimizer, RAdam with Lookahead, and its learning rate schedule."""

import re
import typing

import tensorflow as tf
import tf_keras as keras

from axial.io.check import BelowOne, Count, Fraction, Natural, NonNegative, Positive, checked

NO_DECAY = re.compile(r"(gamma|beta|bias|_table)(:\d+)?$")


@checked
class RAdamLookahead(keras.optimizers.Optimizer):
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

    Attributes:
        is_stopped: function without arguments that returns a bool tensor. While it is true, `apply_gradients` changes
            nothing: no weight, no slot, not the number of steps. The gradients must be finite even then.
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
        name="RAdamLookahead",
        **kwargs,
    ):
        super().__init__(name=name, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.sync_period, self.slow_step, self.decay = sync_period, slow_step, decay
        self.is_stopped = _never

    def build(self, variables):
        super().build(variables)
        if getattr(self, "_built", False):
            return

        def slot(name):
            return [self.add_variable_from_reference(v, name) for v in variables]

        self._first, self._second, self._slow = slot("first"), slot("second"), slot("slow")
        self._built = True

    def _distributed_apply_gradients_fn(self, distribution, grads_and_vars, **kwargs):
        stopped = self.is_stopped()
        self._now = self._scalars(stopped)  # once for a step, not once for each variable
        super()._distributed_apply_gradients_fn(distribution, grads_and_vars, **kwargs)
        self.iterations.assign_sub(tf.cast(stopped, self.iterations.dtype))

    def _scalars(self, stopped):
        """The scalars of this step, which the updates of all variables share."""
        number = self.iterations + 1
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
            "rate": moves * tf.cast(tf.where(rho > 4, rectified, rate * huge), tf.float32),
            "epsilon": tf.cast(tf.where(rho > 4, self.epsilon * root, huge), tf.float32),
            "decay": moves * self.decay * self.learning_rate,
            "zero": tf.zeros([]),
            "beta_1": tf.where(stopped, 1.0, self.beta_1),
            "beta_2": tf.where(stopped, 1.0, self.beta_2),
            "sync": sync,
            "slow": tf.where(sync, self.slow_step, 0.0),
            "first": tf.where((number == 1) & ~stopped, 1.0, 0.0),
        }

    def update_step(self, gradient, variable):
        index, now = self._index_dict[self._var_key(variable)], self._now
        slow = self._slow[index]
        start = tf.convert_to_tensor(variable)
        with tf.control_dependencies([start]):
            adam = tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=self._first[index].handle,
                v=self._second[index].handle,
                beta1_power=now["zero"],
                beta2_power=now["zero"],
                lr=now["rate"],
                beta1=now["beta_1"],
                beta2=now["beta_2"],
                epsilon=now["epsilon"],
                grad=gradient,
            )
        with tf.control_dependencies([adam] if adam is not None else []):
            fast = variable.read_value()
        if self.decay and not NO_DECAY.search(variable.name):
            fast -= now["decay"] * start
        # Weights may have been loaded after the slots were made, so the first step copies them to the slow weights.
        held = slow.assign_add(now["first"] * (start - slow))
        held = slow.assign_add(now["slow"] * (fast - held))
        variable.assign(tf.where(now["sync"], held, fast))

    def get_config(self):
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "sync_period": self.sync_period,
            "slow_step": self.slow_step,
            "decay": self.decay,
        }


def _never():
    return tf.constant(False)


@checked
class WarmupPoly(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate of peak x (1 - step / steps)^power, times a ramp from 0 to 1 over the first `warmup` steps.

    Args:
        peak: learning rate without warm-up and decay.
        steps: steps of the whole training.
        warmup: steps of the warm-up.
        power: power of the decay.

    Raises:
        InputError: an argument of another type, or out of range.
    """

    def __init__(
        self,
        peak: NonNegative = 1e-3,
        steps: Count = 200_000,
        warmup: Natural = 2_000,
        power: NonNegative = 0.9,
    ):
        self.peak, self.steps, self.warmup, self.power = peak, steps, warmup, power

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        left = tf.clip_by_value(1 - step / self.steps, 0.0, 1.0)
        ramp = tf.minimum((step + 1) / self.warmup, 1.0) if self.warmup else 1.0
        return self.peak * ramp * left**self.power

    def get_config(self):
        return dict(peak=self.peak, steps=self.steps, warmup=self.warmup, power=self.power)
