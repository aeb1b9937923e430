"""The values that axial-analyze recipes reads from the text of files equal the values of gin and Python."""

import inspect
import sys
import time

import gin
import pytest

from axial import recipes
from axial.models.names import model_names
from axial.models.registry import VARIANTS
from axial.recipes import configuration
from axial.recipes.settings import read_settings
from tests.conftest import ROOT
from tests.test_imports import without_tensorflow

RECIPES = recipes.read_recipes()


@pytest.mark.parametrize("recipe", RECIPES[:: len(RECIPES) - 1], ids=lambda recipe: recipe.path)
def test_a_recipe_is_read_as_gin_reads_it(recipe):
    """Every macro of the recipe has the value that gin gives it."""
    configuration.load([recipe.path])
    for macro, value in recipe.bindings.items():
        if "." not in macro:
            assert gin.query_parameter(f"{macro}/gin.macro.value") == configuration._gin_value(value), macro
    assert configuration.query("ModelConfig.name", None) == recipe.model


def test_every_leaf_is_a_recipe():
    """`read_recipes` lists the gin files of experiments/ except files for inclusion, each with a short purpose."""
    files = {str(path.relative_to(ROOT / "experiments")) for path in (ROOT / "experiments").glob("*/*.gin")}
    leaves = {name for name in files if not name.startswith(("tasks/", "tiny/"))}
    included = {"panoptic.gin", "classification.gin", "detection.gin", "translation.gin"}
    for recipe in RECIPES:
        assert recipe.purpose.endswith((".", ")")) and len(recipe.purpose) < 200, recipe
        assert "axial-train" not in recipe.purpose, recipe
    assert {recipe.path for recipe in RECIPES} == {name for name in leaves if name.split("/")[1] not in included}


def test_the_settings_are_those_of_the_signatures():
    """Settings have the names, order and defaults of the builders' signatures, and a description each."""
    settings = read_settings()
    assert list(settings) == list(configuration.CONFIGURABLES)
    for builder in configuration._BUILDERS:
        arguments, names = settings[builder.__name__], vars(sys.modules[builder.__module__])
        parameters = inspect.signature(builder).parameters
        assert list(arguments) == list(parameters), builder
        for argument, parameter in parameters.items():
            text, meaning = arguments[argument]
            assert (text is None) == (parameter.default is inspect.Parameter.empty), argument
            if text is not None and not text.startswith("dataclasses."):
                assert eval(text, dict(names)) == parameter.default, argument  # noqa: S307, text of our own files
            assert meaning, argument


def test_the_models_are_those_of_the_module():
    assert model_names() == list(VARIANTS)


def listed(*arguments):
    """Returns (output, seconds) of the command in a new process. The process must not import TensorFlow."""
    started = time.monotonic()
    return without_tensorflow("analyze", "recipes", *arguments), time.monotonic() - started


def test_the_command_lists_recipes_and_settings_quickly():
    """The list has every recipe within 10 seconds. A recipe's page has its own settings with defaults and values."""
    output, seconds = listed()
    assert seconds < 10
    for recipe in RECIPES:
        assert recipe.path[:40] in output and recipe.model[:40] in output
    output, _ = listed("nuclei/demo.gin")
    assert "TextData.lengths" not in output
    (line,) = (line for line in output.splitlines() if "│ DataConfig.photo_scale" in line)
    assert [cell.strip() for cell in line.split("│")[2:4]] == ["None", "1.0"]
    (line,) = (line for line in output.splitlines() if "│ STEPS" in line)
    assert line.split("│")[2].strip() == "1400"
    assert "axial-train --gin_file=nuclei/demo.gin --gin_file=tiny/panoptic.gin --data_dir=DATA" in output


def test_a_recipe_may_be_the_users_and_an_unknown_one_is_named_with_the_nearest(succeed, refuse, tmp_path):
    (tmp_path / "own.gin").write_text("include 'nuclei/demo.gin'\nSTEPS = 1234\n")
    assert "1234" in succeed("analyze", "recipes", str(tmp_path / "own.gin")).out
    assert "demo.gin" in refuse("nuclei/dmo.gin: no such gin file", "analyze", "recipes", "nuclei/dmo.gin").line
    refuse("takes [RECIPE]: got 'b'", "analyze", "recipes", "a", "b")
