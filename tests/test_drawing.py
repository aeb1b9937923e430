"""Overlays of segments on photos."""

import numpy as np

from axial.data.specs import COCO
from axial.drawing import overlay, segment_colors


def test_segments_get_their_colors_and_outlines():
    segments = np.zeros([40, 60], int)
    segments[:, 20:40] = 1
    segments[:, 40:] = 2
    photo = np.full([40, 60, 3], 100, np.uint8)
    painted = overlay(photo, segments, [0, 0], COCO, alpha=1.0, labels=False)
    colors = segment_colors([0, 0], COCO)
    assert not np.array_equal(*colors)  # two instances can be told apart
    np.testing.assert_array_equal(painted[5, 30], colors[0])
    np.testing.assert_array_equal(painted[5, 50], colors[1])
    np.testing.assert_array_equal(painted[5, 5], [40, 40, 40])  # void is dimmed
    np.testing.assert_array_equal(painted[:, 20], 255)


def test_large_segments_are_named():
    segments = np.ones([200, 300], int)
    photo = np.zeros([200, 300, 3], np.uint8)
    plain = overlay(photo, segments, [0], COCO, labels=False)
    named = overlay(photo, segments, [0], COCO)
    assert (plain != named).any()


def test_a_single_pixel():
    photo = np.zeros([1, 1, 3], np.uint8)
    assert overlay(photo, np.ones([1, 1], int), [5], COCO).shape == (1, 1, 3)
    assert overlay(photo, np.zeros([1, 1], int), [], COCO).shape == (1, 1, 3)
