"""Every leaf of experiments/ builds its task, names itself in its header, and keeps the published protocol."""

import os

import pytest

from axial.cli import configuration

ROOT = configuration.experiments_dir()
PARTS = ("runs", "models", "data", "tiny")
LEAVES = sorted(
    os.path.relpath(os.path.join(folder, name), ROOT)
    for folder, _, names in os.walk(ROOT)
    for name in names
    if name.endswith(".gin") and os.path.relpath(folder, ROOT) not in PARTS
)


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_build(leaf, sample_dir):
    splits = ["TRAIN_SPLIT = 'train2017'", "EVAL_SPLIT = 'val2017'"]
    configuration.load([leaf], splits)
    task, training, optimizer = configuration.build(data_dir=sample_dir)
    text = open(os.path.join(ROOT, leaf)).read()
    header = text.split("\n\n")[0]
    assert leaf == "sample/overfit.gin" or f"--gin_file={leaf} " in header
    assert all(side % 16 == 1 for side in (*task.canvas, *task.crop))
    assert training.steps > 0 and training.init_checkpoint is None and optimizer.decay == 0
    configuration.load([leaf, "tiny/panoptic.gin"], splits)
    task, training, _ = configuration.build(data_dir=sample_dir)
    assert task.crop == task.canvas == (65, 65) and training.steps == 1


# What Panoptic-DeepLab and the paper state: canvas, crop, batch, steps, least area of stuff.
PUBLISHED = {
    "coco": ((1025, 1025), (1025, 1025), 64, 200000, 4096),
    "cityscapes": ((1025, 2049), (1025, 2049), 32, 60000, 2048),
    "mapillary": ((2177, 2177), (1025, 1025), 64, 150000, 4096),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_protocols_are_the_published_ones(name, sample_dir):
    configuration.load([f"{name}/axial_deeplab_l.gin"], ["TRAIN_SPLIT = 'train2017'"])
    task, training, _ = configuration.build(data_dir=sample_dir)
    found = (task.canvas, task.crop, training.batch, training.steps, task.grouping.stuff_area)
    assert found == PUBLISHED[name]
    assert task.augmentation.scales == (0.5, 2.0) and task.augmentation.flip
    grouping = task.grouping
    assert (grouping.center_threshold, grouping.nms_kernel, grouping.top_k) == (0.1, 7, 200)
    assert "LEARNING_RATE = 0.001\n" in open(os.path.join(ROOT, name, "axial_deeplab_l.gin")).read()


def test_init_is_a_macro(sample_dir):
    configuration.load(["sample/overfit.gin"], ["INIT = '/some/run'"])
    assert configuration.build(data_dir=sample_dir)[1].init_checkpoint == "/some/run"
