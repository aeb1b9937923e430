"""Drawn pictures: overlays of segments, captions and plots."""

import numpy as np
import pytest
from PIL import Image

from axial.data.specs import COCO, NUCLEI, DatasetSpec
from axial.tasks.classification.task import caption
from axial.tasks.detection.evaluator import draw_objects
from axial.tasks.segmentation.drawing import FILL, overlay, save_stress, segment_colors
from axial.tasks.segmentation.studies import add_changes
from axial.tasks.translation.task import write_lines
from axial.training.report import save_picture_table
from tests.hostile import NAMES


def test_segments_get_their_colors_and_outlines():
    segments = np.zeros([40, 60], int)
    segments[:, 20:40] = 1
    segments[:, 40:] = 2
    photo = np.full([40, 60, 3], 100, np.uint8)
    painted = overlay(photo, segments, [0, 0], COCO)
    colors = segment_colors([0, 0], COCO)
    assert not np.array_equal(*colors)  # two instances have different colours
    for column, color in zip((30, 50), colors):
        np.testing.assert_array_equal(painted[5, column], (FILL * color).astype(np.uint8) + 70)
        np.testing.assert_array_equal(overlay(photo, segments, [0, 0], COCO, 0)[5, column], 100)
    np.testing.assert_array_equal(painted[5, 5], [70, 70, 70])  # void is dimmed
    for column, color in {19: 0, 20: colors[0], 39: colors[0], 40: colors[1]}.items():  # both sides of each border
        np.testing.assert_array_equal(painted[:5, column], np.broadcast_to(color, [5, 3]))


def test_instances_of_a_single_class_of_things_have_hues_of_their_own():
    colors = segment_colors([0, *[1] * 300], NUCLEI)
    np.testing.assert_array_equal(colors[:2], NUCLEI.colors)
    assert len(np.unique(colors[1:], axis=0)) > 290
    neighbours = np.abs(np.diff(colors[1:].astype(int), axis=0)).max(1)
    assert neighbours.min() > 100  # the largest difference is 255


@pytest.mark.filterwarnings("ignore:Glyph")  # the font lacks some letters
def test_every_picture_takes_every_name(tmp_path):
    """Every picture draws hostile class names, such as matplotlib's math markup and line breaks, as plain text."""
    count = len(NAMES)
    spec = DatasetSpec("mine", NAMES, tuple(range(count)), (True,) * count)
    photo, segments = np.zeros([60, 90, 3], np.uint8), np.ones([60, 90], int)
    for index, name in enumerate(NAMES):
        assert overlay(photo, segments, [index], spec).std((0, 1)).any()  # the name is drawn
        assert draw_objects(photo, [{"bbox": (0, 0, 30, 30)}], [index], spec).any()
        assert caption(photo, name).any() and write_lines([name]).any()
    paths = [str(tmp_path / f"{i}.png") for i in range(2)]
    blocks = [(name, [[photo]], name) for name in ("$x_$", r"a $5 and $6 \frac")]
    save_picture_table(paths[0], blocks, ["$x_$"])
    row = {"ratio": 1.0, "pq": 0.5, "pq_things": 0.5, "pq_stuff": 0.5}
    curves = {"$x_$": [dict(row)], "_b": [dict(row)]}
    add_changes(list(curves.values()))
    save_stress(paths[1], curves)
    for path in paths:
        assert np.asarray(Image.open(path)).std() > 5
