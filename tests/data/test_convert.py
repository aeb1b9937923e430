"""Conversion of items to shards, tested with COCO's layout: interruptions, changed input and broken files."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from axial.data import convert as convert_module
from axial.data import tfrecord
from axial.data.levels import LEVELS
from axial.data.specs import COCO
from axial.data.streams import spec_of
from axial.errors import InputError
from axial.tasks.segmentation.evaluator import PANOPTIC
from tests.data.coco_fixture import CocoFolder, convert, stripes
from tests.data.conversion import convert as convert_items
from tests.data.conversion import records

PERSON, SKY = 1, 187


# Forks a converter repeatedly and kills it. The fork happens before TensorFlow has started any thread.
KILLER = """
import os, random, signal, sys, time
from axial.data import convert
from axial.data.converters.coco import coco_items
from axial.data.specs import COCO

def child(folder, output, kill_after):
    pid = os.fork()
    if not pid:
        items, source = coco_items(folder, "val")

        def slow(item):
            ends = kill_after is None or item is not items[-1]  # only the process that is not killed reaches the end
            time.sleep(0.02 if ends else 3600)
            return convert.encode_item(item)

        options = {"shards": 20, "encode": slow, "progress": False}
        convert.convert_split(convert.Conversion(items, source, COCO, "val", output, 1, **options))
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]

