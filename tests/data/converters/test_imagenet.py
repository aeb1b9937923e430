"""Conversion of photos in a folder per class."""

import shutil

import pytest
from PIL import Image

from axial.data.converters import imagenet
from axial.data.streams import check_records, decode_photo
from axial.errors import InputError
from tests.data import conversion
from tests.data.conversion import records

CLASSES = ("n01440764", "n02012849", "n03126707")
NAMES = {"n01440764": "tench, Tinca tinca", "n02012849": "crane", "n03126707": "crane"}


def save(path, number, **options):
    """Writes a photo of one colour, chosen by `number`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"format": "JPEG", "quality": 95, **options}
    Image.new("RGB", (24, 16), (40 * number, 90, 20)).convert(options.pop("mode", "RGB")).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    """Two training photos of each class, and one validation photo of each class in a flat folder with a list."""
    root = tmp_path / "imagenet"
    for number, name in enumerate(CLASSES):
        for photo in range(2):
            save(root / "train" / name / f"{name}_{photo}.JPEG", number)
        save(root / "val" / f"ILSVRC2012_val_{9 - number:08d}.JPEG", number)
    lines = [f"ILSVRC2012_val_{9 - number:08d}.JPEG {name}" for number, name in enumerate(CLASSES)]
    (root / "val.txt").write_text("\n".join(lines))
    (root / "LOC_synset_mapping.txt").write_text("".join(f"{k} {v}\n" for k, v in NAMES.items()))
    return root


def convert(root, split, output, **options):
    spec = imagenet.imagenet_spec(str(root))
    manifest, _ = conversion.convert(imagenet.imagenet_items(str(root), split), spec, output, split, **options)
    check_records(str(output), split)
    return manifest


def test_classes_are_the_folders_and_names_differ(folder):
    spec = imagenet.imagenet_spec(str(folder))
    assert spec.class_names == ("tench, Tinca tinca", "crane (n02012849)", "crane (n03126707)")
    assert spec.category_ids == (0, 1, 2) and not any(spec.things)


@pytest.mark.parametrize("split,count", [("train", 6), ("val", 3)])
def test_folders_and_a_flat_folder_with_a_list(folder, tmp_path, split, count):
    manifest = convert(folder, split, tmp_path / "out", shards=2)
    actual = records(tmp_path / "out", split)
    assert manifest["examples"] == len(actual) == count and manifest["labels"] == "class"
    for record in actual:
        colour = decode_photo(record).numpy()[0, 0].astype(int)
        assert abs(colour[0] - 40 * int(record["image/class"])) <= 6
    assert sorted(int(record["image/id"]) for record in actual) == list(range(count))


@pytest.mark.parametrize(
    "lines",
    ["ImageId,PredictionString\na,n02012849 1 2 3 4", "a.JPEG 1", "a,n02012849"],
    ids=["Kaggle's", "index", "without suffix"],
)
def test_lists(folder, lines):
    for photo in (folder / "val").iterdir():
        photo.unlink()
    save(folder / "val" / "a.JPEG", 1)
    (folder / "val.txt").unlink()
    name = "LOC_val_solution.csv" if lines.startswith("ImageId") else "val.txt"
    (folder / name).write_text(lines)
    items, _ = imagenet.imagenet_items(str(folder), "val")
    assert [item["class"] for item in items] == [1]


def test_an_empty_folder_is_no_class_and_what_is_left_out_is_said(folder, capsys):
    imagenet.imagenet_items(str(folder), "train")
    assert capsys.readouterr().err == ""
    for name in ("empty", "notes"):
        (folder / "train" / name).mkdir()
    (folder / "train" / "notes" / "readme.txt").write_text("x")
    (folder / "train" / CLASSES[1] / "a.heic").write_text("x")
    (folder / "val" / CLASSES[2]).mkdir()  # the class has photos only in the other split
    assert imagenet.imagenet_spec(str(folder)).num_classes == len(CLASSES)
    items, _ = imagenet.imagenet_items(str(folder), "train")
    assert len(items) == 6 and {item["class"] for item in items} == {0, 1, 2}
    classes, photos = capsys.readouterr().err.splitlines()
    assert "folders without photos, which are not classes (2, first empty)" in classes
    assert f"(1, first {CLASSES[1]}/a.heic)" in photos


def without_classes(root):
    for name in ("train", "val"):
        shutil.rmtree(root / name)
    save(root / "val" / "a.JPEG", 0)


BAD = [
    (lambda root: (root / "val.txt").unlink(), "val: photos without folders of classes need .*val.txt"),
    (
        lambda root: (root / "val.txt").write_text("ILSVRC2012_val_00000009.JPEG n01440765"),
        r"val.txt:1: no class 'n01440765' \(did you mean 'n01440764'",
    ),
    (lambda root: save(root / "val" / "new.JPEG", 0), "new.JPEG: not in the list of 'val'"),
    (lambda root: (root / "val.txt").write_text("ILSVRC2012_val_00000009.JPEG"), "val.txt:1: expected 'PHOTO CLASS'"),
    (without_classes, "no split here has folders of classes"),
]


@pytest.mark.parametrize("damage,words", BAD, ids=[words for _, words in BAD])
def test_wrong_input_is_named(folder, damage, words):
    damage(folder)
    with pytest.raises(InputError, match=words):
        imagenet.imagenet_items(str(folder), "val")
