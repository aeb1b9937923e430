"""The tables that counts.py writes: models.csv, steps.csv, and the counts of zoo.csv."""

import pytest

import counts
from axial.analysis import model_counts, step_cost
from axial.errors import InputError
from axial.models.registry import VARIANTS, find_variant
from axial.recipes import read_recipes
from axial.weights import zoo
from pages import csv_rows, write_block
from tests.conftest import ROOT

MODELS = {row.model: row for row in model_counts.read_models(str(ROOT / "experiments/models.csv"))}
STEPS = step_cost.read_steps()
ZOO = zoo.read_zoo()


def test_tables_have_every_model_and_are_not_stale():
    """The tables are complete. The test repeats the counts of the smallest models."""
    for name, kind, rows in (("models", model_counts.Counts, MODELS), ("steps", step_cost.Step, STEPS)):
        assert (ROOT / f"experiments/{name}.csv").read_text() == csv_rows(kind, rows.values())
    assert list(MODELS) == list(VARIANTS)
    recipes = [recipe for recipe in read_recipes() if recipe.canvas]
    assert set(STEPS) == {r.model for r in recipes if find_variant(r.model).task in counts.COUNTED_TASKS}
    assert {(step.model, step.sides) for step in STEPS.values()} <= {(r.model, r.canvas) for r in recipes}
    assert counts.count_variants(["axial_resnet_nano"], processes=1) == [MODELS["axial_resnet_nano"]]
    assert counts.count_step("resnet_nano", STEPS["resnet_nano"].sides) == STEPS["resnet_nano"]


def test_a_block_replaces_itself_alone(tmp_path):
    path = tmp_path / "page.md"
    write_block(str(path), "tables", "one")
    assert path.read_text() == "<!-- tables:begin -->\none\n<!-- tables:end -->\n"
    path.write_text(f"before\n{path.read_text()}after\n")
    write_block(str(path), "tables", "two")
    assert path.read_text() == "before\n<!-- tables:begin -->\ntwo\n<!-- tables:end -->\nafter\n"
    with pytest.raises(InputError, match="holds no lines <!-- zoo:begin -->"):
        write_block(str(path), "zoo", "three")
    assert "two" in path.read_text()


@pytest.mark.slow
def test_the_page_of_the_zoo_is_not_stale():
    text = (ROOT / "experiments/ZOO.md").read_text()
    assert counts.zoo_markdown(ZOO) == text.partition("<!-- zoo:begin -->\n")[2].partition("\n<!-- zoo:end -->")[0]
    for model in ("axial_resnet_26_s", "axial_deeplab_nano"):  # public weights, and a shipped model
        (row,) = (row for row in ZOO if row.model == model)
        assert counts.count_checkpoint(row) == (row.params, row.macs)


@pytest.mark.slow  # traces every model: minutes
@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_counted_again(name):
    assert counts.count_variants([name], processes=1) == [MODELS[name]]
    if name in STEPS:
        assert counts.count_step(name, STEPS[name].sides) == STEPS[name]
    for row in ZOO:
        assert row.model != name or counts.count_checkpoint(row) == (row.params, row.macs)
