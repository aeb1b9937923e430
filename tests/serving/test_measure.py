"""The measures and outlines of objects, compared with scikit-image, with pixels, and with values computed by hand."""

import json
import math
import sys
import warnings

import numpy as np
import pytest
import shapely
from shapely.geometry import shape
from skimage.measure import regionprops_table

from axial.data.specs import NUCLEI
from axial.errors import InputError
from axial.serving import measure
from axial.serving.result import Result
from axial.tasks.classification.task import CLASSIFICATION
from axial.tasks.detection.evaluator import DETECTION
from axial.tasks.segmentation.evaluator import PANOPTIC
from tests.serving.test_result import SPEC, detections, result_of

SAME = "area eccentricity perimeter solidity".split()  # columns with the name of scikit-image's property


def segmented(instance):
    """The prediction of nuclei from their numbers, int [h, w], 0 for the background."""
    semantic = (instance > 0).astype(int)
    panoptic = semantic * NUCLEI.label_divisor + instance
    return {"panoptic": panoptic, "semantic": semantic, "instance": instance, "score": np.full(instance.max(), 0.5)}


def nuclei(instance, stored=None, photo=None):
    """The `Result` of nuclei with these numbers, int [h, w]."""
    image = np.zeros([*instance.shape, 3], np.uint8)
    how = {"evaluator": PANOPTIC, "spec": NUCLEI, "stored": stored, "photo": photo}
    return Result(image, segmented(np.asarray(instance)), **how)


