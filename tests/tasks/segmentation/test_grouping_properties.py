"""Property tests of the grouping and of the connected components of instances, with random maps."""

import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.ndimage import label as components

from axial.models.outputs import CENTER, OFFSET, SEMANTIC
from axial.tasks.segmentation.grouping import PostprocessConfig, apply_pieces
from tests.tasks.segmentation.test_grouping import find_peaks, loops, make_spec, run

RUNS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SPEC = make_spec(5, {1, 3})  # its panoptic labels are class x 1000 + instance
SIZES = [(1, 1), (1, 9), (12, 1), (13, 17)]  # few sizes, as TensorFlow traces each size
KNOBS = st.builds(
    PostprocessConfig,
    center_threshold=st.just(0.25),
    nms_kernel=st.sampled_from([1, 3, 7]),
    top_k=st.sampled_from([2, 50, None]),
    stuff_area=st.sampled_from([0, 5, 60]),
    thing_area=st.sampled_from([0, 4]),
)

# === Grouping ===


@st.composite
def network_maps(draw):
    """Head outputs for one photo, whose classes form blobs. Heats and offsets are multiples of 1/8, so ties occur."""
    height, width = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blobs = rng.integers(0, 5, [4, 4])
    semantic = blobs[np.ix_(np.arange(height) * 4 // height, np.arange(width) * 4 // width)]
    heat = rng.integers(-2, 9, [height, width]) / 8
    offsets = rng.integers(-40, 41, [height, width, 2]) / 8
    noise = rng.uniform(0, 0.1, [height, width, 5])
    return {
        SEMANTIC: (np.eye(5)[semantic] + noise).astype(np.float32),
        CENTER: (heat * draw(st.sampled_from([1, 1, 1, 0])))[..., None].astype(np.float32),
        OFFSET: offsets.astype(np.float32),
    }


def group(maps, config):
    """Applies `postprocess` to the head outputs of one photo. Returns a dict of arrays."""
    results = run({name: x[None] for name, x in maps.items()}, SPEC, config)
    return {name: x[0] for name, x in results.items()}


@settings(RUNS, max_examples=15)
@given(network_maps(), KNOBS)
def test_the_grouping_is_the_loops(maps, config):
    """The first of several equal maxima is the centre. A pixel belongs to the first of equally near centres."""
    actual = group(maps, config)
    np.testing.assert_array_equal(actual["panoptic"], loops(maps, SPEC, config))
    peaks = find_peaks(maps[CENTER][..., 0], config)
    assert actual["dropped"] == max(len(peaks) - (config.top_k or len(peaks)), 0)
    there = np.isin(np.arange(1, len(actual["score"]) + 1), actual["instance"])
    np.testing.assert_array_equal(actual["score"] > 0, there)
    probability = tf.nn.softmax(maps[SEMANTIC]).numpy()
    for i in np.flatnonzero(there):
        mask = actual["instance"] == i + 1
        winner = np.bincount(maps[SEMANTIC].argmax(-1)[mask]).argmax()
        expected = actual["center_score"][i] * probability[..., winner][mask].mean()
        np.testing.assert_allclose(actual["score"][i], expected, rtol=1e-5)


# === Connected components of instances ===


def in_pieces(panoptic, config, scale):
    """`apply_pieces`, written as a loop over instances with SciPy's connected components."""
    labels, others = panoptic.copy(), []
    for label in np.unique(panoptic[panoptic % SPEC.label_divisor > 0]):
        pieces, count = components(panoptic == label)
        areas = np.bincount(pieces.ravel())[1:]
        for i in range(count):
            mask = pieces == i + 1
            if areas[i] * scale**2 < config.thing_area or (config.pieces == "largest" and i != areas.argmax()):
                labels[mask] = SPEC.void
            if i != areas.argmax():
                others.append((np.flatnonzero(mask)[0], label // SPEC.label_divisor, mask))
    for number, (_, kind, mask) in enumerate(sorted(others, key=lambda one: one[0]), 1):
        new = (panoptic % SPEC.label_divisor).max() + number
        if config.pieces == "split" and new < SPEC.label_divisor and SPEC.void not in labels[mask]:
            labels[mask] = kind * SPEC.label_divisor + new
    return labels


@settings(RUNS, max_examples=25)
@given(st.data())
def test_pieces_are_those_of_scipy(data):
    """Random maps with few labels have winding components. After instance 995, four more instance numbers are free."""
    size = data.draw(st.tuples(*[st.integers(1, 25)] * 2))
    labels = np.array(data.draw(st.lists(st.sampled_from([0, 1001, 1002, 3007, 1995, SPEC.void]), min_size=1)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    panoptic = rng.choice(labels, size).astype(np.int32)
    config = PostprocessConfig(pieces=data.draw(st.sampled_from(["largest", "split"])), thing_area=int(rng.integers(9)))
    actual = apply_pieces(tf.constant(panoptic), SPEC, config, 1.5).numpy()
    np.testing.assert_array_equal(actual, in_pieces(panoptic, config, 1.5))


def test_a_spiral_is_one_piece():
    """The pixels of a spiral are one component, although the path between its ends is long."""
    panoptic = np.zeros([61, 61], np.int32)
    for i in range(0, 30, 2):
        panoptic[i, max(i - 2, 0) : 61 - i] = panoptic[60 - i, i : 61 - i] = 1001
        panoptic[i : 61 - i, 60 - i] = panoptic[i + 2 : 61 - i, i] = 1001
    assert components(panoptic)[1] == 1
    actual = apply_pieces(tf.constant(panoptic), SPEC, PostprocessConfig(pieces="largest"), 1.0)
    np.testing.assert_array_equal(actual, panoptic)
