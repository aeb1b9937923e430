"""A converted data set of sentence pairs: each target is its source, spelt backwards."""

import numpy as np
import pytest

from axial.data.convert import Conversion, convert_split
from axial.data.converters import text

WORDS = ("green", "bird", "sings", "two", "dogs", "run", "snow", "child", "über", "Straße", "rope-ladder", "mountain")
SIZE = 64  # number of pieces in the vocabulary


def write_pairs(folder, split, count, seed):
    """Writes SPLIT.en and SPLIT.de with sentences of one to nine words."""
    rng = np.random.default_rng(seed)
    sources = [" ".join(rng.choice(WORDS, rng.integers(1, 10))) for _ in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.en").write_text("\n".join(sources) + "\n", "utf-8")
    (folder / f"{split}.de").write_text("\n".join(line[::-1] for line in sources) + "\n", "utf-8")


def convert_texts(folder, output, splits=("train", "val")):
    """Converts the splits of a folder, with the first split's vocabulary."""
    pairs = {split: text.read_pairs(str(folder), split, ("en", "de")) for split in splits}
    model = text.find_vocabulary(str(output), None, lambda: pairs[splits[0]], SIZE)
    spec = text.text_spec("mirror", ("en", "de"), model)
    for split, (rows, _, digest) in pairs.items():
        listed, encode = (text.pair_items(rows, spec), digest), text.encode_pair
        convert_split(Conversion(*listed, spec, split, str(output), shards=2, encode=encode, progress=False))
    return spec


@pytest.fixture(scope="session")
def texts_dir(tmp_path_factory):
    """A data set with 96 training pairs and 7 validation pairs."""
    root = tmp_path_factory.mktemp("texts")
    for split, count in (("train", 96), ("val", 7)):
        write_pairs(root / "texts", split, count, seed=count)
    convert_texts(root / "texts", root / "data")
    return str(root / "data")