def random_labels(seed):
    """int [h, w] with up to four labels: single pixels, holes, and pixels that touch at edges or corners."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(1, 5, rng.integers(1, 13, 2))
    return np.where(rng.random(labels.shape) < rng.random(), labels, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_measures_are_those_of_scikit_image(dtype):
    """Shapes and intensities equal `regionprops_table`, also of stored values of 16 bits and floats."""
    for seed in range(30):
        labels = random_labels(seed)
        stored = (np.random.default_rng(seed).random([*labels.shape, 3]) * 50000).astype(dtype)
        result = nuclei(labels, stored)
        table = measure.columns(result)
        assert all(value is not None for name in {*table} - {"photo"} for value in table[name])
        properties = *SAME, "label", "centroid", "bbox", "equivalent_diameter_area", "intensity_mean"
        expected = regionprops_table(result.labels, stored, properties)
        names = {name: name for name in (*SAME, "label")} | {"equivalent_diameter": "equivalent_diameter_area"}
        names |= {"centre_x": "centroid-1", "centre_y": "centroid-0", "box_x": "bbox-1", "box_y": "bbox-0"}
        names |= {f"mean_{i + 1}": f"intensity_mean-{i}" for i in range(3)}
        for ours, theirs in names.items():
            np.testing.assert_allclose(table[ours], expected[theirs], rtol=1e-6, err_msg=ours)
        np.testing.assert_array_equal(np.add(table["box_x"], table["box_width"]), expected["bbox-3"])
        np.testing.assert_array_equal(np.add(table["box_y"], table["box_height"]), expected["bbox-2"])


def test_values_by_hand():
    """A pixel at the corner, and a bar of 3 pixels away from it, with a pixel size of 2 um and one missing value."""
    labels = np.array([[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 2, 2, 2, 0], [0, 0, 0, 0, 0]])
    stored = np.arange(20, dtype=np.float32).reshape(4, 5, 1)
    stored[2, 2] = stored[0, 0] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixel, bar = nuclei(labels, stored, "a.tif").table(pixel_size="2 \u00b5m")
    about = {"photo": "a.tif", "class": "nucleus", "score": 0.5}
    assert pixel == pytest.approx(
        {**about, "id": 2, "label": 1, "area": 1, "centre_x": 0, "centre_y": 0, "box_x": 0, "box_y": 0, "box_width": 1}
        | {"box_height": 1, "equivalent_diameter": 2 / math.sqrt(math.pi), "eccentricity": 0, "perimeter": 0}
        | {"solidity": 1, "touches_edge": True, "area_um2": 4, "equivalent_diameter_um": 4 / math.sqrt(math.pi)}
        | {"perimeter_um": 0, "mean_1": None, "sum_1": 0}
    )
    assert (bar["label"], bar["area"], bar["centre_x"], bar["centre_y"]) == (2, 3, 2, 2)
    assert [bar[f"box_{name}"] for name in ("x", "y", "width", "height")] == [1, 2, 3, 1]
    assert (bar["eccentricity"], bar["touches_edge"], bar["area_um2"]) == (1, False, 12)
    assert (bar["mean_1"], bar["sum_1"]) == (12, 24)


def test_where_masks_overlap_a_pixel_counts_once():
    """Two 8x8 cars share 16 pixels, which belong to the better score. A car that others cover has no row."""
    result = result_of(detections([0.9, 0.7], mask=1), DETECTION, size=(12, 16))
    table, masks = result.table(), result.masks()
    assert [(row["label"], row["area"]) for row in table] == [(1, 64), (2, 48)]
    assert {(row["class"], row["mean_3"], row["photo"]) for row in table} == {("car", 90, "folder/photo.jpg")}
    assert masks.dtype == bool and masks.sum(0).max() == 1
    for row, mask in zip(table, masks):
        np.testing.assert_array_equal(mask, result.labels == row["label"])
    hidden = detections([0.9, 0.7], mask=1)
    hidden["box"][1] = [1, 1, 4, 4]
    hidden = result_of(hidden, DETECTION, size=(12, 16))
    assert [row["label"] for row in hidden.table()] == [1] and len(hidden.masks()) == 1


def test_results_of_other_kinds_have_no_table():
    """A classification and boxes have no objects with pixels. `repr` shows photo and summary."""
    label = result_of({"probability": np.array([0.1, 0.2, 0.7, 0])}, CLASSIFICATION, size=(30, 40))
    boxes = result_of(detections([0.9, 0.8]), DETECTION, size=(12, 16))
    for result in (label, boxes):
        for method in (result.table, result.masks, result.geojson, result.detections):
            with pytest.raises(InputError, match="^the network finds no pixels of instances$"):
                method()
        with pytest.raises(InputError, match="^geojson: the network finds no pixels of instances$"):
            result.paths("stem", geojson=True)
    assert repr(boxes) == "Result(photo='folder/photo.jpg', summary='2 objects: car 90%, car 80%')"


def test_outlines_are_the_masks_again():
    """Rasterised at pixel centres, valid polygons with holes, parts and touching corners equal random masks."""
    for seed in range(150):
        labels = random_labels(seed)
        result = nuclei(labels)
        features, (y, x) = result.geojson()["features"], np.indices(labels.shape) + 0.5
        assert len(features) == len(result.masks())
        for feature, mask in zip(features, result.masks()):
            geometry = shape(feature["geometry"])
            assert geometry.is_valid and geometry.area == mask.sum()
            np.testing.assert_array_equal(shapely.contains_xy(geometry, x, y), mask)
            for part in shapely.get_parts(geometry):
                assert part.exterior.is_ccw and not any(ring.is_ccw for ring in part.interiors)  # RFC 7946
                for ring in (part.exterior, *part.interiors):
                    (x1, y1), (x2, y2) = (
                        np.diff(ring.coords, axis=0).T,
                        np.diff([*ring.coords[1:], ring.coords[1]], axis=0).T,
                    )
                    assert np.all(x1 * y2 != y1 * x2) and np.all(np.mod(ring.coords, 1) == 0)


def test_features_are_those_that_qupath_reads(tmp_path):
    """A ring of 8 pixels and a part at its corner: a MultiPolygon with a hole. PHOTO.json names the file."""
    labels = np.zeros([6, 6], int)
    labels[1:4, 1:4], labels[2, 2], labels[4, 4] = 1, 0, 1
    nuclei(labels).write(tmp_path / "a", geojson=True)
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["geojson_file_name"] == "a.geojson"
    collection = json.loads((tmp_path / "a.geojson").read_text())
    (feature,) = collection["features"]
    assert collection["type"] == "FeatureCollection" and feature["type"] == "Feature"
    assert feature["properties"] == {
        "objectType": "detection",
        "classification": {"name": "nucleus", "color": NUCLEI.colors[1].tolist()},
        "measurements": {"label": 1, "score": 0.5, "area": 9},
    }
    assert feature["geometry"]["type"] == "MultiPolygon"
    rings = sorted(sorted(map(tuple, ring[1:])) for part in feature["geometry"]["coordinates"] for ring in part)
    assert rings == [sorted((x, y) for x in ends for y in ends) for ends in ((1, 4), (2, 3), (4, 5))]


def test_objects_for_supervision(monkeypatch):
    pytest.importorskip("supervision")
    for result in (result_of(detections([0.9, 0.7], mask=1), DETECTION, size=(12, 16)), nuclei(np.zeros([4, 5], int))):
        objects, table = result.detections(), result.table()
        assert len(objects) == len(table)
        np.testing.assert_array_equal(objects.mask, result.masks())
        np.testing.assert_allclose(objects.confidence, [row["score"] for row in table])
        assert [SPEC.class_names[index] for index in objects.class_id] == [*objects.data["class_name"]]
    both = result_of(detections([0.9, 0.7], mask=1), DETECTION, size=(12, 16)).detections()
    np.testing.assert_array_equal(both.xyxy, [[0, 0, 8, 8], [4, 4, 12, 12]])
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(InputError, match="pip install supervision"):
        result.detections()
