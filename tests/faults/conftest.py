"""The folder whose files the fault campaigns use and damage."""

import os
import shutil

import pytest

from axial.data.converters.coco import SAMPLE_DIR


@pytest.fixture(scope="session")
def whole(command, sample_dir, tmp_path_factory):
    """A folder with a data set, a tiny run, its export and two photos."""
    tiny = "--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin"
    root = tmp_path_factory.mktemp("whole")
    shutil.copytree(sample_dir, root / "data")
    assert command("train", *tiny, f"--data_dir={root}/data", f"--model_dir={root}/run").code == 0
    assert command("export", f"--model_dir={root}/run", f"--output_dir={root}/export").code == 0
    (root / "photos").mkdir()
    for name in ("000000000285.jpg", "000000000785.jpg"):
        shutil.copy(os.path.join(SAMPLE_DIR, "val2017", name), root / "photos")
    return root
