"""From converted weights to other classes, and from photos of classes to street frames."""

import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from axial.layers.batch_norm import BatchNormConfig
from axial.models.registry import build_model
from axial.weights import convert
from axial.weights.names import weight_names
from tests.conftest import DATA, randomize

CAMVID = ("--gin_file=camvid/axial_deeplab_nano.gin",)
NORM = BatchNormConfig(momentum=0.9, epsilon=1e-3)


def need(*names):
    for name in names:
        if not (DATA / name).is_dir():
            pytest.skip(f"needs the photos in {DATA / name}; set AXIAL_DATA")


@pytest.fixture(scope="module")
def frames(command, tmp_path_factory):
    """Four frames of CamVid, converted; the same ones for training and validation."""
    need("camvid")
    root = tmp_path_factory.mktemp("frames")
    for split in ("train", "val"):
        for photo in sorted((DATA / "camvid" / "leftImg8bit" / "train").rglob("*.jpg"))[:4]:
            name = photo.name.removesuffix("_leftImg8bit.jpg")
            for file in (photo, *(DATA / "camvid" / "gtFine" / "train").rglob(f"{name}_gtFine_*.png")):
                kind, _, city = file.relative_to(DATA / "camvid").parts[:3]
                (root / "in" / kind / split / city).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, root / "in" / kind / split / city)
    flags = ("--spec=camvid", "--partial", "--split=train", "--split=val")
    result = command("convert", "cityscapes", *flags, f"--input_dir={root}/in", f"--output_dir={root}/data")
    assert result.code == 0, result.err
    return root / "data"


def twin(path, name):
    """A `Conversion` of random weights of a small Axial-DeepLab for Cityscapes."""
    model = build_model("axial_deeplab_nano", 19, NORM, span=17)
    model(tf.zeros([1, 33, 33, 3]))
    randomize(model)
    values = {name: weight.numpy() for name, weight in weight_names(model).items()}
    return convert.Conversion("axial_deeplab_nano", 19, {"span": 17}, NORM, values)


def test_cityscapes_weights_on_the_classes_of_camvid(command, frames, tmp_path, monkeypatch):
    """At a learning rate of 0 the run keeps what it has taken: everything but the last layer of the classes."""
    monkeypatch.setitem(convert.SOURCES, "ours", twin)
    (tmp_path / "file").write_bytes(b"")
    weights, run = tmp_path / "weights", tmp_path / "run"
    convert.convert("ours", str(tmp_path / "file"), str(weights))
    files = (*CAMVID, f"--gin_file={weights}/model.gin", f"--gin_binding=INIT = '{weights}'")
    small = "STEPS = 1", "BATCH = 1", "CANVAS = (65, 65)", "LEARNING_RATE = 0", "WARMUP = 0"
    small += "TrainingConfig.eval_interval = 0", "TrainingConfig.steps_per_loop = 1"
    bindings = [f"--gin_binding={binding}" for binding in small]
    result = command("train", *files, *bindings, f"--data_dir={frames}", f"--model_dir={run}")
    assert result.code == 0, result.err
    lines = [line for line in result.err.splitlines() if line.startswith(("init_checkpoint", "  "))]
    assert lines[0] == f"init_checkpoint: {weights}/ckpt-1" and len(lines) == 3
    assert re.search(r"2 of another shape \(.* 11\] here, .* 19\] there\): semantic_head/logits$", lines[2])
    before, after = (tf.train.load_checkpoint(f"{folder}/ckpt-1") for folder in (weights, run))
    names = [n for n in before.get_variable_to_shape_map() if n.startswith("model/") and "moving" not in n]
    kept = [n for n in names if "semantic_head/logits" not in n]
    assert len(kept) == len(names) - 2 > 100
    for name in kept:
        np.testing.assert_array_equal(after.get_tensor(name), before.get_tensor(name), name)
