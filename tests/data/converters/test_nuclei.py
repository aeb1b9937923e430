"""The layout of the 2018 Data Science Bowl, and the sample of it that ships with axial."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import convert_split, encode_item
from axial.data.converters.folder import folder_items
from axial.data.converters.nuclei import SAMPLE_DIR, nuclei_data_dir, nuclei_items
from axial.data.files import load_photo
from axial.data.labels import read_ids
from axial.data.spec_file import find_spec
from axial.data.specs import NUCLEI
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.io.images import PERCENTILES, eight_bits
from axial.tasks.segmentation.feed import segment_map
from tests.conftest import DATA
from tests.io.image_fixture import deep_png, encoded

SIZE = (40, 50)  # (height, width)


def nuclei():
    """int [h, w]: nuclei 1 to 4. The second has a hole, the third two pieces, the fourth touches the first."""
    numbers = np.zeros(SIZE, np.int64)
    numbers[2:10, 2:12] = 1
    numbers[15:30, 5:20] = 2
    numbers[20:24, 10:14] = 0
    numbers[3:8, 30:35] = numbers[12:14, 31:34] = 3
    numbers[10:14, 2:12] = 4
    return numbers


def fluorescence():
    """uint8 [h, w]: bright nuclei on a dark ground."""
    noise = np.random.default_rng(0).integers(0, 20, SIZE)
    return (noise + np.where(nuclei() > 0, 120, 5)).astype(np.uint8)


class Release:
    """A folder in the release's layout, with a photo of `nuclei`."""

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
    """int [h, w]: the numbers of a record's nuclei, 0 for background."""
    classes = np.concatenate([[NUCLEI.ignore], record["segment/class"]])
    ids = np.concatenate([[0], record["segment/id"]])
    place = segment_map({key: tf.constant(value) for key, value in record.items()}).numpy()
    assert set(np.unique(classes[place])) <= {0, 1} and not np.any(record["segment/crowd"])
    return np.where(classes[place] == 1, ids[place] % NUCLEI.label_divisor, 0)


def photo_of(record):
    return decode_photo({key: tf.constant(value) for key, value in record.items()}).numpy()


def test_nuclei_are_numbered_and_keep_their_holes_and_pieces(tmp_path):
    (record,) = Release(tmp_path).records()
    np.testing.assert_array_equal(numbers_of(record), nuclei())
    np.testing.assert_array_equal(photo_of(record), np.repeat(fluorescence()[..., None], 3, -1))  # without alpha
    assert record["image/file_name"] == "f00d.png"


def bright_field():
    """uint8 [h, w, 3]: violet nuclei on a light ground."""
    return np.where(nuclei()[..., None] > 0, np.uint8([90, 50, 140]), np.uint8([240, 225, 235]))


GREY = fluorescence().astype(np.uint16)
DEEP, COLOURS = (eight_bits(x, PERCENTILES) for x in (GREY, bright_field().astype(np.uint16)))  # of any scale
PHOTOS = {
    "grey": (".png", encoded(Image.fromarray(fluorescence()), "PNG"), GREY),
    "bright field": (".png", encoded(Image.fromarray(bright_field()), "PNG"), bright_field()),
    "bright field, JPEG": (".jpg", encoded(Image.fromarray(bright_field()), "JPEG", quality=100), None),
    "16 bits": (".png", encoded(Image.fromarray(GREY * 256), "PNG"), DEEP),
    "12 bits in 16": (".png", encoded(Image.fromarray(GREY * 16), "PNG"), DEEP),
    "8 bits in 16": (".png", encoded(Image.fromarray(GREY), "PNG"), DEEP),
    "colours of 12 bits in 16": (".png", deep_png(bright_field().astype(np.uint16) * 16), COLOURS),
    "grey and alpha of 12 bits": (".png", deep_png(np.dstack([GREY * 16, 65535 + 0 * GREY])), DEEP),
    "TIFF": (".tif", encoded(Image.fromarray(fluorescence()), "TIFF"), GREY),
    "TIFF, 12 bits, compressed": (".tif", encoded(Image.fromarray(GREY * 16), "TIFF", compression="tiff_lzw"), DEEP),
    "TIFF, shares": (".TIFF", encoded(Image.fromarray((GREY / 255).astype(np.float32)), "TIFF"), DEEP),
}


