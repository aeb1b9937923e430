"""The check of a converted data set reports the faults that these tests put into it."""

import dataclasses
import io
import re

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.analysis.data_check import across_splits, check_split, page
from axial.data import tfrecord
from axial.data.labels import colors_of, encode_rgb
from axial.data.specs import DatasetSpec
from axial.io.write import write_json

SPEC = DatasetSpec("test", ("road", "car", "<sky>"), (1, 2, 3), (False, True, False))


def record(name, ids, segments, photo=None, **changes):
    """A serialised record. `ids` is the map of segment ids, int [h, w]. `segments` is a list of (id, class, crowd)."""
    encoded = io.BytesIO()
    if photo is None:
        seed = sum(map(ord, name))
        photo = np.random.default_rng(seed).integers(0, 256, [*ids.shape, 3], np.uint8)
    Image.fromarray(photo).save(encoded, "PNG")
    fields = {
        "image/encoded": encoded.getvalue(),
        "image/file_name": name,
        "image/id": 0,
        "image/height": ids.shape[0],
        "image/width": ids.shape[1],
        "panoptic/encoded": encode_rgb(colors_of(ids)),
        "segment/id": [row[0] for row in segments],
        "segment/class": [row[1] for row in segments],
        "segment/crowd": [row[2] for row in segments],
    }
    return tfrecord.encode_example({**fields, **changes})


def write(folder, split, records, spec=SPEC):
    """Writes a split of one shard with these serialised records, and the split's manifest."""
    name = tfrecord.shard_name(split, 0, 1)
    tfrecord.write_shard(str(folder / name), records)
    size = (folder / name).stat().st_size
    plan = {"format": 1, "spec": spec.to_json(), "split": split, "examples": len(records), "source": "a test"}
    manifest = {**plan, "shards": [[name, len(records), size]]}
    write_json(str(folder / f"{split}.json"), manifest)


