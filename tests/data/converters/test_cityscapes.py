"""Conversion of Cityscapes' layout to TFRecords, compared with cityscapesscripts."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
from cityscapesscripts.helpers.labels import labels as table
from cityscapesscripts.preparation.createPanopticImgs import convert2panoptic
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import convert_split, encode_item
from axial.data.converters.cityscapes import CITIES, cityscapes_items, read_instance_labels
from axial.data.specs import CAMVID, CITYSCAPES
from axial.errors import InputError
from axial.tasks.segmentation.feed import segment_map
from tests.conftest import DATA
from tests.data.cityscapes_fixture import CityscapesFolder, street
from tests.data.killed import check_killed


def convert(folder, output, split="val", spec=CITYSCAPES, **options):
    items, source = cityscapes_items(str(folder), split, spec, **options)
    return convert_split(items, encode_item, spec, split, output_dir=str(output), source=source, progress=False)


def records(output, split="val"):
    manifest = tfrecord.read_manifest(str(output), split)
    files = [os.path.join(output, name) for name, *_ in manifest["shards"]]
    return [tfrecord.parse_example(r) for r in tf.data.TFRecordDataset(files)]


def test_stray_files_are_no_cities(tmp_path, capsys):
    tree = CityscapesFolder(tmp_path)
    tree.add("mine", 0, street(height=30, width=60, seed=0))
    photos, labels = (next(tmp_path.glob(f"{kind}/val")) for kind in ("leftImg8bit", "gtFine"))
    for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
        (photos / name).write_bytes(b"x")
    (photos / "mine" / "notes.txt").write_bytes(b"x")
    assert len(cityscapes_items(str(tmp_path), "val")[0]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("left out: ")[2][:5] for line in said] == ["files", "what "]
    assert "(2, first Thumbs.db)" in said[0] and "(1, first notes.txt)" in said[1]
    (labels / "Thumbs.db").write_bytes(b"x")
    assert len(cityscapes_items(str(tmp_path), "val")[0]) == 1
    shutil.rmtree(photos / "mine"), shutil.rmtree(labels / "mine")
    with pytest.raises(InputError, match="leftImg8bit/val: no photo in a folder of its city"):
        cityscapes_items(str(tmp_path), "val")


def test_the_licence_plate_is_void_and_other_numbers_are_named_as_they_are(tmp_path):
    path = str(tmp_path / "a.png")
    Image.fromarray(np.array([[65535, 26001], [7, 26001]], np.uint16)).save(path)
    assert [identity for identity, *_ in read_instance_labels(path).segments] == [7, 26001]
    Image.fromarray(np.array([[65000, 7]], np.uint16)).save(path)
    with pytest.raises(InputError, match=r"label 65 \(of pixels that are 65000\), which the spec"):
        read_instance_labels(path)
    flat = dataclasses.replace(CITYSCAPES, name="flat", things=(False,) * len(CITYSCAPES.things))
    Image.fromarray(np.array([[255, 7]], np.uint8)).save(path)
    for spec in (flat, dataclasses.replace(flat, ignored_ids=(255,))):
        assert [identity for identity, *_ in read_instance_labels(path, spec).segments] == [7]


def test_the_spec_is_the_public_label_table():
    counted = sorted((label for label in table if not label.ignoreInEval), key=lambda label: label.trainId)
    assert [label.trainId for label in counted] == list(range(19))
    assert CITYSCAPES.class_names == tuple(label.name for label in counted)
    assert CITYSCAPES.category_ids == tuple(label.id for label in counted)
    assert CITYSCAPES.things == tuple(label.hasInstances for label in counted)
    assert CITYSCAPES.palette == tuple(label.color for label in counted)
    assert sorted(CITYSCAPES.ignored_ids) == sorted(label.id for label in table if label.ignoreInEval)


def check_like_cityscapesscripts(folder, output, work, split="val", spec=CITYSCAPES):
    """Every record's segments are those of cityscapesscripts' panoptic image."""
    convert2panoptic(str(folder / "gtFine"), str(work), setNames=[split])
    content = json.loads((work / f"cityscapes_panoptic_{split}.json").read_text())
    wanted = {annotation["image_id"]: annotation for annotation in content["annotations"]}
    found = records(output, split)
    assert len(found) == len(wanted)
    for record in found:
        name = record["image/file_name"].numpy().decode()
        annotation = wanted[os.path.splitext(name)[0].removesuffix("_leftImg8bit")]
        png = Image.open(work / f"cityscapes_panoptic_{split}" / annotation["file_name"])
        np.testing.assert_array_equal(
            tfrecord.segment_ids(record["panoptic/encoded"]), np.asarray(png).astype(int) @ [1, 256, 65536]
        )
        segments = {
            s["id"]: (spec.class_of_category[s["category_id"]], s["iscrowd"]) for s in annotation["segments_info"]
        }

        def numpy(key):
            return record[key].numpy().tolist()

        rows = zip(numpy("segment/id"), zip(numpy("segment/class"), numpy("segment/crowd")))
        assert dict(rows) == segments and numpy("segment/id") == sorted(segments)
        counts = np.bincount(segment_map(record).numpy().ravel(), minlength=len(segments) + 1)
        areas = {s["id"]: s["area"] for s in annotation["segments_info"]}
        assert dict(zip(numpy("segment/id"), counts[1:].tolist())) == areas


def test_panoptic_ids_are_those_of_cityscapesscripts(tmp_path, capsys):
    folder = CityscapesFolder(tmp_path / "cs")
    for city in ("frankfurt", "lindau", "munster"):
        for frame in range(2):
            folder.add(city, frame, street(seed=frame))
    convert(tmp_path / "cs", tmp_path / "out")
    (tmp_path / "work").mkdir()
    check_like_cityscapesscripts(tmp_path / "cs", tmp_path / "out", tmp_path / "work")


def test_panoptic_images_are_read_as_well_as_made(tmp_path, capsys):
    folder = CityscapesFolder(tmp_path / "cs")
    names = [folder.add("mine", frame, street(seed=frame)) for frame in range(2)]
    convert2panoptic(str(tmp_path / "cs" / "gtFine"), setNames=["val"])
    convert(tmp_path / "cs", tmp_path / "made")
    shutil.rmtree(folder.truth)
    convert(tmp_path / "cs", tmp_path / "read", labels="panoptic")
    for made, read in zip(records(tmp_path / "made"), records(tmp_path / "read"), strict=True):
        for key in set(made) - {"panoptic/encoded"}:
            np.testing.assert_array_equal(made[key], read[key])
        np.testing.assert_array_equal(segment_map(made), segment_map(read))
    path = tmp_path / "cs" / "gtFine" / "cityscapes_panoptic_val.json"
    content = json.loads(path.read_text())
    content["annotations"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"cityscapes_panoptic_val.json: nothing of .*{names[1]}"):
        convert(tmp_path / "cs", tmp_path / "again", labels="panoptic")


def test_camvid_keeps_its_labels(tmp_path, capsys):
    folder = DATA / "camvid"
    if not folder.is_dir():
        pytest.skip(f"needs the CamVid frames in {folder}; set AXIAL_DATA")
    convert(folder, tmp_path / "out", spec=CAMVID)
    (tmp_path / "work").mkdir()
    check_like_cityscapesscripts(folder, tmp_path / "out", tmp_path / "work", spec=CAMVID)


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
    spec = dataclasses.replace(CITYSCAPES, things=(False,) * 19)
    convert(tmp_path / "cs", tmp_path / "out", spec=spec)
    (record,) = records(tmp_path / "out")
    assert record["segment/id"].numpy().tolist() == list(CITYSCAPES.category_ids)
    assert not record["segment/crowd"].numpy().any()
    wanted = np.where(street() >= 1000, street() // 1000, street())
    wanted[~np.isin(wanted, CITYSCAPES.category_ids)] = 0
    np.testing.assert_array_equal(tfrecord.segment_ids(record["panoptic/encoded"]), wanted)


@pytest.mark.slow  # takes 20 s; the COCO test covers the same code
def test_killed_twenty_times_ends_with_the_same_bytes(tmp_path):
    folder = CityscapesFolder(tmp_path / "cs")
    for frame in range(60):
        folder.add("mine", frame, street(seed=frame))
    check_killed(cityscapes_items, [str(tmp_path / "cs"), "val"], "val", CITYSCAPES, tmp_path / "out")


# === Input that is wrong ===


def spoil_city_of_labels(folder, name):
    shutil.rmtree(folder.truth / "lindau")


def spoil_city_of_photos(folder, name):
    shutil.rmtree(folder.photos / "lindau")
    shutil.rmtree(folder.truth / "lindau")


def spoil_label(folder, name):
    folder.path(name, "instanceIds").unlink()


def spoil_photo(folder, name):
    (folder.photos / "munster" / f"{name}_leftImg8bit.png").unlink()


def spoil_color(folder, name):
    path = folder.path(name, "instanceIds")
    Image.open(path).convert("L").convert("RGB").save(path)


def spoil_eight_bits(folder, name):
    path = folder.path(name, "instanceIds")
    Image.fromarray((np.asarray(Image.open(path)) % 256).astype(np.uint8)).save(path)


def spoil_size(folder, name):
    path = folder.path(name, "instanceIds")
    Image.fromarray(np.asarray(Image.open(path))[:-1]).save(path)


def spoil_id(folder, name):
    path = folder.path(name, "instanceIds")
    ids = np.asarray(Image.open(path)).copy()
    ids[0, 0] = 34
    Image.fromarray(ids).save(path)


def spoil_cut(folder, name):
    path = folder.path(name, "instanceIds")
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    "spoil,words",
    [
        (spoil_city_of_labels, r"gtFine/val/lindau: the city is missing"),
        (spoil_city_of_photos, r"the official split has lindau too"),
        (spoil_label, r"munster_000000_000001_gtFine_instanceIds.png: missing"),
        (spoil_photo, r"munster_000000_000001_gtFine_instanceIds.png: has no photo"),
        (spoil_color, r"instanceIds.png: in colour \(RGB\)"),
        (spoil_eight_bits, r"instanceIds.png: 8 bits a pixel"),
        (spoil_size, r"leftImg8bit.png: 128x40 pixels, its labels say 128x39"),
        (spoil_id, r"instanceIds.png: label 34, which the spec 'cityscapes' does not have"),
        (spoil_cut, r"instanceIds.png: not a whole image"),
    ],
)
def test_wrong_input_is_named(tmp_path, spoil, words):
    folder = CityscapesFolder(tmp_path / "cs")
    for city in ("frankfurt", "lindau", "munster"):
        name = folder.add(city, 1, street())
    spoil(folder, name)
    with pytest.raises(InputError, match=words):
        convert(tmp_path / "cs", tmp_path / "out")
    assert not (tmp_path / "out" / "val.json").exists()


def test_some_cities_alone_convert_if_asked(tmp_path):
    folder = CityscapesFolder(tmp_path / "cs")
    for city in ("frankfurt", "munster"):
        folder.add(city, 1, street())
    with pytest.raises(InputError, match="has lindau too; unpack the whole release, or .* with --partial"):
        convert(tmp_path / "cs", tmp_path / "out")
    manifest, _ = convert(tmp_path / "cs", tmp_path / "out", partial=True)
    assert manifest["examples"] == 2


def test_unknown_splits_and_labels_name_the_nearest(tmp_path):
    CityscapesFolder(tmp_path / "cs").add("mine", 1, street())
    with pytest.raises(InputError, match="did you mean 'val'"):
        cityscapes_items(str(tmp_path / "cs"), "vall")
    with pytest.raises(InputError, match="did you mean 'gtCoarse'"):
        cityscapes_items(str(tmp_path / "cs"), "val", labels="gtcoarse")
    with pytest.raises(InputError, match="gtCoarse: no such folder"):
        cityscapes_items(str(tmp_path / "cs"), "val", labels="gtCoarse")
