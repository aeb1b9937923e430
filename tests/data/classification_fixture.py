"""A converted classification data set of three colours."""

import numpy as np
import pytest
from PIL import Image

from axial.data.convert import Conversion, convert_split
from axial.data.converters import imagenet

COLOURS = {"blue": (20, 40, 220), "green": (30, 200, 60), "red": (220, 30, 20)}


@pytest.fixture(scope="session")
def colours_dir(tmp_path_factory):
    """Data set with eight training and two validation photos per class, with random sizes and noise."""
    root, rng = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for name, colour in COLOURS.items():
            for number in range(count):
                path = root / "photos" / split / name / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = rng.integers(-20, 20, [*rng.integers(30, 60, 2), 3])
                Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8)).save(path)
    spec = imagenet.imagenet_spec(str(root / "photos"))
    for split in ("train", "val"):
        listed = imagenet.imagenet_items(str(root / "photos"), split)
        convert_split(Conversion(*listed, spec, split, str(root / "data"), progress=False))
    return str(root / "data")
