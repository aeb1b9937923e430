"""Input pipeline of segmentation: augmentation compared with NumPy, and errors for invalid settings."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from axial.data.preprocess import fitted_size, place_image, place_labels
from axial.data.specs import COCO
from axial.data.streams import name_damaged_records
from axial.errors import InputError
from axial.tasks.segmentation.input_pipeline import Augmentation, DataConfig, training_example
from tests.conftest import make_task

CANVAS = (65, 65)
PLAIN = Augmentation(scales=(1.0, 1.0), flip=False, shift=False)


def drawn(record, data, count, seed=0):
    """List of `count` training examples of a record, as dicts of arrays. Example i uses the seed (seed, i)."""
    make = tf.function(lambda number: training_example(record, tf.stack([seed, number]), COCO, data), autograph=False)
    return [{name: x.numpy() for name, x in make(number).items()} for number in tf.range(count)]


def test_training_without_augmentation_prepares_photos_as_evaluation_does(sample_dir):
    for scale in (None, 0.1):  # at 0.1 photos are smaller than the crop
        task = make_task(sample_dir, CANVAS, data={"augmentation": PLAIN, "photo_scale": scale})
        for record in task.eval_dataset("train2017").take(2):
            np.testing.assert_array_equal(task.training_example(record, [0, 0])["image"], record["image"])


def make_record(photo, segments):
    """A parsed record of a photo, uint8 [h, w, 3], with a segment map, uint8 [h, w] with values from 1 to 9."""
    ids = np.stack([segments, np.zeros_like(segments), np.zeros_like(segments)], -1)
    return {
        "image/encoded": tf.io.encode_png(photo),
        "image/file_name": tf.constant("cells.png"),
        "panoptic/encoded": tf.io.encode_png(ids),
        "segment/id": tf.range(1, 10, dtype=tf.int64),
        "segment/class": tf.range(9, dtype=tf.int64),
        "segment/crowd": tf.zeros([9], tf.int64),
    }


@pytest.fixture
def cells():
    """(photo of 24x36 pixels, segment map). Each of its nine patches has its own colour and segment."""
    segments = np.kron(np.arange(1, 10, dtype=np.uint8).reshape(3, 3), np.ones([8, 12], np.uint8))
    return np.stack([25 * segments, 250 - 20 * segments, 3 * segments], -1), segments


def test_quarter_turns_turn_photo_and_labels_together(cells):
    photo, segments = cells
    augmentation = dataclasses.replace(PLAIN, quarter_turns=True, crop=(40, 40))
    for scale in (None, 1.0):  # with None, the photo is fitted to the canvas after the turn
        data = DataConfig("a", "b", (36, 24), augmentation, photo_scale=scale)
        turned = [(np.rot90(photo, k), np.rot90(segments, k)) for k in range(4)]
        expected = [(_placed(image, scale), _placed_classes(ids, scale)) for image, ids in turned]
        turns = []
        for example in drawn(make_record(photo, segments), data, 24):
            matches = [
                k
                for k, (image, classes) in enumerate(expected)
                if np.allclose(example["image"], image, atol=1e-5) and np.array_equal(example["semantic"], classes)
            ]
            assert len(matches) == 1
            turns += matches
        assert set(turns) == {0, 1, 2, 3} and max(map(turns.count, range(4))) < 14


def _valid_size(size, scale):
    return size if scale else [round(side * min(36 / size[0], 24 / size[1])) for side in size]


def _placed(photo, scale):
    return place_image(photo, _valid_size(photo.shape[:2], scale), (40, 40))


def _placed_classes(segments, scale):
    placed = place_labels(tf.constant(segments, tf.int32), _valid_size(segments.shape, scale), (40, 40)).numpy()
    return np.where(placed, placed - 1, COCO.ignore)


def test_brightness_and_gamma_change_values_as_their_equation_says(cells):
    """A pixel value x becomes min(255 (x / 255)^gamma brightness, 255). gamma and brightness are in their ranges."""
    photo, segments = cells
    plain = training_example(make_record(photo, segments), [0, 0], COCO, DataConfig("a", "b", (24, 36), PLAIN))
    numbers = []
    for gamma, brightness in (((0.8, 1.3), (0.6, 1.6)), ((2, 2), (3, 3))):
        data = DataConfig("a", "b", (24, 36), dataclasses.replace(PLAIN, gamma=gamma, brightness=brightness))
        for example in drawn(make_record(photo, segments), data, 10):
            values = (example["image"] + 1) * 127.5
            np.testing.assert_array_equal(example["semantic"], plain["semantic"])
            # Two pixel values that are not clipped determine gamma (`exponent`) and brightness (`factor`).
            low, high = (values[segments == s, 2].mean() / 255 for s in (2, 8))
            exponent = np.log(high / low) / np.log(4)
            factor = low / (6 / 255) ** exponent
            np.testing.assert_allclose(values, np.minimum(255 * (photo / 255) ** exponent * factor, 255), atol=0.05)
            assert gamma[0] - 1e-3 <= exponent <= gamma[1] + 1e-3
            assert brightness[0] - 2e-3 <= factor <= brightness[1] + 2e-3
            numbers.append((round(exponent, 3), round(factor, 3)))
    assert all(len(set(drawn_values)) > 5 for drawn_values in zip(*numbers[:10]))


def test_a_seed_flips_scales_and_cuts_as_it_always_did(cells):
    """Flip, scale and position use the first four random numbers of a seed, as they did in older versions."""
    photo, segments = cells
    data = DataConfig("a", "b", (40, 40), Augmentation(gamma=(1.0, 1.0 + 1e-6)))
    for number, example in enumerate(drawn(make_record(photo, segments), data, 20, seed=7)):
        draw = tf.random.stateless_uniform([4], [7, number]).numpy()
        image, labels = (x[:, ::-1] if draw[0] < 0.5 else x for x in (photo, segments))
        valid_size = fitted_size(photo.shape[:2], (40, 40), np.float32(0.5) + draw[1] * np.float32(1.5)).numpy()
        corner = np.sign(valid_size - 40) * np.floor(draw[2:] * (abs(valid_size - 40) + 1)).astype(int)
        placement = valid_size, (40, 40), corner.astype(np.int32)
        np.testing.assert_allclose(example["image"], place_image(image, *placement), atol=1e-4)
        placed = place_labels(tf.constant(labels, tf.int32), *placement).numpy()
        np.testing.assert_array_equal(example["semantic"], np.where(placed, placed - 1, COCO.ignore))


def test_a_scale_that_does_not_suit_a_photo_of_training_is_one_line(sample_dir):
    turned = dataclasses.replace(PLAIN, scales=(0.9, 0.9), quarter_turns=True)
    small = "become [01]x[01] by DataConfig.photo_scale = 0.001, times"
    for scale, words, augmentation in ((0.001, small, PLAIN), (100.0, "at most 268435456 pixels", turned)):
        task = make_task(sample_dir, CANVAS, data={"augmentation": augmentation, "photo_scale": scale})
        named = pytest.raises(InputError, match=rf"^\d+.jpg: \d+x\d+ pixels .*{words}")
        with named, name_damaged_records(sample_dir, "train2017"):
            next(iter(task.train_dataset(3, seed=0)))


@pytest.mark.parametrize("name", ["scales", "brightness", "gamma"])
def test_ranges_of_augmentations_are_checked(name):
    for value in ((2, 1), (0, 1), 1.0):
        with pytest.raises(InputError, match=f"Augmentation.{name} = .*expected"):
            Augmentation(**{name: value})
