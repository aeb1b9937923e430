"""Every leaf of experiments/ builds its task, names itself in its header, and keeps the published protocol."""

import pytest

from axial.cli import configuration
from test_configuration import LEAVES, ROOT


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_build(leaf, sample_dir):
    splits = ["TRAIN_SPLIT = 'train2017'", "EVAL_SPLIT = 'val2017'"]
    configuration.load([leaf], splits)
    task, training, optimizer = configuration.build(data_dir=sample_dir)
    text = (ROOT / leaf).read_text()
    header = text.split("\n\n")[0]
    assert leaf == "sample/overfit.gin" or f"--gin_file={leaf} " in header
    assert all(side % 16 == 1 for side in (*task.data.canvas, *task.data.crop))
    assert training.steps > 0 and training.init_checkpoint is None and optimizer.decay == 0
    configuration.load([leaf, "tiny/panoptic.gin"], splits)
    task, training, _ = configuration.build(data_dir=sample_dir)
    assert task.data.crop == task.data.canvas == (65, 65) and training.steps == 1


# From Panoptic-DeepLab and the paper: canvas, crop, batch, steps, least area of stuff. From DeepLab2: training scales,
# window of the centres at full resolution, stochastic depth.
PUBLISHED = {
    "coco": ((1025, 1025), (1025, 1025), 64, 200000, 4096, (0.5, 1.5), 41, 0.0),
    "cityscapes": ((1025, 2049), (1025, 2049), 32, 60000, 2048, (0.5, 2.0), 13, 0.2),
    "mapillary": ((2177, 2177), (1025, 1025), 64, 150000, 4096, (0.5, 2.0), 13, 0.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_protocols_are_the_published_ones(name, sample_dir):
    configuration.load([f"{name}/axial_deeplab_l.gin"], ["TRAIN_SPLIT = 'train2017'"])
    task, training, _ = configuration.build(data_dir=sample_dir)
    data, grouping = task.data, task.grouping
    augmentation = data.augmentation
    found = (data.canvas, data.crop, training.batch, training.steps, grouping.stuff_area)
    found += (augmentation.scales, grouping.nms_kernel, task.model.drop_path)
    assert found == PUBLISHED[name]
    assert augmentation.flip and augmentation.shift
    assert (grouping.center_threshold, grouping.top_k) == (0.1, 200)
    assert (task.loss.top_k, data.targets.round_centers) == (0.2, True)
    assert task.multi_scale[-1] == (2 if name == "mapillary" else 1.5)
    assert "LEARNING_RATE = 0.001\n" in (ROOT / name / "panoptic.gin").read_text()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_leaf_is_a_header_its_recipe_and_what_differs(name):
    for leaf in (ROOT / name).glob("axial_*.gin"):
        lines = [line for line in leaf.read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0] == f"include '{name}/panoptic.gin'" and lines[1].startswith("MODEL = "), leaf
        assert len(lines) <= 4, leaf


def test_init_is_a_macro(sample_dir):
    configuration.load(["sample/overfit.gin"], ["INIT = '/some/run'"])
    assert configuration.build(data_dir=sample_dir)[1].init_checkpoint == "/some/run"
