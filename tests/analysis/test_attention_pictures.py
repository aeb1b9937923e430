"""Attention pictures: the numbers that they show, and the files that axial-analyze attention writes."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.analysis import attention_pictures as pictures
from axial.errors import InputError
from axial.layers.attention.layer import AxialAttention, LocalAttention, logit_maps, split_heads
from axial.layers.attention.windows import table_rows
from axial.layers.masking import MASKED
from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from axial.models.registry import build_model
from tests.conftest import built, relative_error
from tests.layers.test_axial_attention import folded_copy


@pytest.fixture
def x():
    return tf.random.stateless_normal([1, 6, 8, 8], [0, 1])


def photo():
    return np.random.default_rng(0).integers(0, 255, [60, 80, 3], np.uint8)


def size_of(path):
    with Image.open(path) as image:
        assert np.asarray(image).std() > 10
        return image.size


AXIAL = {
    "height": dict(axis="height"),
    "span": dict(axis="width", span=3),
    "one term": dict(axis="height", terms=("query",), value_position=False),
}
LAYERS = {name: (AxialAttention, options) for name, options in AXIAL.items()}
LAYERS["square"] = LocalAttention, dict(span=3, position_sensitive=True)
LAYERS["plain square"] = LocalAttention, dict(span=5, batch_norm=False)


def equation_weights(layer, x):
    """Softmax weights by the reference equation, for all pairs of a layer in training: [lines, heads, L, M]."""
    spec, windows = layer.spec, layer.spec.windows(x)
    qkv = tf.einsum("nhwc,cd->nhwd", x, layer.kernel)
    qkv = layer.qkv_norm(qkv) if layer.inner_norm else qkv
    q, k, _ = (split_heads(tensor, windows, spec.options.heads) for tensor in tf.split(qkv, spec.sizes, 3))
    offsets, visible = windows.all_pairs()
    tables = spec.lookup_tables(layer.tables)
    maps = logit_maps(q, k, {n: table_rows(t, offsets) for n, t in tables.items()}, spec.options.terms)
    scales = layer.logit_norm.stored_scales() if layer.inner_norm else tf.ones(maps.shape[:1] + maps.shape[2:3])
    logits = tf.reduce_sum(maps * scales[:, None, :, None, None], 0)
    return tf.nn.softmax(tf.where(visible, logits, MASKED)).numpy()


@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_a_query_are_those_of_the_equation(x, name):
    layer_class, options = LAYERS[name]
    layer = built(layer_class(8, 8, heads=2, **options), x)
    expected, (row, column) = equation_weights(layer, x), (4, 3)
    layer = folded_copy(layer, x)
    actual = pictures.query_weights(layer, x, (row, column)).numpy()
    index = {"height": row, "width": column, "square": row * 8 + column}[layer.spec.axis]
    every = expected[:, :, index].transpose(1, 0, 2)  # [heads, lines, M]
    every = every.transpose(0, 2, 1) if layer.spec.axis == "height" else every.reshape(2, 6, 8)
    assert actual.shape == (2, 6, 8) and relative_error(actual, every) < 1e-4


def test_layers_of_a_model_and_what_they_take():
    model = build_model("axial_deeplab_nano", 5, norm=None)
    images = tf.random.stateless_normal([1, 33, 65, 3], [0, 1])
    maps = model(images)
    layers = pictures.find_layers(model, "stage4_block1")
    assert list(layers) == [f"backbone/stage4_block1/attention/{axis}" for axis in ("height", "width")]
    assert next(iter(pictures.find_layers(model))).startswith("backbone/stage5_block1")
    height, width = pictures.layer_inputs(model, list(layers.values()))(images)
    assert relative_error(layers["backbone/stage4_block1/attention/height"](height)[:, ::2], width) < 1e-5
    for name, value in model(images).items():
        np.testing.assert_array_equal(value, maps[name])  # the layers have stopped recording
    with pytest.raises(InputError, match="no block 'stage4' attends"):
        pictures.find_layers(model, "stage4")
    plain = build_model("panoptic_deeplab_resnet_nano", 5, norm=None)
    plain(images)
    with pytest.raises(InputError, match="no layer that attends"):
        pictures.find_layers(plain)


def test_lines_of_axial_attention(x, tmp_path):
    rows = []
    for axis in ("height", "width"):
        layer = folded_copy(built(AxialAttention(8, 8, axis=axis, heads=4), x), x)
        rows.append((axis, dict(zip("abcd", pictures.query_weights(layer, x, (2, 3)).numpy())), (2, 3)))
    pictures.draw_panels(str(tmp_path / "lines.png"), photo(), (60, 80), rows)
    width, height = size_of(tmp_path / "lines.png")
    assert width > height


def test_panels_have_one_scale_and_no_padding(tmp_path):
    """A photo is the left half of its canvas. A weight of 1/4 is half as bright as a weight of 1."""
    weights = np.zeros([3, 4, 4], np.float32)
    weights[:, 0, 0], weights[:, 3, 3] = (1, 0.25, 0), (0, 0.75, 1)
    rows = [("", dict(zip("abc", weights)), (3, 1))]
    pictures.draw_panels(str(tmp_path / "a.png"), np.zeros([64, 32, 3], np.uint8), (64, 64), rows)
    sheet = np.asarray(Image.open(tmp_path / "a.png"))
    corners = [sheet[40, i * (pictures.PANEL + 8)] for i in range(3)]
    np.testing.assert_allclose([corner.max() for corner in corners], [255, 128, 0], atol=1)
    assert sheet[40 : 40 + pictures.PANEL, 132:200].min() == 255  # the photo is 132 pixels wide, without the padding


def test_maps_of_each_term(x, tmp_path):
    maps = pictures.term_maps(built(GeneralizedAttention("1011", 2), x), x, (2, 3))
    names = ["query and key content", "key content only", "relative position only", "setting 1011"]
    assert list(maps) == names
    for weights in maps.values():
        assert weights.shape == (6, 8) and abs(weights.sum() - 1) < 1e-5
    assert np.abs(maps[names[0]] - maps[names[3]]).max() > 1e-3
    pictures.draw_panels(str(tmp_path / "maps.png"), photo(), (60, 80), [("", maps, (2, 3))])
    width, height = size_of(tmp_path / "maps.png")
    assert width > 3 * height
