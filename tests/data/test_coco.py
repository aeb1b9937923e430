"""Conversion of COCO's layout to TFRecords: what the records have, and the messages for wrong input."""

import codecs
import dataclasses
import json
import os
import shutil
import unicodedata

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from axial.data import convert as convert_module
from axial.data import tfrecord
from axial.data.coco import SAMPLE_DIR, checked_labels, coco_items
from axial.data.convert import convert_split, encode_item
from axial.data.labels import colors_of, encode_rgb, numbered
from axial.data.pipeline import evaluation_dataset, segment_map
from axial.data.spec_file import json_spec
from axial.data.specs import COCO
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.io import schemas
from coco_fixture import CocoFolder, stripes
from conftest import DATA
from killed import check_killed

GRASS, PERSON, SKY = 193, 1, 187


def convert(folder, output, split="val", **options):
    items, source = coco_items(str(folder), split)
    options = {"output_dir": str(output), "source": source, "progress": False, **options}
    return convert_split(items, encode_item, COCO, split, **options)


def records(output, split="val"):
    manifest = tfrecord.read_manifest(str(output), split)
    files = [os.path.join(output, name) for name, *_ in manifest["shards"]]
    return [tfrecord.parse_example(r) for r in tf.data.TFRecordDataset(files)]


def test_ids_beyond_255_crowds_and_void(tmp_path):
    folder = CocoFolder(tmp_path / "coco")
    ids = stripes(20, 40, [0, 300, 70000, 16777215])
    folder.add(7, ids, {300: PERSON, 70000: GRASS, 16777215: PERSON}, crowd=(16777215,))
    convert(tmp_path / "coco", tmp_path / "out")
    (record,) = records(tmp_path / "out")
    assert record["segment/id"].numpy().tolist() == [300, 70000, 16777215]
    classes = [COCO.class_of_category[c] for c in (PERSON, GRASS, PERSON)]
    assert record["segment/class"].numpy().tolist() == classes
    assert record["segment/crowd"].numpy().tolist() == [0, 0, 1]
    wanted = np.searchsorted([0, 300, 70000, 16777215], ids)
    np.testing.assert_array_equal(segment_map(record), wanted)


@given(order=st.permutations([9, 5, 70000, 7]), unlisted=st.booleans())
@settings(deadline=None, max_examples=20)
def test_segments_keep_the_order_of_the_json(order, unlisted):
    """So does a spec that ignores one of them. The map numbers them in this order."""
    spec = COCO if unlisted else dataclasses.replace(COCO, name="less", **without(SKY))
    ids = stripes(4, 8, [0, 5, 7, 9, 70000])
    categories = {9: PERSON, 5: PERSON, 70000: SKY, 7: GRASS}
    segments = [schemas.Segment(id=i, category_id=categories[i]) for i in order]
    found = checked_labels("a.png", encode_rgb(colors_of(ids)), (8, 4), segments, spec=spec)
    kept = [i for i in order if unlisted or categories[i] != SKY]
    assert [identity for identity, *_ in found.segments] == kept
    wanted = np.zeros_like(ids)
    for number, identity in enumerate(kept, 1):
        wanted[ids == identity] = number
    record = {"panoptic/encoded": found.png, "segment/id": np.array(kept, np.int64)}
    np.testing.assert_array_equal(segment_map(record), wanted)
    np.testing.assert_array_equal(numbered(ids, kept), wanted)


def without(category):
    """The fields of COCO's spec without a category, which is ignored."""
    rows = zip(COCO.class_names, COCO.category_ids, COCO.things)
    names, ids, things = zip(*(row for row in rows if row[1] != category))
    return {"class_names": names, "category_ids": ids, "things": things, "ignored_ids": (category,)}


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_photos_of_any_mode_decode_to_rgb(tmp_path, mode):
    pixels = np.zeros([16, 16, 3], np.uint8) + [200, 60, 90]
    photo = Image.fromarray(pixels.astype(np.uint8)).convert(mode)
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(16, 16, [5]), {5: SKY}, photo=photo, quality=95)
    convert(tmp_path / "coco", tmp_path / "out")
    (record,) = records(tmp_path / "out")
    wanted = np.asarray(photo.convert("RGB")).astype(int)
    assert abs(decode_photo(record).numpy().astype(int) - wanted).max() <= 6


