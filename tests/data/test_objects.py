"""The objects that a training measures equal the objects in the label images."""

import os

import numpy as np
import pytest
from PIL import Image

from axial.data.converters.nuclei import SAMPLE_DIR, nuclei_data_dir
from axial.data.objects import objects_of, read_objects
from axial.errors import InputError


def test_sizes_and_grey_levels_are_those_of_the_labels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    diameters, levels = [], []
    for name in sorted(os.listdir(f"{SAMPLE_DIR}/test/photos")):
        instances = np.asarray(Image.open(f"{SAMPLE_DIR}/test/instance/{name}"))
        areas = [np.count_nonzero(instances == i) for i in np.unique(instances[instances > 0])]
        diameters += [2 * (area / np.pi) ** 0.5 for area in areas]
        photo = np.asarray(Image.open(f"{SAMPLE_DIR}/test/photos/{name}").convert("RGB"), float)
        levels.append(np.median(photo.sum(-1) / 3))
    actual = objects_of(nuclei_data_dir(), "test")
    assert (actual.photos, actual.objects) == (33, len(diameters))
    for ranges, values in ((actual.diameter, diameters), (actual.level, levels)):
        np.testing.assert_allclose(ranges, np.percentile(values, [5, 50, 95]), atol=0.006)


def test_data_without_segments_has_none(colours_dir, tmp_path):
    assert objects_of(colours_dir, "train") is None and read_objects(str(tmp_path)) is None
    (tmp_path / "objects.json").write_text('{"photos": 1, "objects": 1, "diameter": [1, 0, 3], "level": [0, 0, 0]}')
    with pytest.raises(InputError, match=r"objects.json: .*diameter"):
        read_objects(str(tmp_path))
