"""coco/2017_panoptic of tensorflow-datasets gives the same records as COCO's own files."""

import os
import shutil

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.object_detection import coco as tfds_coco

from axial.data.coco import SAMPLE_DIR, coco_items
from axial.data.coco_tfds import record_places, tfds_items
from axial.data.convert import convert_split, encode_item
from axial.data.specs import COCO
from axial.errors import InputError


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
    offset, length = next(record_places(str(shard)))
    second = offset + length + 4
    shard.write_bytes(shard.read_bytes()[: second + left])
    words = f"{shard.name}: {second + left} bytes end within the record at byte {second}"
    with pytest.raises(InputError, match=words):
        tfds_items(str(tmp_path / "tfds"), "val2017")
