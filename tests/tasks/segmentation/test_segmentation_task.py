"""The task of semantic segmentation: sliding windows, the auxiliary loss, scales in steps, training and export."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from axial.data.preprocess import restore
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.models.outputs import AUXILIARY, CLASS, SEMANTIC
from axial.models.registry import ModelConfig
from axial.serving.export import export, folded_model
from axial.serving.predictor import Predictor
from axial.tasks.segmentation.canvas_maps import canvas_maps, sliding, window_starts
from axial.tasks.segmentation.feed import Augmentation, DataConfig, _random_scale
from axial.tasks.segmentation.losses import LossConfig, bootstrapped_cross_entropy, panoptic_losses
from axial.tasks.segmentation.panoptic import PanopticTask
from axial.tasks.segmentation.semantic import SegmentationTask
from axial.training.optimizers import NesterovMomentum
from axial.training.trainer import TrainingConfig, train
from tests.conftest import relative_error


def make(folder, name="ccnet_nano_1111", kind=SegmentationTask, **options):
    data = DataConfig("train2017", "val2017", (65, 81), augmentation=Augmentation(crop=(49, 49)))
    small = dict(width=0.25, heads=2, context=16) if name.startswith("ccnet") else {}
    return kind(ModelConfig(name, arguments=small), data, folder, **options)


@pytest.mark.parametrize("size", [1, 48, 49, 50, 97, 1025, 2049])
@pytest.mark.parametrize("overlap", [0, 1 / 3, 0.9])
def test_windows_cover_an_axis_and_stay_inside(size, overlap):
    window = min(size, 49)
    starts = window_starts(size, window, overlap)
    seen = np.zeros(size, int)
    for start in starts:
        assert 0 <= start <= size - window
        seen[start : start + window] += 1
    assert seen.all() and len(set(starts)) == len(starts)
    assert all(b - a <= -(-window * (1 - overlap) // 1) for a, b in itertools.pairwise(starts))


def test_windows_of_cityscapes_are_those_of_ccnets_code():
    assert window_starts(2048, 769, 1 / 3) == [0, 513, 1026, 1279]


def test_sliding_averages_the_logits_of_the_windows():
    images = tf.random.stateless_uniform([2, 7, 11, 3], [0, 0])

    def model(x):  # a result that depends on the place in the window, at half of its size
        return {SEMANTIC: tf.cumsum(x[:, ::2, ::2], 1) * 2.0}

    found = sliding(model, (5, 5), 0.4)(images)[SEMANTIC].numpy()
    total, count = np.zeros(images.shape), np.zeros([7, 11, 1])
    for top in (0, 2):
        for left in (0, 3, 6):
            part = model(images[:, top : top + 5, left : left + 5])[SEMANTIC]
            part = tf.raw_ops.ResizeBilinear(images=part, size=[5, 5], align_corners=True).numpy()
            total[:, top : top + 5, left : left + 5] += part
            count[top : top + 5, left : left + 5] += 1
    assert relative_error(found, total / count) < 1e-6


def test_an_image_that_fits_one_window_is_seen_as_a_whole(sample_dir):
    task = make(sample_dir)
    model = task.build_model()
    images = tf.random.stateless_uniform([1, 49, 41, 3], [0, 0], -1)
    whole = canvas_maps(model, images)
    for name, x in task.maps(model, images).items():
        np.testing.assert_array_equal(x, whole[name])


def test_windows_slide_over_photos_at_their_own_scale(sample_dir):
    task = make(sample_dir)
    assert "photo_scale" not in task.settings()
    model = task.build_model()
    task.canvas, task.data = (129, 145), dataclasses.replace(task.data, photo_scale=0.2)
    assert task.settings()["photo_scale"] == 0.2
    for example, found in task.predictions(model)(task.eval_dataset().take(2)):
        maps = task.maps(model, example["image"][None])
        height, width = example["content"].numpy()
        wanted = restore(maps[CLASS][0], (height, width), example["size"])
        assert (height, width) == tuple(np.round(example["size"].numpy() * 0.2)) and max(height, width) > 49
        assert np.mean(found["semantic"].numpy() != wanted) < 1e-3


def test_a_batch_is_the_images_one_by_one(sample_dir):
    task = make(sample_dir)
    model = task.build_model()
    images = tf.random.stateless_uniform([2, 65, 81, 3], [0, 0], -1)
    both = task.maps(model, images)[CLASS]
    for i in (0, 1):
        np.testing.assert_array_equal(both[i], task.maps(model, images[i : i + 1])[CLASS][0])
    at_once = task.segment(task.maps(model, images))
    for name, x in task.segments(model, images).items():
        np.testing.assert_array_equal(x, at_once[name])


def test_the_auxiliary_loss_has_its_weight(sample_dir):
    task = make(sample_dir)
    batch = next(iter(task.train_dataset(2, seed=0)))
    outputs = {name: tf.random.stateless_normal([2, 4, 4, 133], [0, i]) for i, name in enumerate((SEMANTIC, AUXILIARY))}
    targets = {name: x for name, x in batch.items() if name != "image"}
    losses = panoptic_losses(outputs, targets, task.spec, LossConfig(top_k=1.0, auxiliary_weight=0.3))
    swapped = {SEMANTIC: outputs[AUXILIARY], AUXILIARY: outputs[SEMANTIC]}
    other = panoptic_losses(swapped, targets, task.spec, LossConfig(top_k=1.0, auxiliary_weight=1.0))
    assert relative_error(losses["auxiliary"], 0.3 * other["semantic"]) < 1e-6
    assert relative_error(losses["total"], losses["semantic"] + losses["auxiliary"]) < 1e-6


def test_counting_every_pixel_is_the_mean_over_labelled_pixels():
    logits = tf.random.stateless_normal([1, 3, 4, 5], [0, 0])
    labels = tf.constant([[[0, 1, 2, 3], [4, 9, 9, 0], [1, 1, 1, 1]]])
    found = bootstrapped_cross_entropy(logits, labels, tf.ones([1, 3, 4]), ignore=9, top_k=1.0)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.minimum(labels, 4), logits)
    assert relative_error(found[0], tf.reduce_mean(each[labels != 9])) < 1e-6


def test_scales_come_in_steps():
    augmentation = Augmentation(scales=(0.7, 2.1), scale_step=0.1)
    drawn = {
        round(float(_random_scale(tf.constant(x, tf.float32), augmentation)), 4) for x in np.linspace(0, 0.999, 400)
    }
    assert drawn == {round(0.7 + 0.1 * i, 4) for i in range(15)}


@pytest.mark.slow
def test_it_trains_and_its_export_predicts_the_same(sample_dir, tmp_path):
    task = make(sample_dir, "ccnet_nano_0010_deformable")
    config = TrainingConfig(2, batch=2, steps_per_loop=1, checkpoint_interval=1, eval_interval=0)
    train(task, str(tmp_path / "run"), NesterovMomentum(0.01), config)
    model = task.build_model()
    path = str(tmp_path / "export")
    export(task, model, path)
    assert len(folded_model(task, model).weights) < len(model.weights)  # no batch norms, no auxiliary head
    example = next(iter(task.eval_dataset()))
    predictor = Predictor.of_saved_model(path)
    photo = decode_photo(example).numpy()
    (pair,) = task.predictions(model)([example])
    same = np.mean(predictor(photo)["semantic"] == pair[1]["semantic"].numpy())
    assert same > 0.999


def test_what_is_refused_says_so(sample_dir):
    with pytest.raises(InputError, match="'ccnet_nano_1111': for segmentation; a model for panoptic is expected"):
        make(sample_dir, kind=PanopticTask)
    with pytest.raises(InputError, match="overlap = 1.0"):
        make(sample_dir, overlap=1.0)
    assert make(sample_dir, "axial_deeplab_nano").loss_names == ("semantic", "total")
