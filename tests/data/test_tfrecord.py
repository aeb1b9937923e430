"""Shards appear only when they are complete, and readers detect incomplete shards by the manifest."""

import json
import re
import shutil

import pytest
import tensorflow as tf

from axial.data import tfrecord
from axial.errors import InputError


def test_a_shard_cut_short_is_named(sample_dir, tmp_path):
    shutil.copytree(sample_dir, tmp_path, dirs_exist_ok=True)
    shard = next(tmp_path.glob("train2017-*.tfrecord"))
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(InputError, match="lost or changed"):
        tfrecord.read_manifest(str(tmp_path), "train2017")
    shard.unlink()
    with pytest.raises(InputError, match="0 bytes where"):
        tfrecord.read_manifest(str(tmp_path), "train2017")


def test_missing_splits_are_named(sample_dir, tmp_path):
    with pytest.raises(InputError, match="did you mean 'train2017'"):
        tfrecord.read_manifest(sample_dir, "train2071")
    with pytest.raises(InputError, match="no such folder"):
        tfrecord.read_manifest(str(tmp_path / "no"), "val2017")
    with pytest.raises(InputError, match="no converted split"):
        tfrecord.read_manifest(str(tmp_path), "val2017")
    (tmp_path / "val2017.json").write_text('{"examples": 3}')
    with pytest.raises(InputError, match="is missing the required field format"):
        tfrecord.read_manifest(str(tmp_path), "val2017")


def test_a_manifest_is_of_its_split_and_its_shards(sample_dir, tmp_path):
    shutil.copytree(sample_dir, tmp_path, dirs_exist_ok=True)
    for other in ("train2017", "val2017"):  # names that sort before and after 'u'
        shutil.copy(tmp_path / f"{other}.json", tmp_path / "u.json")
        with pytest.raises(InputError, match=f"u.json: split: the manifest is of '{other}'"):
            tfrecord.read_manifest(str(tmp_path), "u")
    path = tmp_path / "val2017.json"
    content = json.loads(path.read_text())
    name, records, size = content["shards"][0]
    more = size // 16 + 1
    content["shards"][0][1], content["examples"] = more, content["examples"] + more - records
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"shards: {more} records do not fit the {size} bytes of {name}"):
        tfrecord.read_manifest(str(tmp_path), "val2017")


def test_items_that_were_left_out_have_no_record():
    left_out = [(1, "broken"), (3, "too large")]
    assert tfrecord.item_numbers(3, None, left_out).tolist() == [0, 2, 4]
    permuted = tfrecord.item_numbers(3, 7, left_out).tolist()
    assert sorted(permuted) == [0, 2, 4] and permuted == [n for n in tfrecord.item_numbers(5, 7) if n % 2 == 0]


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "a\x00"])
def test_a_split_does_not_leave_its_folder(sample_dir, tmp_path, name):
    shutil.copytree(sample_dir, tmp_path / "data")
    shutil.copy(tmp_path / "data" / "val2017.json", tmp_path / "out.json")
    with pytest.raises(InputError, match=f"{tmp_path}/data: split: "):
        tfrecord.read_manifest(str(tmp_path / "data"), name)


@pytest.mark.parametrize("name", [".", "..", "a\\..\\..\\b", "a\nb"])
def test_a_shard_does_not_leave_its_folder(sample_dir, tmp_path, name):
    shutil.copytree(sample_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "val2017.json"
    content = json.loads(path.read_text())
    content["shards"][0][0] = name
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="a manifest's shard: "):
        tfrecord.read_manifest(str(tmp_path), "val2017")


def test_splits_are_found_where_the_choice_is_obvious(tmp_path):
    recipe = {"train": "train2017", "val": "val2017"}
    assert tfrecord.find_splits(str(tmp_path), recipe) == ["train2017", "val2017"]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert tfrecord.find_splits(str(tmp_path), recipe) == ["train", "validation"]
    assert tfrecord.find_splits(str(tmp_path), {"train": "train", "val": "nope"}) == ["train", "nope"]
    (tmp_path / "train_extra.json").write_text("{}")
    assert tfrecord.find_splits(str(tmp_path), recipe) == ["train2017", "validation"]


def test_a_split_is_known_by_its_fingerprint(sample_dir):
    assert re.fullmatch(r"coco val2017, 8 records, [0-9a-f]{16}", tfrecord.fingerprint(sample_dir, "val2017"))


def test_a_photo_without_an_orientation_is_upright(sample_dir):
    path = tfrecord.shard_paths(sample_dir, tfrecord.read_manifest(sample_dir, "val2017"))[0]
    record = next(iter(tf.data.TFRecordDataset(path)))
    assert int(tfrecord.parse_example(record)["image/orientation"]) == 1
