"""Xception: blocks that are recomputed in the backward pass, and output strides."""

import tensorflow as tf

from axial.models.panoptic_deeplab.xception import Xception71
from axial.models.resnet.network import BackboneOptions
from tests.conftest import relative_error


def test_a_network_that_is_trained_at_output_stride_16_can_be_used_at_8():
    """Every second pixel of each map is that of stride 16: dilation takes the place of the strides."""
    coarse, fine = (Xception71(BackboneOptions(stride)) for stride in (16, 8))
    images = tf.random.stateless_uniform([1, 65, 97, 3], [0, 0], -1, 1)
    wanted = coarse(images)
    fine(images)
    for own, weight in zip(fine.weights, coarse.weights, strict=True):
        own.assign(weight)
    found = fine(images)
    assert found["res4"].shape[1:3] == found["res5"].shape[1:3] == (9, 13)
    for level, x in found.items():
        x = x[:, ::2, ::2] if level in ("res4", "res5") else x
        assert relative_error(x, wanted[level]) < 1e-5, level
