"""Data sets that tensorflow-datasets has prepared give the records of their own files."""

import io
import json
import os
import shutil

import pytest
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.object_detection import coco as tfds_coco
from tensorflow_datasets.translate import wmt14

from axial.data.converters import imagenet, text, wmt14_tfds
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.converters.coco_tfds import record_fields, tfds_items
from axial.data.specs import COCO
from axial.data.streams import check_records
from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.detection.evaluation import DETECTION
from axial.tasks.detection.feed import DetectionData
from axial.tasks.detection.task import DetectionTask
from axial.tasks.segmentation.evaluation import PANOPTIC
from tests.data.coco_fixture import CocoFolder, stripes
from tests.data.conversion import convert, records
from tests.data.text_fixture import write_pairs

# === COCO ===


class Coco(tfds_coco.Coco, skip_registration=True):
    """The published builder, on the validation split of a folder in COCO's layout in place of a download."""

    name = "coco"

    def _split_generators(self, dl_manager):
        panoptic = os.path.join(self.folder, "annotations", "panoptic_val2017")
        place = dict(image_dir=self.folder, annotation_dir=self.folder, panoptic_dir=panoptic)
        kind = "panoptic" if "panoptic" in self.builder_config.name else "bboxes"
        place |= dict(split_name="val2017", annotation_type=kind)
        return [tfds.core.SplitGenerator(name="validation", gen_kwargs=place)]


def prepare(config, folder, data_dir):
    builder = Coco(config=config, data_dir=str(data_dir))
    builder.folder = str(folder)
    builder.download_and_prepare()
    return str(data_dir)


@pytest.fixture(scope="module")
def panoptic(tmp_path_factory):
    """tensorflow-datasets' folder of the sample photos."""
    return prepare("2017_panoptic", SAMPLE_DIR, tmp_path_factory.mktemp("tfds"))


@pytest.fixture(scope="module")
def boxed(tmp_path_factory):
    """(COCO's own folder, tensorflow-datasets' folder) of three photos with four objects, one of them a crowd."""
    root = tmp_path_factory.mktemp("boxes")
    folder = CocoFolder(root / "coco", "val2017")
    for image in (1, 2, 3):
        folder.add(image, stripes(64, 96, [7, 8]), {7: 1, 8: 187})
    rows = [
        (1, 1, 1, [8.25, 4.13, 15.57, 16.01], 0),
        (2, 1, 18, [40.33, 30.0, 20.2, 10.77], 0),
        (3, 1, 1, [0, 0, 10, 64], 1),
        (4, 3, 18, [5, 5, 90.99, 50.01], 0),
    ]
    names = ("id", "image_id", "category_id", "bbox", "iscrowd")
    objects = [{**dict(zip(names, row)), "area": 10 * row[0]} for row in rows]
    categories = [{"id": i, "name": COCO.class_names[COCO.class_index(i)]} for i in COCO.category_ids[:80]]
    content = {"images": folder.content["images"], "annotations": objects, "categories": categories}
    (folder.json.parent / "instances_val2017.json").write_text(json.dumps(content))
    return str(folder.root), prepare("2017", folder.root, root / "tfds")


def test_records_are_those_of_cocos_own_files(panoptic, tmp_path):
    convert(coco_items(SAMPLE_DIR, "val2017"), COCO, tmp_path / "files", "val2017")
    convert(tfds_items(panoptic, "val2017"), COCO, tmp_path / "tfds", "val2017")
    (shard,) = (tmp_path / "files").glob("*.tfrecord")
    assert shard.read_bytes() == (tmp_path / "tfds" / shard.name).read_bytes()


def test_boxes_and_crowds_are_those_of_cocos_own_files(boxed, tmp_path):
    """They are of Faster R-CNN only: a task of segments, and Mask R-CNN, refuse them in one line."""
    found = []
    for name, listed in (("own", coco_items(boxed[0], "val2017")), ("tfds", tfds_items(boxed[1], "val2017"))):
        convert(listed, COCO, tmp_path / name, "val2017")
        photos = DETECTION.examples(str(tmp_path / name), "val2017", COCO)
        keys = ("image/id", "object/class", "object/crowd", "object/box", "object/area", "size")
        found.append([{key: photo[key].numpy().tolist() for key in keys} for photo in photos])
        check_records(str(tmp_path / name), "val2017")
    assert found[0] == found[1] and [len(photo["object/crowd"]) for photo in found[0]].count(3) == 1
    data = DetectionData("val2017", "val2017", (64, 96), (64, 128), boxes=4)
    tasks = [
        DetectionTask(ModelConfig(name), data, str(tmp_path / "tfds"))
        for name in ("faster_rcnn_resnet_nano", "mask_rcnn_resnet_nano")
    ]
    batch = next(iter(tasks[0].train_dataset(3, seed=0)))
    assert (batch["classes"].numpy() > 0).sum() == 3
    with pytest.raises(InputError, match="'val2017' has boxes without masks: for Faster R-CNN"):
        tasks[1].train_dataset(3, seed=0)
    with pytest.raises(InputError, match="records with 'objects' labels; expected 'panoptic'"):
        PANOPTIC.examples(str(tmp_path / "tfds"), "val2017", COCO)


