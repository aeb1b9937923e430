"""Every leaf of experiments/ builds its task, names its command in the header, and follows the published protocol."""

import contextlib
import re

import pytest
import tensorflow as tf
import tf_keras as keras

import published
from axial.layers import device
from axial.models.registry import VARIANTS, build_model, find_variant
from axial.recipes import configuration
from axial.weights.restore import object_paths, plain_path
from tests.recipes.test_configuration import LEAVES, ROOT, recipe_of
from tpu_compile import forms

CLASSIFIERS, DETECTORS, TRANSLATORS, PANOPTIC = (
    [name for name in LEAVES if recipe_of(name) == recipe]
    for recipe in ("classification", "detection", "translation", "panoptic")
)


def build(leaf, sample_dir, *more):
    configuration.load([leaf, *more], ["TRAIN_SPLIT = 'train2017'", "EVAL_SPLIT = 'val2017'"])
    return configuration.build(data_dir=sample_dir)


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_build(leaf, sample_dir, colours_dir, texts_dir):
    if leaf in TRANSLATORS + CLASSIFIERS:
        configuration.load([leaf], ["TRAIN_SPLIT = 'train'", "EVAL_SPLIT = 'val'"])
        _, training, _ = configuration.build(data_dir=texts_dir if leaf in TRANSLATORS else colours_dir)
    else:
        _, training, _ = build(leaf, sample_dir)
    header = (ROOT / leaf).read_text().split("\n\n")[0]
    assert leaf == "nuclei/demo.gin" or f"--gin_file={leaf} " in header
    start = "nuclei" if leaf.startswith("own/") else None  # the only weights that axial ships
    assert training.steps > 0 and training.init_checkpoint == start


# dict from each task to the recipes that bind arguments of the task's models.
RECIPES_OF = {
    "panoptic": ("coco/panoptic.gin", "cityscapes/panoptic.gin", "mapillary/panoptic.gin"),
    "segmentation": ("cityscapes/ccnet.gin",),
    "classification": ("imagenet/classification.gin",),
    "detection": ("coco/detection.gin", "coco/faster_rcnn_axial_resnet_s.gin"),
    "translation": ("wmt14/translation.gin",),
}


def model_configs(name):
    """Returns the `ModelConfig`s of a model in the recipes of the model's task."""
    configs = []
    for recipe in RECIPES_OF[find_variant(name).task]:
        configuration.load([recipe], [f"MODEL = '{name}'", "TRAIN_SPLIT = 'train'", "EVAL_SPLIT = 'val'"])
        config = configuration.build("ModelConfig")
        assert config.name == name
        configs += [config] * (config not in configs)
    return configs


