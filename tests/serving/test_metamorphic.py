"""A prediction does not depend on the rest of the batch. A mirrored photo has the mirrored prediction."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.layers.batch_norm import BatchNormConfig
from axial.models.outputs import CLASS, PROBABILITY
from axial.serving.predictor import Predictor
from axial.tasks.base import Inference
from axial.tasks.segmentation.grouping import PostprocessConfig
from tests.conftest import make_task

CANVAS = (65, 65)  # 32k + 1, so that the grids of strides 4, 16 and 32 are symmetric under mirroring
MAPS = ("panoptic", "semantic", "instance")


@functools.cache
def make_network(sample_dir, name):
    """Returns (task, model, examples of the sample photos). The model predicts many classes and instances for them."""
    grouping = PostprocessConfig(center_threshold=0.02, stuff_area=4)
    task = make_task(sample_dir, CANVAS, model={"name": name, "norm": BatchNormConfig(momentum=0.0)}, grouping=grouping)
    examples = list(task.eval_dataset())
    keras.utils.set_random_seed(0)
    model = task.build_model()
    model(tf.stack([e["image"] for e in examples]), training=True)  # sets the moving statistics
    for weight in model.weights:
        if "logits/conv/kernel" in weight.name:
            weight.assign(50 * weight)  # an untrained head's outputs hardly differ from pixel to pixel
    return task, model, examples


@pytest.fixture(scope="module")
def network(sample_dir):
    return make_network(sample_dir, "panoptic_deeplab_resnet_nano")


# === Batches ===


@pytest.fixture(scope="module")
def one_by_one(network):
    """A list of each sample photo's maps, predicted in a batch of one."""
    task, model, examples = network
    return [{name: x[0] for name, x in task.maps(model, e["image"][None]).items()} for e in examples]


def test_a_batch_is_its_photos_one_by_one(network, one_by_one):
    """The batch holds one photo twice, another photo once, and noise. Each photo is predicted as in a batch of one.

    The maps are equal up to rounding, because libraries may sum in another order for another batch size. Classes are
    equal where the best class is clearly ahead. The grouping is exact: equal maps give equal segments.
    """
    task, model, examples = network
    batch = [3, 0, 3]
    noise = tf.random.stateless_uniform([1, *CANVAS, 3], [0, 1], -1, 1)
    maps = task.maps(model, tf.concat([tf.stack([examples[i]["image"] for i in batch]), noise], 0))
    segments = task.segment(maps)
    for row, number in enumerate(batch):
        alone = one_by_one[number]
        for name in set(maps) - {CLASS}:
            np.testing.assert_allclose(maps[name][row], alone[name], rtol=1e-3, atol=1e-3)
        best = np.sort(alone[PROBABILITY], -1)
        clear = best[..., -1] - best[..., -2] > 1e-2
        assert clear.mean() > 0.5
        np.testing.assert_array_equal(maps[CLASS][row][clear], alone[CLASS][clear])
        again = task.segment({name: x[row : row + 1] for name, x in maps.items()})
        for name, x in again.items():
            np.testing.assert_array_equal(segments[name][row], x[0])


# === Mirrored photos ===


@pytest.fixture(scope="module")
def two_sided(network):
    """The predictor of --flip, which averages the maps of a photo and its mirror image."""
    task, model, _ = network
    return Predictor.of_task(task, model, Inference(flip=True))


@pytest.fixture(scope="module")
def small_photos(network):
    """Lists the sample photos without the padding of their canvases. Each photo is 65 pixels high or wide."""
    canvases = [(e["image"].numpy(), e["valid_size"].numpy()) for e in network[2]]
    return [np.round(127.5 * (image[:h, :w] + 1)).astype(np.uint8) for image, (h, w) in canvases]


def test_flip_of_a_mirrored_photo_is_the_mirrored_result(two_sided, small_photos):
    """The class map of a mirrored photo is the mirrored class map. Photos of the canvas's size are not resampled."""
    for photo in small_photos[:2]:
        turned, plain = two_sided(photo[:, ::-1]), two_sided(photo)
        np.testing.assert_array_equal(turned["semantic"][:, ::-1], plain["semantic"])
