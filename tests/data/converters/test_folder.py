"""Users' own data: photos beside label images, and specs from files."""

import json
import os
import shutil
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import convert_split, encode_item
from axial.data.converters.coco import SAMPLE_DIR
from axial.data.converters.folder import folder_items
from axial.data.labels import colors_of, read_ids
from axial.data.spec_file import find_spec
from axial.data.specs import CITYSCAPES, COCO, DatasetSpec
from axial.errors import InputError
from axial.tasks.segmentation.feed import segment_map

YAML = """
name: mine
classes:
  - {id: 0, name: road, color: [128, 64, 128]}
  - {id: 7, name: car, color: [0, 0, 142], thing: true}
  - {id: 300, name: sky, color: [70, 130, 180]}
ignored_ids: [255]
"""
SPEC = DatasetSpec(
    "mine",
    ("road", "car", "sky"),
    (0, 7, 300),
    (False, True, False),
    palette=((128, 64, 128), (0, 0, 142), (70, 130, 180)),
    ignored_ids=(255,),
)
# (category, instance) of each column: stuff, whose number has no meaning, two cars, a crowd, ignored.
COLUMNS = [(0, 3), (7, 1), (7, 2), (7, 0), (300, 0), (255, 0)]
CLASSES = [0, 1, 1, 1, 2]


