"""Panoptic quality, compared with golden files of panopticapi."""

import numpy as np
import pytest

from axial.data.specs import DatasetSpec
from axial.metrics.panoptic_quality import PanopticQuality, Segments, split_segments
from tests.conftest import golden_files, read_golden


def make_spec(classes, things, divisor=256, ignore=255):
    names = tuple(f"class {i}" for i in range(classes))
    return DatasetSpec(
        "test", names, tuple(range(classes)), tuple(i in things for i in range(classes)), divisor, ignore
    )


@pytest.mark.parametrize("name", golden_files("pq_*.npz"))
def test_golden(name):
    arrays, meta = read_golden(name)
    spec = make_spec(meta["num_classes"], meta["thing_classes"], meta["label_divisor"], meta["ignored_label"])
    quality = PanopticQuality(spec)
    for truth, prediction in zip(arrays["ground_truth"], arrays["prediction"]):
        quality.update(*(split_segments(panoptic, spec) for panoptic in (truth, prediction)))
    actual = np.stack([quality.iou, quality.tp, quality.fn, quality.fp], 1)
    np.testing.assert_allclose(actual, arrays["panopticapi_per_class_iou_tp_fn_fp"], atol=1e-9)
    np.testing.assert_allclose(actual, arrays["per_class_iou_tp_fn_fp"], atol=1e-5)
    result = quality.result()
    rows = [[result[g][q] for q in ("pq", "sq", "rq")] for g in ("all", "things", "stuff")]
    np.testing.assert_allclose(rows, arrays["panopticapi_pq_sq_rq_all_things_stuff"], atol=1e-9)


def test_as_many_segments_as_a_photo_can_hold():
    """Ground truth and prediction have 65,000 segments each, most of one pixel: too many for a table of all pairs."""
    spec = make_spec(4, (0, 1))
    truth = np.arange(256 * 256).reshape(256, 256) % 65001
    classes = np.arange(65000) % 2
    quality = PanopticQuality(spec)
    quality.update(Segments(truth, classes), Segments(truth, classes))
    assert quality.result()["all"]["pq"] == 1.0 and quality.tp.sum() == 65000
    quality.update(Segments(truth, classes), Segments(truth, 1 - classes))
    assert quality.fp.sum() == quality.fn.sum() == 65000
