"""The models' maps on the canvas: resized, and averaged over windows, scales and mirrors."""

import math

import tensorflow as tf

from axial.layers.conv import resize_antialiased, resize_bilinear, step_of
from axial.models.outputs import CENTER, CLASS, OFFSET, PROBABILITY, SEMANTIC


def upsample(outputs, canvas, stride=1):
    """Resizes the heads' maps to every `stride`-th pixel of the canvas.

    Args:
        outputs: dict of a model's maps. Offsets are in pixels of the map.
        canvas: (H, W) of the model's input.
        stride: 1 for every pixel.

    Returns:
        dict of float32 maps [N, ceil(H / stride), ceil(W / stride), C]. Offsets are in pixels of the canvas.
    """
    size = [-(-side // stride) for side in canvas]
    maps = {
        name: resize_bilinear(tf.cast(x, tf.float32), size, exact=name in (CENTER, OFFSET))
        for name, x in outputs.items()
    }
    if OFFSET in maps:
        rows, columns = outputs[OFFSET].shape[1:3]
        maps[OFFSET] *= tf.constant([step_of(rows, canvas[0]), step_of(columns, canvas[1])], tf.float32)
    return maps


def sliding(model, window, overlap):
    """A function like `model` whose network sees a window at a time.

    Windows start a step apart, and the last ones end where the images end. Logits are averaged where windows overlap.
    Images that fit one window are given to the model as they are.

    Args:
        model: function from images to a dict with 'semantic_logits'.
        window: (height, width) of the windows.
        overlap: share of a window that the next one covers again.

    Returns:
        function from images [N, H, W, 3] to the model's dict, or to the dict of 'semantic_logits' [N, H, W, classes].
    """

    def run(images):
        canvas = images.shape[1:3]
        if all(side <= most for side, most in zip(canvas, window)):
            return model(images)
        sides = [min(pair) for pair in zip(canvas, window)]
        total = count = tf.zeros([])
        for top in window_starts(canvas[0], sides[0], overlap):
            for left in window_starts(canvas[1], sides[1], overlap):
                with tf.control_dependencies([total]):  # one window after the other
                    crop = tf.identity(images[:, top : top + sides[0], left : left + sides[1]])
                around = [[0, 0], [top, canvas[0] - top - sides[0]], [left, canvas[1] - left - sides[1]], [0, 0]]
                logits = upsample({SEMANTIC: model(crop)[SEMANTIC]}, sides)[SEMANTIC]
                total += tf.pad(logits, around)
                count += tf.pad(tf.ones([1, *sides, 1]), around)
        return {SEMANTIC: total / count}

    return run


def window_starts(size, window, overlap):
    """Where windows start along an axis of `size` pixels."""
    step = max(math.ceil(window * (1 - overlap)), 1)
    return [min(i * step, size - window) for i in range(math.ceil((size - window) / step) + 1)]


def canvas_maps(model, images, widths=None, scales=(1.0,), *, flip=False):
    """The network's maps on the canvas, averaged over scales and over the photo and its mirror image.

    Class probabilities, heat and offsets (in pixels of the canvas) are averaged. Scales run one after the other and
    are added up, so memory does not grow with their number. A mirrored photo gives the mirrored maps to the last bit,
    because the two images of a scale are averaged before anything else.

    Args:
        model: function from images to the dict of maps.
        images: float32 [N, H, W, 3], of `preprocess`.
        widths: int [N], the width of each photo on the canvas; the rest is padding. Needed with `flip`.
        scales: scales of the canvas; see `scaled_canvas`.
        flip: whether the mirror image is averaged in too.

    Returns:
        dict of maps as `postprocess` takes them.
    """
    total = None
    for scale in scales:
        with tf.control_dependencies(tf.nest.flatten(total or {})):
            scaled = _at_scale(model, images, scale)
        if flip:
            with tf.control_dependencies(tf.nest.flatten(scaled)):
                mirrored = _at_scale(model, _mirror(images, widths), scale)
            mirrored = {name: _mirror(x, widths) for name, x in mirrored.items()}
            if OFFSET in mirrored:
                mirrored[OFFSET] *= tf.constant([1.0, -1.0])
            # A mean, because graph optimisation would reorder a sum with the sum over scales.
            scaled = {name: tf.reduce_mean(tf.stack([scaled[name], mirrored[name]]), 0) for name in scaled}
        total = scaled if total is None else {name: total[name] + scaled[name] for name in total}
    mean = {name: x / len(scales) for name, x in total.items()}
    probability = mean.pop(SEMANTIC)
    return {CLASS: tf.argmax(probability, -1, tf.int32), PROBABILITY: probability, **mean}


def _at_scale(model, images, scale):
    """Class probabilities, heat and offsets on the canvas of one scale."""
    canvas = images.shape[1:3]
    maps = upsample(model(resize_antialiased(images, scaled_canvas(canvas, scale))), canvas)
    maps[SEMANTIC] = tf.nn.softmax(maps[SEMANTIC])
    return maps


def scaled_canvas(canvas, scale):
    """(height, width) of a canvas at a scale, rounded to the nearest 16k + 1 pixels. At scale 1 it stays as it is."""
    if scale == 1:
        return tuple(canvas)
    return tuple(16 * max(round((side - 1) * scale / 16), 1) + 1 for side in canvas)


def _mirror(x, widths):
    """x [N, H, W, C] with the first `widths` columns of each image in reverse."""
    return tf.reverse_sequence(x, widths, seq_axis=2, batch_axis=0)