@pytest.mark.parametrize("name", PHOTOS)
def test_training_prediction_and_the_layout_of_folders_see_the_same_photo(tmp_path, name):
    suffix, data, levels = PHOTOS[name]
    release = Release(tmp_path / "release")
    (release.photos / "f00d.png").unlink()
    release.write_photo(data, suffix)
    (record,) = release.records()
    np.testing.assert_array_equal(numbers_of(record), nuclei())
    found = photo_of(record)
    if levels is not None:
        np.testing.assert_array_equal(found, np.broadcast_to(levels.reshape(*SIZE, -1), found.shape))
    (item,) = release.items()
    np.testing.assert_array_equal(load_photo(item["photo"]), found)
    (tmp_path / "a" / "photos").mkdir(parents=True)
    (tmp_path / "a" / "photos" / f"f00d{suffix}").write_bytes(data)
    (same,) = folder_items(str(tmp_path), "a", NUCLEI)[0]
    np.testing.assert_array_equal(photo_of(encode_item(same)[0]), found)


def test_the_layout_of_folders_has_the_same_labels(tmp_path):
    (record,) = Release(tmp_path).records()
    for layer, pixels in (("photos", GREY), ("semantic", np.where(nuclei() > 0, 2, 1)), ("instance", nuclei())):
        (tmp_path / "a" / layer).mkdir(parents=True)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "a" / layer / "f00d.png")
    (item,) = folder_items(str(tmp_path), "a", NUCLEI)[0]
    same, _ = encode_item(item)
    assert {**same, "image/encoded": record["image/encoded"]} == record


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_masks_of_one_channel_and_any_value(tmp_path, mode):
    release = Release(tmp_path)
    mask = Image.fromarray(np.uint8(nuclei() == 2)).convert("I") if mode == "I;16" else Image.fromarray(nuclei() == 2)
    mask.convert(mode).save(release.masks / "2.png")
    (record,) = release.records()
    np.testing.assert_array_equal(numbers_of(record), nuclei())


def test_a_few_shared_pixels_are_of_the_later_mask(tmp_path):
    release = Release(tmp_path)
    release.write_mask("1.png", (nuclei() == 1) | (np.arange(SIZE[1]) == 2) & (np.arange(SIZE[0]) == 10)[:, None])
    (record,) = release.records()
    np.testing.assert_array_equal(numbers_of(record), nuclei())


