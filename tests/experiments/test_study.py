"""The spatial-attention study's counts, and the plain forms that they are counted from."""

import shlex

import numpy as np
import pytest
import tensorflow as tf

import study
import study_reference
from axial.layers.spatial_attention.attention_terms import SETTINGS
from axial.layers.spatial_attention.dynamic_conv import DynamicConv
from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from axial.models.registry import build_model
from axial.recipes import configuration
from study import MEMORY, TABLE_2, TABLE_3, TASKS
from tests.conftest import randomize, relative_error

PUBLISHED = {**TABLE_2, **TABLE_3}


def named(layer):
    return {weight.name.split("/")[-1].split(":")[0]: tf.convert_to_tensor(weight) for weight in layer.weights}


# === The plain forms ===


@pytest.mark.parametrize("setting,window", [*((setting, None) for setting in SETTINGS), ("1111", 3)])
def test_the_plain_attention_equals_the_layer(setting, window):
    x = tf.random.stateless_normal([1, 4, 5, 8], [0, 1])
    layer = GeneralizedAttention(setting, 2, window=window)
    layer(x)
    randomize(layer)
    w = named(layer)
    shapes = study_reference.weight_shapes(setting, 8, 2)
    assert {name: weight.shape.as_list() for name, weight in w.items()} == shapes
    found = study_reference.generalized_attention(x[0], w, setting, heads=2, window=window)
    assert relative_error(found, layer(x)[0]) < 1e-4


@pytest.mark.parametrize("axes", [1, 2])
def test_the_plain_dynamic_convolution_equals_the_layer(axes):
    x = tf.random.stateless_normal([1, 6, 5, 8][: 1 + axes] + [8], [0, 1])
    layer = DynamicConv(5, 2, axes)
    layer(x)
    randomize(layer)
    x = x if axes == 2 else x[:, :, None]
    found = study_reference.dynamic_conv(x[0], named(layer), kernel=5, groups=2)
    wanted = layer(x if axes == 2 else x[:, :, 0])
    assert relative_error(found, wanted[0] if axes == 2 else wanted[0][:, None]) < 1e-4


# === Counts ===


@pytest.fixture(scope="module")
def counted():
    """{(configuration, task): GFLOPs} of every published row."""
    return {
        (configuration, task): study.network_gflops(task, *configuration)
        for configuration in PUBLISHED
        for task in TASKS
    }


def row_of(counted, task, configuration):
    """The `Row` of a published configuration, without what ships."""
    plain = configuration == study.PLAIN
    added = None if plain else study.added_gflops(task, *configuration, shipped=False)
    published = PUBLISHED[configuration][TASKS.index(task)][1]
    whole = counted[configuration, task]
    return study.Row("", task, *configuration, added, None, gflops=whole, gflops_published=published)


@pytest.mark.slow  # counts every network
@pytest.mark.parametrize("task,misses", [("detection", 0), ("segmentation", 2), ("nmt", 1)])
def test_counts_agree_with_the_published_tables(counted, task, misses):
    """Of a network without a mechanism nothing is compared, but for translation, whose whole is counted."""
    rows = [row_of(counted, task, configuration) for configuration in PUBLISHED]
    missed = {row.label for row in rows if row.agrees is False}
    assert [row.label for row in rows if row.agrees is None] == ["w/o"] * (task != "nmt")
    assert len(rows) == 26 and len(missed) <= misses
    known = {"1010 + deformable", "1000 + deformable", "0100 (n_k = 31)"}
    assert missed <= known


@pytest.mark.slow  # counts what ships, too
def test_rows_and_their_files(tmp_path):
    results = study.rows()
    assert len(results) >= 60
    overhead = {row.setting: row.added for row in results if row.table == "Fig. 3" and row.task == "detection"}
    assert set(overhead) == set(SETTINGS)
    np.testing.assert_allclose(overhead["1111"], 281.4 - 213.7, atol=0.1)
    assert study.markdown(results).count("\n|") == len(results) + 2
    study.write_figure(str(tmp_path / "study.png"), results)
    assert (tmp_path / "study.png").stat().st_size > 10_000


# === The systems ===


ROWS = [(task, *row) for row in PUBLISHED for task in TASKS]
FIGURE_3 = [(task, setting, None, False) for task in (*TASKS, MEMORY) for setting in SETTINGS]


def configured(text):
    """The `ModelConfig` and `TrainingConfig.init_checkpoint` of a command."""
    flags = [word.partition("=")[::2] for word in shlex.split(text)[1:]]
    configuration.load(
        [value for name, value in flags if name == "--gin_file"],
        [value for name, value in flags if name == "--gin_binding"],
    )
    return configuration.build("ModelConfig"), configuration.query("TrainingConfig.init_checkpoint", None)


QUICK = [("detection", "0010", None, True), ("segmentation", "1111", None, False), (MEMORY, "0110", None, False)]


@pytest.mark.parametrize(
    "row",
    [row if row in QUICK else pytest.param(row, marks=pytest.mark.slow) for row in dict.fromkeys([*ROWS, *FIGURE_3])],
    ids=str,
)
def test_every_command_is_parsed_and_its_model_made(row):
    """Networks of photos start from a plain ResNet-50 of ImageNet (Sec. 4.1), which the command before makes."""
    *before, text = study.row_commands(*row)
    config, start = configured(text)
    assert config.name == study.RECIPES[row[0]][1]
    model = build_model(config.name, 19, **config.arguments)
    # Sec. 4.1: conv4 and conv5, once more in the segmenter's head, and both sides of the Transformer
    blocks = {"detection": 9, "segmentation": 10}.get(row[0], 12)
    assert attending(model) == (0 if row[1] == "none" else blocks)
    starts = {"detection": ["resnet_50"], "segmentation": ["resnet_50_deeplab_stem"]}.get(row[0], [])
    assert start == ("CHECKPOINT" if starts else None)
    assert [configured(one)[0].name for one in before] == starts
    assert all(one.endswith("--data_dir=IMAGENET_DATA --model_dir=CHECKPOINT --strategy=tpu") for one in before)


def attending(model):
    """How many layers of a model attend to positions, those with memory apart, or convolve dynamically."""
    layers = [layer for layer in model.submodules if isinstance(layer, GeneralizedAttention | DynamicConv)]
    return len([layer for layer in layers if layer.name != "memory"])


def test_the_scores_that_are_kept_belong_to_rows():
    kept = study.read_scores()
    assert set(kept) <= {*ROWS, *FIGURE_3}