@pytest.mark.parametrize("kind", ["RGBA", "I;16", "P"])
def test_png_photos_of_any_mode(tmp_path, kind):
    folder = CocoFolder(tmp_path / "coco")
    if kind == "I;16":
        photo = Image.fromarray((np.arange(256, dtype=np.uint16) * 257).reshape(16, 16))
        wanted = np.arange(256).reshape(16, 16, 1).repeat(3, 2)
    else:
        photo = Image.fromarray(np.full([16, 16, 3], 102, np.uint8)).convert(kind)
        wanted = np.full([16, 16, 3], 102)
    folder.add(1, stripes(16, 16, [5]), {5: SKY}, photo=photo, format="PNG")
    convert(tmp_path / "coco", tmp_path / "out")
    (record,) = records(tmp_path / "out")
    np.testing.assert_array_equal(decode_photo(record), wanted)


def test_a_photo_that_only_its_exif_tag_fits_to_its_labels_is_turned(tmp_path):
    folder = CocoFolder(tmp_path / "coco")
    upright = np.zeros([20, 10, 3], np.uint8)
    upright[:10] = 255
    lying = Image.fromarray(np.rot90(upright, 1))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: to view the photo, turn it clockwise
    name = folder.add(1, stripes(20, 10, [5]), {5: SKY})
    lying.save(folder.photos / f"{name}.jpg", exif=exif, quality=95)
    convert(tmp_path / "coco", tmp_path / "out")
    (record,) = records(tmp_path / "out")
    found = decode_photo(record).numpy()
    assert found.shape == (20, 10, 3) and found[:8].min() > 200 and found[12:].max() < 60


def test_equal_runs_give_equal_bytes_and_a_second_run_does_nothing(tmp_path):
    for name in ("a", "b"):
        convert(SAMPLE_DIR, tmp_path / name, "train2017", shards=3, workers=2)
    files = sorted(os.listdir(tmp_path / "a"))
    assert files == sorted(os.listdir(tmp_path / "b")) and len(files) == 4
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    _, done = convert(SAMPLE_DIR, tmp_path / "a", "train2017", shards=3)
    assert done["photos"] == 0


def test_killed_ten_times_ends_with_the_same_bytes(tmp_path):
    folder = CocoFolder(tmp_path / "coco")
    for i in range(60):
        folder.add(i, stripes(120, 160, [i + 1, 900 + i]), {i + 1: PERSON, 900 + i: SKY})
    check_killed(coco_items, [str(tmp_path / "coco"), "val"], "val", COCO, tmp_path / "out", times=10)


def test_real_photos_keep_their_labels(tmp_path):
    folder = DATA / "coco"
    if not folder.is_dir():
        pytest.skip(f"needs the COCO photos in {folder}; set AXIAL_DATA")
    convert(folder, tmp_path, "val2017")
    content = json.loads((folder / "annotations" / "panoptic_val2017.json").read_text())
    areas = {(a["image_id"], s["id"]): s["area"] for a in content["annotations"] for s in a["segments_info"]}
    seen = 0
    for record in records(tmp_path, "val2017"):
        counts = np.bincount(segment_map(record).numpy().ravel())
        for i, identity in enumerate(record["segment/id"].numpy()):
            assert counts[i + 1] == areas[int(record["image/id"]), int(identity)]
            seen += 1
    assert seen == len(areas)


def test_test_dev_has_photos_of_the_test_set_and_no_labels(tmp_path):
    folder = CocoFolder(tmp_path / "coco", "test2017")
    for i in (9, 4):
        folder.add(i, stripes(20, 40, [5]), {5: SKY})
    info = {"images": folder.content["images"], "categories": []}
    folder.json.unlink()
    (folder.json.parent / "image_info_test-dev2017.json").write_text(json.dumps(info))
    convert(tmp_path / "coco", tmp_path / "out", "test-dev2017")
    found = records(tmp_path / "out", "test-dev2017")
    assert [int(r["image/id"]) for r in found] == [4, 9]
    assert found[0]["segment/id"].shape == (0,) and segment_map(found[0]).shape == (20, 40)
    with pytest.raises(InputError, match="did you mean 'test-dev2017'"):
        convert(tmp_path / "coco", tmp_path / "out", "testdev2017")
    (folder.photos / "000000000009.jpg").unlink()
    with pytest.raises(InputError, match="000000000009.jpg: missing"):
        convert(tmp_path / "coco", tmp_path / "out", "test-dev2017")


