"""Conversion of Cityscapes' layout to TFRecords, compared with cityscapesscripts."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from cityscapesscripts.helpers.labels import labels as table
from cityscapesscripts.preparation.createPanopticImgs import convert2panoptic
from PIL import Image

from axial.data import tfrecord
from axial.data.converters.cityscapes import CITIES, cityscapes_items, read_instance_labels
from axial.data.labels import decode_rgb
from axial.data.specs import CITYSCAPES
from axial.errors import InputError
from axial.tasks.segmentation.input_pipeline import segment_map
from tests.data import conversion
from tests.data.cityscapes_fixture import CityscapesFolder, street
from tests.data.conversion import delete, records, replace

FLAT = dataclasses.replace(CITYSCAPES, name="flat", things=(False,) * len(CITYSCAPES.things))


def convert(folder, output, split="val", spec=CITYSCAPES, **options):
    return conversion.convert(cityscapes_items(str(folder), split, spec, **options), spec, output, split)


def test_stray_files_are_no_cities(tmp_path, capsys):
    tree = CityscapesFolder(tmp_path)
    tree.add("mine", 0, street(height=30, width=60, seed=0))
    photos, labels = (next(tmp_path.glob(f"{kind}/val")) for kind in ("leftImg8bit", "gtFine"))
    for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
        (photos / name).write_bytes(b"x")
    (photos / "mine" / "notes.txt").write_bytes(b"x")
    assert len(cityscapes_items(str(tmp_path), "val")[0]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("left out: ")[2][:5] for line in said] == ["files", "names"]
    assert "(2, first Thumbs.db)" in said[0] and "(1, first notes.txt)" in said[1]
    (labels / "Thumbs.db").write_bytes(b"x")
    assert len(cityscapes_items(str(tmp_path), "val")[0]) == 1
    shutil.rmtree(photos / "mine"), shutil.rmtree(labels / "mine")
    with pytest.raises(InputError, match="--split=val: no photo is in this split"):
        convert(tmp_path, tmp_path / "out")


def test_the_licence_plate_is_void_and_other_numbers_are_named_as_they_are(tmp_path):
    path = str(tmp_path / "a.png")
    Image.fromarray(np.array([[65535, 26001], [7, 26001]], np.uint16)).save(path)
    assert [identity for identity, *_ in read_instance_labels(CITYSCAPES, "", path).segments] == [7, 26001]
    Image.fromarray(np.array([[65000, 7]], np.uint16)).save(path)
    with pytest.raises(InputError, match=r"label 65 \(of pixels that are 65000\), which the spec"):
        read_instance_labels(CITYSCAPES, "", path)
    Image.fromarray(np.array([[255, 7]], np.uint8)).save(path)
    for spec in (FLAT, dataclasses.replace(FLAT, ignored_ids=(255,))):
        assert [identity for identity, *_ in read_instance_labels(spec, "", path).segments] == [7]


def test_the_spec_is_the_public_label_table():
    counted = sorted((label for label in table if not label.ignoreInEval), key=lambda label: label.trainId)
    assert [label.trainId for label in counted] == list(range(19))
    assert CITYSCAPES.class_names == tuple(label.name for label in counted)
    assert CITYSCAPES.category_ids == tuple(label.id for label in counted)
    assert CITYSCAPES.things == tuple(label.hasInstances for label in counted)
    assert CITYSCAPES.palette == tuple(label.color for label in counted)
    assert sorted(CITYSCAPES.ignored_ids) == sorted(label.id for label in table if label.ignoreInEval)


def test_segments_are_those_of_cityscapesscripts(tmp_path):
    folder = CityscapesFolder(tmp_path / "cs")
    for city in ("frankfurt", "lindau", "munster"):
        for frame in range(2):
            folder.add(city, frame, street(seed=frame))
    convert(tmp_path / "cs", tmp_path / "out")
    work = tmp_path / "work"
    work.mkdir()
    convert2panoptic(str(tmp_path / "cs" / "gtFine"), str(work), setNames=["val"])
    content = json.loads((work / "cityscapes_panoptic_val.json").read_text())
    annotations = {annotation["image_id"]: annotation for annotation in content["annotations"]}
    actual = records(tmp_path / "out")
    assert len(actual) == len(annotations) == 6
    for record in actual:
        annotation = annotations[record["image/file_name"].numpy().decode().partition("_leftImg8bit")[0]]
        png = np.asarray(Image.open(work / "cityscapes_panoptic_val" / annotation["file_name"]))
        np.testing.assert_array_equal(tfrecord.segment_ids(record["panoptic/encoded"]), decode_rgb(png))
        segments = sorted(annotation["segments_info"], key=lambda segment: segment["id"])
        rows = [(s["id"], CITYSCAPES.class_of_category[s["category_id"]], s["iscrowd"]) for s in segments]
        columns = (record[f"segment/{key}"].numpy().tolist() for key in ("id", "class", "crowd"))
        assert list(zip(*columns)) == rows
        areas = np.bincount(segment_map(record).numpy().ravel(), minlength=len(segments) + 1)[1:]
        assert areas.tolist() == [segment["area"] for segment in segments]


def test_coarse_labels_and_a_test_split_without_any(tmp_path):
    coarse = CityscapesFolder(tmp_path / "cs", "train_extra", "gtCoarse")
    for city in CITIES["train_extra"]:
        coarse.add(city, 1, street())
    manifest, _ = convert(tmp_path / "cs", tmp_path / "out", "train_extra", labels="gtCoarse")
    assert manifest["examples"] == 23
    tests = CityscapesFolder(tmp_path / "cs", "test")
    for city in CITIES["test"]:
        tests.add(city, 1, street(), labelled=False)
    convert(tmp_path / "cs", tmp_path / "out", "test")
    record = records(tmp_path / "out", "test")[0]
    assert record["segment/id"].shape == (0,) and not segment_map(record).numpy().any()
    assert segment_map(record).shape == (40, 128)


def test_a_spec_without_things_reads_the_semantic_labels_alone(tmp_path):
    folder = CityscapesFolder(tmp_path / "cs")
    name = folder.add("mine", 1, street())
    folder.path(name, "instanceIds").unlink()
    convert(tmp_path / "cs", tmp_path / "out", spec=FLAT)
    (record,) = records(tmp_path / "out")
    assert record["segment/id"].numpy().tolist() == list(CITYSCAPES.category_ids)
    assert not record["segment/crowd"].numpy().any()
    expected = np.where(street() >= 1000, street() // 1000, street())
    expected[~np.isin(expected, CITYSCAPES.category_ids)] = 0
    np.testing.assert_array_equal(tfrecord.segment_ids(record["panoptic/encoded"]), expected)


# === Input that is wrong ===


def ids(folder):
    return folder.path("munster_000000_000001", "instanceIds")


def photo(folder):
    return folder.photos / "munster" / "munster_000000_000001_leftImg8bit.png"


def without_lindau(folder):
    shutil.rmtree(folder.photos / "lindau")
    shutil.rmtree(folder.truth / "lindau")


def eight_bits(image):
    return Image.fromarray((np.asarray(image) % 256).astype(np.uint8))


def without_a_row(image):
    return Image.fromarray(np.asarray(image)[:-1])


def unknown(image):
    image.putpixel((0, 0), 34)
    return image


BAD = [
    (lambda folder: shutil.rmtree(folder.truth / "lindau"), "gtFine/val/lindau/lindau_.*_instanceIds.png: missing"),
    (without_lindau, "the official split has lindau too; unpack them, or use --partial"),
    (delete(ids), r"munster_000000_000001_gtFine_instanceIds.png: missing"),
    (replace(ids, eight_bits), r"instanceIds.png: 8 bits a pixel"),
    (replace(ids, without_a_row), r"leftImg8bit.png: 128x40 pixels, its labels say 128x39"),
    (replace(ids, unknown), r"instanceIds.png: label 34, which the spec 'cityscapes' does not have"),
]


@pytest.mark.parametrize("damage,words", BAD, ids=[words for _, words in BAD])
def test_wrong_input_is_named(tmp_path, damage, words):
    folder = CityscapesFolder(tmp_path / "cs")
    for city in ("frankfurt", "lindau", "munster"):
        folder.add(city, 1, street())
    damage(folder)
    with pytest.raises(InputError, match=words):
        convert(tmp_path / "cs", tmp_path / "out")
    assert not (tmp_path / "out" / "val.json").exists()
    if damage is without_lindau:
        assert convert(tmp_path / "cs", tmp_path / "out", partial=True)[0]["examples"] == 2


def test_an_unknown_split_names_the_nearest(tmp_path):
    CityscapesFolder(tmp_path / "cs").add("mine", 1, street())
    with pytest.raises(InputError, match="did you mean 'val'"):
        cityscapes_items(str(tmp_path / "cs"), "vall")
    with pytest.raises(InputError, match="gtCoarse: no such folder"):
        cityscapes_items(str(tmp_path / "cs"), "val", labels="gtCoarse")
