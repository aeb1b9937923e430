"""Residual axial blocks, compared with golden files of DeepLab2 and csrhddlam."""

import numpy as np
import pytest
import tensorflow as tf

from axial.layers import blocks, random
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair, BasicBlock, Bottleneck, StridedLocalAttention
from axial.models.panoptic_deeplab.xception import XceptionBlock
from axial.weights.names import assign_weights, csrhddlam_weights, deeplab2_weights, weight_names
from tests.conftest import built, check_golden, golden_files, outputs_and_gradients, prefixed, read_golden

TOLERANCE = 1e-4


def golden_block(meta):
    """Returns (block of a golden file, function that converts weights, function to axial's order of axes)."""
    if "torch" in meta:
        norm = BatchNormConfig(1 - meta["bn_momentum"], meta["bn_eps"], unbiased=True)
        planes, stride = meta["planes"], meta["stride"]
        attention, distance = dict(heads=meta["groups"]), meta["kernel_size"]
        pair = AxialPair(planes // 2, planes, norm, stride, True, attention, max_distance=distance, name="attention")
        block = Bottleneck(planes, 2 * planes, pair, norm, stride, name="block")

        def convert(arrays):
            shapes = {name: w.shape for name, w in weight_names(block).items()}
            return csrhddlam_weights(arrays, shapes, meta["groups"])

        return block, convert, lambda a: a.transpose(0, 2, 3, 1) if a.ndim == 4 else a
    statistics = meta["batch_norms"]
    configs = {name: BatchNormConfig(s["momentum"], s["eps"], unbiased=s["fused"]) for name, s in statistics.items()}
    norm, convolution_norm = configs["batch_norm_qkv"], configs["batch_norm"]
    inner, f, filters = meta["filters_list"]
    attention = dict(heads=meta["num_heads"])
    pair = AxialPair(f, inner, norm, meta["strides"], attention=attention, name="attention")
    block = Bottleneck(inner, filters, pair, convolution_norm, meta["strides"], name="block1")

    def convert(arrays):
        return {k.removeprefix("block1/"): v for k, v in deeplab2_weights(arrays).items()}

    return block, convert, lambda a: a


@pytest.mark.parametrize("name", golden_files("*_block_*.npz"))
def test_golden_block(name):
    arrays, meta = read_golden(name)
    block, convert, to_ours = golden_block(meta)
    x = tf.constant(to_ours(arrays["x"]))
    # DeepLab2's blocks apply ReLU to their input and not to their output.
    before, after = (lambda x: x, tf.nn.relu) if "torch" in meta else (tf.nn.relu, lambda y: y)

    def run(x, training):
        return after(block.before_relu(before(x), training))

    block(before(x))
    assign_weights(block, convert(prefixed(arrays, "w/")))
    check_golden(arrays, run, weight_names(block), convert=convert, to_ours=to_ours)


@pytest.mark.parametrize("name", golden_files("d2_attn2d_*.npz"))
def test_golden_pair(name):
    arrays, meta = read_golden(name)
    statistics = meta["batch_norms"]["batch_norm_qkv"]
    norm = BatchNormConfig(statistics["momentum"], statistics["eps"])
    f = meta["filters"]
    pair = AxialPair(f, 2 * f, norm, meta["strides"], attention=dict(heads=meta["num_heads"]), name="attention")

    def run(x, training):
        return pair.before_relu(x, training)

    x = tf.constant(arrays["x"])
    pair(x)

    def convert(arrays):
        return {k.removeprefix("attention/"): v for k, v in deeplab2_weights(arrays).items()}

    assign_weights(pair, convert(prefixed(arrays, "w/")))
    check_golden(arrays, run, weight_names(pair), convert=convert)


def make_block(name, norm, recompute):
    """A block with drop path: a bottleneck with axial attention, or Xception's block."""
    options = dict(drop_path=0.5, recompute=recompute, name="block")
    if name == "Xception's":
        return XceptionBlock([8, 8, 8], norm, **options)
    pair = AxialPair(4, 8, norm, attention=dict(heads=2), name="attention")
    return Bottleneck(8, 16, pair, norm, **options)


@pytest.fixture
def rematerialised(monkeypatch):
    """A list with the function of each call of `blocks.rematerialised`."""
    original, called = blocks.rematerialised, []

    def log(run, *inputs):
        called.append(run)
        return original(run, *inputs)

    monkeypatch.setattr(blocks, "rematerialised", log)
    return called


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["axial", "Xception's"])
def test_recomputing_changes_no_output_gradient_or_statistic(rematerialised, name, frozen):
    """The cases include frozen statistics, as in the backbone of a detector."""
    x, results = tf.random.stateless_normal([2, 6, 7, 8], [0, 0]), []
    for recompute in ("none", "block"):
        block = built(make_block(name, BatchNormConfig(momentum=0.5, frozen=frozen), recompute), x)
        before = [w.numpy() for w in block.non_trainable_weights]
        with random.seeded(0, tf.constant(3, tf.int64), 0):
            values = outputs_and_gradients(block, x)
        results.append([*values, *block.non_trainable_weights])
        moved = [np.any(w.numpy() != old) for w, old in zip(block.non_trainable_weights, before, strict=True)]
        assert all(moved) != frozen and any(moved) != frozen
    assert len(rematerialised) == 1
    for ours, expected in zip(*results, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5 * max(np.abs(expected).max(), 1))


def test_a_frozen_block_drops_no_branch():
    x = tf.random.stateless_normal([16, 3, 3, 8], [0, 1])
    block = built(BasicBlock(8, BatchNormConfig(), drop_path=0.9), x)
    assert np.any(block(x, training=True).numpy() != block(x).numpy())
    block.trainable = False
    np.testing.assert_array_equal(block(x, training=True), block(x))


def test_files_of_0_2_have_batch_norm_among_the_options_of_attention():
    layer = StridedLocalAttention(8, BatchNormConfig(), 2, batch_norm=False)
    layer(tf.zeros([1, 5, 5, 8]))
    assert not any("qkv_norm" in weight.name for weight in layer.weights)
