"""coco/2017_panoptic of tensorflow-datasets gives the same records as COCO's own files."""

import json
import os
import shutil

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.object_detection import coco as tfds_coco

from axial.data.convert import convert_split, encode_item
from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.converters.coco_tfds import record_fields, tfds_items
from axial.data.specs import COCO
from axial.data.streams import check_records
from axial.errors import InputError
from axial.tasks.detection.feed import DetectionData, evaluation_photos, training_batches
from axial.tasks.segmentation.feed import evaluation_dataset
from tests.data.coco_fixture import CocoFolder, stripes


class Coco(tfds_coco.Coco, skip_registration=True):
    """The published builder, on the sample photos in place of a download."""

    BUILDER_CONFIGS = tuple(config for config in tfds_coco.Coco.BUILDER_CONFIGS if config.name == "2017_panoptic")

    def _split_generators(self, dl_manager):
        return [
            tfds.core.SplitGenerator(
                name=split.name,
                gen_kwargs=dict(
                    image_dir=SAMPLE_DIR,
                    annotation_dir=SAMPLE_DIR,
                    split_name=split.images,
                    annotation_type=split.annotation_type,
                    panoptic_dir=os.path.join(SAMPLE_DIR, "annotations", f"panoptic_{split.images}"),
                ),
            )
            for split in self.builder_config.splits
        ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tfds"))
    Coco(config="2017_panoptic", data_dir=path).download_and_prepare()
    return path


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_records_are_those_of_cocos_own_files(prepared, tmp_path, split):
    items, source = coco_items(SAMPLE_DIR, split)
    convert_split(items, encode_item, COCO, split, output_dir=str(tmp_path / "files"), source=source, progress=False)
    items, source = tfds_items(prepared, split)
    convert_split(items, encode_item, COCO, split, output_dir=str(tmp_path / "tfds"), source=source, progress=False)
    shards = sorted(p.name for p in (tmp_path / "files").glob("*.tfrecord"))
    assert shards and shards == sorted(p.name for p in (tmp_path / "tfds").glob("*.tfrecord"))
    for name in shards:
        assert (tmp_path / "files" / name).read_bytes() == (tmp_path / "tfds" / name).read_bytes()


def test_splits_and_folders_that_are_not_there(prepared, tmp_path):
    with pytest.raises(InputError, match="did you mean 'train2017'"):
        tfds_items(prepared, "train2018")
    with pytest.raises(InputError, match="not prepared; run tfds build"):
        tfds_items(str(tmp_path), "train2017")


@pytest.mark.parametrize("left", [3, 11, 40], ids=["in the length", "in its checksum", "in the data"])
def test_a_shard_that_is_cut_short_is_named(prepared, tmp_path, left):
    """The second record of the shard is cut after some bytes."""
    shutil.copytree(prepared, tmp_path / "tfds")
    [shard] = (tmp_path / "tfds").rglob("*validation.tfrecord*")
    (offset, length), _ = next(record_fields(str(shard), ("image/id",)))
    second = offset + length + 4
    shard.write_bytes(shard.read_bytes()[: second + left])
    words = f"{shard.name}: {second + left} bytes end within the record at byte {second}"
    with pytest.raises(InputError, match=words):
        tfds_items(str(tmp_path / "tfds"), "val2017")


def test_a_record_without_a_feature_is_named(tmp_path):
    path = str(tmp_path / "records")
    example = tf.train.Example()
    example.features.feature["image/id"].int64_list.value.append(7)
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(example.SerializeToString())
    with pytest.raises(InputError, match="the record at byte 0 does not have image/id and image/filename; prepare"):
        next(record_fields(path, ("image/id", "image/filename")))


class Boxes(tfds_coco.Coco, skip_registration=True):
    """The published builder of boxes, on a made-up folder in place of a download."""

    name = "coco"
    BUILDER_CONFIGS = tuple(config for config in tfds_coco.Coco.BUILDER_CONFIGS if config.name == "2017")

    def _split_generators(self, dl_manager):
        place = dict(image_dir=self.folder, annotation_dir=self.folder, panoptic_dir=None)
        place |= dict(split_name="val2017", annotation_type="bboxes")
        return [tfds.core.SplitGenerator(name="validation", gen_kwargs=place)]


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
    builder = Boxes(config="2017", data_dir=str(root / "tfds"))
    builder.folder = str(folder.root)
    builder.download_and_prepare()
    return str(folder.root), str(root / "tfds")


def test_boxes_and_crowds_are_those_of_cocos_own_files(boxed, tmp_path):
    """They are of Faster R-CNN only: a task of segments, and Mask R-CNN, refuse them in one line."""
    found = []
    for name, (items, source) in (("own", coco_items(boxed[0], "val2017")), ("tfds", tfds_items(boxed[1], "val2017"))):
        options = dict(output_dir=str(tmp_path / name), source=source, progress=False)
        convert_split(items, encode_item, COCO, "val2017", **options)
        photos = evaluation_photos(str(tmp_path / name), "val2017", COCO, (64, 64))
        keys = ("image/id", "object/class", "object/crowd", "object/box", "object/area", "size")
        found.append([{key: photo[key].numpy().tolist() for key in keys} for photo in photos])
        check_records(str(tmp_path / name), "val2017")
    assert found[0] == found[1] and [len(photo["object/crowd"]) for photo in found[0]].count(3) == 1
    data = DetectionData("val2017", "val2017", (64, 96), (64, 128), boxes=4)
    batch = next(iter(training_batches(str(tmp_path / "tfds"), data, COCO, batch=3)))
    assert (batch["classes"].numpy() > 0).sum() == 3
    with pytest.raises(InputError, match="'val2017' has boxes without masks: for Faster R-CNN"):
        training_batches(str(tmp_path / "tfds"), data, COCO, batch=3, masks=True)
    with pytest.raises(InputError, match="records with 'objects' labels; expected 'panoptic'"):
        evaluation_dataset(str(tmp_path / "tfds"), "val2017", COCO, (65, 65))


def test_panoptic_records_get_the_boxes_if_both_are_prepared(prepared, boxed, tmp_path):
    shutil.copytree(prepared, tmp_path / "tfds")
    shutil.copytree(os.path.join(boxed[1], "coco", "2017"), tmp_path / "tfds" / "coco" / "2017")
    with pytest.raises(InputError, match="image 1 is only in one of coco/2017_panoptic and coco/2017"):
        tfds_items(str(tmp_path / "tfds"), "val2017")
