"""From a decoded photo to the network's canvas and back; training, evaluation and export share it.

A photo is scaled to fit the canvas, [-1, 1], and padded with 0, mid grey, at the bottom and right.
"""

import tensorflow as tf


def content_size(size, canvas, scale=1.0):
    """int32 [2]: what a photo of `size` (h, w) measures once scaled to fit `canvas`, times `scale`.

    A photo that a scale of 1 leaves within a pixel of its own size keeps it: 1024x2048 on a canvas
    of 1025x2049 is not resampled.
    """
    size = tf.cast(size, tf.float32)
    fitted = tf.round(size * tf.reduce_min(tf.cast(canvas, tf.float32) / size) * scale)
    fitted = tf.where(tf.reduce_all(tf.abs(fitted - size) <= 1), size, fitted)
    return tf.cast(tf.maximum(fitted, 1), tf.int32)


def place_image(image, content, canvas, corner=(0, 0)):
    """uint8 [h, w, 3] -> float32 [*canvas, 3]: scaled to `content`, cut from `corner`, padded."""
    resized = tf.image.resize(image, content, "bilinear", antialias=True)
    return _window(resized / 127.5 - 1, canvas, corner, 0.0)


def place_labels(labels, content, canvas, corner=(0, 0), fill=0):
    """int32 [h, w] -> int32 [*canvas]: the nearest label of each pixel, `fill` in the padding."""
    resized = tf.image.resize(labels[..., None], content, "nearest")
    return _window(resized, canvas, corner, fill)[..., 0]


def _window(x, canvas, corner, fill):
    x = x[corner[0] : corner[0] + canvas[0], corner[1] : corner[1] + canvas[1]]
    missing = tf.maximum(tf.stack(canvas) - tf.shape(x)[:2], 0)
    x = tf.pad(x, [[0, missing[0]], [0, missing[1]], [0, 0]], constant_values=fill)
    return tf.ensure_shape(x, [*canvas, x.shape[-1]])


def preprocess(image, canvas):
    """The network's input for one photo, without augmentation.

    Args:
        image: uint8 [h, w, 3], any size.
        canvas: (height, width), static.

    Returns:
        float32 [*canvas, 3], and the int32 [2] size of the part that is photo.
    """
    content = content_size(tf.shape(image)[:2], canvas)
    return place_image(image, content, canvas), content


def restore(labels, content, size):
    """int32 [*canvas] -> int32 [*size]: the photo's part of a label map at the photo's own size."""
    labels = labels[: content[0], : content[1], None]
    return tf.image.resize(labels, size, "nearest")[..., 0]
