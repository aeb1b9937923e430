"""From a decoded photo to the network's canvas and back. Training, evaluation and export share this file.

A photo is scaled to fit the canvas, and its values are scaled to [-1, 1]. The rest of the canvas is padded with 0, mid
grey. Evaluation pads at the bottom and on the right. Training puts the photo at a random place (see
`pipeline.Augmentation`).
"""

import tensorflow as tf


def content_size(size, canvas, scale=1.0):
    """int32 [2]: the size of a photo of `size` (h, w), scaled to fit `canvas` and then by `scale`.

    A photo that fits and would change by at most a pixel keeps its size: 1024x2048 on a canvas of 1025x2049 is not
    resampled.
    """
    size, canvas = tf.cast(size, tf.float32), tf.cast(canvas, tf.float32)
    fitted = tf.round(size * tf.reduce_min(canvas / size) * scale)
    kept = tf.reduce_all((tf.abs(fitted - size) <= 1) & (size <= canvas))
    fitted = tf.where(kept, size, fitted)
    return tf.cast(tf.maximum(fitted, 1), tf.int32)


def place_image(image, content, canvas, corner=(0, 0)):
    """A photo on a canvas: uint8 [h, w, 3] -> float32 [*canvas, 3].

    Args:
        image: the photo.
        content: int32 [2], the size that it is scaled to.
        canvas: (height, width).
        corner: (y, x) of the canvas' upper left corner on the scaled photo. It is negative if padding comes before the
            photo.
    """
    resized = tf.image.resize(image, content, "bilinear", antialias=True)
    return _window(resized / 127.5 - 1, canvas, corner, 0.0)


def place_labels(labels, content, canvas, corner=(0, 0), fill=0):
    """Labels on a canvas: int32 [h, w] -> int32 [*canvas]. Each pixel has its nearest label; padding has `fill`.

    The other arguments are those of `place_image`.
    """
    resized = tf.image.resize(labels[..., None], content, "nearest")
    return _window(resized, canvas, corner, fill)[..., 0]


def _window(x, canvas, corner, fill):
    corner = tf.convert_to_tensor(corner)
    first, before = tf.maximum(corner, 0), tf.maximum(-corner, 0)
    room = tf.stack(canvas) - before
    x = x[first[0] : first[0] + room[0], first[1] : first[1] + room[1]]
    after = room - tf.shape(x)[:2]
    x = tf.pad(x, [[before[0], after[0]], [before[1], after[1]], [0, 0]], constant_values=fill)
    return tf.ensure_shape(x, [*canvas, x.shape[-1]])


def preprocess(image, canvas):
    """The network's input for one photo, without augmentation.

    Args:
        image: uint8 [h, w, 3], any size.
        canvas: (height, width), static.

    Returns:
        float32 [*canvas, 3], and int32 [2], the photo's size on the canvas.
    """
    content = content_size(tf.shape(image)[:2], canvas)
    return place_image(image, content, canvas), content


def restore(labels, content, size):
    """The photo's part of a label map, at the photo's own size: int32 [*canvas] -> int32 [*size]."""
    labels = labels[: content[0], : content[1], None]
    return tf.image.resize(labels, size, "nearest")[..., 0]


def full_size(result, content, size):
    """A prediction on the canvas, brought to the photo's own size.

    Args:
        result: dict of int32 maps 'panoptic', 'semantic', 'instance' [*canvas], and 'score' [K], of one photo.
        content: int [2], the photo's size on the canvas.
        size: int [2], the photo's own size.
    """
    maps = {name: restore(result[name], content, size) for name in ("panoptic", "semantic", "instance")}
    return {**maps, "score": result["score"]}
