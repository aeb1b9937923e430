"""Conversion of Mapillary Vistas' layout to TFRecords."""

import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import convert_split, encode_item
from axial.data.converters.mapillary import mapillary_items, mapillary_spec
from axial.data.specs import CITYSCAPES
from axial.errors import InputError
from axial.tasks.segmentation.feed import segment_map
from tests.data.killed import check_killed
from tests.data.mapillary_fixture import MapillaryFolder

STUFF, THING, VOID = 9, 10, 65  # labels of the fixture


def scene(height=30, width=60):
    """int [h, w] of label x 256 + number: stuff, three instances of a thing, void."""
    columns = [STUFF * 256, THING * 256, THING * 256 + 1, THING * 256 + 2, VOID * 256]
    return np.asarray(columns)[np.arange(width) * 5 // width][None].repeat(height, 0)


def convert(root, output, split="training", version="v1.2"):
    _, spec = mapillary_spec(str(root), version)
    items, source = mapillary_items(str(root), split, spec, version)
    return convert_split(items, encode_item, spec, split, output_dir=str(output), source=source, progress=False)


def records(output, split="training"):
    manifest = tfrecord.read_manifest(str(output), split)
    files = [os.path.join(output, name) for name, *_ in manifest["shards"]]
    return [tfrecord.parse_example(r) for r in tf.data.TFRecordDataset(files)]


def items_of(root, split, version):
    return mapillary_items(root, split, mapillary_spec(root, version)[1], version)


@pytest.mark.parametrize("version,nested", [("v1.2", True), ("v1.2", False), ("v2.0", True)])
def test_classes_come_from_the_releases_configuration(tmp_path, version, nested):
    folder = MapillaryFolder(tmp_path, version=version, nested=nested)
    path, spec = mapillary_spec(str(tmp_path), version)
    assert path == str(folder.config)
    counts = {"v1.2": (65, 37, 1), "v2.0": (116, 70, 8)}[version]
    assert (spec.num_classes, sum(spec.things), len(spec.ignored_ids)) == counts
    assert spec.category_ids[0] == 1 and spec.class_names[3] == "Class 3"
    assert spec.colors[3].tolist() == folder.labels[3]["color"]


@pytest.mark.parametrize("layout", ["panoptic", "instances"])
def test_both_layouts_give_the_same_segments(tmp_path, layout):
    folder = MapillaryFolder(tmp_path / "mvd")
    for key in ("b", "aa"):
        folder.add(key, scene())
    if layout == "instances":
        shutil.rmtree(folder.panoptic)
    convert(tmp_path / "mvd", tmp_path / "out")
    first, second = records(tmp_path / "out")
    assert first["image/file_name"].numpy() == b"aa.jpg" and int(second["image/id"]) == 1
    found, classes = segment_map(first).numpy(), first["segment/class"].numpy()
    assert classes.tolist() == [STUFF] + [THING] * 3 and not first["segment/crowd"].numpy().any()
    wanted = np.searchsorted([STUFF * 256, THING * 256, THING * 256 + 1, THING * 256 + 2], scene()) + 1
    np.testing.assert_array_equal(found, np.where(scene() == VOID * 256, 0, wanted))


def test_photos_in_capitals_are_read(tmp_path):
    folder = MapillaryFolder(tmp_path / "mvd")
    folder.add("k", scene())
    shutil.rmtree(folder.panoptic)
    (folder.photos / "k.jpg").rename(folder.photos / "k.JPG")
    convert(tmp_path / "mvd", tmp_path / "out")
    (record,) = records(tmp_path / "out")
    assert record["image/file_name"].numpy() == b"k.JPG" and record["segment/id"].shape == (4,)


def test_the_testing_split_has_photos_alone(tmp_path):
    folder = MapillaryFolder(tmp_path / "mvd", "testing")
    folder.add("k", scene())
    shutil.rmtree(folder.split / "v1.2")
    convert(tmp_path / "mvd", tmp_path / "out", "testing")
    (record,) = records(tmp_path / "out", "testing")
    assert record["segment/id"].shape == (0,) and segment_map(record).shape == (30, 60)


@pytest.mark.slow  # takes 20 s; the COCO test covers the same code
def test_killed_twenty_times_ends_with_the_same_bytes(tmp_path):
    folder = MapillaryFolder(tmp_path / "mvd")
    for number in range(60):
        folder.add(f"key{number:02d}", scene())
    _, spec = mapillary_spec(str(tmp_path / "mvd"), "v1.2")
    arguments = [str(tmp_path / "mvd"), "training", "v1.2"]
    check_killed(items_of, arguments, "training", spec, tmp_path / "out")


# === Input that is wrong ===


def test_another_version_is_told_by_its_count(tmp_path):
    MapillaryFolder(tmp_path, version="v2.0")
    shutil.copy(tmp_path / "config_v2.0.json", tmp_path / "config_v1.2.json")
    with pytest.raises(InputError, match=r"124 labels where v1.2 has 66; is it --version=v2.0"):
        mapillary_spec(str(tmp_path), "v1.2")
    (tmp_path / "config_v1.2.json").unlink()
    with pytest.raises(InputError, match=r"config_v1.2.json: no such file; here: config_v2.0.json"):
        mapillary_spec(str(tmp_path), "v1.2")
    with pytest.raises(InputError, match="did you mean 'v1.2'"):
        mapillary_spec(str(tmp_path), "v1.1")


def test_an_unknown_version_is_refused_with_a_spec_of_the_users_own(tmp_path):
    MapillaryFolder(tmp_path).add("k", scene())
    with pytest.raises(InputError, match="--version=v1.3: one of v1.2, v2.0"):
        mapillary_items(str(tmp_path), "training", CITYSCAPES, "v1.3")


def test_other_numbers_of_things_are_refused(tmp_path):
    folder = MapillaryFolder(tmp_path)
    folder.labels[10]["instances"] = False
    folder.config.write_text(json.dumps({"labels": folder.labels}))
    with pytest.raises(InputError, match="65 classes with 36 things where v1.2 has 65 with 37"):
        mapillary_spec(str(tmp_path), "v1.2")


def spoil_json(folder):
    folder.content["annotations"][0]["segments_info"][0]["category_id"] = 99
    folder.json.write_text(json.dumps(folder.content))


def spoil_panoptic(folder):
    (folder.panoptic / "k.png").unlink()


def spoil_photo(folder):
    (folder.photos / "k.jpg").unlink()


def spoil_labels(folder):
    shutil.rmtree(folder.split / "v1.2")


def spoil_instances(folder):
    shutil.rmtree(folder.panoptic)
    (folder.instances / "k.png").unlink()


def spoil_photo_beside_instances(folder):
    folder.add("l", scene())
    shutil.rmtree(folder.panoptic)
    spoil_photo(folder)


def spoil_eight_bits(folder):
    shutil.rmtree(folder.panoptic)
    path = folder.instances / "k.png"
    Image.fromarray((np.asarray(Image.open(path)) % 256).astype(np.uint8)).save(path)


@pytest.mark.parametrize(
    "spoil,words",
    [
        (spoil_json, "category_id 99, which the spec 'mapillary_v1.2' does not have"),
        (spoil_panoptic, "k.png: missing"),
        (spoil_photo, "k.jpg: missing"),
        (spoil_labels, "panoptic_2018.json: no such file, and no folder"),
        (spoil_instances, "k.png: missing, though"),
        (spoil_photo_beside_instances, "instances/k.png: has no photo in .*images"),
        (spoil_eight_bits, "k.png: 8 bits a pixel"),
    ],
)
def test_wrong_input_is_named(tmp_path, spoil, words):
    folder = MapillaryFolder(tmp_path / "mvd")
    folder.add("k", scene())
    spoil(folder)
    with pytest.raises(InputError, match=words):
        convert(tmp_path / "mvd", tmp_path / "out")


def test_an_unknown_split_names_the_others(tmp_path):
    MapillaryFolder(tmp_path).add("k", scene())
    with pytest.raises(InputError, match="did you mean 'training'"):
        items_of(str(tmp_path), "trainin", "v1.2")
