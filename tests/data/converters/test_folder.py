"""Users' own data: photos with label images, and specs from files."""

import dataclasses
import json
import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from axial.data import tfrecord
from axial.data.converters.folder import NAMES, folder_items
from axial.data.labels import colors_of, read_ids
from axial.data.specs import CITYSCAPES, DatasetSpec, find_spec, plain_spec
from axial.errors import InputError
from axial.tasks.segmentation.input_pipeline import segment_map
from tests.data.conversion import convert, records, replace
from tests.io.image_fixture import png_chunk

FLAT = DatasetSpec("flat", ("road", "car", "sky"), (0, 7, 300), (False,) * 3, ignored_ids=(255,))
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
# (category, instance number) of each column: stuff, whose number is ignored, two cars, a crowd, ignored pixels.
COLUMNS = [(0, 3), (7, 1), (7, 2), (7, 0), (300, 0), (255, 0)]
CLASSES = [0, 1, 1, 1, 2]


class Folder:
    """A split with one photo whose columns are `COLUMNS`."""

    def __init__(self, root, *layers, spec=SPEC):
        self.split, self.spec = root / "train", spec

        def spread(values):
            return np.asarray(values)[np.arange(60) // 10][None].repeat(30, 0)

        semantic, instance = (spread([column[k] for column in COLUMNS]) for k in (0, 1))
        (self.split / "photos").mkdir(parents=True)
        photo = np.random.default_rng(0).integers(0, 256, [30, 60, 3], np.uint8)
        Image.fromarray(photo).save(self.split / "photos" / "a.png")
        panoptic = colors_of(semantic * spec.label_divisor + instance)
        images = dict(semantic=semantic.astype(np.uint16), instance=instance.astype(np.uint8), panoptic=panoptic)
        for layer in layers:
            (self.split / layer).mkdir()
            Image.fromarray(images[layer]).save(self.split / layer / "a.png")

    def record(self):
        root = self.split.parent
        convert(folder_items(str(root), "train", self.spec), self.spec, root / "out", "train")
        (record,) = records(root / "out", "train")
        return record


def test_panoptic_images_give_the_same_as_semantic_and_instance_images(tmp_path):
    one = Folder(tmp_path / "a", "semantic", "instance").record()
    two = Folder(tmp_path / "b", "panoptic").record()
    for record in (one, two):
        actual, classes = segment_map(record).numpy()[0, ::10], record["segment/class"].numpy()
        assert sorted(classes.tolist()) == CLASSES and len(set(actual)) == 6
        table = np.concatenate([[SPEC.ignore], classes])
        assert table[actual].tolist() == [0, 1, 1, 1, 2, SPEC.ignore]
        crowd = np.concatenate([[0], record["segment/crowd"].numpy()])
        assert crowd[actual].tolist() == [0, 0, 0, 1, 0, 0]
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
    record = Folder(tmp_path / "a", "semantic", spec=FLAT).record()
    assert record["segment/class"].numpy().tolist() == [0, 1, 2]
    again = Folder(tmp_path / "b", "semantic", "instance", spec=FLAT).record()
    np.testing.assert_array_equal(segment_map(record), segment_map(again))
    assert capsys.readouterr().err == f"{tmp_path}/b/train/instance: left out: no class of the spec 'flat' is a thing\n"


def test_photos_alone_are_a_split_without_labels(tmp_path):
    record = Folder(tmp_path).record()
    assert record["segment/id"].shape == (0,) and segment_map(record).shape == (30, 60)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_ids_are_the_numbers_of_the_file_whatever_its_depth(tmp_path, bits):
    """Ids are the stored values, although Pillow scales grey of 2 and 4 bits to 0..255."""
    ids = np.arange(8 * 8).reshape(8, 8) % 2 ** min(bits, 6)
    places = np.arange(bits)[::-1]
    rows = np.packbits((ids[..., None] >> places & 1).reshape(len(ids), -1).astype(np.uint8), axis=1)
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, bits, 0, 0, 0, 0))  # one channel of grey
    content = png_chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + content + png_chunk(b"IEND", b""))
    np.testing.assert_array_equal(read_ids(str(tmp_path / "a.png")), ids)