def test_files_lie_in_folders_of_their_own(tmp_path):
    folder = CocoFolder(tmp_path / "coco")
    for number in (1, 2, 3):
        folder.add(number, stripes(20, 40, [5]), {5: SKY})
    for number, where in ((1, "a"), (2, "a/b")):
        for kind, place, suffix in (("images", folder.photos, "jpg"), ("annotations", folder.labels, "png")):
            name = f"{number:012d}.{suffix}"
            (place / where).mkdir(exist_ok=True)
            (place / name).rename(place / where / name)
            folder.content[kind][number - 1]["file_name"] = f"{where}/{name}"
    folder.write()
    convert(tmp_path / "coco", tmp_path / "out")
    assert sorted(int(r["image/id"]) for r in records(tmp_path / "out")) == [1, 2, 3]
    (folder.photos / "a" / "b" / "000000000002.jpg").unlink()
    with pytest.raises(InputError, match="val/a/b/000000000002.jpg: missing"):
        coco_items(str(tmp_path / "coco"), "val")
    folder.content["images"][0]["file_name"] = "../000000000001.jpg"
    folder.write()
    with pytest.raises(InputError, match="images: file_name: '../000000000001.jpg': leaves its folder"):
        coco_items(str(tmp_path / "coco"), "val")


def test_a_byte_order_mark_changes_nothing(tmp_path):
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(20, 40, [5]), {5: SKY})
    convert(tmp_path / "coco", tmp_path / "plain")
    folder.json.write_bytes(codecs.BOM_UTF8 + folder.json.read_bytes())
    convert(tmp_path / "coco", tmp_path / "marked")
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "marked" / path.name).read_bytes() == path.read_bytes()


def test_photos_without_an_annotation_are_counted(tmp_path, capsys):
    folder = CocoFolder(tmp_path / "coco")
    for number in (1, 2, 3):
        folder.add(number, stripes(20, 40, [5]), {5: SKY})
    coco_items(str(tmp_path / "coco"), "val")
    assert capsys.readouterr().err == ""
    del folder.content["annotations"][0], folder.content["images"][2], folder.content["annotations"][1]
    folder.write()
    items, _ = coco_items(str(tmp_path / "coco"), "val")
    assert len(items) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("(2, first 000000000001.jpg)") and "photos without an annotation in" in line


# === Categories ===

OURS = {"id": SKY, "name": "sky-other-merged", "isthing": 0}


@pytest.mark.parametrize(
    "category,words",
    [
        ({"id": 1, "name": "weed", "isthing": 0}, r"category 1 is .weed. \(stuff\), .*calls it .person. \(thing\)"),
        ({"id": 1, "name": "weed"}, "category 1 is 'weed', the spec"),
        ({"id": 1, "name": "person", "isthing": 0}, r"category 1 is 'person' \(stuff\)"),
        ({"id": SKY, "isthing": 1}, r"category 187 is None \(thing\)"),
        ({"id": 1, "name": 7}, "category 1 is '7'"),
    ],
)
def test_categories_that_are_not_the_specs_are_named(tmp_path, category, words):
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(20, 40, [5]), {5: SKY})
    folder.content["categories"] = [OURS, {"id": 1, "name": "person", "isthing": 1}]
    folder.write()
    coco_items(str(tmp_path / "coco"), "val")
    folder.content["categories"] = [OURS | {"supercategory": "sky"}, category]
    folder.write()
    with pytest.raises(InputError, match=words) as error:
        coco_items(str(tmp_path / "coco"), "val")
    assert "\n" not in str(error.value) and "panoptic_val.json" in str(error.value)


@pytest.mark.parametrize(
    "category",
    [
        {"id": SKY, "name": "Sky_other merged", "isthing": False},
        {"id": SKY},
        {"id": SKY, "name": None, "color": [1, 2, 3]},
        {"id": 12, "name": "street sign", "isthing": 1},  # of COCO's gaps, which no annotation has
    ],
    ids=str,
)
def test_categories_that_say_the_same_or_nothing_are_taken(tmp_path, category):
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(20, 40, [5]), {5: SKY})
    folder.content["categories"] = [category]
    folder.write()
    assert coco_items(str(tmp_path / "coco"), "val")[0]


