"""Photos are placed on canvases, and predictions are resized to the photo's size."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from axial.data.preprocess import (
    LEAST_SIDE,
    ScaledCanvas,
    canvas_sides,
    fitted_size,
    is_whole,
    place_image,
    place_labels,
    preprocess,
    restore,
    scaled_size,
)
from axial.errors import InputError


@pytest.mark.parametrize(
    "size,canvas,expected",
    [
        ((480, 640), (641, 641), (480, 640)),  # within a pixel of the canvas, so not resampled
        ((1024, 2048), (1025, 2049), (1024, 2048)),
        ((240, 320), (641, 641), (481, 641)),
        ((640, 480), (321, 321), (321, 241)),
        ((1, 5000), (65, 65), (1, 65)),
    ],
)
def test_content_fits_the_canvas(size, canvas, expected):
    assert tuple(fitted_size(size, canvas).numpy()) == expected


def test_values_and_padding():
    image, valid_size = preprocess(tf.fill([10, 20, 3], tf.cast(255, tf.uint8)), (33, 33))
    assert image.shape == (33, 33, 3) and tuple(valid_size.numpy()) == (16, 33)
    np.testing.assert_allclose(image[:16], 1.0)
    np.testing.assert_array_equal(image[16:], 0.0)


@pytest.mark.parametrize("size", [(10, 20), (1, 1), (100, 7)])
def test_labels_come_back_at_the_photos_size(size):
    """Blocks of labels that are larger than a canvas pixel keep their labels on the way to the canvas and back."""
    labels = np.zeros(size, np.int32)
    labels[size[0] // 2 :] += 1
    labels[:, size[1] // 2 :] += 2
    valid_size = fitted_size(size, (33, 33))
    canvas = place_labels(tf.constant(labels), valid_size, (33, 33), fill=9)
    assert np.all(canvas[valid_size[0] :] == 9) and np.all(canvas[:, valid_size[1] :] == 9)
    back = restore(canvas, valid_size, size).numpy()
    assert back.shape == size
    assert (back == labels).mean() > 0.8 and set(np.unique(back)) <= set(np.unique(labels))


@pytest.mark.parametrize("size,scale", [((60, 90), 0.3), ((200, 150), 1.0), ((7, 300), 1.9)])
def test_a_crop_is_the_part_of_the_whole_photo_that_it_shows(size, scale):
    """A crop of the canvas equals the same region of the whole resized photo."""
    rng = np.random.default_rng(1)
    photo, labels = rng.integers(0, 256, [*size, 3], np.uint8), rng.integers(0, 1000, size, np.int32)
    valid_size = np.maximum(np.round(np.array(size) * scale), 1).astype(np.int32)
    whole = tf.image.resize(photo, valid_size, "bilinear", antialias=True).numpy() / 127.5 - 1
    whole_labels = tf.image.resize(labels[..., None], valid_size, "nearest").numpy()[..., 0]
    place_both = tf.function(
        lambda *x: (place_image(x[0], x[2], (33, 17), x[3]), place_labels(x[1], *x[2:3], (33, 17), x[3]))
    )
    for fraction in (0, 0.3, 0.8, 1):
        room = valid_size - np.array((33, 17))
        corner = (np.sign(room) * np.floor(fraction * (abs(room)))).astype(np.int32)
        crop, label_crop = place_both(photo, labels, valid_size, corner)
        for actual, all_of_it, atol in ((crop, whole, 3e-4), (label_crop, whole_labels, 0)):
            expected = np.zeros(actual.shape, all_of_it.dtype)
            visible = all_of_it[tuple(slice(max(c, 0), max(c + side, 0)) for c, side in zip(corner, (33, 17)))]
            top, left = np.maximum(-corner, 0)
            visible = visible[: 33 - top, : 17 - left]
            expected[top : top + visible.shape[0], left : left + visible.shape[1]] = visible
            np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_sides_of_canvases_go_down_by_a_fifth():
    for side in (1, 65, 81, 257, 1025, 4097):
        sides = canvas_sides(side)
        assert sides[0] == side and list(sides) == sorted(set(sides), reverse=True)
        assert all((side - smaller) % 16 == 0 and smaller >= LEAST_SIDE for smaller in sides[1:])
        assert all(abs(smaller - 0.8 * larger) <= 16 for larger, smaller in itertools.pairwise(sides))
        assert sides[-1] < LEAST_SIDE / 0.8 + 16 or len(sides) == 1


@pytest.mark.parametrize("size,scale", [((20, 30), 0.5), ((86, 200), 1.0), ((64, 64), 1.5), ((2, 43), 1.0)])
def test_a_photo_keeps_its_scale_on_the_smallest_canvas(size, scale):
    canvas = ScaledCanvas.within((129, 321), scale)
    photo = np.random.default_rng(0).integers(0, 256, [*size, 3], np.uint8)
    signature = [tf.TensorSpec([None, None, 3], tf.uint8)]
    image, valid_size = tf.function(lambda x: preprocess(x, canvas), input_signature=signature)(photo)
    expected = [round(side * scale) for side in size]
    assert list(valid_size.numpy()) == expected
    for actual, sides, side in zip(image.shape, (canvas.heights, canvas.widths), expected):
        assert actual == min(s for s in sides if s >= side)
    np.testing.assert_allclose(image, place_image(photo, valid_size, image.shape[:2]), atol=1e-6)
    if scale == 1:
        np.testing.assert_allclose(image[: size[0], : size[1]], photo / 127.5 - 1, atol=1e-5)
    assert preprocess(photo, canvas.alone)[0].shape == (129, 321, 3) and is_whole(size, canvas)


def test_a_photo_that_the_largest_canvas_does_not_hold_is_cut_into_tiles():
    canvas = ScaledCanvas.within((129, 321), 1.0)
    for size in ((129, 322), (130, 5), (4000, 4000)):
        assert not is_whole(size, canvas) and not is_whole(size, canvas.alone)
        image, valid_size = preprocess(np.zeros([*size, 3], np.uint8), canvas)
        assert tuple(valid_size.numpy()) == size and image.shape == (65, 65, 3)  # small, to save memory
    assert is_whole((129, 321), canvas)
    assert is_whole(size, (129, 321))  # scaled to fit the canvas


def test_a_tile_fills_the_canvas_at_its_scale():
    for scale in (0.1, 0.7, 1.0, 3.0):
        canvas = ScaledCanvas.within((129, 321), scale)
        assert canvas.alone.tile == canvas.tile and canvas.overlap == canvas.tile[0] // 4
        assert is_whole(canvas.tile, canvas)
        assert (np.array(canvas.tile) * scale > np.array(canvas.largest) - scale - 1e-3).all()
    assert ScaledCanvas.within((129, 321), scale, 7).alone.overlap == 7


def test_a_photo_that_its_scale_does_not_suit_is_named():
    assert tuple(scaled_size((3, 400), 0.1).numpy()) == (0, 40)
    with pytest.raises(InputError, match="^p.png: 400x3 pixels become 40x0 by photo_scale = 0.1; expected"):
        is_whole((3, 400), ScaledCanvas.within((129, 321), 0.1), "p.png")
    canvas = ScaledCanvas.within((129, 321), 4.1)
    assert is_whole((31, 78), canvas)
    with pytest.raises(
        InputError, match="^p.png: 79x31 .* at most 321x129, .* tile of 78x31: expected at least 32x32$"
    ):
        is_whole((31, 79), canvas, "p.png")
