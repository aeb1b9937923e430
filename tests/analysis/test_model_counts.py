"""experiments/models.csv: the parameters of every registered model."""

import pytest

from axial.analysis import model_counts
from axial.analysis.model_counts import count
from axial.models.registry import VARIANTS, find_variant
from tests.conftest import ROOT

CSV = ROOT / "experiments" / "models.csv"
MODELS = {row.model: row for row in model_counts.read_models(str(CSV))}


def counted(name):
    parameters, norms, _ = count(name, (65, 65))
    variant = find_variant(name)
    numbers = dict(classes=variant.classes, parameters=parameters, attention_norms=norms)
    return model_counts.Counts(name, variant.task, **numbers)


def test_every_model_has_a_row(tmp_path):
    assert list(MODELS) == list(VARIANTS)
    model_counts.write_models(str(tmp_path / "models.csv"), MODELS.values())
    assert (tmp_path / "models.csv").read_text() == CSV.read_text()
    assert counted("axial_resnet_nano") == MODELS["axial_resnet_nano"]


@pytest.mark.slow  # traces every model: minutes
@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_counted_again(name):
    assert counted(name) == MODELS[name]


def test_the_command_prints_the_table(command):
    result = command("analyze", "models")
    assert result.code == 0 and not result.err, result.err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line]
    assert rows == [list(map(str, row.cells())) for row in MODELS.values()]
