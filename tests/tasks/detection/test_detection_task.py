"""The task of detection: where each output goes in the losses, and detections on a photo's own pixels."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.base import whole_batch
from axial.tasks.detection.feed import SAMPLED_ANCHORS, DetectionData
from axial.tasks.detection.task import DetectionTask

SURE = 50.0  # a logit


@pytest.fixture
def task(sample_dir):
    data = DetectionData("train2017", "val2017", (64, 64), (64, 64), shuffle=0)
    return DetectionTask(ModelConfig("mask_rcnn_resnet_nano"), data, sample_dir)


@pytest.fixture
def batch():
    """The targets of one image: four anchors on one level, of which one is ignored, and its true boxes."""
    return {
        "image": tf.zeros([1, 64, 64, 3]),
        "content": tf.constant([[64, 64]]),
        "boxes": tf.zeros([1, 1, 4]),
        "classes": tf.ones([1, 1], tf.int32),
        "anchor_scores/2": tf.constant([[[[1, 0]], [[-1, 1]]]]),
        "anchor_boxes/2": tf.constant([[[[0.1, 0.2, 0.3, 0.4, 0, 0, 0, 0]], [[0, 0, 0, 0, -0.1, 0.2, 0, 0.5]]]]),
    }


@pytest.fixture
def outputs(batch):
    """What a detector that makes no mistake returns: boxes of class 2, of background and of class 1."""
    classes = tf.constant([[2, 0, 1]])
    targets = tf.constant([[[0.5, 0, -0.5, 1], [0, 0, 0, 0], [0.1, 0.2, 0.3, 0.4]]])
    masks = tf.cast(tf.random.stateless_uniform([1, 2, 28, 28], [0, 0]) > 0.5, tf.float32)
    return {
        "anchor_scores": {"2": tf.constant([[[[SURE, -SURE]], [[SURE, SURE]]]])},  # the third is ignored
        "anchor_codes": {"2": batch["anchor_boxes/2"]},
        "logits": SURE * tf.one_hot(classes, 3),
        "codes": tf.reshape(tf.one_hot(classes, 3)[..., None] * targets[:, :, None], [1, 3, 12]),
        "classes": classes,
        "code_targets": targets,
        "mask_logits": SURE * (2 * masks - 1),
        "mask_targets": masks,
        "mask_classes": tf.constant([[2, 1]]),
    }


def losses(task, batch, outputs):
    found = task.losses(lambda image, content, truth, training: outputs, batch)
    assert set(found) == set(task.loss_names)
    values = {name: float(value) for name, value in found.items()}
    assert values["total"] == pytest.approx(sum(values.values()) - values["total"])
    return values


def test_no_mistake_has_no_loss(task, batch, outputs):
    assert max(losses(task, batch, outputs).values()) < 1e-6


def huber(error, turn):
    """Quadratic up to `turn`, then linear, as tf-models-official scales it."""
    return 0.5 * error**2 if error <= turn else turn * error - 0.5 * turn**2


def spoil(tensor, place, by):
    array = tensor.numpy()
    array[place] += by
    return tf.constant(array)


def test_each_mistake_has_its_own_loss(task, batch, outputs):
    """One output is wrong. The wanted losses are those of Ren et al., NIPS 2015, and He et al., ICCV 2017."""
    cases = {
        # sums over the anchors that are not ignored, of the anchors that a photo samples
        "anchor_score": ({"anchor_scores": (0, 0, 0, 1)}, 2 * SURE, SURE / SAMPLED_ANCHORS),
        # over the numbers of the codes of both objects
        "anchor_box": ({"anchor_codes": (0, 1, 0, 5)}, 0.5, huber(0.5, 1 / 9) / 8.01),
        # the mean over all boxes
        "class": ({"logits": (0, 1, 1)}, 2 * SURE, SURE / 3),
        # of the boxes with an object, of the code of the box's class
        "box": ({"codes": (0, 0, 2 * 4 + 1)}, 3.0, huber(3.0, 1.0) / 8.01),
    }
    for name, (place, by, wanted) in cases.items():
        ((key, at),) = place.items()
        wrong = outputs[key]
        wrong = {"2": spoil(wrong["2"], at, by)} if isinstance(wrong, dict) else spoil(wrong, at, by)
        found = losses(task, batch, outputs | {key: wrong})
        assert found[name] == pytest.approx(wanted, rel=1e-3), name
        assert max(value for other, value in found.items() if other not in (name, "total")) < 1e-6, name
    # codes of classes that the box does not have, and of background, change nothing
    for at in ((0, 0, 1 * 4 + 1), (0, 1, 0), (0, 1, 5)):
        assert losses(task, batch, outputs | {"codes": spoil(outputs["codes"], at, 3.0)})["total"] < 1e-6


def test_masks_have_the_mean_over_their_pixels(task, batch, outputs):
    wrong = spoil(outputs["mask_logits"], (0, 0, 3, 4), 0)
    wrong = spoil(wrong, (0, 0, 3, 4), -2 * float(wrong[0, 0, 3, 4]))
    found = losses(task, batch, outputs | {"mask_logits": wrong})
    assert found["mask"] == pytest.approx(SURE / (2 * 28 * 28), rel=1e-3) == found["total"]


def test_the_mean_over_parts_is_the_loss_of_the_whole_batch(task, batch, outputs):
    """One part has one object and is wrong about it, the other has three and is right."""
    right = outputs | {"anchor_codes": {"2": batch["anchor_boxes/2"]}}
    wrong = right | {
        "anchor_codes": {"2": spoil(batch["anchor_boxes/2"] * 0, (0, 0, 0, 0), 1.0)},
        "codes": outputs["codes"] + 1.0,
        "classes": tf.constant([[2, 0, 0]]),
        "mask_logits": -outputs["mask_logits"],
        "mask_classes": tf.constant([[2, 0]]),
    }
    of_wrong = batch | {"anchor_boxes/2": spoil(batch["anchor_boxes/2"] * 0, (0, 0, 0, 1), 0.5)}

    def model(image, content, truth, training):
        """The outputs of one photo or of both, by their pixels."""
        found = [wrong if float(photo[0, 0, 0]) else right for photo in image]
        return tf.nest.map_structure(lambda *x: tf.concat(x, 0), *found)

    parts = [of_wrong | {"image": tf.ones([1, 64, 64, 3])}, batch]
    both = {name: tf.concat([part[name] for part in parts], 0) for name in batch}
    counts = [task.counts(model, part) for part in parts]
    counts = {name: sum(count[name] for count in counts) for name in counts[0]}
    found = [task.losses(model, part, whole_batch(counts, 2)) for part in parts]
    for name, value in task.losses(model, both).items():
        assert float(value) > 0 or name in ("anchor_score", "class"), name
        assert np.mean([part[name] for part in found]) == pytest.approx(float(value), rel=1e-5, abs=1e-7), name


def test_detections_are_on_the_photos_own_pixels(task):
    """A photo of 200x100 pixels (height x width) that takes 100x25 of the canvas."""
    found = {
        "box": tf.constant([[10.0, 5, 60, 20], [-3, -3, 130, 30]]),  # top, left, bottom, right
        "class": tf.constant([1, len(task.spec.thing_classes)]),
        "score": tf.constant([0.9, 0.8]),
    }
    ours = task.on_photo(found, tf.constant([100, 25]), tf.constant([200, 100]))
    np.testing.assert_allclose(ours["box"], [[20, 20, 60, 100], [0, 0, 100, 200]])  # left, top, width, height
    np.testing.assert_array_equal(ours["class"], [task.spec.thing_classes[0], task.spec.thing_classes[-1]])
    np.testing.assert_array_equal(ours["score"], found["score"])


def test_a_data_set_without_things_is_refused(task, sample_dir):
    spec = DatasetSpec("flat", ("road",), (1,), (False,))
    with pytest.raises(InputError, match="the spec 'flat' has no things to detect"):
        DetectionTask(task.model, task.data, sample_dir, spec)
