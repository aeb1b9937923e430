"""Panoptic targets, compared with loops over pixels."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.tasks.segmentation.losses import TargetConfig, panoptic_targets

SPEC = DatasetSpec("test", ("person", "car", "sky"), (1, 2, 3), (True, True, False))


def oracle(segments, classes, crowd, config):
    """The targets of `panoptic_targets`, computed with loops over pixels."""
    height, width = segments.shape
    out = {
        "semantic": np.full([height, width], SPEC.ignore),
        "semantic_weight": np.ones([height, width]),
        "center": np.zeros([height, width]),
        "center_weight": np.zeros([height, width]),
        "offset": np.zeros([height, width, 2]),
        "offset_weight": np.zeros([height, width]),
    }
    for i, (category, is_crowd) in enumerate(zip(classes, crowd)):
        pixels = [(y, x) for y in range(height) for x in range(width) if segments[y, x] == i + 1]
        if is_crowd or not pixels:
            continue
        mean = np.mean(pixels, 0)
        thing = SPEC.things[category]
        for y, x in pixels:
            out["semantic"][y, x] = category
            out["center_weight"][y, x] = 1
            if thing:
                out["offset"][y, x] = (np.round(mean) if config.round_centers else mean) - (y, x)
                out["offset_weight"][y, x] = 1
                if len(pixels) < config.small_area:
                    out["semantic_weight"][y, x] = config.small_weight
        if thing:
            cy, cx = np.round(mean)
            for y in range(height):
                for x in range(width):
                    if max(abs(y - cy), abs(x - cx)) <= 3 * config.sigma:
                        value = np.exp(-((y - cy) ** 2 + (x - cx) ** 2) / (2 * config.sigma**2))
                        out["center"][y, x] = max(out["center"][y, x], value)
    return out


CASES = {  # (segment of each stripe, class of each segment, 1 for each segment that is a crowd)
    "things, stuff, crowd and void": ([0, 1, 2, 3], [0, 2, 1], [0, 0, 1]),
    "two instances": ([1, 2], [0, 0], [0, 0]),
    "nothing": ([0], [], []),
    "a segment outside the crop": ([1, 3], [0, 1, 2], [0, 0, 0]),
}


@pytest.mark.parametrize(
    "config", [TargetConfig(), TargetConfig(4.0, 100, 2.0, round_centers=False), TargetConfig(0.3)]
)
@pytest.mark.parametrize("stripes,classes,crowd", CASES.values(), ids=CASES)
def test_matches_loops(stripes, classes, crowd, config):
    """The segments of a crop of 40x45 pixels are vertical stripes and 50 random pixels."""
    rng = np.random.default_rng(0)
    segments = np.asarray(stripes)[np.arange(45) * len(stripes) // 45][None].repeat(40, 0)
    segments[rng.integers(0, 40, 50), rng.integers(0, 45, 50)] = rng.choice(stripes, 50)
    rows = tf.constant(classes, tf.int64), tf.constant(crowd, tf.int64)
    actual = panoptic_targets(tf.constant(segments, tf.int32), *rows, spec=SPEC, config=config)
    for key, expected in oracle(segments, classes, crowd, config).items():
        np.testing.assert_allclose(actual[key], expected, atol=1e-4, err_msg=key)


def test_the_defaults_of_panoptic_deeplab():
    """Cheng et al., CVPR 2020, Sec. 3.3 and 4: sigma 8; things below 64 x 64 pixels weigh three times."""
    config = TargetConfig()
    assert (config.sigma, config.small_area, config.small_weight) == (8.0, 4096, 3.0)
