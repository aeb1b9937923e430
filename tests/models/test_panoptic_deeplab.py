"""Panoptic-DeepLab, compared with golden outputs of DeepLab2, and dropout of its ASPP."""

import json
import zlib

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.batch_norm import BatchNormConfig
from axial.models.outputs import CENTER, OFFSET, SEMANTIC
from axial.models.panoptic_deeplab.network import ASPP
from axial.models.registry import build_model
from axial.tasks.segmentation.canvas_maps import upsample
from axial.weights.names import assign_weights, deeplab2_weights
from tests.conftest import golden_files, read_golden, relative_error

TOLERANCE = 1e-3


def golden_weight(name, shape):
    """A weight of the golden files. Its random values depend only on its name and shape."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("gamma"):
        x = rng.uniform(0.8, 1.2, shape)
    elif name.endswith("moving_variance"):
        x = rng.uniform(0.5, 1.5, shape)
    elif name.endswith(("beta", "moving_mean", "bias")):
        x = rng.normal(0, 0.1, shape)
    elif name.endswith("embeddings"):
        x = rng.normal(0, 0.5, shape)
    elif name.endswith("depthwise_kernel"):
        x = rng.normal(0, (shape[0] * shape[1]) ** -0.5, shape)
    else:
        x = rng.normal(0, int(np.prod(shape[:-1])) ** -0.5, shape)
    return np.asarray(x, np.float32)


def golden_network(arrays, meta, images):
    """The network of a golden file with the file's weights."""
    num_classes, norm = arrays["head/semantic_logits"].shape[-1], BatchNormConfig(epsilon=meta["bn_eps"])
    options = dict(width=meta["width"], output_stride=meta["output_stride"], heads=meta["num_heads"], span=None)
    options |= dict(pool=False, projection=256, inner_norm=True)  # the first stage has a stride instead of a max-pool
    model = build_model("axial_deeplab_l", num_classes, norm, **options)
    model(images)  # creates the weights
    values = {n: golden_weight(n, shape) for n, shape in json.loads(str(arrays["weights"]))}
    assign_weights(model, deeplab2_weights(values))
    return model


@pytest.mark.parametrize("name", golden_files("d2_full_*.npz"))
def test_golden_network(name):
    """Feature maps, logits, heat map and offsets equal DeepLab2's on a golden image, up to 1e-3."""
    arrays, meta = read_golden(name)
    images = tf.constant(arrays["image_0_255"].astype(np.float32)) / 127.5 - 1
    model = golden_network(arrays, meta, images)
    for key, actual in model.backbone(images).items():
        expected, actual = arrays[f"endpoint/{key}"], actual[:1].numpy()
        if key == "res1":  # the golden file has every fourth pixel, before the ReLU
            expected, actual = np.maximum(expected, 0), actual[:, ::4, ::4]
        assert relative_error(actual, expected) < TOLERANCE, key
    outputs = model(images)
    for key, actual in outputs.items():
        assert relative_error(actual, arrays[f"head/{key}"]) < TOLERANCE, key
    maps = upsample(outputs, images.shape[1:3])
    for key, step in ((SEMANTIC, 4), (CENTER, 1), (OFFSET, 1)):
        assert relative_error(maps[key][:1, ::step, ::step], arrays[f"resized/{key}"]) < TOLERANCE, key


def test_aspp_drops_out_in_training_alone():
    """In training, dropout of rate 0.5 changes a constant 1 to 0 or 2. Inference has no dropout. Rate 1 is refused."""
    layer = ASPP(8, BatchNormConfig(), dropout=0.5)
    x = tf.random.stateless_normal([2, 5, 5, 4], [0, 0])
    np.testing.assert_array_equal(layer(x), layer(x))
    layer.mix.conv.kernel.assign(tf.zeros_like(layer.mix.conv.kernel))
    layer.mix.norm.beta.assign(tf.ones([8]))
    y = layer(x, training=True).numpy()
    assert set(np.unique(y)) == {0.0, 2.0} and 0.3 < (y == 0).mean() < 0.7
    with pytest.raises(InputError, match="aspp_dropout must be at least 0 and below 1: got 1"):
        ASPP(8, BatchNormConfig(), dropout=1)
