"""Training without instances: the semantic branch alone."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.layers.batch_norm import BatchNormConfig
from axial.models.outputs import SEMANTIC
from axial.serving.fold import fold
from axial.tasks.segmentation.feed import Augmentation, DataConfig, training_example
from axial.tasks.segmentation.grouping import PostprocessConfig
from tests.conftest import make_task

CANVAS = (33, 33)


@pytest.fixture(scope="module")
def semantic(sample_dir):
    """A task without instances and its model."""
    task = make_task(
        sample_dir,
        CANVAS,
        model={"norm": BatchNormConfig(momentum=0.0)},
        grouping=PostprocessConfig(stuff_area=4),
        instances=False,
    )
    return task, task.build_model()


def test_only_the_semantic_branch_is_there_and_learns(semantic):
    task, model = semantic
    assert task.loss_names == ("semantic", "total")
    names = " ".join(weight.name for weight in model.weights)
    assert "semantic_head" in names and "instance" not in names and "center" not in names
    batch = next(iter(task.train_dataset(4, seed=0)))
    assert set(batch) == {"image", "semantic", "semantic_weight"}
    with tf.GradientTape() as tape:
        losses = task.losses(model, batch)
    assert set(losses) == set(task.loss_names) and losses["total"] == losses["semantic"]
    gradients = tape.gradient(losses["total"], model.trainable_variables)
    assert all(g is not None for g in gradients)


def test_every_class_is_one_segment_of_the_prediction(semantic):
    task, model = semantic
    images = tf.stack([example["image"] for example in task.eval_dataset().take(2)])
    result = task.segment(task.maps(model, images))
    assert not result["instance"].numpy().any() and not result["score"].numpy().any()
    classes, panoptic = result["semantic"].numpy(), result["panoptic"].numpy()
    for one, labels in zip(classes, panoptic):
        areas = np.bincount(one.ravel(), minlength=task.spec.num_classes)
        wanted = np.where(areas[one] >= 4, one * task.spec.label_divisor, task.spec.void)
        np.testing.assert_array_equal(labels, wanted)


def test_folding_keeps_the_function(semantic):
    task, model = semantic
    batch = next(iter(task.train_dataset(4, seed=0)))
    model(batch["image"], training=True)
    folded, images = fold(task, model), batch["image"][:1]
    assert set(folded(images)) == {SEMANTIC}
    np.testing.assert_allclose(folded(images)[SEMANTIC], model(images)[SEMANTIC], atol=1e-4)


def test_checkpoints_are_compared_by_miou(semantic):
    assert semantic[0].main_score({"miou": {"miou": 0.25}, "pq": {"all": {"pq": 0.5}}}) == 0.25


def test_crowds_count_as_their_class_and_crops_are_cut_from_the_canvas():
    ids = np.full([40, 40, 3], 0, np.uint8)
    ids[:, :20, 0], ids[:, 20:, 0] = 1, 2
    record = {
        "image/encoded": tf.io.encode_png(np.full([40, 40, 3], 7, np.uint8)),
        "panoptic/encoded": tf.io.encode_png(ids),
        "segment/id": tf.constant([1, 2], tf.int64),
        "segment/class": tf.constant([1, 0], tf.int64),
        "segment/crowd": tf.constant([1, 0], tf.int64),
    }
    spec = DatasetSpec("two", ("a", "b"), (1, 2), (True, True))
    plain = Augmentation(scales=(1.0, 1.0), flip=False, shift=False, crop=(17, 80))
    data = DataConfig("a", "b", (40, 40), dataclasses.replace(plain, crop=None))
    whole = training_example(record, [0, 0], spec, data, instances=False)
    np.testing.assert_array_equal(whole["semantic"][0], [1] * 20 + [0] * 20)
    data = DataConfig("a", "b", (80, 80), plain)
    part = training_example(record, [0, 0], spec, data, instances=False)
    np.testing.assert_array_equal(part["semantic"], [[1] * 40 + [0] * 40] * 17)  # the labels are twice as large
    assert part["image"].shape == (17, 80, 3)
