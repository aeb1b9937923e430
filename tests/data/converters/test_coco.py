"""Conversion of COCO's layout to TFRecords: contents of the records, and messages for wrong input."""

import dataclasses
import json
import os

import numpy as np
import pytest
from PIL import Image

from axial.data.convert import encode_item
from axial.data.converters.coco import checked_labels, coco_items
from axial.data.labels import colors_of, encode_rgb, numbered
from axial.data.specs import COCO, json_spec
from axial.errors import InputError
from axial.io import schemas
from axial.tasks.segmentation.input_pipeline import segment_map
from tests.data.coco_fixture import CocoFolder, convert, stripes
from tests.data.conversion import cut, delete, records, replace

GRASS, PERSON, SKY = 193, 1, 187


@pytest.fixture
def folder(tmp_path):
    """A folder with one photo of the sky."""
    folder = CocoFolder(tmp_path / "coco")
    folder.add(1, stripes(20, 40, [5]), {5: SKY})
    return folder


def test_ids_beyond_255_crowds_and_void(tmp_path):
    folder = CocoFolder(tmp_path / "coco")
    ids = stripes(20, 40, [0, 300, 70000, 16777215])
    folder.add(7, ids, {300: PERSON, 70000: GRASS, 16777215: PERSON}, crowd=(16777215,))
    convert(folder.root, tmp_path / "out")
    (record,) = records(tmp_path / "out")
    assert record["segment/id"].numpy().tolist() == [300, 70000, 16777215]
    classes = [COCO.class_of_category[c] for c in (PERSON, GRASS, PERSON)]
    assert record["segment/class"].numpy().tolist() == classes
    assert record["segment/crowd"].numpy().tolist() == [0, 0, 1]
    np.testing.assert_array_equal(segment_map(record), np.searchsorted([0, 300, 70000, 16777215], ids))


@pytest.mark.parametrize("ignored", [None, SKY])
def test_segments_keep_the_order_of_the_json(ignored):
    """The segment map numbers the segments in this order, even if the spec ignores one of them."""
    rows = [row for row in zip(COCO.class_names, COCO.category_ids, COCO.things) if row[1] != ignored]
    fields = dict(zip(("class_names", "category_ids", "things"), zip(*rows)))
    spec = dataclasses.replace(COCO, name="less", **fields, ignored_ids=(ignored,)) if ignored else COCO
    ids = stripes(4, 8, [0, 5, 7, 9, 70000])
    categories = {9: PERSON, 5: PERSON, 70000: SKY, 7: GRASS}
    segments = [schemas.Segment(id=i, category_id=category) for i, category in categories.items()]
    labels = checked_labels("a.png", (8, 4), segments, spec=spec, png=encode_rgb(colors_of(ids)))
    kept = [i for i, category in categories.items() if category != ignored]
    assert [identity for identity, *_ in labels.segments] == kept
    expected = sum(number * (ids == identity) for number, identity in enumerate(kept, 1))
    record = {"panoptic/encoded": labels.png, "segment/id": np.array(kept, np.int64)}
    np.testing.assert_array_equal(segment_map(record), expected)
    np.testing.assert_array_equal(numbered(ids, kept), expected)


def test_test_dev_has_photos_of_the_test_set_and_no_labels(tmp_path):
    folder = CocoFolder(tmp_path / "coco", "test2017")
    for i in (9, 4):
        folder.add(i, stripes(20, 40, [5]), {5: SKY})
    info = {"images": folder.content["images"], "categories": []}
    folder.json.unlink()
    (folder.json.parent / "image_info_test-dev2017.json").write_text(json.dumps(info))
    convert(folder.root, tmp_path / "out", "test-dev2017")
    actual = records(tmp_path / "out", "test-dev2017")
    assert [int(r["image/id"]) for r in actual] == [4, 9]
    assert actual[0]["segment/id"].shape == (0,) and segment_map(actual[0]).shape == (20, 40)
    with pytest.raises(InputError, match="did you mean 'test-dev2017'"):
        coco_items(str(folder.root), "testdev2017")
    (folder.photos / "000000000009.jpg").unlink()
    with pytest.raises(InputError, match="000000000009.jpg: missing"):
        coco_items(str(folder.root), "test-dev2017")


def test_files_lie_in_folders_of_their_own(folder, tmp_path):
    folder.add(2, stripes(20, 40, [5]), {5: SKY})
    for kind, directory, suffix in (("images", folder.photos, "jpg"), ("annotations", folder.labels, "png")):
        name = f"000000000002.{suffix}"
        (directory / "a" / "b").mkdir(parents=True)
        (directory / name).rename(directory / "a" / "b" / name)
        folder.content[kind][1]["file_name"] = f"a/b/{name}"
    folder.write()
    convert(folder.root, tmp_path / "out")
    assert sorted(int(r["image/id"]) for r in records(tmp_path / "out")) == [1, 2]
    (folder.photos / "a" / "b" / "000000000002.jpg").unlink()
    with pytest.raises(InputError, match="val/a/b/000000000002.jpg: missing"):
        coco_items(str(folder.root), "val")
    folder.content["images"][0]["file_name"] = "../000000000001.jpg"
    folder.write()
    with pytest.raises(InputError, match="images: file_name: '../000000000001.jpg': leaves its folder"):
        coco_items(str(folder.root), "val")


def test_photos_without_an_annotation_are_counted(folder, capsys):
    for number in (2, 3):
        folder.add(number, stripes(20, 40, [5]), {5: SKY})
    coco_items(str(folder.root), "val")
    assert capsys.readouterr().err == ""
    del folder.content["annotations"][0], folder.content["images"][2], folder.content["annotations"][1]
    folder.write()
    items, _ = coco_items(str(folder.root), "val")
    assert len(items) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("(2, first 000000000001.jpg)") and "photos without an annotation in" in line


