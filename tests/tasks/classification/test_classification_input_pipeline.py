"""Input pipeline of classification: crops and labels."""

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.classification.task import ClassificationData, ClassificationTask, central_crop
from tests.data.classification_fixture import COLOURS

SMALL = (16, 16)


def batches(folder, count, **options):
    """List of the first `count` training batches of four photos. `options` are arguments of `ClassificationData`."""
    data = ClassificationData("train", "val", SMALL, shuffle=16, **options)
    return list(ClassificationTask(ModelConfig("resnet_nano"), data, folder).train_dataset(4, seed=3).take(count))


def test_labels_belong_to_the_photos(colours_dir):
    for batch in batches(colours_dir, 6):
        mean = (batch["image"].numpy().mean((1, 2)) + 1) * 127.5
        nearest = np.abs(mean[:, None] - np.array(list(COLOURS.values()))).sum(-1).argmin(1)
        np.testing.assert_array_equal(nearest, batch["label"].numpy().argmax(1))
        assert batch["image"].shape == (4, *SMALL, 3) and abs(batch["image"].numpy()).max() <= 1


@pytest.mark.parametrize(
    "options",
    [pytest.param(dict(policy="randaugment"), marks=pytest.mark.slow), *(dict(mixup=0.2), dict(cutmix=1.0))],
    ids=str,
)
def test_options(colours_dir, options):
    """Each option changes the images, keeps their shape, and gives labels that sum to 1."""
    (plain,), (changed,) = batches(colours_dir, 1), batches(colours_dir, 1, **options)
    assert changed["image"].shape == plain["image"].shape
    assert not np.allclose(changed["image"], plain["image"], atol=1e-3)
    np.testing.assert_allclose(changed["label"].numpy().sum(1), 1, atol=1e-6)
    assert abs(changed["image"].numpy()).max() <= 1


@pytest.mark.parametrize("size", [(16, 24), (24, 16), (16, 16)])
def test_central_crop_is_central(size):
    """The centre crop of a wide or tall photo is its middle square."""
    photo = np.random.default_rng(0).integers(0, 256, [*size, 3], np.uint8)
    y, x = ((side - 16) // 2 for side in size)
    expected = photo[y : y + 16, x : x + 16] / 127.5 - 1
    np.testing.assert_allclose(central_crop(tf.constant(photo), SMALL, 1.0), expected, atol=1e-6)


@pytest.mark.parametrize("size", [(1, 1), (3, 100)])
def test_any_photo_fits_any_size(size):
    assert central_crop(tf.zeros([*size, 3], tf.uint8), (7, 9), 0.875).shape == (7, 9, 3)


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(area=(1.0, 0.5)), r"ClassificationData.area = \(1.0, 0.5\): expected \(smallest, largest\)"),
        (dict(policy="autoaugmnt"), "did you mean 'autoaugment'"),
        (dict(image=(0, 5)), "ClassificationData.image"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        ClassificationData("train", "val", **options)


def test_a_segmentation_data_set_is_refused(sample_dir):
    with pytest.raises(InputError, match="records with 'panoptic' labels; expected 'class'"):
        batches(sample_dir, 1)
