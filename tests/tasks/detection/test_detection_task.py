"""The task of detection: where each output goes in the losses, and detections on a photo's own pixels."""

import numpy as np
import pytest
import tensorflow as tf

import oracles
from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.base import whole_batch
from axial.tasks.detection.feed import DetectionData
from axial.tasks.detection.task import DetectionTask
from axial.training.continuing import check_continues, keep_settings, trained_with
from axial.training.optimizers import NesterovMomentum
from axial.training.trainer import TrainingConfig

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


def spoil(tensor, place, by):
    array = tensor.numpy()
    array[place] += by
    return tf.constant(array)


# Of four photos: labels of anchors and classes of boxes that are drawn, and of masks. -1 is not drawn.
CASES = {
    "some of each": ([-1, 0, 1], [-1, 0, 1, 2], [0, 1, 2]),
    "all drawn": ([0, 1], [0, 1, 2], [1, 2]),
    "no object": ([-1, 0], [-1, 0], [0]),
    "nothing drawn": ([-1], [-1], [0]),
    "objects without a mask": ([0, 1], [0, 2], [0]),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_the_studys(task, case):
    """Maps of odd sizes, and errors on both sides of where a box's loss turns linear."""
    rng = np.random.default_rng(0)
    labels, kinds, masked = CASES[case]

    def normal(*shape, scale=1.0):
        return rng.normal(0, scale, shape).astype(np.float32)

    batch = {"image": np.zeros([4, 64, 64, 3]), "content": np.full([4, 2], 64)}
    outputs = {"anchor_scores": {}, "anchor_codes": {}}
    for level, size in (("2", (5, 3)), ("3", (2, 1)), ("6", (1, 1))):
        label = rng.choice(labels, [4, *size, 3])
        batch[f"anchor_scores/{level}"] = label
        batch[f"anchor_boxes/{level}"] = np.repeat(label > 0, 4, -1) * normal(4, *size, 12, scale=0.1)
        outputs["anchor_scores"][level] = normal(4, *size, 3, scale=5)
        outputs["anchor_codes"][level] = normal(4, *size, 12, scale=0.1)
    classes = rng.choice(kinds, [4, 7])
    outputs |= {"classes": classes, "logits": normal(4, 7, 3, scale=5), "codes": normal(4, 7, 12)}
    outputs |= {"code_targets": (classes > 0)[..., None] * normal(4, 7, 4), "mask_classes": rng.choice(masked, [4, 2])}
    outputs |= {"mask_logits": normal(4, 2, 6, 6, scale=5), "mask_targets": rng.uniform(0, 1, [4, 2, 6, 6])}
    wanted = oracles.detector_losses(outputs, batch)
    assert [name for name, value in wanted.items() if not value] == {
        "no object": ["anchor_box", "box", "mask"],
        "nothing drawn": list(wanted),
        "objects without a mask": ["mask"],
    }.get(case, [])
    found = losses(task, tf.nest.map_structure(constant, batch), tf.nest.map_structure(constant, outputs))
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def constant(x):
    return tf.constant(x, tf.float32 if x.dtype.kind == "f" else tf.int32)


def test_a_run_of_before_the_studys_losses_goes_on_if_asked(task, tmp_path, capsys):
    settings = trained_with(task, NesterovMomentum(), TrainingConfig(1, 1))
    keep_settings(str(tmp_path), {name: value for name, value in settings.items() if name != "loss_rule"})
    with pytest.raises(InputError, match="loss_rule is 'tf-models-official' in the run and 'mmdetection' here"):
        check_continues(str(tmp_path), settings)
    check_continues(str(tmp_path), settings, ["loss_rule"])
    assert "goes on with another loss_rule" in capsys.readouterr().err
    keep_settings(str(tmp_path), settings, step=1)
    check_continues(str(tmp_path), settings)


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
        assert float(value) > 0 or name in ("anchor_score", "class"), name  # of which no anchor and no box is wrong
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
