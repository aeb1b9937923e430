"""The layout of the 2018 Data Science Bowl, and the sample that ships with axial."""

import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.data.convert import encode_item
from axial.data.converters.folder import folder_items
from axial.data.converters.nuclei import SAMPLE_DIR, nuclei_items
from axial.data.files import load_photo
from axial.data.labels import read_ids
from axial.data.levels import PERCENTILES, eight_bits
from axial.data.specs import NUCLEI, find_spec
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.tasks.segmentation.input_pipeline import segment_map
from tests.data.conversion import delete, replace
from tests.io.image_fixture import encoded

SIZE = (40, 50)  # (height, width)


def nuclei():
    """int [h, w] of nuclei 1 to 4. Nucleus 2 has a hole, nucleus 3 has two pieces, nucleus 4 touches nucleus 1."""
    numbers = np.zeros(SIZE, np.int64)
    numbers[2:10, 2:12] = 1
    numbers[15:30, 5:20] = 2
    numbers[20:24, 10:14] = 0
    numbers[3:8, 30:35] = numbers[12:14, 31:34] = 3
    numbers[10:14, 2:12] = 4
    return numbers


def fluorescence():
    """uint8 [h, w]: bright nuclei on a dark background."""
    noise = np.random.default_rng(0).integers(0, 20, SIZE)
    return (noise + np.where(nuclei() > 0, 120, 5)).astype(np.uint8)


class Release:
    """A folder in the layout of the 2018 Data Science Bowl's release, with a photo of `nuclei()`."""

    def __init__(self, root, identity="f00d", split="stage1_train"):
        self.root, self.split, self.identity = root, split, identity
        self.photos, self.masks = (root / split / identity / name for name in ("images", "masks"))
        self.photos.mkdir(parents=True)
        self.masks.mkdir()
        grey = fluorescence()
        self.write_photo(encoded(Image.fromarray(np.dstack([grey, grey, grey, 255 + 0 * grey])), "PNG"))
        for number in range(1, 5):
            self.write_mask(f"{number}.png", nuclei() == number)

    def write_photo(self, data, suffix=".png"):
        (self.photos / f"{self.identity}{suffix}").write_bytes(data)

    def write_mask(self, name, inside):
        Image.fromarray(np.uint8(255) * inside).save(self.masks / name)

    def items(self):
        return nuclei_items(str(self.root), self.split)[0]

    def records(self):
        return [encode_item(item)[0] for item in self.items()]


def numbers_of(record):
    """Returns the numbers of a record's nuclei, int [h, w], 0 for background."""
    classes = np.concatenate([[NUCLEI.ignore], record["segment/class"]])
    ids = np.concatenate([[0], record["segment/id"]])
    index = segment_map({key: tf.constant(value) for key, value in record.items()}).numpy()
    assert set(np.unique(classes[index])) <= {0, 1} and not np.any(record["segment/crowd"])
    return np.where(classes[index] == 1, ids[index] % NUCLEI.label_divisor, 0)


def photo_of(record):
    return decode_photo({key: tf.constant(value) for key, value in record.items()}).numpy()


GREY = fluorescence()
BRIGHT = np.where(nuclei()[..., None] > 0, np.uint8([90, 50, 140]), np.uint8([240, 225, 235]))  # violet nuclei
DEEP = eight_bits(GREY, PERCENTILES)  # the same for all multiples of GREY
TIFF = encoded(Image.fromarray(GREY.astype(np.uint16) * 16), "TIFF", compression="tiff_lzw")
ALPHA = Image.fromarray(np.dstack([GREY, GREY, GREY, 255 + 0 * GREY]))
PHOTOS = {
    "grey and alpha": (".png", encoded(ALPHA, "PNG"), GREY),
    "bright field": (".png", encoded(Image.fromarray(BRIGHT), "PNG"), BRIGHT),
    "12 bits in 16": (".png", encoded(Image.fromarray(GREY.astype(np.uint16) * 16), "PNG"), DEEP),
    "TIFF, 12 bits, compressed": (".tif", TIFF, DEEP),
}


@pytest.mark.parametrize("name", PHOTOS)
def test_training_prediction_and_the_layout_of_folders_see_the_same(tmp_path, name):
    """Records, axial-predict and the folder converter have equal photos and labels, with all holes and pieces."""
    suffix, data, levels = PHOTOS[name]
    release = Release(tmp_path / "release")
    (release.photos / "f00d.png").unlink()
    release.write_photo(data, suffix)
    (record,) = release.records()
    np.testing.assert_array_equal(numbers_of(record), nuclei())
    np.testing.assert_array_equal(photo_of(record), np.broadcast_to(levels.reshape(*SIZE, -1), [*SIZE, 3]))
    (item,) = release.items()
    np.testing.assert_array_equal(load_photo(item["photo"]), photo_of(record))
    for layer, pixels in (("photos", None), ("semantic", np.where(nuclei() > 0, 2, 1)), ("instance", nuclei())):
        (tmp_path / "a" / layer).mkdir(parents=True)
        if pixels is None:
            (tmp_path / "a" / layer / f"f00d{suffix}").write_bytes(data)
        else:
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "a" / layer / "f00d.png")
    (item,) = folder_items(str(tmp_path), "a", NUCLEI)[0]
    assert encode_item(item)[0] == record


