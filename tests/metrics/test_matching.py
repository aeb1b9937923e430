"""Matching accuracy (StarDist's metric), compared with golden files of StarDist."""

import math

import numpy as np
import pytest

from axial.data.specs import DatasetSpec
from axial.metrics.matching import COUNTS, MatchingAccuracy, largest_matching
from axial.metrics.panoptic_quality import Segments
from tests.conftest import golden_files, read_golden

NUCLEI = DatasetSpec("test", ("background", "nucleus"), (1, 2), (False, True))
CARS = DatasetSpec("test", ("car", "dog", "sky"), (1, 2, 3), (True, True, False))


def add(metric, truth, classes, predicted, guesses, crowd=None):
    metric.update(Segments(truth, classes, crowd=crowd), Segments(predicted, guesses))


def with_background(labels):
    """Converts a label map. Returns (map where 1 is background and 2, 3, ... are objects, list of class indices)."""
    old, new = np.unique(np.append(0, labels), return_inverse=True)
    return new[1:].reshape(labels.shape) + 1, [0] + [1] * (len(old) - 1)


def counts_of(row):
    return [row[name] for name in COUNTS]


@pytest.mark.parametrize("name", golden_files("matching_stardist*.npz"))
def test_golden(name):
    arrays, meta = read_golden(name)
    whole = MatchingAccuracy(NUCLEI, meta["thresholds"])
    for truth, predicted, counts, accuracy in zip(*map(arrays.get, ("truth", "prediction", "counts", "accuracy"))):
        one = MatchingAccuracy(NUCLEI, meta["thresholds"])
        add(one, *with_background(truth), *with_background(predicted))
        rows = list(one.result().values())
        np.testing.assert_array_equal([counts_of(row) for row in rows], counts)
        # Without objects, our accuracy is NaN and StarDist's is 0.
        without = -1 if not truth.any() and not predicted.any() else 0
        np.testing.assert_array_equal([row["accuracy"] for row in rows], accuracy if not without else math.nan)
        whole.merge(one)
    rows = list(whole.result().values())
    np.testing.assert_array_equal([counts_of(row) for row in rows], arrays["dataset_counts"])
    np.testing.assert_array_equal([row["accuracy"] for row in rows], arrays["dataset_accuracy"])
    assert list(whole.result()) == [str(t) for t in meta["thresholds"]]
    assert np.all(np.diff(arrays["dataset_counts"][:, 0]) <= 0) and arrays["dataset_counts"].min() > 0


def strips(*widths):
    """A map of one row. Segment i has the i-th width of `widths` in pixels. A tuple (w, n) is w pixels of segment n."""
    parts = [(width, i) if isinstance(width, int) else width for i, width in enumerate(widths, 1)]
    return np.repeat([n for _, n in parts], [w for w, _ in parts])[None]


def test_an_iou_at_the_threshold_is_a_match_and_one_below_is_none():
    """The IoUs are 3/3 and 2/4. The thresholds are 0.6 and 0.5, and the next larger floats."""
    for truth, predicted, at in ((strips(3, (2, 0)), strips(5), 0.6), (strips(4), strips(2, 2), 0.5)):
        metric = MatchingAccuracy(CARS, (at, np.nextafter(at, 1)))
        add(metric, truth, [0], predicted, [0] * predicted.max())
        hit, missed = metric.result().values()
        if at == 0.6:  # the union leaves out unlabelled pixels
            assert counts_of(hit) == counts_of(missed) == [1, 0, 0]
        else:
            assert counts_of(hit) == [1, 1, 0] and counts_of(missed) == [0, 2, 1]


def test_things_match_their_own_class_and_stuff_is_left_out():
    metric = MatchingAccuracy(CARS, [0.5])
    add(metric, strips(4, 4, 9), [0, 1, 2], strips(4, 4, 9), [1, 1, 2])
    (row,) = metric.result().values()
    assert counts_of(row) == [1, 1, 1] and row["accuracy"] == 1 / 3
    car, dog = row["per_class"]["car"], row["per_class"]["dog"]
    assert counts_of(car) == [0, 0, 1] and counts_of(dog) == [1, 1, 0] and dog["accuracy"] == 1 / 2


def test_below_half_the_most_objects_are_matched():
    """In `largest_matching`, rows 1 and 2 can both match column 5, but only row 1 can match column 7."""
    truth, predicted = strips(8, 12), strips((4, 1), (8, 2), (8, 3))
    metric = MatchingAccuracy(CARS, [0.3])  # IoUs: 4/8, 4/12, 4/16, 8/12
    add(metric, truth, [0, 0], predicted, [0, 0, 0])
    (row,) = metric.result().values()
    assert counts_of(row) == [2, 1, 0]
    rows, columns = largest_matching(np.array([1, 1, 2]), np.array([5, 7, 5]))
    assert sorted(zip(rows.tolist(), columns.tolist())) == [(1, 7), (2, 5)]


def test_of_the_largest_matchings_the_fewest_false_positives_count():
    """Two predictions can match the object. The metric matches the one that is not mostly on unlabelled pixels."""
    truth, halves = strips((6, 0), (4, 1)), strips((8, 1), (2, 2))
    metric = MatchingAccuracy(CARS, [0.5])
    add(metric, truth, [0], halves, [0, 0])
    assert counts_of(metric.result()["0.5"]) == [1, 0, 0]


def test_crowds_match_nothing_and_excuse_what_lies_on_them():
    metric = MatchingAccuracy(CARS, [0.5])
    add(metric, strips(6, 4), [0, 0], strips(6, 4), [0, 0], [True, False])
    assert counts_of(metric.result()["0.5"]) == [1, 0, 0]
    add(metric, strips(6, 4), [1, 0], strips(6, 4), [0, 0], [True, False])  # a crowd of another class
    assert counts_of(metric.result()["0.5"]) == [2, 1, 0]


@pytest.mark.parametrize("field,value", [("tp", [[0, 0]]), ("fn", [[0, -1, 0]])])
def test_a_state_of_other_counts_is_refused(field, value):
    state = MatchingAccuracy(CARS, [0.5]).state()
    with pytest.raises(ValueError, match="reshape|counts below 0|inhomogeneous"):
        MatchingAccuracy(CARS, [0.5]).restore({**state, field: value})