def one_of_each_kind():
    """Returns every variant. For each network and backbone, all variants but the first are marked slow."""
    kinds = {(v.model, v.backbone): name for name, v in reversed(VARIANTS.items())}.values()
    return [name if name in kinds else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", one_of_each_kind())
def test_a_model_takes_what_its_recipes_bind(name, kernels, monkeypatch):
    """Models build with batch norms as in training, folded as in an export, with a TPU's kernels, and without."""
    monkeypatch.setattr(keras.Model, "__call__", lambda model, inputs: inputs)  # creating the weights takes minutes
    monkeypatch.setattr(device, "has_kernels", lambda: kernels)
    with forms() if kernels else contextlib.nullcontext():
        for config in model_configs(name):
            for folded in (False, True):
                config.build(7, (16,) if find_variant(name).task == "translation" else (65, 65), folded)


STARTED = [leaf for leaf in LEAVES if leaf.startswith(("coco/", "cityscapes/", "mapillary/"))]


@pytest.mark.parametrize("leaf", STARTED)
def test_a_leaf_that_starts_from_another_run_says_from_which(leaf):
    """The header's command sets INIT, and the header names the run that makes these weights, as in the papers."""
    header, text = re.split(r"\n\n(?=include)", (ROOT / leaf).read_text(), maxsplit=1)
    model = re.search("^MODEL = '(.+)'$", text, re.M)[1]
    start, arguments = published.plain_classifier(model)
    if leaf.endswith("_mapillary.gin"):
        assert "INIT = 'MAPILLARY_RUN'" in header and f"(mapillary/{model}.gin)" in header
    else:
        assert "INIT = 'CHECKPOINT'" in header and not arguments
        leaf_name = f"imagenet/{start}.gin"
        assert f"a run of {leaf_name if leaf_name in LEAVES else start}" in header


STARTING = [n for n in VARIANTS if find_variant(n).task not in ("classification", "translation")]
QUICK_STARTS = ("axial_deeplab_nano", "faster_rcnn_attended_nano_0010")


@pytest.mark.parametrize(
    "name", [n if n in QUICK_STARTS else pytest.param(n, marks=pytest.mark.slow) for n in STARTING]
)
def test_every_model_of_photos_starts_from_a_plain_classifier(name):
    """The backbones have weights of equal paths and shapes, except the model's modules that start as the identity."""
    plain, arguments = published.plain_classifier(name)
    with tf.Graph().as_default():  # a graph allocates no weights
        backbones = [build_model(n, 19, **changes).backbone for n, changes in ((plain, arguments), (name, {}))]
        for backbone in backbones:
            tf.autograph.experimental.do_not_convert(backbone)(tf.zeros([1, 65, 65, 3]))
    added = {id(w) for m in backbones[1].submodules if hasattr(m, "added_weights") for w in m.added_weights}
    theirs, ours = (
        {plain_path(path): w.shape for path, w in object_paths(b, "backbone").items() if id(w) not in added}
        for b in backbones
    )
    assert find_variant(plain).task == "classification" and theirs == ours


@pytest.mark.parametrize("leaf", PANOPTIC)
def test_segmenters_have_odd_canvases(leaf, sample_dir):
    task, _, optimizer = build(leaf, sample_dir)
    assert all(side % 16 == 1 for side in (*task.data.canvas, *task.data.crop))
    assert optimizer.decay == 0
    task, training, _ = build(leaf, sample_dir, "tiny/panoptic.gin")
    assert task.data.crop == task.data.canvas == (65, 65) and training.steps == 1


@pytest.mark.parametrize("leaf", [leaf for leaf in CLASSIFIERS if leaf.startswith("imagenet/")])
def test_classifiers_keep_the_protocol(leaf, colours_dir):
    configuration.load([leaf], ["TRAIN_SPLIT = 'train'"])
    task, training, optimizer = configuration.build(data_dir=colours_dir)
    assert task.data.image == (224, 224) and task.label_smoothing == 0.1
    assert training.batch == (512 if "full" in leaf else 1024)
    epoch = 1281167 // training.batch
    schedule = configuration.build("WarmupCosine")
    assert training.steps == schedule.steps == 130 * epoch and schedule.warmup == 10 * epoch
    assert schedule.peak == pytest.approx(1.6 * training.batch / 4096)
    assert (optimizer.momentum, optimizer.average) == (0.9, 0.9999)
    assert (optimizer.decay, optimizer.decay_tables) == (8e-5, True)  # csrhddlam/axial-deeplab's train.py


@pytest.mark.parametrize("leaf", [leaf for leaf in DETECTORS if leaf.startswith("coco/")])
def test_detectors_keep_the_protocol(leaf, sample_dir):
    """The source is Zhu et al., ICCV 2019, Sec. 4.1, with mmdetection's schedule and clipping: 12 epochs, batch 16."""
    task, training, optimizer = build(leaf, sample_dir)
    assert task.data.sides == (800, 1333) and task.data.flip and training.batch == 16
    schedule, epoch = configuration.build("WarmupSteps"), -(-117266 // 16)
    assert training.steps == 12 * epoch and schedule.drops == (8 * epoch, 11 * epoch)
    rates = [float(schedule(step)) for step in (0, 250, 500, 8 * epoch - 1, 8 * epoch, 11 * epoch)]
    assert rates == pytest.approx([0.02 / 3, 0.02 * 2 / 3, 0.02, 0.02, 0.002, 0.0002])
    assert (optimizer.momentum, optimizer.decay, optimizer.nesterov, training.clip_norm) == (0.9, 1e-4, False, 35)
    assert find_variant(task.model.name).arguments["frozen_stages"] == 1 and task.model.norm.frozen


def test_segmentation_keeps_the_protocol(sample_dir):
    """The protocol is from CCNet's code. Zhu et al., ICCV 2019, say that they follow CCNet's paper strictly."""
    task, training, optimizer = build("cityscapes/ccnet.gin", sample_dir)
    assert (task.canvas, task.data.crop, task.overlap) == ((1025, 2049), (769, 769), pytest.approx(1 / 3, abs=1e-3))
    assert (training.steps, training.batch) == (60000, 8)
    schedule = configuration.build("WarmupPoly")
    assert (schedule.peak, schedule.steps, schedule.warmup, schedule.power) == (0.01, 60000, 0, 0.9)
    assert (optimizer.momentum, optimizer.decay, optimizer.nesterov) == (0.9, 5e-4, False)
    assert (task.data.augmentation.scales, task.data.augmentation.scale_step) == ((0.7, 2.1), 0.1)
    assert (task.loss.top_k, task.loss.auxiliary_weight, task.loss.stride) == (1.0, 0.4, 1)


# Canvas, crop, batch, steps, smallest stuff area and window of the centre NMS come from Panoptic-DeepLab and the paper.
# Training scales come from DeepLab2.
PUBLISHED = {
    "coco": ((1025, 1025), (1025, 1025), 64, 200000, 4096, 7, (0.5, 1.5)),
    "cityscapes": ((1025, 2049), (1025, 2049), 32, 60000, 2048, 7, (0.5, 2.0)),
    "mapillary": ((2177, 2177), (1025, 1025), 64, 150000, 4096, 7, (0.5, 2.0)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_protocols_are_the_published_ones(name, sample_dir):
    configuration.load([f"{name}/axial_deeplab_l.gin"], ["TRAIN_SPLIT = 'train2017'"])
    task, training, _ = configuration.build(data_dir=sample_dir)
    data, grouping = task.data, task.grouping
    augmentation = data.augmentation
    actual = (data.canvas, data.crop, training.batch, training.steps, grouping.stuff_area, grouping.nms_kernel)
    assert (*actual, augmentation.scales) == PUBLISHED[name]
    assert augmentation.flip and augmentation.shift
    assert (grouping.center_threshold, grouping.top_k) == (0.1, 200)
    assert (task.loss.top_k, data.targets.round_centers) == (0.2, True)
    assert task.multi_scale == published.SCALES[data.canvas]
    assert "LEARNING_RATE = 0.001\n" in (ROOT / name / "panoptic.gin").read_text()


def test_translators_keep_the_protocol(texts_dir):
    """The protocol is from Vaswani et al., NeurIPS 2017, Sec. 5 and 6.1. Zhu et al. follow it."""
    configuration.load(["wmt14/transformer_base.gin"])
    task, training, optimizer = configuration.build(data_dir=texts_dir)
    assert (task.label_smoothing, task.beams, task.alpha, task.longer) == (0.1, 4, 0.6, 50)
    assert (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert (training.steps, training.keep) == (100000, 5) and training.batch // 256 * 256 >= 25000
    for step in (0, 1999, 3999, 50000):
        expected = 512**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)
        assert abs(float(optimizer.learning_rate(step)) / expected - 1) < 0.002  # the recipe rounds its peak
