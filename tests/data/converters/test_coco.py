"""Conversion of COCO's layout to TFRecords: what the records have, and the messages for wrong input."""

import codecs
import dataclasses
import json
import os
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from axial.data.convert import encode_item
from axial.data.converters.coco import checked_labels, coco_items
from axial.data.labels import colors_of, encode_rgb, numbered
from axial.data.spec_file import json_spec
from axial.data.specs import COCO
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.io import schemas
from axial.io.images import PERCENTILES, eight_bits
from axial.tasks.segmentation.feed import segment_map
from tests.conftest import DATA
from tests.data.coco_fixture import CocoFolder, convert, records, stripes

GRASS, PERSON, SKY = 193, 1, 187


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
        wanted = eight_bits(np.asarray(photo), PERCENTILES)[..., None].repeat(3, 2)
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


def test_a_split_of_boxes_alone_and_names_of_windows_are_named(tmp_path):
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(20, 40, [5]), {5: SKY})
    folder.content["images"][0]["file_name"] = "sub\\a.jpg"
    folder.write()
    with pytest.raises(InputError, match=r"a.jpg: missing, though .* names it .a backslash separates no folders"):
        coco_items(str(tmp_path / "coco"), "val")
    folder.json.rename(folder.json.with_name("instances_val.json"))
    for read in (json_spec, coco_items):
        with pytest.raises(InputError, match="panoptic_val.json: no such file; .*instances_val.json is there, but"):
            read(str(tmp_path / "coco"), ["val"] if read is json_spec else "val")


def test_missing_folder():
    with pytest.raises(InputError, match="/nowhere: no such folder"):
        coco_items("/nowhere", "val")
