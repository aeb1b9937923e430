"""The cost of a training step, from counted multiply-adds and the device's measured speed."""

import math

import pytest

from axial.analysis import step_cost
from axial.recipes import configuration

STEPS = step_cost.read_steps()


def test_the_rate_is_measured():
    assert 1e8 < step_cost.rate() < 1e15
    device, memory = step_cost.device_memory()
    assert device in ("CPU", "GPU") and (memory is None or memory > 2**28)
    assert 2**26 < step_cost.resident() < 2**40


def recipe_of(path):
    """Returns (`Step`, crop, `TrainingConfig`) of a recipe."""
    configuration.load([path])
    tasks = [configuration.query(f"{task.__name__}.data", None) for task in configuration.TASKS]
    (data,) = filter(None, tasks)
    return STEPS[configuration.query("ModelConfig.name", None)], data.crop, configuration.build("TrainingConfig")


@pytest.mark.parametrize("device", [("CPU", 2**34), ("GPU", None)])
def test_a_step_that_does_not_suit_the_device_is_said(device, monkeypatch):
    """The warning has the run's time on a fake device with 50 billion multiply-adds a second, like a laptop."""
    monkeypatch.setattr(step_cost, "device_memory", lambda: device)
    monkeypatch.setattr(step_cost, "rate", lambda: 5e10)
    step, crop, training = recipe_of("coco/axial_deeplab_s.gin")
    said = step_cost.long_step(step, crop, training)
    products = 3 * step.multiply_adds * training.batch * crop[0] * crop[1] / math.prod(step.sides)
    assert f"takes about {step_cost.duration(products / 5e10)} on this {device[0]}" in said
    assert f"a step of {training.batch} photos of {crop[0]}x{crop[1]}" in said and "GB of memory" in said


@pytest.mark.parametrize("path", ["own/axial_deeplab_nano.gin", "nuclei/demo.gin", "imagenette/axial_resnet_nano.gin"])
def test_small_recipes_are_not_warned_of_and_cost_nothing(path, monkeypatch):
    """Small recipes give no warning with 8 GB of memory, and the device's speed is not measured."""
    monkeypatch.setattr(step_cost, "device_memory", lambda: ("CPU", 2**33))
    monkeypatch.setattr(step_cost, "rate", lambda: pytest.fail("measured"))
    assert step_cost.long_step(*recipe_of(path)) is None