def test_folders_that_do_not_have_the_split_are_named(panoptic, boxed, tmp_path):
    with pytest.raises(InputError, match="did you mean 'val2017'"):
        tfds_items(panoptic, "val2018")
    with pytest.raises(InputError, match="not prepared; run tfds build"):
        tfds_items(str(tmp_path), "val2017")
    shutil.copytree(panoptic, tmp_path / "tfds")
    shutil.copytree(os.path.join(boxed[1], "coco", "2017"), tmp_path / "tfds" / "coco" / "2017")
    with pytest.raises(InputError, match="image 1 is only in one of coco/2017_panoptic and coco/2017"):
        tfds_items(str(tmp_path / "tfds"), "val2017")


def test_a_shard_that_is_cut_short_is_named(panoptic, tmp_path):
    shutil.copytree(panoptic, tmp_path / "tfds")
    [shard] = (tmp_path / "tfds").rglob("*validation.tfrecord*")
    (offset, length), _ = next(record_fields(str(shard), ("image/id",)))
    second = offset + length + 4
    shard.write_bytes(shard.read_bytes()[: second + 40])
    words = f"{shard.name}: {second + 40} bytes end within the record at byte {second}"
    with pytest.raises(InputError, match=words):
        tfds_items(str(tmp_path / "tfds"), "val2017")


# === ImageNet ===

CLASSES = ("n01440764", "n02012849", "n03126707")


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


def test_imagenet(tmp_path):
    prepared = str(tmp_path / "tfds")
    Imagenet2012(data_dir=prepared).download_and_prepare()
    spec = imagenet.tfds_spec(prepared)
    convert(imagenet.tfds_items(prepared, "train"), spec, tmp_path / "out", "train")
    found = records(tmp_path / "out", "train")
    labels = {r["image/file_name"].numpy().decode(): spec.class_names[int(r["image/class"])] for r in found}
    assert labels == {f"{name}_0.JPEG": name for name in CLASSES}
    for data_dir, split, words in (
        (str(tmp_path), "train", "imagenet2012: not prepared; run tfds build"),
        (prepared, "val", "not prepared"),
        (prepared, "valid", "--split=valid: one of train, val"),
    ):
        with pytest.raises(InputError, match=words):
            imagenet.tfds_items(data_dir, split)


# === WMT14 ===

SIZES = {"train": 96, "newstest2013": 7, "newstest2014": 5}


class Wmt14Translate(wmt14.Wmt14Translate, skip_registration=True):
    """The published builder, on made-up sentences in place of its archives."""

    BUILDER_CONFIGS = tuple(one for one in wmt14.Wmt14Translate.BUILDER_CONFIGS if one.name == "de-en")

    def _split_generators(self, dl_manager):
        return {theirs: self._generate_examples(ours) for ours, theirs in wmt14_tfds.SPLITS.items()}

    def _generate_examples(self, split):
        pairs, *_ = text.read_pairs(self.texts, split, ("en", "de"))
        yield from ((number, {"en": source, "de": target}) for number, source, target in pairs)
        yield len(pairs), {"en": "alone", "de": " "}


def test_sentence_pairs_are_those_of_text_files(tmp_path):
    """In either direction, with the same bytes each time. What is not prepared is named."""
    for split, count in SIZES.items():
        write_pairs(tmp_path, split, count, seed=count)
    prepared = str(tmp_path / "tfds")
    builder = Wmt14Translate(config="de-en", data_dir=prepared)
    builder.texts = str(tmp_path)
    builder.download_and_prepare()
    for languages in (("en", "de"), ("de", "en")):
        for split in SIZES:
            own, *_ = text.read_pairs(str(tmp_path), split, languages)
            found, empty, digest = wmt14_tfds.read_pairs(prepared, split, languages)
            assert sorted(pair for _, *pair in found) == sorted(pair for _, *pair in own) and empty == 1
            assert wmt14_tfds.read_pairs(prepared, split, languages) == (found, empty, digest)
    for split, languages, words in (
        ("newstest2012", ("en", "de"), "--split=newstest2012: one of train, newstest2013, newstest2014"),
        ("train", ("fr", "de"), "--languages=fr,de: expected en and one other"),
        ("train", ("en", "fr"), "fr-en: not prepared; run tfds build wmt14_translate/fr-en --data_dir="),
    ):
        with pytest.raises(InputError, match=words):
            wmt14_tfds.read_pairs(prepared, split, languages)