def halves(height=20, width=30):
    """int [h, w]: id 1 in the left half, id 5 in the right half."""
    return np.where(np.arange(width) < width // 2, 1, 5)[None].repeat(height, 0)


ROWS = [(1, 0, 0), (5, 1, 0)]
GOOD = record("good.png", halves(), ROWS)


def findings(tmp_path, *records):
    write(tmp_path, "train", [GOOD, *records])
    report = check_split(str(tmp_path), "train")
    return report, [(kind, photo) for kind, photo, _ in report.findings if kind != "class never occurs"]


def test_a_sound_split_counts_its_classes(tmp_path):
    hole = halves()
    hole[:, -6:] = 0
    report, faults = findings(tmp_path, record("b.png", hole, ROWS))
    assert not faults and not report.errors() and report.photos == 2
    assert report.photos_of.tolist() == report.segments_of.tolist() == [2, 2, 0]
    assert report.pixels_of.tolist() == [600, 300 + 180, 0]
    assert report.unlabelled == 120 / 1200
    assert [detail for kind, _, detail in report.findings if kind == "class never occurs"] == ["<sky>"]


def dot():
    ids = halves()
    ids[0, 0] = 9
    return ids


@pytest.mark.parametrize(
    "kind,errors,made",
    [
        ("unreadable", 1, lambda: record("x.png", halves(), ROWS, **{"image/encoded": b"no picture"})),
        ("unreadable", 1, lambda: record("x.png", halves(), ROWS, photo=np.zeros([20, 31, 3], np.uint8))),
        ("unknown id", 1, lambda: record("x.png", dot(), ROWS)),
        ("unreadable", 1, lambda: record("x.png", halves(), [(1, 0, 0), (5, 3, 0)])),
        ("segment without pixels", 1, lambda: record("x.png", halves(), [*ROWS, (8, 2, 0)])),
        ("tiny segment", 0, lambda: record("x.png", dot(), [*ROWS, (9, 2, 0)])),
        ("no segment", 0, lambda: record("x.png", 0 * halves(), [])),
        ("photo twice", 0, lambda: GOOD),
    ],
)
def test_oddities_are_named(tmp_path, kind, errors, made):
    report, faults = findings(tmp_path, made())
    places = {"photo twice": "good.png", "unreadable": "train-00000-of-00001.tfrecord: record 1"}
    assert faults == [(kind, places.get(kind, "x.png"))]
    assert report.errors() == errors


NUMBERED = DatasetSpec("numbered", ("road", "car"), (1, 2), (False, True), 100_000, ignored_ids=(0,))
FROM_0 = dataclasses.replace(NUMBERED, category_ids=(0, 1), ignored_ids=(255,))
ROAD, CAR = (100_000, 200_000)


@pytest.mark.parametrize(
    "spec,ids,words",
    [
        (NUMBERED, [ROAD, CAR + 1, CAR + 1, 0], None),
        (NUMBERED, [ROAD, 0, 0, 0], r"75.0 % of the pixels are \(0,\), .* none is car; .* the spec, 1 to 2\?"),
        (FROM_0, [CAR + 1, CAR + 1, CAR + 2, CAR + 2], "the number 0 never occurs; are the label images numbered from"),
        (NUMBERED, [ROAD, CAR, CAR + 1, CAR + 2], "each photo with things has a crowd.* numbered from 0"),
        (NUMBERED, [CAR + 1, ROAD, CAR + 1, ROAD], "no photo has two objects of a class, but some are in pieces"),
        (NUMBERED, [ROAD, CAR + 1, CAR + 255, CAR + 255], "255 is an object in 1 photo; does it stand for no object"),
        (NUMBERED, [ROAD, CAR + 254, CAR + 255, CAR + 255], None),
    ],
)
def test_numbers_that_look_mistaken_are_named(tmp_path, spec, ids, words):
    rows = [(i, i // 100_000 - 1, int(i == CAR)) for i in sorted({*ids} - {0})]
    write(tmp_path, "train", [record("a.png", np.repeat(ids, 10)[None].repeat(20, 0), rows)], spec)
    report = check_split(str(tmp_path), "train")
    details = [detail for kind, _, detail in report.findings if kind == "numbering?"]
    assert len(details) == bool(words) and not report.errors()
    assert not words or re.search(words, details[0])


def test_a_split_without_any_label_is_an_error(tmp_path):
    write(tmp_path, "train", [record("a.png", 0 * halves(), [])])
    report = check_split(str(tmp_path), "train")
    assert report.errors() == report.counts()["no label"] == 1
    assert report.title == "1 photo, 100.0 % of pixels unlabelled"


@pytest.mark.parametrize(
    "way,side,kinds", [(6, 30, ["turned"]), (3, 30, ["turned", "ambiguous turn"]), (None, 30, ["lies as stored"])]
)
def test_turned_and_ambiguous_photos_are_counted(tmp_path, way, side, kinds):
    ids, photo, exif = halves(side, 20), io.BytesIO(), Image.Exif()
    exif[0x0112] = way or 8
    stored = (20, side) if way in (None, 2, 3) else (side, 20)
    Image.new("RGB", stored).save(photo, "JPEG", exif=exif)
    turn = {"image/orientation": way} if way else {}
    report, faults = findings(tmp_path, record("x.jpg", ids, ROWS, **{"image/encoded": photo.getvalue()}, **turn))
    assert faults == [(kind, "x.jpg") for kind in kinds] and not report.errors()


def test_photos_in_two_splits(tmp_path):
    write(tmp_path, "train", [GOOD])
    write(tmp_path, "val", [record("other.png", halves(), ROWS), GOOD])
    reports = [check_split(str(tmp_path), split) for split in ("train", "val")]
    across_splits(reports)
    twins = [f for report in reports for f in report.findings if f[0] == "photo in two splits"]
    assert twins == [("photo in two splits", "good.png", "the same file as train good.png")]


def test_the_page_shows_twenty_photos_from_the_records(tmp_path):
    photo = np.full([40, 60, 3], 200, np.uint8)
    records = [record(f"{i}.png", halves(40, 60), ROWS, photo=photo + np.uint8(i)) for i in range(30)]
    write(tmp_path, "train", records)
    report = check_split(str(tmp_path), "train")
    assert len(report.sample) == 20
    assert [name for name, _ in report.sample] == [name for name, _ in check_split(str(tmp_path), "train").sample]
    text = page([report])
    assert len(re.findall("<img ", text)) == 20 and "&lt;sky&gt;" in text and "<sky>" not in text
    assert "http:" not in text and "https:" not in text


def test_data_of_whole_photos_and_of_sentences_are_checked(colours_dir, texts_dir):
    report = check_split(colours_dir, "val")
    assert not report.errors() and report.photos == report.photos_of.sum() == len(report.hashes) > 0
    assert len(report.sample) == min(20, report.photos) and "unlabelled" not in page([report])
    report = check_split(texts_dir, "val")
    assert report.photos > 0 and not report.findings and "sentence pairs" in report.title


@pytest.mark.parametrize(
    "data,labels,change,fault",
    [
        ("colours_dir", "class", {"image/class": 99}, "image/class: a number that the spec"),
        ("texts_dir", "text", {"source/ids": []}, "source/ids: empty"),
    ],
)
def test_a_wrong_record_of_other_labels_is_named(tmp_path, request, data, labels, change, fault):
    folder = request.getfixturevalue(data)
    manifest = tfrecord.read_manifest(folder, "val")
    serialized = next(iter(tf.data.TFRecordDataset(tfrecord.shard_paths(folder, manifest)[0])))
    fields = {key: x.numpy() for key, x in tfrecord.parse_example(serialized, labels).items()}
    name = tfrecord.shard_name("val", 0, 1)
    tfrecord.write_shard(str(tmp_path / name), [tfrecord.encode_example({**fields, **change})])
    shards = [[name, 1, (tmp_path / name).stat().st_size]]
    plan = dict(manifest, spec=manifest["spec"].to_json(), examples=1, shards=shards, hashes=[], left_out=[])
    write_json(str(tmp_path / "val.json"), plan)
    report = check_split(str(tmp_path), "val")
    assert report.errors() == 1
    ((_, where, detail),) = [finding for finding in report.findings if finding[0] == "unreadable"]
    assert where == f"{name}: record 0" and fault in detail
