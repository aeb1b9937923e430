"""mIoU, compared with its definition."""

import json

import numpy as np

from axial.data.specs import DatasetSpec
from axial.metrics.mean_iou import MeanIoU

SPEC = DatasetSpec("test", ("a", "b", "c", "d"), (1, 2, 3, 4), (True, False, False, False))


def test_matches_sets_of_pixels():
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 3, [2, 5, 9, 11])
    truth[0, 0] = SPEC.ignore
    metric, other = MeanIoU(SPEC), MeanIoU(SPEC)
    metric.update(truth[:3], predicted[:3])
    other.update(truth[3:], predicted[3:])
    again = MeanIoU(SPEC)
    again.restore(json.loads(json.dumps(other.state())))
    metric.merge(again)
    valid = truth != SPEC.ignore
    wanted = [
        ((truth == c) & (predicted == c) & valid).sum() / (((truth == c) | (predicted == c)) & valid).sum()
        for c in range(3)
    ]
    result = metric.result()
    np.testing.assert_allclose(list(result["per_class"].values()), wanted)
    np.testing.assert_allclose(result["miou"], np.mean(wanted))
    assert "d" not in result["per_class"]


def test_pixels_without_a_prediction_miss_their_class():
    metric = MeanIoU(SPEC)
    metric.update(np.array([[0, 0, 1, SPEC.ignore]]), np.array([[0, SPEC.ignore, 0, SPEC.ignore]]))
    result = metric.result()
    assert result["per_class"] == {"a": 1 / 3, "b": 0.0}
    assert result["confusion"] == {"a": {"a": 1, "void": 1}, "b": {"a": 1}}
