"""The task of semantic segmentation: sliding windows, scale steps, loss names, crops and errors."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.models.outputs import CLASS, SEMANTIC
from axial.models.registry import ModelConfig
from axial.tasks.segmentation.canvas_maps import canvas_maps, sliding, window_starts
from axial.tasks.segmentation.input_pipeline import Augmentation, DataConfig, _random_scale, training_example
from axial.tasks.segmentation.panoptic import PanopticTask, SegmentationTask
from tests.conftest import make_task, relative_error
from tests.tasks.segmentation.test_segmentation_input_pipeline import make_record


def make(folder, name="ccnet_nano_1111", kind=SegmentationTask, **options):
    data = DataConfig("train2017", "val2017", (65, 81), augmentation=Augmentation(crop=(49, 49)))
    small = dict(width=0.25, heads=2, context=16, repeats=(1, 0, 0, 0)) if name.startswith("ccnet") else {}
    return kind(ModelConfig(name, arguments=small), data, folder, **options)


@pytest.mark.parametrize("size", [1, 49, 50, 1025])
@pytest.mark.parametrize("overlap", [0, 1 / 3, 0.9])
def test_windows_cover_an_axis_and_stay_inside(size, overlap):
    window = min(size, 49)
    starts = window_starts(size, window, overlap)
    covered = np.zeros(size, int)
    for start in starts:
        assert 0 <= start <= size - window
        covered[start : start + window] += 1
    assert covered.all() and len(set(starts)) == len(starts)
    assert all(b - a <= -(-window * (1 - overlap) // 1) for a, b in itertools.pairwise(starts))


def test_sliding_averages_the_logits_of_the_windows():
    images = tf.random.stateless_uniform([2, 7, 11, 3], [0, 0])

    def model(x):  # logits at stride 2 that depend on the position in the window
        return {SEMANTIC: tf.cumsum(x[:, ::2, ::2], 1) * 2.0}

    actual = sliding(model, (5, 5), 0.4)(images)[SEMANTIC].numpy()
    total, count = np.zeros(images.shape), np.zeros([7, 11, 1])
    for top in (0, 2):
        for left in (0, 3, 6):
            logits = model(images[:, top : top + 5, left : left + 5])[SEMANTIC]
            logits = tf.raw_ops.ResizeBilinear(images=logits, size=[5, 5], align_corners=True).numpy()
            total[:, top : top + 5, left : left + 5] += logits
            count[top : top + 5, left : left + 5] += 1
    assert relative_error(actual, total / count) < 1e-6


def test_a_batch_is_the_images_one_by_one(sample_dir):
    """A batch gives the same results as single images. Images that fit into one window are not divided."""
    task = make(sample_dir)
    model = task.build_model()
    images = tf.random.stateless_uniform([2, 65, 81, 3], [0, 0], -1)
    whole = canvas_maps(model, images[:, :49, :41])
    for name, x in task.maps(model, images[:, :49, :41]).items():
        np.testing.assert_array_equal(x, whole[name])
    both = task.maps(model, images)[CLASS]
    for i in (0, 1):
        np.testing.assert_array_equal(both[i], task.maps(model, images[i : i + 1])[CLASS][0])


def test_scales_come_in_steps():
    augmentation = Augmentation(scales=(0.7, 2.1), scale_step=0.1)
    drawn = {
        round(float(_random_scale(tf.constant(x, tf.float32), augmentation)), 4) for x in np.linspace(0, 0.999, 400)
    }
    assert drawn == {round(0.7 + 0.1 * i, 4) for i in range(15)}


def test_what_is_refused_says_so(sample_dir):
    with pytest.raises(InputError, match="'ccnet_nano_1111': for segmentation; a model for panoptic is expected"):
        make(sample_dir, kind=PanopticTask)
    with pytest.raises(InputError, match="overlap = 1.0"):
        make(sample_dir, overlap=1.0)
    assert make(sample_dir, "axial_deeplab_nano").loss_names == ("semantic", "total")
    assert make(sample_dir).main_score({"miou": {"miou": 0.25}, "pq": {"all": {"pq": 0.5}}}) == 0.25


def test_a_panoptic_network_without_instances_has_the_semantic_branch_alone(sample_dir):
    task = make_task(sample_dir, (33, 33), model={"arguments": {"repeats": (1, 0, 0, 0)}}, instances=False)
    names = " ".join(weight.name for weight in task.build_model().weights)
    assert "semantic_head" in names and "instance" not in names and "center" not in names
    assert task.loss_names == ("semantic", "total")
    assert set(next(iter(task.train_dataset(4, seed=0)))) == {"image", "semantic", "semantic_weight"}


def test_crowds_count_as_their_class_and_crops_are_cut_from_the_canvas():
    record = make_record(np.full([40, 40, 3], 7, np.uint8), np.uint8([[1] * 20 + [2] * 20] * 40))
    record |= {"segment/class": tf.constant([1, 0]), "segment/crowd": tf.constant([1, 0])}
    record["segment/id"] = tf.constant([1, 2], tf.int64)
    spec = DatasetSpec("two", ("a", "b"), (1, 2), (True, True))
    plain = Augmentation(scales=(1.0, 1.0), flip=False, shift=False, crop=(17, 80))
    data = DataConfig("a", "b", (40, 40), dataclasses.replace(plain, crop=None))
    whole = training_example(record, [0, 0], spec, data, instances=False)
    np.testing.assert_array_equal(whole["semantic"][0], [1] * 20 + [0] * 20)
    data = DataConfig("a", "b", (80, 80), plain)
    crop = training_example(record, [0, 0], spec, data, instances=False)
    np.testing.assert_array_equal(crop["semantic"], [[1] * 40 + [0] * 40] * 17)  # the photo is scaled by 2
    assert crop["image"].shape == (17, 80, 3)
