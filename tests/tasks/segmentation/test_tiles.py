"""Predictions of tiles, joined, give the segments of the whole photo."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import label as components

from axial.tasks.segmentation.grouping import PostprocessConfig
from axial.tasks.segmentation.tiles import Tiling, join
from tests.tasks.segmentation.test_grouping_properties import RUNS, SPEC

ALL = PostprocessConfig(stuff_area=0)
THINGS, STUFF = np.flatnonzero(SPEC.things), np.flatnonzero(~np.array(SPEC.things))

# === Photos with ground truth, and simulated predictions of their tiles ===


def made_photo(size, rng, *, objects, largest):
    """Random ground truth (semantic, instance) of a photo. The sides of objects are at most `largest` pixels."""
    rows, columns = np.ogrid[: size[0], : size[1]]
    drawn = np.zeros(size, int)
    for i in range(1, objects + 1):
        y, x = rng.integers(0, size)
        sides = rng.integers(1, largest + 1, 2)
        inside = (rows >= y) & (rows < y + sides[0]) & (columns >= x) & (columns < x + sides[1])
        if rng.random() < 0.5:  # an ellipse
            (a, b), (h, w) = (y, x) + (sides - 1) / 2, sides / 2
            inside &= ((rows - a) / h) ** 2 + ((columns - b) / w) ** 2 <= 1
        drawn[inside] = i
    instance = np.zeros(size, np.int32)
    for i in range(1, objects + 1):
        pieces = components(drawn == i)[0]
        instance += np.where(pieces > 0, pieces + instance.max(), 0).astype(np.int32)
    semantic = rng.choice(STUFF, [3, 3])[np.ix_(np.arange(size[0]) * 3 // size[0], np.arange(size[1]) * 3 // size[1])]
    classes = np.concatenate([[0], rng.choice(THINGS, instance.max() + 1)])
    return np.where(instance > 0, classes[instance], semantic).astype(np.int32), instance


def renumbered(semantic, instance, scores, rng):
    """The prediction of a tile, whose instances get random numbers. Some numbers have no pixels."""
    there = np.unique(instance[instance > 0])
    numbers = np.zeros(len(scores) + 1, int)
    numbers[there] = rng.permutation(len(there) + 3)[: len(there)] + 1
    score = np.zeros(len(there) + 3)
    score[numbers[there] - 1] = scores[there - 1]
    return {"semantic": semantic, "instance": numbers[instance], "score": score}


def predict_tiles(photo, tiling, rng, edges=None):
    """Yields a prediction for each tile of a photo (semantic, instance). Instance i has the score 1 / (i + 1).

    `edges(semantic, instance, cut)` adds errors to a tile in place. `cut` lists the instances that the tile cuts.
    """
    scores = 1 / (np.arange(2 * photo[1].max()) + 2)
    for box in tiling.boxes:
        semantic, instance = photo[0][box].copy(), photo[1][box].copy()
        if edges:
            cut = set()
            for axis, (span, side) in enumerate(zip(box, tiling.size)):
                lines = np.moveaxis(instance, axis, 0)
                cut |= {*lines[0]} if span.start else set()
                cut |= {*lines[-1]} if span.stop < side else set()
            edges(semantic, instance, sorted(cut - {0}))
        yield renumbered(semantic, instance, scores, rng)


def numbered(instance):
    """Renumbers instances in the raster order of their first pixels. Returns (new map, old numbers in this order)."""
    values, first = np.unique(instance, return_index=True)
    order = values[np.argsort(first)]
    order = order[order > 0]
    table = np.zeros(instance.max() + 1, int)
    table[order] = np.arange(1, len(order) + 1)
    return table[instance], order


def assert_truth(actual, photo):
    """Asserts that all maps and scores of a joined prediction equal the ground truth."""
    semantic, instance = photo
    expected, order = numbered(instance)
    np.testing.assert_array_equal(actual["semantic"], semantic)
    np.testing.assert_array_equal(actual["instance"], expected)
    np.testing.assert_allclose(actual["score"], 1 / (order + 1), rtol=1e-6)
    counts, labels = collections.Counter(), [0]
    for first in np.unique(expected[expected > 0], return_index=True)[1]:
        category = semantic[expected > 0][first]
        counts[category] += 1
        labels.append(category * SPEC.label_divisor + counts[category])
    panoptic = np.where(expected > 0, np.array(labels)[expected], semantic * SPEC.label_divisor)
    np.testing.assert_array_equal(actual["panoptic"], panoptic)


@st.composite
def photos_and_tiles(draw):
    """Draws (size of a photo, its `Tiling`, NumPy random generator)."""
    tile = tuple(draw(st.integers(8, 40)) for _ in range(2))
    overlap = draw(st.integers(2, 3 * min(tile) // 4))
    size = tuple(draw(st.integers(1, 3 * side)) for side in tile)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    stride = draw(st.sampled_from([1, 1.5, 3, 4]))
    return size, Tiling(size, tile, overlap, stride), rng


def drop(semantic, instance, cut):
    """For `edges` of `predict_tiles`: the network predicts background in the visible part of cut objects."""
    lost = np.isin(instance, cut)
    semantic[lost], instance[lost] = STUFF[0], 0


def mix(semantic, instance, cut):
    """For `edges` of `predict_tiles`: the network predicts one object of another class for all cut objects."""
    mask = np.isin(instance, cut)
    semantic[mask], instance[mask] = THINGS[-1], max(cut, default=0)


# === Tiles ===


@given(photos_and_tiles())
@RUNS
def test_tiles_cover_the_photo(case):
    size, tiling, _ = case
    covered = np.zeros(size, bool)
    for box in tiling.boxes:
        shape = [span.stop - span.start for span in box]
        assert all(0 <= min(pair) - side < tiling.stride for pair, side in zip(zip(size, tiling.tile), shape))
        if tiling.stride <= min(tiling.tile) - tiling.overlap:
            multiples = {round(k * tiling.stride) for k in range(max(size) + 1)}
            assert {span.start for span in box} <= multiples
        covered[box] = True
    assert covered.all()
    for axis, tile in enumerate(tiling.tile):
        spans = sorted({(box[axis].start, box[axis].stop) for box in tiling.boxes})
        assert all(
            a_end - b_start >= min(tiling.overlap, tile) for (_, a_end), (b_start, _) in itertools.pairwise(spans)
        )


@pytest.mark.parametrize("edges", [None, drop, mix])
@given(case=photos_and_tiles())
@RUNS
def test_joined_tiles_are_the_photo(case, edges):
    """Objects smaller than the overlap are exact, even if the network is wrong where a tile cuts an object."""
    size, tiling, rng = case
    largest = tiling.overlap - 1 if edges else max(size)
    photo = made_photo(size, rng, objects=int(rng.integers(0, 20)), largest=largest)
    actual = join(predict_tiles(photo, tiling, rng, edges), tiling, spec=SPEC, grouping=ALL, scale=1.0)
    assert_truth(actual, photo)


def test_the_outline_of_a_cut_object_goes_with_it():
    """The joined object has the outline from the tile that contains it whole, not from the tile that cuts it."""
    tiling = Tiling((10, 30), (10, 20), 10)
    whole, cut = np.zeros([2, 10, 30], np.int32)
    whole[3:7, 13:22], cut[2:8, 11:22] = 1, 1
    results = [
        {"semantic": 2 + x[box], "instance": x[box], "score": [0.5]} for x, box in zip((cut, whole), tiling.boxes)
    ]
    actual = join(results, tiling, spec=SPEC, grouping=ALL, scale=1.0)
    np.testing.assert_array_equal(actual["instance"], whole)
    np.testing.assert_array_equal(actual["semantic"], 2 + whole)
    np.testing.assert_array_equal(actual["score"], [0.5])


def test_scores_are_means_by_pixels_and_classes_by_majority():
    """Two tiles cut an object of 20 pixels. Each tile's core has 10 of its pixels, with another class and score."""
    tiling = Tiling((4, 10), (4, 8), 6)
    instance = np.zeros([4, 10], np.int32)
    instance[1:3] = 1
    results = [
        {"semantic": np.full([4, 8], category), "instance": instance[box], "score": [score]}
        for box, category, score in zip(tiling.boxes, (1, 3), (0.2, 0.8))
    ]
    actual = join(results, tiling, spec=SPEC, grouping=ALL, scale=1.0)
    np.testing.assert_array_equal(actual["instance"], instance)
    np.testing.assert_allclose(actual["score"], [(0.2 + 0.8) / 2], rtol=1e-6)