rng = random.Random(0)
print(*(child(*sys.argv[1:], after) for after in (*(rng.uniform(0.02, 0.2) for _ in range(5)), None)))
"""


def test_killed_many_times_it_ends_with_the_same_bytes(tmp_path):
    folder = CocoFolder(tmp_path / "in")
    for i in range(60):
        folder.add(i, stripes(12, 16, [i + 1, 900 + i]), {i + 1: PERSON, 900 + i: SKY})
    convert(folder.root, tmp_path / "whole", shards=20)
    command = [sys.executable, "-c", KILLER, str(folder.root), str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert output.split() == [*5 * [str(int(signal.SIGKILL))], "0"]
    names = sorted(os.listdir(tmp_path / "whole"))
    assert sorted(os.listdir(tmp_path / "killed")) == names and len(names) == 21
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_with_another_split_of_that_name_is_left_alone(tmp_path):
    one, two = CocoFolder(tmp_path / "one"), CocoFolder(tmp_path / "two")
    one.add(1, stripes(20, 40, [5]), {5: SKY})
    two.add(3, stripes(20, 40, [5]), {5: SKY})
    convert(tmp_path / "one", tmp_path / "out")
    before = (tmp_path / "out" / "val.json").read_bytes()
    with pytest.raises(InputError, match="made from other input"):
        convert(tmp_path / "two", tmp_path / "out")
    assert (tmp_path / "out" / "val.json").read_bytes() == before


def test_shards_that_were_cut_or_whose_files_changed_are_converted_again(tmp_path):
    coco = CocoFolder(tmp_path / "coco")
    for number in (1, 2):
        coco.add(number, stripes(20, 40, [5]), {5: SKY})
    assert convert(coco.root, tmp_path / "out", shards=2)[1]["photos"] == 2
    assert convert(coco.root, tmp_path / "out", shards=2)[1]["photos"] == 0
    path = coco.labels / "000000000002.png"
    changed = np.array(Image.open(path))
    changed[:10] = 0  # void
    Image.fromarray(changed).save(path)
    assert convert(coco.root, tmp_path / "out", shards=2)[1]["photos"] == 1
    convert(coco.root, tmp_path / "anew", shards=2)
    shard = tmp_path / "out" / "val-00001-of-00002.tfrecord"
    shard.write_bytes(shard.read_bytes()[:-7])
    assert convert(coco.root, tmp_path / "out", shards=2)[1]["photos"] == 1
    for path in (tmp_path / "anew").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    (tmp_path / "out" / "val.json").rename(tmp_path / "out" / ".val.plan")  # the state after a killed run
    os.utime(coco.photos / "000000000001.jpg", ns=(0, 0))
    assert convert(coco.root, tmp_path / "out", shards=2)[1]["photos"] == 1


# === Broken photos and label files ===


def broken_folder(root, count=12, broken=(2, 3, 7), bad_labels=(9,)):
    """Writes photos 1 to `count`. The photos in `broken` and the label files in `bad_labels` are truncated."""
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
            [row for row in folder.content[field] if row[key] != number]
            for field, key in (("images", "id"), ("annotations", "image_id"))
        )
        folder.add(number, stripes(20, 40, [5]), {5: SKY})


def test_all_broken_files_are_named_at_once_and_whole_shards_stay(tmp_path, capsys):
    folder = broken_folder(tmp_path / "coco")
    out = tmp_path / "out"
    with pytest.raises(InputError, match=rf"^4 of 12 photos are broken; all are listed in {out}/val.broken.txt; "):
        convert(tmp_path / "coco", out, shards=6)
    listed = (out / "val.broken.txt").read_text().splitlines()
    names = sorted(os.path.basename(line.split(":")[0]).lstrip("0") for line in listed)
    assert names == ["2.jpg", "3.jpg", "7.jpg", "9.png"]
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


def test_whatever_a_library_raises_is_of_the_photo(tmp_path, monkeypatch):
    broken_folder(tmp_path / "coco", count=2, broken=(), bad_labels=())
    monkeypatch.setattr(convert_module, "photo_fields", lambda *_, **__: int("x"))
    with pytest.raises(InputError, match="^2 of 2 photos are broken; .*; none is left$"):
        convert(tmp_path / "coco", tmp_path / "out", skip_broken=True)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name[0] != "."] == ["val.broken.txt"]
    assert "2.jpg: it or its labels cannot be converted (Val" in (tmp_path / "out/val.broken.txt").read_text()


def test_broken_files_are_left_out_and_the_manifest_lists_them(tmp_path):
    broken_folder(tmp_path / "coco")
    manifest, _ = convert(tmp_path / "coco", tmp_path / "out", shards=6, skip_broken=True)
    assert [number + 1 for number, _ in manifest["left_out"]] == [2, 3, 7, 9] and manifest["examples"] == 8
    assert tfrecord.read_manifest(str(tmp_path / "out"), "val")["examples"] == 8
    whole = [1, 4, 5, 6, 8, 10, 11, 12]
    assert sorted(int(record["image/id"]) for record in records(tmp_path / "out")) == whole
    examples = list(PANOPTIC.examples(str(tmp_path / "out"), "val", COCO))
    assert [int(example["number"]) + 1 for example in examples] == [int(e["image/id"]) for e in examples]
    again, done = convert(tmp_path / "coco", tmp_path / "out", shards=6, skip_broken=True)
    assert done["photos"] == 0 and list(map(list, again["left_out"])) == manifest["left_out"]


def test_without_the_flag_a_split_has_every_photo(tmp_path):
    """After a conversion with --skip_broken, a call without the flag fails until all photos are whole."""
    folder = broken_folder(tmp_path / "coco")
    options = dict(shards=3)
    convert(tmp_path / "coco", tmp_path / "out", skip_broken=True, **options)
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.suffix != ".txt"}
    with pytest.raises(InputError, match="^4 of 12 photos are broken"):
        convert(tmp_path / "coco", tmp_path / "out", **options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.suffix != ".txt"} == made
    json_bytes = folder.json.read_bytes()
    mend(folder)
    folder.json.write_bytes(json_bytes)  # restores the list of photos
    manifest, _ = convert(tmp_path / "coco", tmp_path / "out", **options)
    assert manifest["examples"] == 12 and not manifest.get("left_out")
    convert(tmp_path / "coco", tmp_path / "anew", **options)
    for path in (tmp_path / "anew").glob("*.tfrecord"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_deep_photos_and_pages_are_counted_once_and_the_levels_are_kept(tmp_path, capsys):
    """A manifest of an older version has no rule for levels. Its split keeps the older rule 'depth'."""
    values = np.random.default_rng(0).integers(0, 5000, [6, 8]).astype(np.uint16)
    for name in "abc":
        Image.fromarray(values).save(tmp_path / f"{name}.png")
    pages = [Image.fromarray(values.astype(np.uint8))] * 2
    pages[0].save(tmp_path / "d.tif", save_all=True, append_images=pages)
    items = [{"photo": str(path), "id": i} for i, path in enumerate(sorted(tmp_path.iterdir()))]
    output = str(tmp_path / "out")
    manifest, _ = convert_items((items, b""), COCO, output, "train", shards=2)
    deep = f"{tmp_path}/a.png: has more than 8 bits; {LEVELS['percentiles']}; so for 2 other photos"
    assert capsys.readouterr().err.splitlines() == [deep, f"{tmp_path}/d.tif: page 1 of 3 is read"]
    assert manifest["spec"]["levels"] == "percentiles"
    assert spec_of(output, "train").levels == "percentiles"
    path = tmp_path / "out" / "train.json"
    del manifest["spec"]["levels"]
    path.write_text(json.dumps(manifest))
    assert convert_items((items, b""), COCO, output, "train", shards=2)[1]["photos"] == 0
    assert spec_of(output, "train").levels == "depth" and not capsys.readouterr().err