def test_a_spec_without_things_merges_them(tmp_path):
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(20, 40, [5]), {5: PERSON})
    folder.content["categories"] = [{"id": 1, "name": "person", "isthing": 1}]
    folder.write()
    flat = dataclasses.replace(COCO, name="flat", things=(False,) * len(COCO.things))
    assert coco_items(str(tmp_path / "coco"), "val", flat)[0]


def test_the_jsons_own_categories_are_a_spec(tmp_path):
    folder = CocoFolder(tmp_path / "field")
    folder.add(1, stripes(20, 40, [5, 6]), {5: 1, 6: 2})
    rows = [{"id": 2, "name": "crop", "isthing": 1}, {"id": 1, "name": "weed", "isthing": 0}]
    folder.content["categories"] = [row | {"color": [1, 2, 3]} for row in rows]
    folder.write()
    spec = json_spec(str(tmp_path / "field"), ["test", "val"])
    assert (spec.name, spec.class_names, spec.category_ids) == ("field", ("crop", "weed"), (2, 1))
    assert spec.things == (True, False) and spec.palette == ((1, 2, 3),) * 2
    items, _ = coco_items(str(tmp_path / "field"), "val", spec)
    assert encode_item(items[0])[0]["segment/class"] == (1, 0)


@pytest.mark.parametrize(
    "rows,words",
    [
        ([], "categories: empty"),
        ([{"id": 1, "name": "a"}], "category 1: is missing the field isthing"),
        ([{"id": 1, "isthing": 1}], "category 1: is missing the field name"),
        ([{"id": i, "name": "a", "isthing": 1} for i in (1, 2)], "class names must differ"),
        ([{"id": 1, "name": "a", "isthing": 1, "color": [1, 2]}], "color"),
    ],
)
def test_categories_that_are_no_spec_are_named(tmp_path, rows, words):
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(20, 40, [5]), {5: 1})
    folder.content["categories"] = rows
    folder.write()
    with pytest.raises(InputError, match=f"--spec=json: .*panoptic_val.json: .*{words}"):
        json_spec(str(tmp_path / "coco"), ["val"])
    with pytest.raises(InputError, match="--spec=json: .*panoptic_test.json: no such file"):
        json_spec(str(tmp_path / "coco"), ["test"])


# === Input that is wrong ===


def spoil_form(folder, name):
    """The photo's name is stored in the other form of Unicode."""
    forms = [unicodedata.normalize(form, "caf\xe9.jpg") for form in ("NFC", "NFD")]
    (folder.photos / f"{name}.jpg").rename(folder.photos / forms[1])
    folder.content["images"][-1]["file_name"] = forms[0]
    folder.write()


def spoil_mixed(folder, name):
    folder.content["images"][-1]["id"] = folder.content["annotations"][-1]["image_id"] = "2"
    folder.write()


def spoil_text_id(folder, name):
    folder.content["annotations"][-1]["image_id"] = "2"
    folder.write()


def spoil_lossy(folder, name):
    label = Image.open(folder.labels / f"{name}.png")
    label.save(folder.labels / f"{name}.png", "JPEG", quality=100)


def spoil_truncated(folder, name):
    path = folder.photos / f"{name}.jpg"
    path.write_bytes(path.read_bytes()[:-200])


def spoil_empty_photo(folder, name):
    (folder.photos / f"{name}.jpg").write_bytes(b"")


def spoil_missing_photo(folder, name):
    (folder.photos / f"{name}.jpg").unlink()


def spoil_missing_png(folder, name):
    (folder.labels / f"{name}.png").unlink()


def spoil_png_id(folder, name):
    rgb = np.asarray(Image.open(folder.labels / f"{name}.png")).copy()
    rgb[0, 0] = (99, 0, 0)
    Image.fromarray(rgb).save(folder.labels / f"{name}.png")


def spoil_json_id(folder, name):
    folder.content["annotations"][-1]["segments_info"].append({"id": 77, "category_id": SKY})
    folder.write()


def spoil_png_size(folder, name):
    Image.new("RGB", (9, 9)).save(folder.labels / f"{name}.png")


def spoil_photo_size(folder, name):
    Image.new("RGB", (9, 9)).save(folder.photos / f"{name}.jpg")


