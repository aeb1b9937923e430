"""The counts and commands of the spatial-attention study."""

import shlex

import numpy as np
import pytest

import study
from axial.layers.spatial_attention.attention_terms import SETTINGS
from axial.layers.spatial_attention.dynamic_conv import DynamicConv
from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from axial.models.registry import build_model
from axial.recipes import configuration
from study import FIGURE_3, MEMORY
from tests.conftest import ROOT


def test_the_page_has_the_products_of_the_equations():
    block = (ROOT / "experiments/results/study.md").read_text().partition("<!-- study:begin -->")[2]
    lines = [line.split(" | ") for line in block.partition("<!-- study:end -->")[0].splitlines() if "|" in line][2:]
    for row, line in zip(study.ROWS, lines, strict=True):
        assert line[:3] == [f"| {row.table}", row.task, row.configuration] and line[11] == f"{row.scores_ours} |"
        added = "" if row.added() is None else f"{row.added():.{3 if row.table == FIGURE_3 else 2}f}"
        assert line[3] == added, row


@pytest.mark.slow  # counts every network
@pytest.mark.parametrize("task,misses", [("detection", 0), ("segmentation", 2), ("nmt", 1)])
def test_counts_agree_with_the_published_tables(task, misses):
    """The rows 'w/o' have no count to compare, as counts are additions to the plain network, except in translation."""
    rows = [row for row in study.ROWS if row.task == task and row.table != FIGURE_3]
    missed = {row.configuration for row in rows if row.agrees is False}
    assert [row.configuration for row in rows if row.agrees is None] == ["w/o"] * (task != "nmt")
    assert len(rows) == 26 and len(missed) <= misses
    apart = {"1010 + deformable", "1000 + deformable", "0100 (n_k = 31)"}
    assert missed <= apart


@pytest.mark.slow  # traces our layers too
def test_rows_and_their_files(tmp_path):
    assert len(study.ROWS) >= 60
    overhead = {row.setting: row.added() for row in study.ROWS if row.table == FIGURE_3 and row.task == "detection"}
    assert set(overhead) == set(SETTINGS)
    np.testing.assert_allclose(overhead["1111"], 281.4 - 213.7, atol=0.1)
    page = (ROOT / "experiments/results/study.md").read_text().partition("<!-- study:begin -->\n")[2]
    assert study.markdown(list(map(study.cells, study.ROWS))) == page.partition("\n<!-- study:end -->")[0]
    study.write_figure(str(tmp_path / "study.png"))
    assert (tmp_path / "study.png").stat().st_size > 10_000


# === The systems ===


def configured(text):
    """Returns (`ModelConfig`, `TrainingConfig.init_checkpoint`) of a command."""
    flags = [word.partition("=")[::2] for word in shlex.split(text)[1:]]
    files, bindings = ([value for name, value in flags if name == f"--gin_{kind}"] for kind in ("file", "binding"))
    configuration.load(files, bindings)
    return configuration.build("ModelConfig"), configuration.query("TrainingConfig.init_checkpoint", None)


QUICK = [("detection", "0010", None, True), ("segmentation", "1111", None, False), (MEMORY, "0110", None, False)]


@pytest.mark.parametrize(
    "row",
    [row if (row.task, *row.key) in QUICK else pytest.param(row, marks=pytest.mark.slow) for row in study.ROWS],
    ids=lambda row: row.label,
)
def test_every_command_is_parsed_and_its_model_made(row):
    """Image networks start from a plain ResNet-50 on ImageNet (Sec. 4.1), which the previous command trains."""
    *before, text = row.commands()
    config, start = configured(text)
    assert config.name == study.RECIPES[row.task][1]
    model = build_model(config.name, 19, **config.arguments)
    # Sec. 4.1: attention is in conv4 and conv5, in the segmenter's head, and in the Transformer's encoder and decoder.
    blocks = {"detection": 9, "segmentation": 10}.get(row.task, 12)
    assert attending(model) == (0 if row.setting == "none" else blocks)
    starts = {"detection": ["resnet_50"], "segmentation": ["resnet_50_deeplab_stem"]}.get(row.task, [])
    assert start == ("CHECKPOINT" if starts else None)
    assert [configured(one)[0].name for one in before] == starts
    assert all(one.endswith("--data_dir=IMAGENET_DATA --model_dir=CHECKPOINT --strategy=tpu") for one in before)


def attending(model):
    """Returns the number of attention and dynamic convolution layers of a model, without encoder-decoder attention."""
    layers = [layer for layer in model.submodules if isinstance(layer, GeneralizedAttention | DynamicConv)]
    return len([layer for layer in layers if layer.name != "memory"])


def test_the_scores_that_are_kept_belong_to_rows():
    assert {(line["task"], study._key(line)) for line in study.OURS} <= {(row.task, row.key) for row in study.ROWS}
