"""A data set that tensorflow-datasets prepared gives the same records as the data set's original files."""

import os
import shutil

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.object_detection import coco as tfds_coco

from axial.data.converters.coco import SAMPLE_DIR, coco_items
from axial.data.converters.coco_tfds import coco_tfds_items, record_fields
from axial.data.specs import COCO
from axial.errors import InputError
from tests.data.conversion import convert


class Coco(tfds_coco.Coco, skip_registration=True):
    """The published builder, which reads the sample's validation split instead of a download."""

    name = "coco"

    def _split_generators(self, dl_manager):
        paths = dict(image_dir=SAMPLE_DIR, annotation_dir=SAMPLE_DIR, split_name="val2017", annotation_type="panoptic")
        paths["panoptic_dir"] = os.path.join(SAMPLE_DIR, "annotations", "panoptic_val2017")
        return [tfds.core.SplitGenerator(name="validation", gen_kwargs=paths)]


@pytest.fixture(scope="module")
def panoptic(tmp_path_factory):
    """The folder that tensorflow-datasets prepares from the sample photos."""
    data_dir = str(tmp_path_factory.mktemp("tfds"))
    Coco(config="2017_panoptic", data_dir=data_dir).download_and_prepare()
    return data_dir


def test_records_are_those_of_cocos_own_files(panoptic, tmp_path):
    convert(coco_items(SAMPLE_DIR, "val2017"), COCO, tmp_path / "files", "val2017")
    convert(coco_tfds_items(panoptic, "val2017"), COCO, tmp_path / "tfds", "val2017")
    (shard,) = (tmp_path / "files").glob("*.tfrecord")
    assert shard.read_bytes() == (tmp_path / "tfds" / shard.name).read_bytes()


def test_folders_that_do_not_have_the_split_are_named(panoptic, tmp_path):
    with pytest.raises(InputError, match="did you mean 'val2017'"):
        coco_tfds_items(panoptic, "val2018")
    with pytest.raises(InputError, match="not prepared; run tfds build"):
        coco_tfds_items(str(tmp_path), "val2017")


def test_a_shard_that_is_cut_short_is_named(panoptic, tmp_path):
    shutil.copytree(panoptic, tmp_path / "tfds")
    [shard] = (tmp_path / "tfds").rglob("*validation.tfrecord*")
    (offset, length), _ = next(record_fields(str(shard), ("image/id",)))
    second = offset + length + 4
    shard.write_bytes(shard.read_bytes()[: second + 40])
    with pytest.raises(InputError, match=f"{shard.name}: the record at byte {second} is damaged"):
        coco_tfds_items(str(tmp_path / "tfds"), "val2017")