class Folder:
    """One split with one photo of `COLUMNS`."""

    def __init__(self, root, *layers, spec=SPEC):
        self.split, self.spec = root / "train", spec

        def spread(values):
            return np.asarray(values)[np.arange(60) // 10][None].repeat(30, 0)

        semantic, instance = (spread([column[k] for column in COLUMNS]) for k in (0, 1))
        (self.split / "photos").mkdir(parents=True)
        photo = np.random.default_rng(0).integers(0, 256, [30, 60, 3], np.uint8)
        Image.fromarray(photo).save(self.split / "photos" / "a.png")
        ids = semantic * spec.label_divisor + instance
        images = {
            "semantic": semantic.astype(np.uint16),
            "instance": instance.astype(np.uint8),
            "panoptic": np.stack([ids % 256, ids // 256 % 256, ids // 65536], -1).astype(np.uint8),
        }
        for layer in layers:
            (self.split / layer).mkdir()
            Image.fromarray(images[layer]).save(self.split / layer / "a.png")

    def record(self):
        items, source = folder_items(str(self.split.parent), "train", self.spec)
        output = str(self.split.parent / "out")
        convert_split(items, encode_item, self.spec, "train", output_dir=output, source=source, progress=False)
        ((name, *_),) = tfrecord.read_manifest(output, "train")["shards"]
        (record,) = tf.data.TFRecordDataset(os.path.join(output, name))
        return tfrecord.parse_example(record)


def test_semantic_and_instance_images(tmp_path):
    record = Folder(tmp_path, "semantic", "instance").record()
    found, classes = segment_map(record).numpy(), record["segment/class"].numpy()
    assert sorted(classes.tolist()) == CLASSES and record["segment/crowd"].numpy().sum() == 1
    table = np.concatenate([[SPEC.ignore], classes])
    assert table[found[0, ::10]].tolist() == [0, 1, 1, 1, 2, SPEC.ignore]
    assert len(set(found[0, ::10])) == 6
    crowd = np.concatenate([[0], record["segment/crowd"].numpy()])
    assert crowd[found[0, ::10]].tolist() == [0, 0, 0, 1, 0, 0]


def test_panoptic_images_give_the_same_but_for_the_zero_of_the_void(tmp_path):
    one = Folder(tmp_path / "a", "semantic", "instance").record()
    two = Folder(tmp_path / "b", "panoptic").record()
    for key in ("segment/class", "segment/crowd"):
        np.testing.assert_array_equal(one[key], two[key])
    np.testing.assert_array_equal(segment_map(one), segment_map(two))


@pytest.mark.parametrize(
    "ids,ignored,classes,crowd",
    [((0, 7), (255,), [0], [0]), ((7, 0), (255,), [1], [1]), ((7, 8), (255,), [], []), ((7, 8), (0,), [], [])],
    ids=["stuff", "thing", "no category 0", "ignored"],
)
def test_a_panoptic_zero_is_category_zero_if_the_spec_has_it(tmp_path, ids, ignored, classes, crowd):
    spec = DatasetSpec("zero", ("road", "car"), ids, (False, True), ignored_ids=ignored)
    folder = Folder(tmp_path, "panoptic", spec=spec)
    Image.new("RGB", (60, 30)).save(folder.split / "panoptic" / "a.png")
    record = folder.record()
    assert record["segment/class"].numpy().tolist() == classes
    assert record["segment/crowd"].numpy().tolist() == crowd
    np.testing.assert_array_equal(segment_map(record), np.full([30, 60], len(classes)))


def test_semantic_images_alone_for_a_spec_without_things(tmp_path, capsys):
    spec = DatasetSpec("flat", ("road", "car", "sky"), (0, 7, 300), (False,) * 3, ignored_ids=(255,))
    record = Folder(tmp_path / "a", "semantic", spec=spec).record()
    assert record["segment/class"].numpy().tolist() == [0, 1, 2]
    again = Folder(tmp_path / "b", "semantic", "instance", spec=spec).record()
    np.testing.assert_array_equal(segment_map(record), segment_map(again))
    assert capsys.readouterr().err == f"{tmp_path}/b/train/instance: left out: no class of the spec 'flat' is a thing\n"


def test_photos_alone_are_a_split_without_labels(tmp_path):
    record = Folder(tmp_path).record()
    assert record["segment/id"].shape == (0,) and segment_map(record).shape == (30, 60)


def test_cocos_layout(tmp_path):
    items, _ = folder_items(SAMPLE_DIR, "val2017", COCO)
    assert len(items) == 8
    fields, _ = encode_item(items[0])
    assert fields["image/id"] == 285 and len(fields["segment/id"])


def test_many_instances_keep_apart(tmp_path):
    spec = DatasetSpec("many", ("dot",), (1,), (True,), label_divisor=65536)
    folder = Folder(tmp_path, "semantic", "instance", spec=spec)
    numbers = np.arange(1, 1 + 250 * 260).reshape(250, 260)
    Image.fromarray(np.ones([250, 260], np.uint8)).save(folder.split / "semantic" / "a.png")
    Image.fromarray(numbers.astype(np.uint16)).save(folder.split / "instance" / "a.png")
    Image.fromarray(np.zeros([250, 260, 3], np.uint8)).save(folder.split / "photos" / "a.png")
    np.testing.assert_array_equal(segment_map(folder.record()), numbers)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_ids_are_the_numbers_of_the_file_whatever_its_depth(tmp_path, bits):
    """Pillow spreads grey of 2 and 4 bits over 0 to 255."""
    ids = np.arange(8 * 8).reshape(8, 8) % 2 ** min(bits, 6)
    (tmp_path / "a.png").write_bytes(grey_png(ids, bits))
    np.testing.assert_array_equal(read_ids(str(tmp_path / "a.png")), ids)


def grey_png(ids, bits):
    """A PNG of one channel of grey (PNG, third edition), int [h, w] of numbers below 2^bits."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    places = np.arange(bits)[::-1]
    rows = np.packbits((ids[..., None] >> places & 1).reshape(len(ids), -1).astype(np.uint8), axis=1)
    header = struct.pack(">IIBBBBB", ids.shape[1], ids.shape[0], bits, 0, 0, 0, 0)
    content = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def test_what_is_left_out_is_said_once(tmp_path, capsys):
    folder = Folder(tmp_path, "semantic", "instance")
    folder.record()
    assert capsys.readouterr().err == ""
    for name in ("Thumbs.db", "a.heic", ".DS_Store"):
        (folder.split / "photos" / name).write_bytes(b"x")
    folder_items(str(tmp_path), "train", SPEC)
    (line,) = capsys.readouterr().err.splitlines()
    assert "train/photos: left out: " in line and "(2, first Thumbs.db)" in line


def predicted(folder, name="car", road=0):
    """Puts a prediction of four segments, a PNG and its JSON, in the place of a panoptic image. Returns its ids."""
    ids = np.array([4, 1, 2, 3, 0, 0], np.uint8)[np.arange(60) // 10][None].repeat(30, 0)
    Image.fromarray(colors_of(ids)).save(folder.split / "panoptic" / "a.png")
    segments = [{"id": i, "class": name, "category_id": 7, "thing": True} for i in (1, 2, 3)]
    segments.append({"id": 4, "class": "road", "category_id": road, "thing": False})
    (folder.split / "panoptic" / "a.json").write_text(json.dumps({"segments": segments}))
    return ids


def test_predictions_of_axial_are_labels(tmp_path, capsys):
    folder = Folder(tmp_path, "panoptic")
    ids = predicted(folder)
    record = folder.record()
    np.testing.assert_array_equal(np.concatenate([[0], record["segment/id"]])[segment_map(record)], ids)
    assert record["segment/class"].numpy().tolist() == [1, 1, 1, 0]
    assert capsys.readouterr().err == ""  # nothing is left out
    predicted(folder, name="bus")
    with pytest.raises(InputError, match=r"a.json: category 7 is 'bus' \(thing\), the spec 'mine' calls it 'car'"):
        folder.record()
    predicted(folder, road=9)
    with pytest.raises(InputError, match="a.json: .* has category_id 9, which the spec 'mine' does not have"):
        folder.record()


@pytest.mark.parametrize("ignored", [(), (0,)])
def test_ids_of_segments_are_no_panoptic_labels(tmp_path, ignored):
    folder = Folder(tmp_path, "panoptic", spec=DatasetSpec("mine", ("road",), (1,), (False,), ignored_ids=ignored))
    predicted(folder)
    (folder.split / "panoptic" / "a.json").unlink()
    with pytest.raises(
        InputError, match="label 0 .of pixels that are 1.* ids of segments, .* need its JSON as .*a.json"
    ):
        folder.record()


def test_folders_that_are_not_read_are_named(tmp_path, capsys):
    folder = Folder(tmp_path)
    for name in ("masks", "SEMANTIC", "Instances", ".git"):
        (folder.split / name).mkdir()
    folder.record()
    others = "Instances (did you mean 'instance'?), SEMANTIC (did you mean 'semantic'?), masks"
    line = f"{folder.split}: left out: {others}; photos, panoptic, semantic, instance are read\n"
    assert capsys.readouterr().err == line


# === Specs from files ===


def test_specs_from_yaml_and_python_are_equal(tmp_path):
    (tmp_path / "a.yaml").write_text(YAML)
    lines = "from axial.data.specs import DatasetSpec\nSPEC = " + repr(SPEC)
    (tmp_path / "a.py").write_text(lines)
    assert find_spec(str(tmp_path / "a.yaml")) == find_spec(str(tmp_path / "a.py")) == SPEC
    assert find_spec("cityscapes") is CITYSCAPES
    assert SPEC.colors[1].tolist() == [0, 0, 142]


@pytest.mark.parametrize(
    "old,new,words",
    [
        ("id: 7", "id: 0", "category ids must differ, 0 is there twice"),
        ("name: car", "name: road", "class names must differ, 'road' is there twice"),
        ("[255]", "[7]", "category ids must differ, 7 is there twice"),
        ("thing: true", "things: true", r"classes\[1\]: has an unknown field things \(did you mean 'thing'"),
        ("thing: true", "thing: 3", r"classes\[1\].thing: expected bool, got int"),
        ("id: 300", "id: sky", r"classes\[2\].id: expected int, got str"),
        ("id: 300, ", "", r"classes\[2\]: is missing the required field id"),
        ("[0, 0, 142]", "[0, 0, 256]", r"classes\[1\].color\[2\]: expected int <= 255"),
        ("color: [0, 0, 142], ", "", "one colour for each class, or none at all"),
        ("name: mine", "", "is missing the required field name"),
        ("classes:", "classes: [", "not YAML"),
        ("ignored_ids: [255]", "ignored_ids: 255", "ignored_ids: expected a list, got int"),
    ],
)
def test_wrong_yaml_is_named(tmp_path, old, new, words):
    (tmp_path / "a.yaml").write_text(YAML.replace(old, new, 1))
    with pytest.raises(InputError, match=words) as error:
        find_spec(str(tmp_path / "a.yaml"))
    assert "a.yaml" in str(error.value)


@pytest.mark.parametrize(
    "text,words",
    [
        ("SPEC = 3", "it sets no SPEC"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        (
            "from axial.data.specs import DatasetSpec\nSPEC = DatasetSpec('a', ('b',), (1, 2), (True,))",
            "a.py: spec 'a': one name, id",
        ),
    ],
)
def test_wrong_python_is_named(tmp_path, text, words):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(InputError, match=words):
        find_spec(str(tmp_path / "a.py"))


def test_no_such_spec(tmp_path):
    with pytest.raises(InputError, match="did you mean 'cityscapes'"):
        find_spec("cityscape")
    with pytest.raises(InputError, match="b.yaml: no such file"):
        find_spec(str(tmp_path / "b.yaml"))


# === Input that is wrong ===


def spoil_instances(folder):
    shutil.rmtree(folder.split / "instance")


def spoil_capitals(folder):
    (folder.split / "instance").rename(folder.split / "Instance")


def spoil_name(folder):
    (folder.split / "semantic" / "a.png").rename(folder.split / "semantic" / "b.png")


def spoil_both(folder):
    shutil.copytree(folder.split / "instance", folder.split / "panoptic")


def spoil_twins(folder):
    Image.new("RGB", (60, 30)).save(folder.split / "photos" / "a.jpg")


def spoil_size(folder):
    Image.new("L", (60, 29)).save(folder.split / "instance" / "a.png")


def spoil_color(folder):
    Image.new("RGB", (60, 30)).save(folder.split / "semantic" / "a.png")


def spoil_transparent(folder):
    Image.new("LA", (60, 30)).save(folder.split / "semantic" / "a.png")


def spoil_lossy(folder):
    Image.new("L", (60, 30)).save(folder.split / "semantic" / "a.png", "JPEG")


def spoil_webp(folder):
    Image.new("RGB", (60, 30)).save(folder.split / "semantic" / "a.png", "WEBP")


def spoil_deep(folder):
    Image.fromarray(np.full([30, 60], 65535, np.uint16)).save(folder.split / "semantic" / "a.png")


def spoil_form(folder):
    (folder.split / "semantic" / "a.png").rename(folder.split / "semantic" / "e\u0301.png")
    (folder.split / "photos" / "a.png").rename(folder.split / "photos" / "\xe9.png")


def spoil_id(folder):
    Image.new("L", (60, 30), 9).save(folder.split / "semantic" / "a.png")


def spoil_photo(folder):
    Image.new("RGB", (60, 29)).save(folder.split / "photos" / "a.png")


def spoil_number(folder):
    Image.fromarray(np.full([30, 60], 1000, np.uint16)).save(folder.split / "instance" / "a.png")


@pytest.mark.parametrize(
    "spoil,words",
    [
        (spoil_instances, "'car' is a thing in the spec 'mine', but there are no instances"),
        (spoil_capitals, "but there are no instances.*did you mean 'Instance'"),
        (spoil_name, "a.png: has no image in .*semantic"),
        (spoil_both, "either panoptic/, or semantic/ and instance/"),
        (spoil_twins, "a.png: .*a.jpg has the same name"),
        (spoil_size, "instance/a.png: 60x29 pixels, but .*semantic/a.png has 60x30"),
        (spoil_color, "semantic/a.png: in colour"),
        (spoil_transparent, r"semantic/a.png: with transparency \(LA\)"),
        (spoil_lossy, "semantic/a.png: its content is JPEG, which changes"),
        (spoil_webp, "semantic/a.png: its content is WEBP, which changes"),
        (spoil_deep, "semantic/a.png: label 65535, which the spec"),
        (spoil_form, r"did you mean '.*(u0301|xe9)'\? '.*' looks alike"),
        (spoil_id, "semantic/a.png: label 9, which the spec 'mine' does not have; its classes are .0, 7, 300., ign"),
        (spoil_photo, "photos/a.png: 60x29 pixels, its labels say 60x30"),
        (spoil_number, "instance 1000 of 'car'.*label_divisor 1000"),
    ],
)
def test_wrong_input_is_named(tmp_path, spoil, words):
    folder = Folder(tmp_path, "semantic", "instance")
    spoil(folder)
    with pytest.raises(InputError, match=words):
        folder.record()


def test_a_panoptic_image_of_one_channel_is_named(tmp_path):
    folder = Folder(tmp_path, "panoptic")
    Image.new("L", (60, 30)).save(folder.split / "panoptic" / "a.png")
    with pytest.raises(InputError, match="a panoptic PNG is RGB of 8 bits.*this one is L of 8 bits"):
        folder.record()
