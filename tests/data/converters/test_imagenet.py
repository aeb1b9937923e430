"""Conversion of folders of folders, and of ImageNet as tensorflow-datasets has it."""

import io

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from axial.data import tfrecord
from axial.data.convert import convert_split, encode_item
from axial.data.converters import imagenet
from axial.data.files import load_photo
from axial.data.streams import check_records, decode_photo
from axial.errors import InputError
from axial.tasks.classification.feed import ClassificationData, evaluation_photo, training_crop

CLASSES = ("n01440764", "n02012849", "n03126707")
NAMES = {"n01440764": "tench, Tinca tinca", "n02012849": "crane", "n03126707": "crane"}


def save(path, number, **options):
    """A photo of one colour, which `number` decides."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"format": "JPEG", "quality": 95, **options}
    Image.new("RGB", (24, 16), (40 * number, 90, 20)).convert(options.pop("mode", "RGB")).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    """Two photos of each class for training, and one of each for validation, in one folder with a list."""
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
    items, source = imagenet.imagenet_items(str(root), split)
    options = {"output_dir": str(output), "source": source, "progress": False, **options}
    manifest, _ = convert_split(items, encode_item, imagenet.imagenet_spec(str(root)), split, **options)
    check_records(str(output), split)
    return manifest


def records(output, split):
    manifest = tfrecord.read_manifest(str(output), split)
    dataset = tf.data.TFRecordDataset(tfrecord.shard_paths(str(output), manifest))
    return [tfrecord.parse_example(record, manifest["labels"]) for record in dataset]


def test_classes_are_the_folders_and_names_differ(folder):
    spec = imagenet.imagenet_spec(str(folder))
    assert spec.class_names == ("tench, Tinca tinca", "crane (n02012849)", "crane (n03126707)")
    assert spec.category_ids == (0, 1, 2) and not any(spec.things)


@pytest.mark.parametrize("split,count", [("train", 6), ("val", 3)])
def test_folders_and_a_flat_folder_with_a_list(folder, tmp_path, split, count):
    manifest = convert(folder, split, tmp_path / "out", shards=2)
    found = records(tmp_path / "out", split)
    assert manifest["examples"] == len(found) == count and manifest["labels"] == "class"
    for record in found:
        colour = decode_photo(record).numpy()[0, 0].astype(int)
        assert abs(colour[0] - 40 * int(record["image/class"])) <= 6
    assert sorted(int(record["image/id"]) for record in found) == list(range(count))


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


@pytest.mark.parametrize("options", [dict(mode="CMYK"), dict(format="PNG"), dict(mode="L")], ids=str)
def test_photos_that_imagenet_has(folder, tmp_path, options):
    """CMYK photos, PNG files called JPEG, and grey photos."""
    options.pop("quality", None)
    save(folder / "train" / CLASSES[0] / "odd.JPEG", 3, **options)
    convert(folder, "train", tmp_path / "out")
    (record,) = (r for r in records(tmp_path / "out", "train") if r["image/file_name"] == b"odd.JPEG")
    assert decode_photo(record).shape == (16, 24, 3)


def test_photos_are_trained_and_evaluated_on_upright(folder, tmp_path):
    """As axial-predict shows them. Their bytes stay as they are."""
    upright = np.zeros([24, 16, 3], np.uint8)
    upright[:12] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    path = folder / "train" / CLASSES[0] / "phone.JPEG"
    Image.fromarray(np.rot90(upright)).save(path, exif=exif, quality=95)
    convert(folder, "train", tmp_path / "out")
    (record,) = (r for r in records(tmp_path / "out", "train") if r["image/file_name"] == b"phone.JPEG")
    assert record["image/encoded"].numpy() == path.read_bytes() and int(record["image/height"]) == 24
    np.testing.assert_array_equal(decode_photo(record), load_photo(str(path)))
    data = ClassificationData("train", "val", (24, 16), area=(1, 1), aspect=(2 / 3, 2 / 3), flip=False)
    for image in (training_crop(record, [0, 0], data)["image"], evaluation_photo(record, (24, 16), 1.0)["image"]):
        assert image[:10].numpy().min() > 0.7 and image[14:].numpy().max() < -0.7
    check_records(str(tmp_path / "out"), "train")


def test_records_are_as_large_as_the_files(folder, tmp_path):
    rng = np.random.default_rng(0)
    for path in (folder / "train").rglob("*.JPEG"):
        Image.fromarray(rng.integers(0, 256, [160, 200, 3], np.uint8)).save(path, quality=90)
    manifest = convert(folder, "train", tmp_path / "out")
    files = sum(path.stat().st_size for path in (folder / "train").rglob("*.JPEG"))
    assert sum(size for *_, size in manifest["shards"]) < 1.05 * files


def test_an_empty_folder_is_no_class_and_what_is_left_out_is_said(folder, capsys):
    imagenet.imagenet_items(str(folder), "train")
    assert capsys.readouterr().err == ""
    for name in ("empty", "notes"):
        (folder / "train" / name).mkdir()
    (folder / "train" / "notes" / "readme.txt").write_text("x")
    (folder / "train" / CLASSES[1] / "a.heic").write_text("x")
    (folder / "val" / CLASSES[2]).mkdir()  # it has photos in the other split
    assert imagenet.class_folders(str(folder)) == list(CLASSES)
    items, _ = imagenet.imagenet_items(str(folder), "train")
    assert len(items) == 6 and {item["class"] for item in items} == {0, 1, 2}
    classes, photos = capsys.readouterr().err.splitlines()
    assert "folders without photos, which are no classes (2, first empty)" in classes
    assert f"(1, first {CLASSES[1]}/a.heic)" in photos


def test_a_thousand_classes_with_a_photo_each(tmp_path):
    for number in range(1000):
        save(tmp_path / "many" / "train" / f"n{number:08d}" / "one.JPEG", 1)
    manifest = convert(tmp_path / "many", "train", tmp_path / "out")
    assert manifest["examples"] == 1000 and len(manifest["spec"]["class_names"]) == 1000


def no_list(root):
    (root / "val.txt").unlink()


def unknown_class(root):
    (root / "val.txt").write_text("ILSVRC2012_val_00000009.JPEG n01440765")


def unlisted(root):
    save(root / "val" / "new.JPEG", 0)


def no_class(root):
    (root / "val.txt").write_text("ILSVRC2012_val_00000009.JPEG")


@pytest.mark.parametrize(
    "spoil,message",
    [
        (no_list, "val: photos without folders of classes need .*val.txt"),
        (unknown_class, r"val.txt:1: no class 'n01440765' \(did you mean 'n01440764'"),
        (unlisted, "new.JPEG: not in the list of 'val'"),
        (no_class, "val.txt:1: expected 'PHOTO CLASS'"),
    ],
)
def test_what_is_refused(folder, spoil, message):
    spoil(folder)
    with pytest.raises(InputError, match=message):
        imagenet.imagenet_items(str(folder), "val")


def test_a_folder_without_classes_is_refused(tmp_path):
    save(tmp_path / "photos" / "train" / "a.JPEG", 0)
    with pytest.raises(InputError, match="no split here has folders of classes"):
        imagenet.imagenet_spec(str(tmp_path / "photos"))


class Imagenet2012(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The published builder's features, on three photos in place of its archives."""

    VERSION = tfds.core.Version("5.1.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=CLASSES),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number, name in reversed(list(enumerate(CLASSES))):
            data = io.BytesIO()
            Image.new("RGB", (24, 16), (40 * number, 90, 20)).save(data, "JPEG")
            data.seek(0)
            yield name, {"image": data, "label": name, "file_name": f"{name}_0.JPEG"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    Imagenet2012(data_dir=str(root)).download_and_prepare()
    return root


def test_tensorflow_datasets(prepared, tmp_path):
    items, source = imagenet.tfds_items(str(prepared), "train")
    spec = imagenet.tfds_spec(str(prepared))
    output = tmp_path / "out"
    convert_split(items, encode_item, spec, "train", output_dir=str(output), source=source, progress=False)
    found = records(output, "train")
    labels = {r["image/file_name"].numpy().decode(): spec.class_names[int(r["image/class"])] for r in found}
    assert labels == {f"{name}_0.JPEG": name for name in CLASSES}


def test_splits_that_tensorflow_datasets_has_not(prepared, tmp_path):
    with pytest.raises(InputError, match="imagenet2012: not prepared; run tfds build"):
        imagenet.tfds_items(str(tmp_path), "train")
    with pytest.raises(InputError, match="not prepared"):
        imagenet.tfds_items(str(prepared), "val")
    with pytest.raises(InputError, match="--split=valid: one of train, val"):
        imagenet.tfds_items(str(prepared), "valid")