def test_more_nuclei_than_other_specs_have_room_for(tmp_path):
    release, numbers = Release(tmp_path), np.zeros(SIZE, np.int64)
    numbers[::2] = np.arange(1, SIZE[0] // 2 * SIZE[1] + 1).reshape(-1, SIZE[1])
    for number in range(1, numbers.max() + 1):
        release.write_mask(f"{number:04}.png", numbers == number)
    for number in range(1, 5):
        (release.masks / f"{number}.png").unlink()
    (record,) = release.records()
    assert numbers.max() == 1000
    np.testing.assert_array_equal(numbers_of(record), numbers)


# === Splits ===


def test_a_list_names_the_photos_of_a_split(tmp_path):
    for identity in ("c", "a", "b"):
        Release(tmp_path, identity)
    Release(tmp_path, "d", "stage1_test")
    (tmp_path / "stage1_train" / "notes.txt").write_text("no photo")
    (tmp_path / "train.txt").write_text("\ufeffstage1_train/c\r\n\r\nstage1_test/d \nstage1_train/a")

    def names(split):
        items, source = nuclei_items(str(tmp_path), split)
        return [item["name"] for item in items], source

    assert names("train")[0] == ["c.png", "d.png", "a.png"]
    assert names("stage1_train")[0] == ["a.png", "b.png", "c.png"]
    assert len({names(split)[1] for split in ("train", "stage1_train", "stage1_test")}) == 3
    convert_split(
        *(nuclei_items(str(tmp_path), "train")[0], encode_item, NUCLEI, "train"),
        **dict(output_dir=str(tmp_path / "out"), source=names("train")[1], progress=False),
    )
    assert tfrecord.read_manifest(str(tmp_path / "out"), "train")["examples"] == 3


def test_photos_without_masks_are_a_split_without_labels(tmp_path):
    release = Release(tmp_path, split="stage1_test")
    for mask in release.masks.iterdir():
        mask.unlink()
    release.masks.rmdir()
    (record,) = release.records()
    assert not len(record["segment/id"])
    Release(tmp_path, "other", "stage1_test")
    with pytest.raises(InputError, match="f00d/masks: no such folder, though .*stage1_test/other has masks"):
        release.items()


# === Input that is wrong ===


def spoil_photo(release):
    (release.photos / "f00d.png").unlink()


def spoil_photos(release):
    release.write_photo(PHOTOS["grey"][1], ".tif")
    (release.photos / "f00d.tif").rename(release.photos / "other.tif")


def spoil_images(release):
    spoil_photo(release)
    release.photos.rmdir()


def spoil_split(release):
    (release.root / "stage1_train").rename(release.root / "stage1")


def spoil_root(release):
    release.root /= "stage1_train"


def spoil_ids(release):
    (release.root / "stage1_train").rename(release.root / "elsewhere")
    (release.root / "stage1_train").mkdir()


def spoil_masks(release):
    for mask in release.masks.iterdir():
        mask.unlink()


def spoil_overlap(release):
    release.write_mask("3.png", (nuclei() == 3) | (nuclei() == 2))


def spoil_many_overlaps(release):
    """Two masks share few of their pixels, with one that shares too many of its own."""
    for number in (5, 6):
        mask = np.zeros(SIZE, bool)
        mask[4 * number + 11 : 4 * number + 15] = mask[15, number * 8 - 35 : number * 8 - 27] = True
        release.write_mask(f"{number}.png", mask)


def spoil_empty(release):
    release.write_mask("2.png", nuclei() > 4)


def spoil_size(release):
    release.write_mask("1.png", nuclei()[:, 1:] == 1)


def spoil_numbers(release):
    Image.fromarray(nuclei().astype(np.uint8)).save(release.masks / "1.png")


def spoil_color(release):
    Image.new("RGB", SIZE[::-1]).save(release.masks / "1.png")


def spoil_lossy(release):
    Image.new("L", SIZE[::-1]).save(release.masks / "1.png", "JPEG")


def spoil_cut(release):
    release.write_photo(PHOTOS["grey"][1][:200])


def spoil_pages(release):
    page = Image.fromarray(fluorescence())
    spoil_photo(release)
    release.write_photo(encoded(page, "TIFF", save_all=True, append_images=[page]), ".tif")


def spoil_float(release):
    spoil_photo(release)
    page = Image.fromarray(fluorescence())
    release.write_photo(
        encoded(page, "TIFF").replace(b"\x02\x01\x03\0\x01\0\0\0\x08\0", b"\x02\x01\x03\0\x01\0\0\0\x40\0"), ".tif"
    )


def spoil_list(text):
    def spoil(release):
        (release.root / "stage1_train.txt").write_text(text)

    return spoil


BAD = [
    (spoil_photo, "f00d/images: no photos, one is expected"),
    (spoil_photos, "f00d/images: 2 photos, one is expected"),
    (spoil_images, "f00d/images: no such folder"),
    (spoil_split, r"stage1_train: no such folder, and no list stage1_train.txt; .*did you mean 'stage1'"),
    (spoil_root, "stage1_train: itself a split; --input_dir is the folder that has it"),
    (spoil_ids, "stage1_train: the split is empty; expected folders"),
    (spoil_masks, "f00d/masks: no masks; expected one for each nucleus"),
    (spoil_overlap, r"masks/2.png: 209 of its 209 pixels are in other masks too, like 3.png; at most 5 % may be"),
    (spoil_many_overlaps, "masks/2.png: 15 of its 209 pixels are in other masks too, like 6.png"),
    (spoil_empty, "masks/2.png: an empty mask"),
    (spoil_size, "masks/1.png: 49x40 pixels, but .*images/f00d.png has 50x40"),
    (spoil_numbers, "masks/1.png: 1 and 4, a mask has 0 and one other value"),
    (spoil_color, r"masks/1.png: in colour \(RGB\)"),
    (spoil_lossy, "masks/1.png: its content is JPEG"),
    (spoil_cut, "images/f00d.png: not a"),
    (spoil_pages, "images/f00d.tif: a TIFF of several pages, one is expected"),
    (spoil_float, "images/f00d.tif: not a whole TIFF, or one of pixels, planes or a compression"),
    (spoil_list("\n"), "stage1_train.txt: the split is empty"),
    (spoil_list("stage1_train/f00d\nstage1_train/f00d"), "stage1_train.txt: the photo 'f00d' is there twice"),
    (spoil_list("../f00d"), "stage1_train.txt: line 1: '../f00d': leaves its folder"),
    (spoil_list("stage1_train/f00"), "stage1_train/f00/images: no such folder"),
]


@pytest.mark.parametrize("spoil,words", BAD)
def test_wrong_input_is_named(tmp_path, spoil, words):
    release = Release(tmp_path)
    spoil(release)
    with pytest.raises(InputError, match=words) as error:
        release.records()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spoil", [spoil_photo, spoil_overlap, spoil_empty, spoil_size])
def test_the_command_names_wrong_input_and_ends_with_2(command, tmp_path, spoil):
    release = Release(tmp_path / "in")
    call = "convert", "nuclei", f"--input_dir={release.root}", f"--output_dir={tmp_path / 'out'}"
    assert command(*call).code == 0
    spoil(release)
    result = command(*call)
    assert result.code == 2 and "/f00d/" in result.line


# === Real photos ===


def test_the_sample_is_what_its_page_says():
    names = {}
    for split, count in (("train", 97), ("test", 33)):
        names[split] = pathlib.Path(SAMPLE_DIR, f"{split}.txt").read_text().split()
        items, _ = folder_items(SAMPLE_DIR, split, NUCLEI)
        assert len(items) == len(names[split]) == count
        assert [pathlib.Path(item["photo"]).stem for item in items] == [
            name.split("/")[1][:16] for name in names[split]
        ]
        for item in items:
            photo = Image.open(item["photo"])
            semantic, instance = map(read_ids, item["label_files"])
            assert (photo.mode, photo.size) == ("L", (256, 256))
            np.testing.assert_array_equal(semantic, np.where(instance > 0, 2, 1))
            assert np.bincount(instance.ravel())[1:].min() > 0
    assert not set(names["train"]) & set(names["test"])
    assert sum(path.stat().st_size for path in pathlib.Path(SAMPLE_DIR).rglob("*")) < 3e6
    assert find_spec(f"{SAMPLE_DIR}/spec.yaml") == NUCLEI


def test_the_sample_is_converted_at_first_use(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = nuclei_data_dir()
    assert path.startswith(str(tmp_path))
    assert [tfrecord.read_manifest(path, split)["examples"] for split in ("train", "test")] == [97, 33]


def test_the_release_has_the_labels_and_photos_of_the_layout_of_folders():
    root = DATA / "nuclei"
    if not (root / "raw").is_dir():
        pytest.skip(f"needs the nuclei in {root}; set AXIAL_DATA")
    layouts = [(folder, split) for folder in (SAMPLE_DIR, str(root)) for split in ("train", "test")]
    twins = {}
    for layout in layouts:
        for item in folder_items(*layout, NUCLEI)[0]:
            twins.setdefault(pathlib.Path(item["photo"]).stem, []).append(item)
    compared = dict.fromkeys((SAMPLE_DIR, str(root)), 0)
    for item in nuclei_items(str(root / "raw"), "stage1_train")[0]:
        record, _ = encode_item(item)
        for twin in twins[item["name"][:16]]:
            same, _ = encode_item(twin)
            for key in ("segment/id", "segment/class", "segment/crowd"):
                assert same[key] == record[key]
            np.testing.assert_array_equal(numbers_of(same), numbers_of(record))
            np.testing.assert_array_equal(photo_of(same), photo_of(record))
            compared[next(folder for folder in compared if twin["photo"].startswith(folder))] += 1
    assert compared[str(root)] == 12 and compared[SAMPLE_DIR] >= 4
