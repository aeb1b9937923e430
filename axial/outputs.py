"""The names of the models' maps, and the function that resizes the maps to the canvas."""

import tensorflow as tf

from axial.layers.conv import resize_bilinear

# What models return.
LOGITS = "logits"  # float32 [N, classes]
SEMANTIC = "semantic_logits"  # float32 [N, h, w, classes]
CENTER = "center_heatmap"  # float32 [N, h, w, 1]
OFFSET = "offset_map"  # float32 [N, h, w, 2]: (y, x) from a pixel to the centre of its instance

# What a task computes from them. Post-processing takes these two, CENTER and OFFSET.
CLASS = "semantic"  # int32 [N, H, W]
PROBABILITY = "probability"  # float32 [N, H, W, classes]


def upsample(outputs, canvas, stride=1):
    """Resizes the heads' maps to every `stride`-th pixel of the canvas, with aligned corners.

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
        maps[OFFSET] *= tf.constant([(canvas[0] - 1) / max(rows - 1, 1), (canvas[1] - 1) / max(columns - 1, 1)])
    return maps
