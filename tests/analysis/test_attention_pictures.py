"""Pictures of the mechanisms: the numbers that they show, and the files."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.analysis import attention_pictures as pictures
from axial.layers.deformable_conv import DeformableConv
from axial.layers.dynamic_conv import DynamicConv
from axial.layers.generalized_attention import GeneralizedAttention
from conftest import randomize


@pytest.fixture
def x():
    return tf.random.stateless_normal([1, 6, 8, 8], [0, 1])


def built(layer, x):
    layer(x)
    randomize(layer)
    return layer


def photo():
    return np.random.default_rng(0).integers(0, 255, [60, 80, 3], np.uint8)


def size_of(path):
    with Image.open(path) as image:
        assert np.asarray(image).std() > 10
        return image.size


def test_maps_of_each_term(x, tmp_path):
    maps = pictures.term_maps(built(GeneralizedAttention("1011", 2), x), x, (2, 3))
    names = ["query and key content", "key content only", "relative position only", "setting 1011"]
    assert list(maps) == names
    for weights in maps.values():
        assert weights.shape == (6, 8) and abs(weights.sum() - 1) < 1e-5
    assert np.abs(maps[names[0]] - maps[names[3]]).max() > 1e-3
    pictures.draw_maps(str(tmp_path / "maps.png"), photo(), maps, (2, 3))
    width, height = size_of(tmp_path / "maps.png")
    assert width > 3 * height


@pytest.mark.parametrize("modulation", ["none", "sigmoid"])
def test_samples_of_a_deformable_convolution(x, tmp_path, modulation):
    layer = DeformableConv(8, 3, None, modulation=modulation, offset_groups=2)
    layer(x)
    rows, columns, masks = pictures.sampling_points(layer, x, (2, 3))
    assert rows.shape == columns.shape == masks.shape == (9, 2)
    np.testing.assert_array_equal(rows[:, 0], np.repeat([1, 2, 3], 3))  # no offsets yet
    np.testing.assert_array_equal(columns[:, 1], np.tile([2, 3, 4], 3))
    np.testing.assert_array_equal(masks, np.full([9, 2], 1.0 if modulation == "none" else 0.5))
    randomize(layer)
    points = pictures.sampling_points(layer, x, (2, 3))
    assert np.abs(points[0] - rows).max() > 0.1
    pictures.draw_points(str(tmp_path / "points.png"), photo(), points, (2, 3), (6, 8))
    size_of(tmp_path / "points.png")


def test_kernels_of_a_query(x, tmp_path):
    kernels = pictures.query_kernels(built(DynamicConv(5, 4), x), x, (2, 3))
    assert kernels.shape == (4, 5, 5)
    np.testing.assert_allclose(kernels.sum((1, 2)), np.ones(4), rtol=1e-5)
    pictures.draw_kernels(str(tmp_path / "kernels.png"), kernels)
    size_of(tmp_path / "kernels.png")
