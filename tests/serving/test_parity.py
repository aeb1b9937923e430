"""The measured differences between a checkpoint and its export."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.metrics.panoptic_quality import PanopticQuality
from axial.serving.parity import QUALITY, equal_segments, map_differences, prediction_differences

SPEC = DatasetSpec("test", ("car", "man", "sky"), (1, 2, 3), (True, True, False))
CAR, MAN, SKY = (index * SPEC.label_divisor for index in range(3))
STRIPES = np.array([[CAR + 1, CAR + 2, CAR + 3, MAN + 1, SKY, SPEC.void]]).repeat(8, 0).repeat(4, 1)


class Fixed:
    """A predictor that returns given panoptic maps. The photo is an int, the index of the map to return."""

    spec = SPEC

    def __init__(self, *maps):
        self.maps = maps

    def __call__(self, number):
        return {"panoptic": self.maps[number], "instance": self.maps[number] % 7, "semantic": self.maps[number] // 1000}


def renumbered(panoptic):
    """Returns the same segments with instance numbers larger by one, as if one more centre had no pixels."""
    return np.where(panoptic % SPEC.label_divisor > 0, panoptic + 1, panoptic)


def test_other_numbers_of_instances_are_no_difference():
    differences = prediction_differences(Fixed(STRIPES), Fixed(renumbered(STRIPES)), [0])
    assert differences == {"panoptic": 1.0, "semantic": 1.0, QUALITY: 1.0}


def test_the_worst_photo_and_the_quality_of_all_are_told():
    """In the second photo, a car is predicted as sky. Neither the car nor the sky, whose IoU is 1/2, has a match."""
    worse = np.where(STRIPES == CAR + 2, SKY, STRIPES)
    differences = prediction_differences(Fixed(STRIPES, STRIPES), Fixed(STRIPES, renumbered(worse)), [0, 1])
    assert differences["panoptic"] == pytest.approx(4 / 6)  # equal stripes: two cars, a man, void
    assert differences["semantic"] == pytest.approx(5 / 6)
    car, man, sky = 5 / 5.5, 1, 1 / (1 + 0.5 + 0.5)
    assert differences[QUALITY] == pytest.approx((car + man + sky) / 3)


def test_a_segment_of_another_class_is_another_segment():
    """One of six stripes has another class: 5/6 of the pixels are equal. Two void maps are equal."""
    panoptic = np.where(STRIPES == MAN + 1, CAR + 4, STRIPES)
    assert equal_segments(STRIPES, panoptic, PanopticQuality(SPEC)) == pytest.approx(5 / 6)
    assert equal_segments(np.full([4, 4], SPEC.void), np.full([4, 4], SPEC.void), PanopticQuality(SPEC)) == 1


class Canvas:
    """A task whose canvas does not depend on the photo."""

    def example(self, photo):
        return {"image": tf.zeros([4, 4, 3])}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whose", ["the export", "the checkpoint"])
def test_numbers_that_are_none_fail_the_comparison(wrong, whose):
    """A NaN or infinity on the second photo raises InputError, which says whether checkpoint or export has it."""
    good, bad = np.ones([1, 5], np.float32), np.array([[1, 1, 1, 1, wrong]], np.float32)
    photos = [np.zeros([4, 4, 3], np.uint8)] * 2
    maps = [iter([good, bad]), iter([good, good])]
    ours, theirs = reversed(maps) if whose == "the export" else maps
    message = f"logits of {whose}: 20 % of its numbers are NaN or infinite"
    with pytest.raises(InputError, match=message):
        map_differences(Canvas(), lambda _: {"logits": next(ours)}, lambda _: {"logits": next(theirs)}, photos)
    maps = [iter([good, bad]), iter([good, good])]
    ours, theirs = reversed(maps) if whose == "the export" else maps
    with pytest.raises(InputError, match=message.replace("logits", "probability")):
        prediction_differences(lambda _: {"probability": next(ours)}, lambda _: {"probability": next(theirs)}, photos)
