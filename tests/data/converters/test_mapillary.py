"""Conversion of Mapillary Vistas' layout to TFRecords."""

import json
import shutil

import numpy as np
import pytest

from axial.data.converters.mapillary import mapillary_items, mapillary_spec
from axial.errors import InputError
from axial.tasks.segmentation.input_pipeline import segment_map
from tests.data import conversion
from tests.data.conversion import delete, records
from tests.data.mapillary_fixture import MapillaryFolder, labels_of

STUFF, THING, VOID = 9, 10, 65  # labels of the fixture


def scene(height=30, width=60):
    """int [h, w] of label x 256 + instance number: stuff, three instances of a thing, void."""
    columns = [STUFF * 256, THING * 256, THING * 256 + 1, THING * 256 + 2, VOID * 256]
    return np.asarray(columns)[np.arange(width) * 5 // width][None].repeat(height, 0)


def items_of(root, split, version):
    return mapillary_items(str(root), split, mapillary_spec(str(root), version), version)


def convert(root, output, split="training"):
    spec = mapillary_spec(str(root), "v1.2")
    return conversion.convert(items_of(root, split, "v1.2"), spec, output, split)


@pytest.mark.parametrize("version,nested", [("v1.2", True), ("v1.2", False), ("v2.0", True)])
def test_classes_come_from_the_releases_configuration(tmp_path, version, nested):
    folder = MapillaryFolder(tmp_path, version=version, nested=nested)
    spec = mapillary_spec(str(tmp_path), version)
    counts = {"v1.2": (65, 37, 1), "v2.0": (116, 70, 8)}[version]
    assert (spec.num_classes, sum(spec.things), len(spec.ignored_ids)) == counts
    assert spec.category_ids[0] == 1 and spec.class_names[3] == "Class 3"
    assert spec.colors[3].tolist() == folder.labels[3]["color"]


def test_the_segments_are_those_of_the_release(tmp_path):
    folder = MapillaryFolder(tmp_path / "mvd")
    for key in ("b", "aa"):
        folder.add(key, scene())
    convert(tmp_path / "mvd", tmp_path / "out")
    first, second = records(tmp_path / "out", "training")
    assert first["image/file_name"].numpy() == b"aa.jpg" and int(second["image/id"]) == 1
    actual, classes = segment_map(first).numpy(), first["segment/class"].numpy()
    assert classes.tolist() == [STUFF] + [THING] * 3 and not first["segment/crowd"].numpy().any()
    expected = np.searchsorted([STUFF * 256, THING * 256, THING * 256 + 1, THING * 256 + 2], scene()) + 1
    np.testing.assert_array_equal(actual, np.where(scene() == VOID * 256, 0, expected))


def test_the_testing_split_has_photos_alone(tmp_path):
    folder = MapillaryFolder(tmp_path / "mvd", "testing")
    folder.add("k", scene())
    shutil.rmtree(folder.split / "v1.2")
    convert(tmp_path / "mvd", tmp_path / "out", "testing")
    (record,) = records(tmp_path / "out", "testing")
    assert record["segment/id"].shape == (0,) and segment_map(record).shape == (30, 60)


# === Input that is wrong ===


def test_versions_and_configurations_that_are_wrong(tmp_path):
    folder = MapillaryFolder(tmp_path)
    folder.add("k", scene())
    with pytest.raises(InputError, match="did you mean 'training'"):
        items_of(tmp_path, "trainin", "v1.2")
    folder.config.write_text(json.dumps({"labels": labels_of("v2.0")}))
    with pytest.raises(InputError, match=r"124 labels where v1.2 has 66; is it --version=v2.0"):
        mapillary_spec(str(tmp_path), "v1.2")
    folder.config.rename(tmp_path / "config_v2.0.json")
    with pytest.raises(InputError, match=r"config_v1.2.json: no such file; here: config_v2.0.json"):
        mapillary_spec(str(tmp_path), "v1.2")


def unknown_category(folder):
    folder.content["annotations"][0]["segments_info"][0]["category_id"] = 99
    folder.json.write_text(json.dumps(folder.content))


def photo(folder):
    return folder.photos / "k.jpg"


BAD = [
    (unknown_category, "category_id 99, which the spec 'mapillary_v1.2' lacks"),
    (delete(lambda folder: folder.panoptic / "k.png"), "k.png: missing"),
    (delete(photo), "k.jpg: missing"),
    (lambda folder: shutil.rmtree(folder.split / "v1.2"), "panoptic_2018.json: no such file"),
]


@pytest.mark.parametrize("damage,words", BAD, ids=[words for _, words in BAD])
def test_wrong_input_is_named(tmp_path, damage, words):
    folder = MapillaryFolder(tmp_path / "mvd")
    folder.add("k", scene())
    damage(folder)
    with pytest.raises(InputError, match=words):
        convert(tmp_path / "mvd", tmp_path / "out")
