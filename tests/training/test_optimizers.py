"""The optimizers equal float64 implementations of the papers' rules at every step, on one replica and on two."""

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.spatial_attention.deformable_conv import DeformableConv
from axial.training.optimizers import Adam, NesterovMomentum, RAdamLookahead, WarmupCosine, WarmupPoly
from tests.conftest import two_replicas


class Oracle:
    """Rectified Adam inside Lookahead, by the papers' rules, for one float64 array."""

    def __init__(self, weight, beta_1, beta_2, epsilon, period, slow_step, decay):
        self.fast, self.slow = weight.astype(np.float64), weight.astype(np.float64)
        self.m, self.v, self.t = np.zeros(weight.shape), np.zeros(weight.shape), 0
        self.knobs = beta_1, beta_2, epsilon, period, slow_step, decay

    def step(self, gradient, rate):
        beta_1, beta_2, epsilon, period, slow_step, decay = self.knobs
        self.t += 1
        self.fast = self.fast - rate * decay * self.fast
        self.m = beta_1 * self.m + (1 - beta_1) * gradient
        self.v = beta_2 * self.v + (1 - beta_2) * gradient**2
        mean = self.m / (1 - beta_1**self.t)
        longest = 2 / (1 - beta_2) - 1
        length = longest - 2 * self.t * beta_2**self.t / (1 - beta_2**self.t)
        if length > 4:
            r = np.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
            self.fast = self.fast - rate * r * mean / (np.sqrt(self.v / (1 - beta_2**self.t)) + epsilon)
        else:
            self.fast = self.fast - rate * mean
        if self.t % period == 0:
            self.slow = self.slow + slow_step * (self.fast - self.slow)
            self.fast = self.slow.copy()
        return self.fast


def test_slow_weights_start_where_training_does():
    """If weights are loaded after the slots are made, Lookahead's slow weights start from the loaded weights."""
    variable = tf.Variable([0.0])
    optimizer = RAdamLookahead(1e-3).build([variable])
    variable.assign([100.0])
    for _ in range(5):
        optimizer.apply([tf.constant([1.0])], [variable])
    assert 99.9 < float(variable[0]) < 100