# === Categories ===

FLAT = dataclasses.replace(COCO, name="flat", things=(False,) * len(COCO.things))


@pytest.mark.parametrize(
    "category,words",
    [
        ({"id": 1, "name": "weed", "isthing": 0}, r"category 1 is .weed. \(stuff\), .*calls it .person. \(thing\)"),
        ({"id": SKY, "isthing": 1}, r"category 187 is None \(thing\)"),
        ({"id": SKY, "name": "Sky_other merged", "isthing": False}, None),
        ({"id": 12, "name": "street sign", "isthing": 1}, None),  # a gap in COCO's ids, which no annotation uses
    ],
)
def test_categories_that_are_not_the_specs_are_named(folder, category, words):
    """Categories that agree with the spec or lack fields are accepted. A spec without things accepts things."""
    folder.content["categories"] = [category]
    folder.write()
    if words is None:
        assert coco_items(str(folder.root), "val")[0] and coco_items(str(folder.root), "val", FLAT)[0]
        return
    with pytest.raises(InputError, match=words) as error:
        coco_items(str(folder.root), "val")
    assert "\n" not in str(error.value) and "panoptic_val.json" in str(error.value)


def test_the_jsons_own_categories_are_a_spec(folder):
    folder.add(2, stripes(20, 40, [5, 6]), {5: 1, 6: 2})
    folder.content["annotations"][0]["segments_info"][0]["category_id"] = 1
    rows = [{"id": 2, "name": "crop", "isthing": 1}, {"id": 1, "name": "weed", "isthing": 0}]
    folder.content["categories"] = [row | {"color": [1, 2, 3]} for row in rows]
    folder.write()
    spec = json_spec(str(folder.root), ["test", "val"])
    assert (spec.name, spec.class_names, spec.category_ids) == ("coco", ("crop", "weed"), (2, 1))
    assert spec.things == (True, False) and spec.palette == ((1, 2, 3),) * 2
    items, _ = coco_items(str(folder.root), "val", spec)
    assert encode_item(items[1])[0]["segment/class"] == (1, 0)


@pytest.mark.parametrize(
    "rows,words",
    [
        ([], "categories: empty"),
        ([{"id": 1, "name": "a"}], "category 1: is missing the field isthing"),
        ([{"id": 1, "name": "a", "isthing": 1, "color": [1, 2]}], "color"),
    ],
)
def test_categories_that_are_no_spec_are_named(folder, rows, words):
    folder.content["categories"] = rows
    folder.write()
    with pytest.raises(InputError, match=f"--spec=json: .*panoptic_val.json: .*{words}"):
        json_spec(str(folder.root), ["val"])
    with pytest.raises(InputError, match="--spec=json: .*panoptic_test.json: no such file"):
        json_spec(str(folder.root), ["test"])


# === Input that is wrong ===


def photo(folder):
    return folder.photos / "000000000002.jpg"


def png(folder):
    return folder.labels / "000000000002.png"


def content(change):
    """Returns a damage that applies `change` to the JSON's content. The content's last photo has number 2."""

    def damage(folder):
        change(folder.content)
        folder.write()

    return damage


def text_ids(content):
    content["images"][-1]["id"] = content["annotations"][-1]["image_id"] = "2"


def other_category(content):
    content["annotations"][-1]["segments_info"][0]["category_id"] = 12


def painted(image):
    image.putpixel((0, 0), (99, 0, 0))
    return image


SMALL = Image.new("RGB", (9, 9))
BAD = [
    (cut(photo, 200), r"000000000002.jpg: not a whole image"),
    (delete(photo), r"000000000002.jpg: missing"),
    (replace(png, painted), r"000000000002.png: .*id 99 is only in the PNG"),
    (replace(png, SMALL), r"000000000002.png: 9x9 pixels, the JSON says 40x20"),
    (content(other_category), r"category_id 12, which the spec 'coco' lacks"),
    (lambda folder: folder.json.write_text("{"), r"panoptic_val.json: not JSON"),
    (content(text_ids), r"id '2' of 000000000002.jpg is a text, id 1 of 000000000001.jpg a number"),
    (content(lambda c: c["annotations"][-1].update(image_id="2")), r"image_id '2', which is not in images"),
    (replace(png, lambda image: image, format="JPEG"), r"000000000002.png: its content is JPEG"),
    (content(lambda c: c["images"][-1].update(file_name="sub\\a.jpg")), r"a.jpg: missing, .*a backslash separates no"),
]


@pytest.mark.parametrize("damage,words", BAD, ids=[words for _, words in BAD])
def test_wrong_input_is_named_and_finished_shards_stay(folder, tmp_path, damage, words):
    folder.add(2, stripes(20, 40, [5, 6]), {5: SKY, 6: PERSON})
    damage(folder)
    with pytest.raises(InputError, match=words):
        convert(folder.root, tmp_path / "out", shards=2)
    left = os.listdir(tmp_path / "out") if (tmp_path / "out").exists() else []
    assert "val.json" not in left and not any("00001" in n and not n.startswith(".") for n in left)


def test_what_is_not_there_is_named(folder, tmp_path):
    for split, words in (("vall", "did you mean 'val'"), ("train2017", "splits here: val")):
        with pytest.raises(InputError, match=words):
            coco_items(str(folder.root), split)
    with pytest.raises(InputError, match="nowhere/annotations/panoptic_val.json: no such file"):
        coco_items(str(tmp_path / "nowhere"), "val")
    folder.json.rename(folder.json.with_name("instances_val.json"))
    for read in (json_spec, coco_items):
        with pytest.raises(InputError, match="panoptic_val.json: no such file; .*instances_val.json is there, which"):
            read(str(folder.root), ["val"] if read is json_spec else "val")
