"""The spatial-attention study's counts, and the plain forms that they are counted from."""

import json

import numpy as np
import pytest
import tensorflow as tf

from axial.analysis import study, study_reference
from axial.analysis.study_published import TABLE_2, TABLE_3, TASKS
from axial.layers.attention_terms import SETTINGS
from axial.layers.dynamic_conv import DynamicConv
from axial.layers.generalized_attention import TEXT, GeneralizedAttention
from conftest import randomize, relative_error

PUBLISHED = {**TABLE_2, **TABLE_3}


def named(layer):
    return {weight.name.split("/")[-1].split(":")[0]: tf.convert_to_tensor(weight) for weight in layer.weights}


# === The plain forms ===


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("setting", SETTINGS)
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


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_plain_attention_of_sequences_equals_the_layer(setting):
    x, keys = tf.random.stateless_normal([1, 4, 8], [0, 1]), tf.random.stateless_normal([1, 6, 8], [2, 3])
    layer = GeneralizedAttention(setting, 2, **TEXT)
    layer(x)
    randomize(layer)
    options = dict(heads=2, scaled=True, wavelength=1e4)
    found = study_reference.generalized_attention(
        x[0][:, None], named(layer), setting, keys=keys[0][:, None], **options
    )
    assert relative_error(found[:, 0], layer(x, keys=keys)[0]) < 1e-4


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


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_count_of_a_module_is_that_of_its_equation(setting):
    """N pixels, C channels; a position of each axis and difference takes C x C."""
    e1, e2, e3, e4 = (bit == "1" for bit in setting)
    height, width, channels = 6, 9, 16
    pixels, square = height * width, channels**2
    wanted = (2 + (e1 or e2) + (e1 or e3)) * pixels * square  # the projections
    wanted += (2 * height - 1 + 2 * width - 1) * (square + e4 * channels) * (e2 or e4)
    wanted += (
        pixels**2 * channels * e1 + pixels * (height + width) * channels * (e2 and not e1) + pixels * channels * e3
    )
    wanted += pixels * channels * (1 if setting == "0010" else pixels)  # the weighted sum
    assert study.module(setting, (height, width), channels) == wanted


def test_what_ships_needs_no_more_products_than_the_plain_form():
    for setting in ("0001", "0010", "0011", "0110"):
        counts = [study.module(setting, (24, 24), 64, shipped=shipped) for shipped in (True, False)]
        assert counts[0] < counts[1], setting


@pytest.fixture(scope="module")
def counted():
    """{(configuration, task): GFLOPs} of every published row."""
    return {
        (configuration, task): study.network_gflops(task, *configuration, shipped=False)
        for configuration in PUBLISHED
        for task in TASKS
    }


@pytest.mark.parametrize("task,misses", [("detection", 0), ("segmentation", 2), ("nmt", 1)])
def test_counts_agree_with_the_published_tables(counted, task, misses):
    rows = [
        study.Row("", task, *configuration, counted[configuration, task], 0.0, numbers[TASKS.index(task)][1])
        for configuration, numbers in PUBLISHED.items()
    ]
    missed = {row.label for row in rows if not row.agrees}
    assert len(rows) == 26 and len(missed) <= misses
    known = {"1010 + deformable", "1000 + deformable", "0100 (n_k = 31)"}
    assert missed <= known


@pytest.mark.slow  # counts what ships, too
def test_rows_and_their_files(tmp_path):
    results = study.rows()
    assert len(results) >= 60
    data = json.loads(json.dumps([row.to_json() for row in results]))
    assert {"task", "setting", "gflops", "gflops_published", "score_published"} <= set(data[0])
    overhead = {row.setting: row.gflops for row in results if row.table == "Fig. 3" and row.task == "detection"}
    assert set(overhead) == set(SETTINGS)
    np.testing.assert_allclose(overhead["1111"], 281.4 - 213.7, atol=0.1)
    assert study.markdown(results).count("\n|") == len(results) + 2
    study.write_figure(str(tmp_path / "study.png"), results)
    assert (tmp_path / "study.png").stat().st_size > 10_000
