"""Anchor targets: which anchors are sampled, and their box codes."""

import numpy as np
import pytest
import tensorflow as tf

from axial.models.faster_rcnn.anchors import anchors
from axial.tasks.detection.input_pipeline import anchor_targets
from tests import oracles


def drawn(objects, valid_size, canvas, seed=0):
    """Anchor targets for the corners of objects: (corners [n, 4], labels [n], box codes [n, 4]) of all n anchors."""
    targets = anchor_targets(tf.constant(objects, tf.float32, [len(objects), 4]), valid_size, canvas, [seed, 0])
    anchor_maps = anchors(canvas)
    columns = zip(*((x, targets[f"anchor_scores/{i}"], targets[f"anchor_boxes/{i}"]) for i, x in anchor_maps.items()))
    corners, scores, codes = (np.concatenate([x.numpy().ravel() for x in column]) for column in columns)
    return corners.reshape(-1, 4), scores, codes.reshape(-1, 4)


def is_inside(corners, valid_size):
    return (corners[:, :2] >= 0).all(1) & (corners[:, 2:] <= valid_size).all(1)


@pytest.mark.parametrize("valid_size,canvas", [((800, 1067), (1344, 1344)), ((800, 533), (832, 1344))])
def test_no_anchor_beyond_the_photo_is_drawn(valid_size, canvas):
    """The image sizes are from Zhu et al., and some objects are at the edges of the photo."""
    height, width = valid_size
    objects = [[0, 0, 90, 130], [height - 200, width - 80, height, width], [300, 200, 420, 330], [0, 300, 20, 500]]
    corners, scores, _ = drawn(objects, valid_size, canvas)
    assert (scores >= 0).sum() == 256 and (scores == 1).sum() > 0
    beyond = ~is_inside(corners, valid_size)
    assert beyond.mean() > 0.2 and (scores[beyond] == -1).all()


@pytest.mark.parametrize(
    "objects",
    [
        [],
        [[4, 8, 40, 60]],
        [[2, 3, 11, 12]],  # so small that its IoU with every anchor is below 0.3
        [[5, 5, 45, 40], [7, 5, 45, 42], [0, 0, 33, 31], [20, 60, 53, 101]],
        [[10, 10, 38, 34], [10, 10, 38, 34]],  # equal boxes, which have equal IoUs
    ],
)
@pytest.mark.parametrize("valid_size", [(53, 101), (20, 20)])
def test_anchors_are_assigned_as_in_the_studys_code(objects, valid_size):
    """Anchors inside the photo have the oracle's targets. The photo of 20x20 pixels contains no anchor."""
    objects = [box for box in objects if box[2] <= valid_size[0] and box[3] <= valid_size[1]]
    corners, scores, codes = drawn(objects, valid_size, (64, 128))
    inside = is_inside(corners, valid_size)
    expected = np.full(len(corners), -2)
    expected[inside] = oracles.assigned(corners[inside], objects, 0.7, 0.3)
    positive, background = expected >= 0, expected == -1
    sampled = min(positive.sum(), 128)
    assert (scores == 1).sum() == sampled and (scores == 0).sum() == min(background.sum(), 256 - sampled)
    assert positive[scores == 1].all() and background[scores == 0].all()
    assert not codes[scores != 1].any()
    for i in np.flatnonzero(scores == 1):
        np.testing.assert_allclose(codes[i], oracles.box_code(objects[expected[i]], corners[i]), 1e-4, 1e-5)
