"""Faster and Mask R-CNN: sampling, gradients, frozen stages, folding, padding, and batches."""

import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.layers import device
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.random import seeded
from axial.models.faster_rcnn.network import FasterRCNN, FasterRCNNOptions
from axial.models.registry import VARIANTS, build_model, find_variant
from axial.serving.export import fold
from tests import oracles
from tests.conftest import relative_error

CLASSES, SIDES = 5, (64, 128)
SEED = 4  # with other seeds a sampled box may exceed its mask, so that mask targets are between 0 and 1
SMALL = dict(pre_nms=(60, 40), proposals=(40, 20), sampled=16, detections=10)
DETECTORS = [name for name in VARIANTS if find_variant(name).task == "detection"]
REDUCED = dict(SMALL, repeats=(1, 1, 1, 1), width=0.25, heads=2, pyramid_width=32, head_width=64)


def make(name, norm=BatchNormConfig(), **changes):
    """A detector with few channels, built for images of `SIDES` pixels."""
    model = build_model(name, CLASSES, norm, **(SMALL if "nano" in name else REDUCED) | changes)
    model(tf.zeros([1, *SIDES, 3]))
    return model


def trained_like(name, **changes):
    """A detector with seeded random weights. It detects objects, because scores differ and exceed the threshold."""
    keras.utils.set_random_seed(SEED)
    model = make(name, **changes)
    bias = model.box_head.classes.weights[1]  # distinct biases, so that classes have different scores
    bias.assign(np.linspace(0, 1.5, CLASSES + 1))
    for weight in model.backbone.weights:
        if weight.name.endswith("gamma:0"):
            weight.assign(tf.ones_like(weight))
    return model


def images(count=2, seed=0):
    """Images of uniform noise from -1 to 1, float32 [count, 64, 128, 3]."""
    return tf.random.stateless_uniform([count, *SIDES, 3], [seed, 0], -1, 1)


TRUTH = {
    "boxes": tf.constant([[[4.0, 8, 40, 60], [10, 70, 60, 120]], [[0, 0, 30, 30], [-1, -1, -1, -1]]]),
    "classes": tf.constant([[1, 3], [5, -1]]),
    "masks": tf.ones([2, 2, 112, 112]),
}


def step(model, **more):
    """Runs a training step on two images with the objects of `TRUTH`. Returns (outputs, gradients of a loss)."""
    with seeded(0, tf.constant(0, tf.int64), 0), tf.GradientTape() as tape:
        outputs = model(images(), truth=TRUTH, training=True, **more)
        values = [x for x in tf.nest.flatten(outputs) if x.dtype.is_floating]
        loss = tf.add_n([tf.reduce_mean(tf.square(x - 1)) for x in values])
    return outputs, tape.gradient(loss, model.trainable_weights)


QUICK = "mask_rcnn_resnet_nano"
SOME = [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DETECTORS]


@pytest.mark.parametrize("name", SOME)
def test_every_weight_learns_and_the_draw_repeats(name):
    """Every weight gets a gradient. A second run with the same seed samples the same boxes."""
    model = trained_like(name)
    run = tf.function(lambda: step(model), autograph=False)
    outputs, gradients = run()
    assert outputs["logits"].shape == (2, 16, 1 + CLASSES) and outputs["codes"].shape == (2, 16, 4 * (1 + CLASSES))
    assert (outputs["classes"].numpy() > 0).any(1).all()  # each image has sampled objects
    for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
        gradient = tf.convert_to_tensor(gradient).numpy()
        assert np.isfinite(gradient).all(), weight.name
        if not ("height/" in weight.name and weight.name.endswith("output_norm/beta:0")):  # see `test_registry`
            assert np.abs(gradient).max() > 0, weight.name
    tf.nest.map_structure(np.testing.assert_array_equal, outputs, run()[0])


