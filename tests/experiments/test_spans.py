"""What the published multiply-adds say of the span."""

import pytest

import spans
from published import COCO


def test_each_model_and_image_size_has_a_row():
    rows = spans.published_rows()
    assert [(row.model, row.image == COCO) for row in rows][:3] == [
        ("axial_deeplab_s", True),
        ("axial_deeplab_m", True),
        ("axial_deeplab_l", True),
    ]
    assert len(rows) == len({(row.model, row.image) for row in rows}) == 8
    assert {row.macs for row in rows} == {110.4, 209.9, 343.9, 1550.0, 220.8, 419.6, 687.4, 2446.8}


@pytest.mark.slow  # four graphs of a large model
def test_counts_exclude_spans_that_are_longer_than_65():
    """They do not tell a window of 65 from a whole axis of up to 65 pixels."""
    counts = spans.count_spans("axial_deeplab_s", COCO)
    assert [round(count / 1e9, 1) for count in counts.values()] == [110.3, 110.3, 123.2, 140.3]
    row = {"model": "axial_deeplab_s", "image": COCO, "published": 110.4e9, **counts}
    assert spans.cells(row) == ("axial_deeplab_s", "1025 x 1025", "110.4", "110.3", "110.3", "123.2", "140.3")
