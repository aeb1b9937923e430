"""Output maps of the networks on the canvas: resized, and averaged over windows, scales and mirror images."""

import math

import tensorflow as tf

from axial.layers.conv import resize_antialiased, resize_bilinear, step_of
from axial.models.outputs import CENTER, CLASS, OFFSET, PROBABILITY, SEMANTIC


def upsample(outputs, canvas, stride=1):
    """Resizes the heads' output maps to every `stride`-th pixel of the canvas.

    Args:
        outputs: dict of the model's output maps. Offsets are in pixels of the map.
        canvas: (H, W) of the model's input.
        stride: output stride; 1 for every pixel.

    Returns:
        dict of float32 maps [N, ceil(H / stride), ceil(W / stride), C]. Offsets are in pixels of the canvas.
    """
    size = [-(-side // stride) for side in canvas]
    maps = {name: tf.cast(x, tf.float32) for name, x in outputs.items()}
    maps = {name: resize_bilinear(x, size, exact=name in (CENTER, OFFSET)) for name, x in maps.items()}
    if OFFSET in maps:
        rows, columns = outputs[OFFSET].shape[1:3]
        maps[OFFSET] *= tf.constant([step_of(rows, canvas[0]), step_of(columns, canvas[1])], tf.float32)
    return maps


def sliding(model, window, overlap):
    """Sliding-window inference: a function like `model` that runs the network on one window at a time.

    Windows start at equal steps; the last windows end at the border of the images. Logits are averaged where windows
    overlap. Images that fit into one window go to the model unchanged.

    Args:
        model: function that maps images to a dict with 'semantic_logits'.
        window: (height, width) of the windows.
        overlap: overlap of neighbouring windows, as a fraction of a window's side.

    Returns:
        function that maps images [N, H, W, 3] to the model's dict if they fit into one window, otherwise to a dict of
        'semantic_logits' [N, H, W, classes].
    """

    def run(images):
        canvas = images.shape[1:3]
        if all(side <= most for side, most in zip(canvas, window)):
            return model(images)
        sides = [min(pair) for pair in zip(canvas, window)]
        total = count = tf.zeros([])
        for top in window_starts(canvas[0], sides[0], overlap):
            for left in window_starts(canvas[1], sides[1], overlap):
                with tf.control_dependencies([total]):  # runs one window after the other, to bound the memory
                    crop = tf.identity(images[:, top : top + sides[0], left : left + sides[1]])
                around = [[0, 0], [top, canvas[0] - top - sides[0]], [left, canvas[1] - left - sides[1]], [0, 0]]
                logits = upsample({SEMANTIC: model(crop)[SEMANTIC]}, sides)[SEMANTIC]
                total += tf.pad(logits, around)
                count += tf.pad(tf.ones([1, *sides, 1]), around)
        return {SEMANTIC: total / count}

    return run


def window_starts(size, window, overlap):
    """List of the first pixels of the windows along an axis of `size` pixels."""
    step = max(math.ceil(window * (1 - overlap)), 1)
    return [min(i * step, size - window) for i in range(math.ceil((size - window) / step) + 1)]


def canvas_maps(model, images, widths=None, scales=(1.0,), *, flip=False):
    """The network's output maps on the canvas, averaged over scales and optionally over the mirror image.

    It takes means of class probabilities, centre heat maps and offsets (in pixels of the canvas). Scales run one after
    the other, so memory does not grow with their number. A mirrored photo gives exactly the mirrored maps, because each
    scale averages the image and its mirror image first.

    Args:
        model: function that maps images to the dict of output maps.
        images: canvases from `preprocess`, float32 [N, H, W, 3].
        widths: int [N], valid width of each canvas; the rest is padding. Needed with `flip`.
        scales: scales of the canvas; see `scaled_canvas`.
        flip: whether to average over the mirror image as well.

    Returns:
        dict of maps for `postprocess`.
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
            # TensorFlow's graph optimisation would reorder a plain sum with the sum over scales.
            scaled = {name: tf.reduce_mean(tf.stack([scaled[name], mirrored[name]]), 0) for name in scaled}
        total = scaled if total is None else {name: total[name] + scaled[name] for name in total}
    mean = {name: x / len(scales) for name, x in total.items()}
    probability = mean.pop(SEMANTIC)
    return {CLASS: tf.argmax(probability, -1, tf.int32), PROBABILITY: probability, **mean}


def _at_scale(model, images, scale):
    """Class probabilities, centre heat map and offsets on the canvas, from the network at one scale."""
    canvas = images.shape[1:3]
    maps = upsample(model(resize_antialiased(images, scaled_canvas(canvas, scale))), canvas)
    maps[SEMANTIC] = tf.nn.softmax(maps[SEMANTIC])
    return maps


def scaled_canvas(canvas, scale):
    """(height, width) of the canvas at a scale, rounded to the nearest 16k + 1 pixels; unchanged at scale 1."""
    if scale == 1:
        return tuple(canvas)
    return tuple(16 * max(round((side - 1) * scale / 16), 1) + 1 for side in canvas)


def _mirror(x, widths):
    """Maps [N, H, W, C] with the first `widths` columns of each image reversed."""
    return tf.reverse_sequence(x, widths, seq_axis=2, batch_axis=0)