def spoil_category(folder, name):
    folder.content["annotations"][-1]["segments_info"][0]["category_id"] = 12
    folder.write()


def spoil_empty(folder, name):
    folder.content["annotations"] = []
    folder.write()


def spoil_json(folder, name):
    folder.json.write_text("{")


def spoil_keys(folder, name):
    folder.json.write_text("{}")


def spoil_image_id(folder, name):
    folder.content["annotations"][-1]["image_id"] = 999
    folder.write()


@pytest.mark.parametrize(
    "spoil,words",
    [
        (spoil_truncated, r"000000000002.jpg: not a whole image"),
        (spoil_empty_photo, r"000000000002.jpg: not an image"),
        (spoil_missing_photo, r"000000000002.jpg: missing"),
        (spoil_missing_png, r"000000000002.png: missing"),
        (spoil_png_id, r"000000000002.png: .*id 99 is only in the PNG"),
        (spoil_json_id, r"000000000002.png: .*id 77 is only in the JSON"),
        (spoil_png_size, r"000000000002.png: 9x9 pixels, the JSON says 40x20"),
        (spoil_photo_size, r"000000000002.jpg: 9x9 pixels, its labels say 40x20"),
        (spoil_category, r"category_id 12, which the spec 'coco' does not have"),
        (spoil_empty, r"panoptic_val.json: the split is empty"),
        (spoil_json, r"panoptic_val.json: not JSON"),
        (spoil_keys, r"panoptic_val.json: is missing the required field images"),
        (spoil_image_id, r"image 999"),
        (spoil_form, r"did you mean 'cafe\\u0301.jpg'\? 'caf\\xe9.jpg' looks alike"),
        (spoil_mixed, r"id '2' of 000000000002.jpg is a text, id 1 of 000000000001.jpg a number"),
        (spoil_text_id, r"names image 2, images do not \(2 is there, which is another id\)"),
        (spoil_lossy, r"000000000002.png: its content is JPEG"),
    ],
)
def test_wrong_input_is_named_and_finished_shards_stay(tmp_path, spoil, words):
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(20, 40, [5]), {5: SKY})
    name = folder.add(2, stripes(20, 40, [5, 6]), {5: SKY, 6: PERSON})
    spoil(folder, name)
    with pytest.raises(InputError, match=words):
        convert(tmp_path / "coco", tmp_path / "out", shards=2)
    left = os.listdir(tmp_path / "out") if (tmp_path / "out").exists() else []
    assert "val.json" not in left and not any("00001" in n and not n.startswith(".") for n in left)


@pytest.mark.parametrize("split,words", [("vall", "did you mean 'val'"), ("train2017", "splits here: val")])
def test_unknown_split_names_the_others(tmp_path, split, words):
    CocoFolder(tmp_path / "coco").add(1, stripes(20, 40, [5]), {5: SKY})
    with pytest.raises(InputError, match=words):
        convert(tmp_path / "coco", tmp_path / "out", split)


def test_missing_folder():
    with pytest.raises(InputError, match="/nowhere: no such folder"):
        coco_items("/nowhere", "val")


def test_a_folder_with_another_split_of_that_name_is_left_alone(tmp_path):
    one, two = CocoFolder(tmp_path / "one"), CocoFolder(tmp_path / "two")
    one.add(1, stripes(20, 40, [5]), {5: SKY})
    two.add(3, stripes(20, 40, [5]), {5: SKY})
    convert(tmp_path / "one", tmp_path / "out")
    before = (tmp_path / "out" / "val.json").read_bytes()
    with pytest.raises(InputError, match="made from other input"):
        convert(tmp_path / "two", tmp_path / "out")
    assert (tmp_path / "out" / "val.json").read_bytes() == before


def test_a_shard_that_was_cut_is_converted_again(tmp_path):
    convert(SAMPLE_DIR, tmp_path / "whole", "val2017", shards=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shard = tmp_path / "cut" / "val2017-00001-of-00002.tfrecord"
    shard.write_bytes(shard.read_bytes()[:-7])
    convert(SAMPLE_DIR, tmp_path / "cut", "val2017", shards=2)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "cut" / path.name).read_bytes() == path.read_bytes()