def test_what_is_not_read_is_said_once(tmp_path, capsys):
    folder = Folder(tmp_path, "semantic", "instance")
    folder.record()
    assert capsys.readouterr().err == ""
    for name in ("Thumbs.db", "a.heic", ".DS_Store"):
        (folder.split / "photos" / name).write_bytes(b"x")
    for name in ("masks", "SEMANTIC", "Instances", ".git"):
        (folder.split / name).mkdir()
    folder_items(str(tmp_path), "train", SPEC)
    files, folders = sorted(capsys.readouterr().err.splitlines(), key=lambda line: "SEMANTIC" in line)
    assert "train/photos: left out: " in files and "(2, first Thumbs.db)" in files
    others = "Instances (did you mean 'instance'?), SEMANTIC (did you mean 'semantic'?), masks"
    assert folders == f"{folder.split}: left out: {others}; {', '.join(NAMES)} are read"


def predicted(folder, name="car", road=0):
    """Replaces a panoptic image by a prediction of four segments, a PNG and its JSON. Returns the segments' ids."""
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
    assert capsys.readouterr().err == ""  # no message about skipped files
    predicted(folder, name="bus")
    with pytest.raises(InputError, match=r"a.json: category 7 is 'bus' \(thing\), the spec 'mine' calls it 'car'"):
        folder.record()
    predicted(folder, road=9)
    with pytest.raises(InputError, match="a.json: .* has category_id 9, which the spec 'mine' lacks"):
        folder.record()


def test_ids_of_segments_are_no_panoptic_labels(tmp_path):
    folder = Folder(tmp_path, "panoptic", spec=DatasetSpec("mine", ("road",), (1,), (False,), ignored_ids=(0,)))
    predicted(folder)
    (folder.split / "panoptic" / "a.json").unlink()
    with pytest.raises(InputError, match="label 0 .of pixels that are 1.* ids of segments need its JSON as .*a.json"):
        folder.record()


# === Specs from files ===


def test_a_spec_from_yaml(tmp_path):
    (tmp_path / "a.yaml").write_text(YAML)
    assert find_spec(str(tmp_path / "a.yaml")) == SPEC
    assert find_spec("cityscapes") is CITYSCAPES
    assert SPEC.colors[1].tolist() == [0, 0, 142]


@pytest.mark.parametrize(
    "old,new,words",
    [
        ("id: 7", "id: 0", "category ids must differ, 0 is there twice"),
        ("thing: true", "things: true", r"classes\[1\]: has an unknown field things"),
        ("id: 300", "id: sky", r"classes\[2\].id: expected int, got str"),
        ("color: [0, 0, 142], ", "", "one colour for each class, or none at all"),
        ("classes:", "classes: [", "not YAML"),
        ("ignored_ids: [255]", "ignored_ids: 255", "ignored_ids: expected a list, got str"),
    ],
)
def test_wrong_yaml_is_named(tmp_path, old, new, words):
    (tmp_path / "a.yaml").write_text(YAML.replace(old, new, 1))
    with pytest.raises(InputError, match=words) as error:
        find_spec(str(tmp_path / "a.yaml"))
    assert "a.yaml" in str(error.value)


def test_no_such_spec(tmp_path):
    with pytest.raises(InputError, match="did you mean 'cityscapes'"):
        find_spec("cityscape")
    with pytest.raises(InputError, match="b.yaml: no such file"):
        find_spec(str(tmp_path / "b.yaml"))


# === Instances alone ===

CELLS, BARE = plain_spec("cells", {1: "cell"}, "rest"), plain_spec("cells", {1: "cell"}, None)
NUMBERS = np.repeat(np.int32([0, 1, 2, 300]), 15)[None].repeat(30, 0)  # the numbers of the objects in four columns


