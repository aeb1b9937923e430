"""The cost of a training step, from counted multiply-adds and the device's measured speed."""

from axial.analysis import step_cost


def test_the_rate_is_measured():
    assert 1e8 < step_cost.rate() < 1e15
    assert 2**26 < step_cost.resident() < 2**40