def test_a_shard_whose_label_image_changed_is_converted_again(tmp_path):
    coco = CocoFolder(tmp_path / "coco")
    for number in (1, 2):
        coco.add(number, stripes(20, 40, [5]), {5: SKY})
    _, first = convert(tmp_path / "coco", tmp_path / "out", shards=2)
    _, second = convert(tmp_path / "coco", tmp_path / "out", shards=2)
    [png] = (tmp_path / "coco").rglob("*2.png")
    changed = np.array(Image.open(png))
    changed[:10] = 0  # void
    Image.fromarray(changed).save(png)
    manifest, third = convert(tmp_path / "coco", tmp_path / "out", shards=2)
    convert(tmp_path / "coco", tmp_path / "anew", shards=2)
    assert (first["photos"], second["photos"], third["photos"]) == (2, 0, 1)
    for name, _, _ in manifest["shards"]:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "anew" / name).read_bytes()


def test_a_killed_conversion_whose_photo_changed_starts_that_shard_again(tmp_path):
    coco = CocoFolder(tmp_path / "coco")
    for number in (1, 2):
        coco.add(number, stripes(20, 40, [5]), {5: SKY})
    convert(tmp_path / "coco", tmp_path / "out", shards=2)
    (tmp_path / "out" / "val.json").rename(tmp_path / "out" / ".val.plan")
    os.utime(next((tmp_path / "coco").glob("*/*1.jpg")), ns=(0, 0))
    assert convert(tmp_path / "coco", tmp_path / "out", shards=2)[1]["photos"] == 1


def test_a_plan_without_shards_holds_nobody_up(tmp_path):
    """After a mistake in the spec is mended, the same command converts."""
    (tmp_path / ".val2017.plan").write_text("{}")
    convert(SAMPLE_DIR, tmp_path, "val2017", shards=2)
    assert tfrecord.read_manifest(str(tmp_path), "val2017")["examples"] == 8