def test_schedules():
    """Polynomial and cosine schedules at steps during, after and beyond their warm-up and decay."""
    schedule = WarmupPoly(peak=2.0, steps=100, warmup=10, power=0.9)
    for step in (0, 4, 9, 10, 50, 99, 100, 150):
        left = max(1 - step / 100, 0)
        expected = 2.0 * min((step + 1) / 10, 1) * left**0.9
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)
    assert float(WarmupPoly(2.0, 100, 0)(0)) == 2.0
    rates = [float(WarmupCosine(0.4, 110, 10)(step)) for step in (0, 4, 9, 10, 60, 110, 200)]
    np.testing.assert_allclose(rates, [0.04, 0.2, 0.4, 0.4, 0.2, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("rate", [None, "0.1", True, -1, float("nan"), WarmupPoly], ids=repr)
def test_a_learning_rate_is_a_number_or_a_schedule(rate):
    with pytest.raises(InputError, match=r"^Adam\.learning_rate = .*: expected a number >= 0 or a"):
        Adam(rate)
    for good in (0, np.float32(0.5), WarmupPoly()):
        RAdamLookahead(good)


class MomentumOracle:
    """Plain or Nesterov momentum and the moving average of the weights, for one float64 array."""

    def __init__(self, weight, momentum, decay, average, nesterov=True):
        self.weight, self.velocity = weight.astype(np.float64), np.zeros(weight.shape)
        self.average, self.t, self.knobs = self.weight.copy(), 0, (momentum, decay, average, nesterov)

    def step(self, gradient, rate):
        momentum, decay, average, nesterov = self.knobs
        self.t += 1
        gradient = gradient + decay * self.weight
        self.velocity = momentum * self.velocity - rate * gradient
        self.weight = self.weight + (momentum * self.velocity - rate * gradient if nesterov else self.velocity)
        kept = 0 if self.t == 1 else min(average, (1 + self.t) / (10 + self.t))
        self.average = kept * self.average + (1 - kept) * self.weight
        return self.weight


class AdamOracle:
    """Adam with the epsilon of Kingma and Ba's Sec. 2, for one float64 array."""

    def __init__(self, weight, beta_1, beta_2, epsilon):
        self.weight, self.m, self.v, self.t = weight.astype(np.float64), 0.0, 0.0, 0
        self.knobs = beta_1, beta_2, epsilon

    def step(self, gradient, rate):
        beta_1, beta_2, epsilon = self.knobs
        self.t += 1
        self.m = beta_1 * self.m + (1 - beta_1) * gradient
        self.v = beta_2 * self.v + (1 - beta_2) * gradient**2
        rate *= np.sqrt(1 - beta_2**self.t) / (1 - beta_1**self.t)
        self.weight = self.weight - rate * self.m / (np.sqrt(self.v) + epsilon)
        return self.weight


RULES = {  # dict from name to (optimizer by rate, oracle by weight and decay, weight decay of position tables)
    "radam": (
        lambda rate: RAdamLookahead(rate, decay=0.1),
        lambda weight, decay: Oracle(weight, 0.9, 0.999, 1e-7, 5, 0.5, decay),
        0.0,
    ),
    "radam, short": (
        lambda rate: RAdamLookahead(rate, beta_2=0.9),
        lambda weight, decay: Oracle(weight, 0.9, 0.9, 1e-7, 5, 0.5, 0.0),
        0.0,
    ),
    "nesterov": (
        lambda rate: NesterovMomentum(rate, decay=0.1, average=0.9, decay_tables=True),
        lambda weight, decay: MomentumOracle(weight, 0.9, decay, 0.9),
        0.1,
    ),
    "momentum": (
        lambda rate: NesterovMomentum(rate, decay=0.1, nesterov=False),
        lambda weight, decay: MomentumOracle(weight, 0.9, decay, 0, nesterov=False),
        0.0,
    ),
    "adam": (Adam, lambda weight, decay: AdamOracle(weight, 0.9, 0.98, 1e-9), 0.0),
}


def optimized(start, factors, optimizer, strategy):
    """Returns (variables by name, built optimizer, function of (gradients by name, finite) that runs a step)."""
    variables = {k: tf.Variable(v, dtype=tf.float32, name=k) for k, v in start.items()}
    for name, factor in factors.items():
        variables[name].learning_rate_factor = factor
    optimizer = optimizer.build(list(variables.values()))

    @tf.function
    def step(gradients, finite):
        strategy.run(lambda: optimizer.apply(list(gradients.values()), list(variables.values()), finite))

    return variables, optimizer, step


def check_values(actual, expected, **tolerances):
    """Checks that each replica's copy of a variable equals the oracle's array."""
    for copy in actual:
        np.testing.assert_allclose(copy.numpy(), expected, **tolerances)


@pytest.mark.parametrize("rule,replicas", [*((rule, 1) for rule in RULES), ("radam", 2), ("nesterov", 2)])
def test_an_optimizer_equals_its_oracle(rule, replicas):
    """23 random gradients of four 3x4 variables. Step 7 is not finite and changes nothing."""
    optimizer, oracle, table_decay = RULES[rule]
    decays = {"kernel": 0.1, "gamma": 0.0, "query_table": table_decay, "offset_kernel": 0.1}  # 0 for batch norm
    rng, factors, schedule = np.random.default_rng(0), {"offset_kernel": 0.25}, WarmupPoly(0.05, 40, 6)
    start = {name: rng.normal(size=[3, 4]) for name in decays}
    strategy = two_replicas() if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        variables, optimizer, step = optimized(start, factors, optimizer(schedule), strategy)
    oracles = {name: oracle(value, decays[name]) for name, value in start.items()}
    for number in range(23):
        gradients = {k: rng.normal(size=v.shape) for k, v in start.items()}
        step({k: tf.constant(g, tf.float32) for k, g in gradients.items()}, tf.constant(number != 7))
        if number == 7:
            assert optimizer.bad_step.numpy() == optimizer.iterations.numpy() == 7
            optimizer.bad_step.assign(-1)
            continue
        for index, (name, one) in enumerate(oracles.items()):
            expected = one.step(gradients[name], factors.get(name, 1.0) * float(schedule(one.t)))
            tolerances = dict(rtol=2e-5, atol=2e-6, err_msg=f"{name} {number}")
            check_values(strategy.experimental_local_results(variables[name]), expected, **tolerances)
            if optimizer.averages:
                check_values([optimizer.averages[index]], one.average, **tolerances)
    assert all(np.abs(variables[name].numpy() - start[name]).max() > 1e-4 for name in start)  # far above the tolerance


def test_offsets_move_a_tenth_as_far_as_with_the_whole_learning_rate():
    """The factor is from Dai et al., ICCV 2017."""
    layer = DeformableConv(4, 3, norm=None)
    layer.build([1, 5, 5, 4])
    factors = [getattr(weight, "learning_rate_factor", None) for weight in (layer.offset_kernel, layer.offset_bias)]
    assert factors == [0.1, 0.1]