PROPOSALS = [[4, 8, 40, 55], [0, 0, 30, 31], [12, 70, 60, 118], [12, 72, 58, 120], [20, 20, 50, 80], [5, 9, 41, 61]]
OBJECTS = np.array([[4, 8, 40, 60], [10, 70, 60, 120], [14, 70, 60, 120]])


@pytest.mark.parametrize("objects,sampled", [(3, 8), (3, 24), (0, 8)])
def test_boxes_are_sampled_as_in_the_studys_code(objects, sampled):
    """The sampled boxes follow an oracle of mmdetection's rule. Two of the 24 proposals have no area.

    At most a quarter of the sampled boxes are objects. No box is sampled twice. Unused rows have class -1.
    """
    true = np.full([4, 4], -1.0, np.float32)
    true[:objects] = OBJECTS[:objects]
    classes = np.where(np.arange(4) < objects, [3, 1, 5, 2], -1)
    truth = {"boxes": tf.constant(true[None]), "classes": tf.constant(classes[None], tf.int32)}
    proposals = tf.constant(
        [[*PROPOSALS, [0, 0, 0, 0], [64, 3, 64, 9], *[[50, 0, 60, i] for i in range(9, 25)]]], tf.float32
    )
    with seeded(0, tf.constant(0, tf.int64), 0):
        drawn = FasterRCNN._sample(types.SimpleNamespace(options=FasterRCNNOptions(sampled=sampled)), proposals, truth)
    boxes, matched, kinds = (x.numpy()[0] for x in drawn)
    real = [box for box in proposals.numpy()[0] if (box[2:] > box[:2]).all()]
    assigned = dict(zip(map(tuple, real), oracles.assigned(real, true[:objects], 0.5, 0.5)))
    assigned |= {tuple(box): number for number, box in enumerate(true[:objects])}
    positive = min(sum(number >= 0 for number in assigned.values()), sampled // 4)
    assert (kinds > 0).sum() == positive
    assert (kinds == 0).sum() == min(sum(number == -1 for number in assigned.values()), sampled - positive)
    assert len({tuple(box) for box in boxes[kinds >= 0]}) == (kinds >= 0).sum()
    for box, index, kind in zip(boxes, matched, kinds):
        if kind >= 0:
            number = assigned[tuple(box)]
            assert kind == (classes[number] if number >= 0 else 0) and (number == -1 or index == number)


def test_targets_are_codes_of_the_true_boxes():
    """Targets equal the oracle's box codes times 10 and 5, the inverses of mmdetection's stds. Background has zeros."""
    model = trained_like("faster_rcnn_resnet_nano")
    calls, sample = [], model._sample
    model._sample = lambda *x: calls.append(sample(*x)) or calls[0]
    outputs, _ = step(model)
    boxes, matched, classes = (x.numpy() for x in calls[0])
    for image, row in zip(*np.nonzero(classes > 0)):
        true = TRUTH["boxes"][image, matched[image, row]]
        expected = oracles.box_code(true, boxes[image, row], (10, 10, 5, 5))
        np.testing.assert_allclose(outputs["code_targets"][image, row], expected, rtol=1e-4, atol=1e-4)
    assert not outputs["code_targets"].numpy()[classes <= 0].any()


def test_an_object_without_a_mask_is_learned_without_one():
    """The box head samples boxes of an object without a mask as usual. The mask head samples none of them."""
    model = trained_like("mask_rcnn_resnet_nano")
    has_mask = tf.constant([[True, False], [True, True]])[..., None, None]
    truth = {**TRUTH, "masks": tf.where(has_mask, TRUTH["masks"], -1.0)}
    with seeded(0, tf.constant(0, tf.int64), 0):
        whole = model(images(), truth=TRUTH, training=True)
    with seeded(0, tf.constant(0, tf.int64), 0):
        partial = model(images(), truth=truth, training=True)
    np.testing.assert_array_equal(partial["classes"], whole["classes"])
    kinds = {name: set(out["mask_classes"][0].numpy()) for name, out in (("whole", whole), ("partial", partial))}
    assert kinds == {"whole": {1, 3}, "partial": {0, 1}} or kinds == {"whole": {0, 1, 3}, "partial": {0, 1}}
    np.testing.assert_array_equal(partial["mask_classes"][1], whole["mask_classes"][1])
    np.testing.assert_array_equal(partial["mask_targets"][1], whole["mask_targets"][1])
    assert set(np.unique(partial["mask_targets"].numpy()[partial["mask_classes"].numpy() > 0])) <= {0, 1}


@pytest.mark.parametrize("name", SOME)
def test_folded_and_in_a_graph_it_is_the_same(name):
    """The folded model in a `tf.function` has the same detections as the model with batch norms, up to 1e-3."""
    model = trained_like(name)
    model(images(), training=True)  # sets the moving statistics
    twin = fold(types.SimpleNamespace(build_model=lambda folded: make(name, None)), model)
    assert not [w for w in twin.weights if "norm" in w.name]
    expected, actual = model(images()), tf.function(twin, autograph=False)(images())
    assert expected["count"].numpy().min() > 0
    for key in expected:
        assert relative_error(actual[key], expected[key]) < 1e-3, key


def test_neighbours_and_padding_change_nothing():
    """Photos of 50x100 and 64x128 pixels on canvases of 64x128 have the same detections in a batch as alone."""
    model = trained_like("faster_rcnn_resnet_nano")
    size = tf.constant([[50, 100], [64, 128]])
    mask = tf.sequence_mask([50, 64], 64)[:, :, None, None] & tf.sequence_mask([100, 128], 128)[:, None, :, None]
    photos = tf.where(mask, images(), 0.0)
    both = model(photos, valid_size=size)
    assert both["count"].numpy().min() > 0
    for i, order in ((0, slice(0, 1)), (1, slice(1, 2))):
        alone = model(photos[order], valid_size=size[order])
        for key in both:
            np.testing.assert_allclose(both[key][i], alone[key][0], rtol=1e-4, atol=1e-3)
    corners = both["box"][0, : both["count"][0]].numpy()
    assert corners[:, ::2].max() <= 50 and corners[:, 1::2].max() <= 100
    odd = model(photos[:1, :50, :100])  # the model pads an odd size itself
    np.testing.assert_allclose(odd["box"], both["box"][:1], rtol=1e-4, atol=1e-2)


def test_both_forms_of_suppression_agree(monkeypatch):
    """The op for CPUs and the loop for other devices give the same boxes, scores and classes."""
    model = trained_like("mask_rcnn_resnet_nano")
    expected = model(images())
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    actual = model(images())
    count = expected["count"].numpy()
    np.testing.assert_array_equal(actual["count"], count)
    for key in ("box", "score", "class"):
        for i, n in enumerate(count):
            np.testing.assert_allclose(actual[key][i, :n], expected[key][i, :n], rtol=1e-4, atol=1e-3)


def test_statistics_of_frozen_stages_stay_and_those_of_the_others_move():
    """With one frozen stage, a training step changes no weight and no statistic of the stem and the first stage."""
    model = make("faster_rcnn_resnet_nano", BatchNormConfig(momentum=0.5), frozen_stages=1)
    frozen = [w for layer in (model.backbone.stem, *model.backbone.stages[0]) for w in layer.weights]
    assert not {id(w) for w in frozen} & {id(w) for w in model.trainable_weights}
    others = [w for block in model.backbone.stages[1] for w in block.weights if "moving_variance" in w.name]
    before = [[w.numpy() for w in weights] for weights in (frozen, others)]
    step(model)
    for weight, value in zip(frozen, before[0], strict=True):
        np.testing.assert_array_equal(weight, value)
    assert all(np.any(w.numpy() != value) for w, value in zip(others, before[1], strict=True))
