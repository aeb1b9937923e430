"""The detection task: losses from network outputs, and detections in the photo's own pixels."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.base import whole_batch
from axial.tasks.detection.input_pipeline import DetectionData
from axial.tasks.detection.task import DetectionTask
from axial.training.continuing import check_continues, hyperparameters, keep_settings
from axial.training.optimizers import NesterovMomentum
from axial.training.trainer import TrainingConfig
from tests import oracles


@pytest.fixture
def task(sample_dir):
    data = DetectionData("train2017", "val2017", (64, 64), (64, 64), shuffle=0)
    return DetectionTask(ModelConfig("mask_rcnn_resnet_nano"), data, sample_dir)


# The values that occur as (anchor labels, classes of boxes, classes of boxes with a mask). -1 means not sampled.
CASES = {
    "some of each": ([-1, 0, 1], [-1, 0, 1, 2], [0, 1, 2]),
    "all drawn": ([0, 1], [0, 1, 2], [1, 2]),
    "no object": ([-1, 0], [-1, 0], [0]),
    "nothing drawn": ([-1], [-1], [0]),
    "objects without a mask": ([0, 1], [0, 2], [0]),
}
EMPTY = {  # names of the losses that are 0 in a case
    "no object": ["anchor_box", "box", "mask"],
    "nothing drawn": ["anchor_score", "anchor_box", "class", "box", "mask"],
    "objects without a mask": ["mask"],
}


def random_step(labels, kinds, masked):
    """Random (batch, outputs of a detector) for four photos. The arguments are the values of a case of `CASES`.

    Box errors occur in both the quadratic and the linear part of the smooth L1 loss. Image i has the value i.
    """
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return rng.normal(0, scale, shape).astype(np.float32)

    classes = rng.choice(kinds, [4, 7])
    batch = {"image": np.arange(4.0)[:, None, None, None], "valid_size": np.full([4, 2], 64)}
    outputs = {"classes": classes, "logits": normal(4, 7, 3, scale=5), "codes": normal(4, 7, 12)}
    outputs |= {"code_targets": (classes > 0)[..., None] * normal(4, 7, 4), "mask_classes": rng.choice(masked, [4, 2])}
    outputs |= {"mask_logits": normal(4, 2, 6, 6, scale=5), "mask_targets": rng.uniform(0, 1, [4, 2, 6, 6])}
    outputs |= {"anchor_scores": {}, "anchor_codes": {}}
    for level, size in (("2", (5, 3)), ("3", (2, 1)), ("6", (1, 1))):
        label = batch[f"anchor_scores/{level}"] = rng.choice(labels, [4, *size, 3])
        batch[f"anchor_boxes/{level}"] = np.repeat(label > 0, 4, -1) * normal(4, *size, 12, scale=0.1)
        outputs["anchor_scores"][level] = normal(4, *size, 3, scale=5)
        outputs["anchor_codes"][level] = normal(4, *size, 12, scale=0.1)
    return batch, outputs


@pytest.mark.parametrize("case", CASES)
def test_losses_are_the_studys_and_the_mean_over_parts(task, case):
    """The losses equal the oracle's, for a whole batch and for two micro-batches of one and three photos."""
    batch, outputs = random_step(*CASES[case])
    expected = oracles.detector_losses(outputs, batch)
    assert [name for name, value in expected.items() if not value] == EMPTY.get(case, [])
    expected["total"] = sum(expected.values())

    def constant(x):
        return tf.constant(x, tf.float32 if x.dtype.kind == "f" else tf.int32)

    def model(image, valid_size, truth, training):
        return tf.nest.map_structure(lambda x: constant(x[image.numpy().astype(int).ravel()]), outputs)

    def micro_batch(rows):
        return {name: constant(x[rows]) for name, x in batch.items()}

    actual = task.losses(model, micro_batch(range(4)))
    assert {name: float(actual[name]) for name in actual} == pytest.approx(expected, rel=1e-5)
    micro_batches = [micro_batch([0]), micro_batch([1, 2, 3])]
    counts = [task.counts(model, one) for one in micro_batches]
    counts = {name: counts[0][name] + counts[1][name] for name in counts[0]}
    first, second = (task.losses(model, one, whole_batch(counts, 2)) for one in micro_batches)
    assert {name: float(first[name] + second[name]) / 2 for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_run_of_before_the_studys_losses_goes_on_if_asked(task, tmp_path, capsys):
    settings = hyperparameters(task, NesterovMomentum(), TrainingConfig(1, 1))
    keep_settings(str(tmp_path), {name: value for name, value in settings.items() if name != "loss_rule"})
    with pytest.raises(InputError, match="loss_rule is 'tf-models-official' in the run and 'mmdetection' here"):
        check_continues(str(tmp_path), settings)
    check_continues(str(tmp_path), settings, ["loss_rule"])
    assert "goes on with another loss_rule" in capsys.readouterr().err
    keep_settings(str(tmp_path), settings, step=1)
    check_continues(str(tmp_path), settings)


def test_detections_are_on_the_photos_own_pixels(task):
    """A photo has height 200 and width 100. On the canvas its valid region has height 100 and width 25."""
    detections = {
        "box": tf.constant([[10.0, 5, 60, 20], [-3, -3, 130, 30]]),  # top, left, bottom, right
        "class": tf.constant([1, len(task.spec.thing_classes)]),
        "score": tf.constant([0.9, 0.8]),
    }
    ours = task.on_photo(detections, tf.constant([100, 25]), tf.constant([200, 100]))
    np.testing.assert_allclose(ours["box"], [[20, 20, 60, 100], [0, 0, 100, 200]])  # left, top, width, height
    np.testing.assert_array_equal(ours["class"], [task.spec.thing_classes[0], task.spec.thing_classes[-1]])
    np.testing.assert_array_equal(ours["score"], detections["score"])


def test_a_data_set_without_things_is_refused(task, sample_dir):
    spec = DatasetSpec("flat", ("road",), (1,), (False,))
    with pytest.raises(InputError, match="the spec 'flat' has no things to detect"):
        DetectionTask(task.model, task.data, sample_dir, spec)