def write_instances(root, photo="images/a.jpg", label="masks/a.tif", numbers=NUMBERS):
    """A split with one photo and its instance image."""
    for path, image in ((photo, Image.new("RGB", (60, 30))), (label, Image.fromarray(numbers))):
        (root / "train" / path).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / "train" / path)


def read_instances(root, spec=CELLS):
    """Segment ids, int [h, w], of the only record."""
    convert(folder_items(str(root), "train", spec), spec, root / "out", "train")
    (record,) = records(root / "out", "train")
    return tfrecord.segment_ids(record["panoptic/encoded"]).numpy()


@pytest.mark.parametrize(
    "photo,label",
    [
        ("photos/a.png", "instance/a.png"),
        ("images/a.jpg", "labels/a.labels.tif"),
        ("a.tif", "a_masks.tif"),
        ("a_img.png", "a_cp_masks.png"),
        ("a.b.png", "a.b.labels.tif"),
        ("photos/a_masks.png", "masks/a_masks.png"),
    ],
)
def test_instances_alone_of_each_layout(tmp_path, photo, label):
    write_instances(tmp_path, photo, label, NUMBERS.astype(np.uint16))
    expected = np.where(NUMBERS == 0, CELLS.label_divisor, 2 * CELLS.label_divisor + NUMBERS)
    np.testing.assert_array_equal(read_instances(tmp_path), expected)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.uint32, np.int16, np.float32])  # Fiji's are floats
def test_tiffs_of_any_depth_and_pixels_without_a_class(tmp_path, kind):
    write_instances(tmp_path, numbers=NUMBERS.astype(kind))
    np.testing.assert_array_equal(read_instances(tmp_path, BARE), NUMBERS + BARE.label_divisor * (NUMBERS > 0))


def test_a_semantic_label_beyond_16_bits_is_named(tmp_path):
    folder = Folder(tmp_path, "semantic", "instance")
    Image.fromarray(np.full([30, 60], 65537, np.int32)).save(folder.split / "semantic" / "a.tif")
    (folder.split / "semantic" / "a.png").unlink()
    with pytest.raises(InputError, match="a.tif: label 65537, which the spec 'mine' does not have"):
        folder.record()


def test_a_photo_beside_one_with_an_ending_is_not_lost(tmp_path):
    write_instances(tmp_path, "a_img.tif", "a_masks.tif")
    Image.new("RGB", (60, 30)).save(tmp_path / "train" / "a.tif")
    with pytest.raises(InputError, match="a.tif: a_img.tif is there too"):
        read_instances(tmp_path)


def test_numbers_with_gaps_are_closed_if_they_are_too_large(tmp_path):
    spec = dataclasses.replace(CELLS, label_divisor=1000)
    write_instances(tmp_path, numbers=NUMBERS * 300_000)
    assert np.unique(read_instances(tmp_path, spec)).tolist() == [1000, 2001, 2002, 2003]


def test_what_axial_predict_writes_beside_its_label_images_is_left_out(tmp_path, capsys):
    write_instances(tmp_path, label="labels/a.labels.tif")
    for name in ("a.overlay.png", "a.json", "a.panoptic.png"):
        (tmp_path / "train/labels" / name).write_text("")
    assert len(np.unique(read_instances(tmp_path))) == 4
    error = capsys.readouterr().err
    assert "labels: left out: names that do not end in .png, .tif, .tiff (1, first a.json)" in error
    assert "labels: left out: names without .labels, _cp_masks or _masks (2, first " in error


def stack(root):
    pages = [Image.fromarray(NUMBERS.astype(np.uint8))] * 2
    pages[0].save(root / "train/masks/a.tif", save_all=True, append_images=pages[1:])


def with_numbers(numbers):
    return lambda root: write_instances(root, numbers=numbers)