# === Splits ===


def test_a_list_names_the_photos_of_a_split(tmp_path):
    for identity in ("c", "a", "b"):
        Release(tmp_path, identity)
    Release(tmp_path, "d", "stage1_test")
    (tmp_path / "stage1_train" / "notes.txt").write_text("no photo")
    (tmp_path / "train.txt").write_text("\ufeffstage1_train/c\r\n\r\nstage1_test/d \nstage1_train/a")
    listed = {split: nuclei_items(str(tmp_path), split) for split in ("train", "stage1_train", "stage1_test")}
    assert [item["name"] for item in listed["train"][0]] == ["c.png", "d.png", "a.png"]
    assert [item["name"] for item in listed["stage1_train"][0]] == ["a.png", "b.png", "c.png"]
    assert len({source for _, source in listed.values()}) == 3


def test_photos_without_masks_are_a_split_without_labels(tmp_path):
    release = Release(tmp_path, split="stage1_test")
    shutil.rmtree(release.masks)
    (record,) = release.records()
    assert not len(record["segment/id"])
    Release(tmp_path, "other", "stage1_test")
    with pytest.raises(InputError, match="f00d/masks: no such folder, though .*stage1_test/other has masks"):
        release.items()


# === Input that is wrong ===


def photo(release):
    return release.photos / "f00d.png"


def mask(number):
    return lambda release: release.masks / f"{number}.png"


def no_masks(release):
    shutil.rmtree(release.masks)
    release.masks.mkdir()


def tiff(data):
    """Returns a damage that replaces the photo by a TIFF."""

    def damage(release):
        photo(release).unlink()
        release.write_photo(data, ".tif")

    return damage


def listed(text):
    return lambda release: (release.root / "stage1_train.txt").write_text(text)


def rename_split(release):
    (release.root / "stage1_train").rename(release.root / "stage1")


PAGE, ALL = Image.fromarray(GREY), Image.fromarray(nuclei().astype(np.uint8))
BAD = [
    (delete(photo), "f00d/images: no photos, one is expected"),
    (lambda release: shutil.rmtree(release.photos), "f00d/images: no such folder"),
    (rename_split, r"stage1_train: no such folder; .*did you mean 'stage1'"),
    (no_masks, "f00d/masks: no masks; expected one for each nucleus"),
    (lambda release: release.write_mask("2.png", nuclei() > 4), "masks/2.png: an empty mask"),
    (lambda release: release.write_mask("1.png", nuclei()[:, 1:] == 1), "masks/1.png: 49x40 pixels, .* has 50x40"),
    (replace(mask(1), ALL), "masks/1.png: 1 and 4, a mask has 0 and one other value"),
    (replace(mask(1), Image.new("RGB", SIZE[::-1])), r"masks/1.png: in colour \(RGB\)"),
    (tiff(encoded(PAGE, "TIFF", save_all=True, append_images=[PAGE])), "images/f00d.tif: a TIFF of several pages"),
    (listed("stage1_train/f00d\nstage1_train/f00d"), "stage1_train.txt: the photo 'f00d' is there twice"),
    (listed("../f00d"), "stage1_train.txt: line 1: '../f00d': leaves its folder"),
]


@pytest.mark.parametrize("damage,words", BAD, ids=[words for _, words in BAD])
def test_wrong_input_is_named(tmp_path, damage, words):
    release = Release(tmp_path)
    damage(release)
    with pytest.raises(InputError, match=words) as error:
        release.records()
    assert "\n" not in str(error.value)


# === Real photos ===


def test_the_sample_is_what_its_page_says():
    names = [pathlib.Path(SAMPLE_DIR, f"{split}.txt").read_text().split() for split in ("train", "test")]
    assert [len(listed) for listed in names] == [97, 33] and not set(names[0]) & set(names[1])
    for split, listed in zip(("train", "test"), names):
        items, _ = folder_items(SAMPLE_DIR, split, NUCLEI)
        assert [pathlib.Path(item["photo"]).stem for item in items] == [name.split("/")[1][:16] for name in listed]
        for item in items:
            semantic, instance = map(read_ids, item["label_files"])
            np.testing.assert_array_equal(semantic, np.where(instance > 0, 2, 1))
    assert find_spec(f"{SAMPLE_DIR}/spec.yaml") == NUCLEI