def test_a_manifest_that_claims_too_much_is_refused(tmp_path):
    convert(SAMPLE_DIR, tmp_path, "val2017", shards=1)
    manifest = json.loads((tmp_path / "val2017.json").read_text())
    manifest["examples"] = manifest["shards"][0][1] = 10**9
    (tmp_path / "val2017.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="1000000000 records do not fit the"):
        tfrecord.read_manifest(str(tmp_path), "val2017")


# === Broken photos and label files ===


def broken_folder(root, count=12, broken=(2, 3, 7), bad_labels=(9,)):
    """Photos 1 to `count`, of which some are cut short, and some have label files that are."""
    folder = CocoFolder(root)
    for number in range(1, count + 1):
        name = folder.add(number, stripes(20, 40, [5]), {5: SKY})
        for path, spoilt in ((folder.photos / f"{name}.jpg", broken), (folder.labels / f"{name}.png", bad_labels)):
            if number in spoilt:
                path.write_bytes(path.read_bytes()[:-30])
    return folder


def mend(folder):
    for number in (2, 3, 7, 9):
        folder.content["images"], folder.content["annotations"] = (
            [row for row in folder.content[part] if row[key] != number]
            for part, key in (("images", "id"), ("annotations", "image_id"))
        )
        folder.add(number, stripes(20, 40, [5]), {5: SKY})


def test_all_broken_files_are_named_at_once_and_whole_shards_stay(tmp_path, capsys):
    folder = broken_folder(tmp_path / "coco")
    out = tmp_path / "out"
    with pytest.raises(InputError, match=rf"^4 of 12 photos are broken; all are listed in {out}/val.broken.txt; "):
        convert(tmp_path / "coco", out, shards=6)
    listed = (out / "val.broken.txt").read_text().splitlines()
    assert sorted(os.path.basename(line.split(":")[0]) for line in listed) == [
        "000000000002.jpg",
        "000000000003.jpg",
        "000000000007.jpg",
        "000000000009.png",
    ]
    assert capsys.readouterr().err.splitlines() == listed
    shards = sorted(path.name for path in out.glob("*.tfrecord"))
    assert 2 <= len(shards) < 6 and not (out / "val.json").exists()
    assert sorted(path.name for path in out.iterdir()) == sorted([".val.plan", "val.broken.txt", *shards])
    listed, times = folder.json.read_bytes(), {name: (out / name).stat().st_mtime_ns for name in shards}
    mend(folder)
    folder.json.write_bytes(listed)
    manifest, done = convert(tmp_path / "coco", out, shards=6)
    assert manifest["examples"] == 12 and done["photos"] == 12 - 2 * len(shards)
    assert {name: (out / name).stat().st_mtime_ns for name in shards} == times
    assert not (out / "val.broken.txt").exists()


def test_the_first_twenty_are_printed(tmp_path, capsys):
    broken_folder(tmp_path / "coco", count=25, broken=range(1, 25), bad_labels=())
    with pytest.raises(InputError, match="^24 of 25 photos are broken"):
        convert(tmp_path / "coco", tmp_path / "out")
    listed = (tmp_path / "out" / "val.broken.txt").read_text().splitlines()
    assert len(listed) == 24 and capsys.readouterr().err.splitlines() == listed[:20]


def test_broken_files_are_left_out_and_the_manifest_lists_them(tmp_path):
    broken_folder(tmp_path / "coco")
    manifest, _ = convert(tmp_path / "coco", tmp_path / "out", shards=6, skip_broken=True)
    assert [number + 1 for number, _ in manifest["left_out"]] == [2, 3, 7, 9] and manifest["examples"] == 8
    assert tfrecord.read_manifest(str(tmp_path / "out"), "val")["examples"] == 8
    whole = [1, 4, 5, 6, 8, 10, 11, 12]
    assert sorted(int(record["image/id"]) for record in records(tmp_path / "out")) == whole
    examples = list(evaluation_dataset(str(tmp_path / "out"), "val", COCO, (17, 17)))
    assert [int(example["number"]) + 1 for example in examples] == [int(e["image/id"]) for e in examples]
    again, done = convert(tmp_path / "coco", tmp_path / "out", shards=6, skip_broken=True)
    assert done["photos"] == 0 and list(map(list, again["left_out"])) == manifest["left_out"]


def test_without_the_flag_a_split_has_every_photo(tmp_path):
    """What --skip_broken has made stays, but is no answer to a call without it, until the photos are whole."""
    folder = broken_folder(tmp_path / "coco")
    options = dict(shards=3)
    convert(tmp_path / "coco", tmp_path / "out", skip_broken=True, **options)
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.suffix != ".txt"}
    with pytest.raises(InputError, match="^4 of 12 photos are broken"):
        convert(tmp_path / "coco", tmp_path / "out", **options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.suffix != ".txt"} == made
    json_bytes = folder.json.read_bytes()
    mend(folder)
    folder.json.write_bytes(json_bytes)  # the same list of photos
    manifest, _ = convert(tmp_path / "coco", tmp_path / "out", **options)
    assert manifest["examples"] == 12 and not manifest.get("left_out")
    convert(tmp_path / "coco", tmp_path / "anew", **options)
    for path in (tmp_path / "anew").glob("*.tfrecord"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_a_stopped_conversion_goes_on_without_broken_files(tmp_path, monkeypatch):
    """After every shard, the same call goes on, and in the end the files are those of one call."""
    broken_folder(tmp_path / "coco")
    whole, _ = convert(tmp_path / "coco", tmp_path / "whole", shards=6, skip_broken=True)
    for kept in range(1, 6):
        out, written = tmp_path / str(kept), []

        def stop(path, *arguments, write=convert_module.write_items, written=written, kept=kept, **options):
            if len(written) == kept:
                raise KeyboardInterrupt
            written.append(path)
            return write(path, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(convert_module, "write_items", stop)
            with pytest.raises(KeyboardInterrupt):
                convert(tmp_path / "coco", out, shards=6, skip_broken=True)
        assert convert(tmp_path / "coco", out, shards=6, skip_broken=True)[0] == whole
        assert sorted(os.listdir(out)) == sorted(os.listdir(tmp_path / "whole"))


def test_a_split_of_broken_photos_alone_is_refused(tmp_path):
    broken_folder(tmp_path / "coco", count=3, broken=(1, 2, 3), bad_labels=())
    with pytest.raises(InputError, match="^3 of 3 photos are broken; .*; none is left$"):
        convert(tmp_path / "coco", tmp_path / "out", skip_broken=True)
    assert not list((tmp_path / "out").glob("*.tfrecord")) and not (tmp_path / "out" / "val.json").exists()
