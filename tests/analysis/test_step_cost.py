"""The counted and measured cost of a training step."""

import math

import pytest

from axial import configuration
from axial.analysis import step_cost
from axial.errors import InputError
from axial.models.registry import find_variant
from axial.recipes import read_recipes
from tests.conftest import ROOT

CSV = ROOT / "experiments" / "steps.csv"
STEPS = step_cost.read_steps(str(CSV))


def test_every_recipe_for_photos_is_counted():
    recipes = [recipe for recipe in read_recipes() if recipe.canvas]
    wanted = {recipe.model for recipe in recipes if find_variant(recipe.model).task in step_cost.COUNTED}
    assert set(STEPS) == wanted
    canvases = {(recipe.model, recipe.canvas) for recipe in recipes}
    assert all((step.model, step.sides) in canvases for step in STEPS.values())


def test_the_file_is_not_stale(tmp_path):
    step = STEPS["resnet_nano"]
    assert step_cost.count("resnet_nano", step.sides) == step
    step_cost.write_steps(str(tmp_path / "steps.csv"), STEPS.values())
    assert (tmp_path / "steps.csv").read_text() == CSV.read_text()


@pytest.mark.slow  # traces the largest models: minutes
@pytest.mark.parametrize("name", STEPS)
def test_every_row_is_counted_again(name):
    assert step_cost.count(name, STEPS[name].sides) == STEPS[name]


def test_a_step_is_in_proportion_to_its_pixels():
    step = step_cost.Step("m", "10x20", 1000, 64)
    assert step.of((10, 20), 1) == (3000, 64) and step.of((20, 40), 8) == (8 * 4 * 3000, 8 * 4 * 64)


def test_the_rate_is_measured():
    assert 1e8 < step_cost.rate() < 1e15
    device, memory = step_cost.device_memory()
    assert device in ("CPU", "GPU") and (memory is None or memory > 2**28)
    assert 2**26 < step_cost.resident() < 2**40


def recipe_of(path):
    """(`Step`, crop, `TrainingConfig`) of a recipe."""
    configuration.load([path])
    tasks = [configuration.query(f"{task.__name__}.data", None) for task in configuration.TASKS]
    (data,) = filter(None, tasks)
    return STEPS[configuration.query("ModelConfig.name", None)], data.crop, configuration.build("TrainingConfig")


@pytest.mark.parametrize("path", ["coco/axial_deeplab_s.gin", "cityscapes/axial_deeplab_l.gin"])
@pytest.mark.parametrize("device", [("CPU", 2**34), ("GPU", 2**33), ("GPU", None)])
def test_a_step_that_does_not_suit_the_device_is_said(path, device, monkeypatch):
    """On a device of a 50 billion multiply-adds a second, as a laptop is."""
    monkeypatch.setattr(step_cost, "device_memory", lambda: device)
    monkeypatch.setattr(step_cost, "rate", lambda: 5e10)
    step, crop, training = recipe_of(path)
    said = step_cost.long_step(step, crop, training)
    products = 3 * step.multiply_adds * training.batch * crop[0] * crop[1] / math.prod(step.sides)
    assert f"takes about {step_cost.duration(products / 5e10)} on this {device[0]}" in said
    assert f"a step of {training.batch} photos of {crop[0]}x{crop[1]}" in said and "GB of memory" in said


SMALL = [
    *("own/axial_deeplab_nano.gin", "nuclei/demo.gin", "nuclei/axial_deeplab_nano.gin", "sample/overfit.gin"),
    *("camvid/axial_deeplab_nano.gin", "camvid/ccnet_nano.gin", "imagenette/axial_resnet_nano.gin"),
]


@pytest.mark.parametrize("path", SMALL)
def test_small_recipes_are_not_warned_of_and_cost_nothing(path, monkeypatch):
    """Not even on 8 GB of memory."""
    monkeypatch.setattr(step_cost, "device_memory", lambda: ("CPU", 2**33))
    monkeypatch.setattr(step_cost, "rate", lambda: pytest.fail("measured"))
    assert step_cost.long_step(*recipe_of(path)) is None


@pytest.mark.parametrize(
    "old,new", [("canvas", "size"), (",224x224,", ",224,"), ("multiply_adds", "products"), ("canvas", "model")]
)
def test_a_wrong_row_is_named(old, new, tmp_path):
    (tmp_path / "steps.csv").write_text(CSV.read_text().replace(old, new))
    with pytest.raises(InputError, match="steps.csv:"):
        step_cost.read_steps(str(tmp_path / "steps.csv"))
