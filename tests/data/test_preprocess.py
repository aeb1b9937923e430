"""From photos to canvases and back."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.preprocess import content_size, place_labels, preprocess, restore


@pytest.mark.parametrize(
    "size,canvas,wanted",
    [
        ((480, 640), (641, 641), (480, 640)),  # fits to within a pixel, so it is not resampled
        ((1024, 2048), (1025, 2049), (1024, 2048)),
        ((240, 320), (641, 641), (481, 641)),
        ((640, 480), (321, 321), (321, 241)),
        ((641, 641), (641, 641), (641, 641)),
        ((1, 1), (65, 65), (65, 65)),
        ((1, 5000), (65, 65), (1, 65)),
        ((6000, 8000), (641, 641), (481, 641)),
    ],
)
def test_content_fits_the_canvas(size, canvas, wanted):
    assert tuple(content_size(size, canvas).numpy()) == wanted


def test_values_and_padding():
    image, content = preprocess(tf.fill([10, 20, 3], tf.cast(255, tf.uint8)), (33, 33))
    assert image.shape == (33, 33, 3) and tuple(content.numpy()) == (16, 33)
    np.testing.assert_allclose(image[:16], 1.0)
    np.testing.assert_array_equal(image[16:], 0.0)


@pytest.mark.parametrize("size", [(10, 20), (40, 20), (33, 33), (1, 1), (100, 7)])
def test_labels_come_back_at_the_photos_size(size):
    """Blocks that are larger than a pixel of the canvas are still there on the way back from the canvas."""
    labels = np.zeros(size, np.int32)
    labels[size[0] // 2 :] += 1
    labels[:, size[1] // 2 :] += 2
    content = content_size(size, (33, 33))
    canvas = place_labels(tf.constant(labels), content, (33, 33), fill=9)
    assert np.all(canvas[content[0] :] == 9) and np.all(canvas[:, content[1] :] == 9)
    back = restore(canvas, content, size).numpy()
    assert back.shape == size
    assert (back == labels).mean() > 0.8 and set(np.unique(back)) <= set(np.unique(labels))


def test_padding_stands_where_the_corner_says():
    labels = tf.ones([3, 5], tf.int32)
    window = place_labels(labels, tf.constant([3, 5]), (6, 4), (-2, 1), fill=9).numpy()
    np.testing.assert_array_equal(window, [[9] * 4] * 2 + [[1] * 4] * 3 + [[9] * 4])


def test_crops_of_large_content():
    labels = tf.reshape(tf.range(100 * 100), [100, 100])
    window = place_labels(labels, tf.constant([100, 100]), (33, 17), (5, 50))
    np.testing.assert_array_equal(window, labels[5:38, 50:67])