BAD_INSTANCES = [
    (with_numbers(NUMBERS.astype(np.float32) / 2), r"a.tif: with fractions \(F\), where one"),
    (with_numbers(np.zeros([30, 60, 3], np.uint8)), r"a.tif: in colour \(RGB\), where one"),
    (with_numbers(NUMBERS[:9].astype(np.uint8)), "a.jpg: 60x30 pixels, its labels say 60x9"),
    (with_numbers(-NUMBERS), "a.tif: a pixel is -300, ids are at least 0"),
    (stack, "a.tif: page 1 of 2 is read, where a label image of one page"),
    (lambda root: write_instances(root, label="masks/b.tif"), "masks/b.tif: has no photo in .*images"),
    (lambda root: (root / "train/masks").rename(root / "train/Masks"), "Masks .did you mean 'masks'.*no labels are"),
    (lambda root: write_instances(root, photo="images/b.png"), "masks/b.tif: missing, though .*images/b.png is there"),
]


@pytest.mark.parametrize("damage,words", BAD_INSTANCES, ids=[words for _, words in BAD_INSTANCES])
def test_a_wrong_instance_image_is_named(tmp_path, damage, words):
    write_instances(tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=words):
        read_instances(tmp_path)


def test_instances_alone_need_one_thing(tmp_path):
    write_instances(tmp_path)
    words = "instances alone do not say .* 'mine' has 1 thing among 3 classes; add semantic/"
    with pytest.raises(InputError, match=words):
        read_instances(tmp_path, SPEC)


def test_more_objects_than_the_divisor_has_numbers(tmp_path):
    write_instances(tmp_path)
    with pytest.raises(InputError, match="a.tif: instance 3 of 'cell': expected less than the label_divisor 3"):
        read_instances(tmp_path, dataclasses.replace(CELLS, label_divisor=3))


# === Input that is wrong ===


def image_of(layer):
    return lambda folder: folder.split / layer / "a.png"


def moved(one, other):
    return lambda folder: (folder.split / one).rename(folder.split / other)


def other_form(folder):
    """Damage: a photo's name is in another Unicode normalisation form than the name of its labels."""
    image_of("semantic")(folder).rename(folder.split / "semantic" / "e\u0301.png")
    image_of("photos")(folder).rename(folder.split / "photos" / "\xe9.png")


def grey(value, height=30, mode="L"):
    return Image.new(mode, (60, height), value)


SEMANTIC, INSTANCE, PHOTO = map(image_of, ("semantic", "instance", "photos"))
BAD = [
    (lambda folder: shutil.rmtree(folder.split / "instance"), "'car' is a thing in .* but there are no instances"),
    (moved("semantic/a.png", "semantic/b.png"), "semantic/a.png: missing, though .*photos/a.png is there"),
    (lambda folder: grey(0, mode="RGB").save(folder.split / "photos" / "a.jpg"), "a.png: .*a.jpg has the same name"),
    (replace(INSTANCE, grey(0, height=29)), "instance/a.png: 60x29 pixels, but .*semantic/a.png has 60x30"),
    (replace(SEMANTIC, grey(0, mode="RGB")), "semantic/a.png: in colour"),
    (other_form, r"did you mean '.*(u0301|xe9)'\? '.*' looks alike"),
    (replace(SEMANTIC, grey(9)), "semantic/a.png: label 9, .*'mine' does not have; its classes are .0, 7, 300., ign"),
    (replace(PHOTO, grey(0, height=29)), "photos/a.png: 60x29 pixels, its labels say 60x30"),
    (replace(INSTANCE, grey(1000, mode="I;16")), "instance 1000 of 'car'.*label_divisor 1000"),
]


@pytest.mark.parametrize("damage,words", BAD, ids=[words for _, words in BAD])
def test_wrong_input_is_named(tmp_path, damage, words):
    folder = Folder(tmp_path, "semantic", "instance")
    damage(folder)
    with pytest.raises(InputError, match=words):
        folder.record()