def test_least_areas_are_those_of_the_whole_photo():
    """Area thresholds are in pixels of the canvas. At a scale of 1/2, the canvas has a quarter of the pixels."""
    semantic, instance = np.zeros([2, 20, 40], np.int32)
    instance[4:12, 8:24] = 1  # 128 pixels, 32 on the canvas
    semantic[instance > 0] = 1
    semantic[:, 36:] = 2  # 80 pixels, 20 on the canvas
    tiling = Tiling(instance.shape, (20, 16), 6)
    for thing, stuff in itertools.product((32, 33), (20, 21)):
        grouping = PostprocessConfig(thing_area=thing, stuff_area=stuff)
        results = ({"semantic": semantic[box], "instance": instance[box], "score": [1.0]} for box in tiling.boxes)
        panoptic = join(results, tiling, spec=SPEC, grouping=grouping, scale=0.5)["panoptic"]
        assert set(panoptic[instance > 0]) == {1001 if thing == 32 else SPEC.void}
        assert set(panoptic[semantic == 2]) == {2000 if stuff == 20 else SPEC.void}


@pytest.mark.parametrize("pieces", ["largest", "split"])
def test_pieces_are_those_of_the_whole_photo(pieces):
    """An object has two legs, which are connected only in another tile, and a separate speck in one tile."""
    instance = np.zeros([20, 60], np.int32)
    instance[4:6, 8:50] = instance[12:14, 8:50] = instance[4:14, 46:50] = 1
    speck = np.s_[17:19, 3:6]
    instance[speck] = 1
    tiling, grouping = Tiling(instance.shape, (20, 24), 8), PostprocessConfig(stuff_area=0, pieces=pieces)
    tiles = (
        {"semantic": x, "instance": x, "score": [0.5], "dropped": x.sum()}
        for x in map(instance.__getitem__, tiling.boxes)
    )
    actual = join(tiles, tiling, spec=SPEC, grouping=grouping, scale=1.0)
    expected = 1001 * instance
    expected[speck] = SPEC.void if pieces == "largest" else 1002
    np.testing.assert_array_equal(actual["panoptic"], expected)
    assert actual["dropped"] == max(instance[box].sum() for box in tiling.boxes)
