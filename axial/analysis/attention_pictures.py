"""Pictures of where the mechanisms of the spatial-attention study look from one pixel of a photo.

The features that a layer takes are smaller than the photo. A pixel of them stands for a patch of the photo, and the
pictures mark the middle of the patch.
"""

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure
from PIL import Image

from axial.io.write import write_whole
from axial.layers.deformable_conv import positions

TERM_NAMES = {
    "1000": "query and key content",
    "0100": "query content and relative position",
    "0010": "key content only",
    "0001": "relative position only",
}


def term_maps(layer, x, place):
    """{name: float32 [Y, X]}: the weights of a query by each term of the setting alone, and by all, mean of the heads.

    Args:
        layer: a built `GeneralizedAttention` of maps.
        x: [1, H, W, C], what the layer takes.
        place: (row, column) of the query.
    """
    own = [bits for bits in TERM_NAMES if int(bits, 2) & int(layer.setting, 2)]
    maps = {TERM_NAMES[bits]: layer.query_weights(x, place, terms=bits) for bits in own}
    maps[f"setting {layer.setting}"] = layer.query_weights(x, place)
    return {name: tf.reduce_mean(weights[0], 0).numpy() for name, weights in maps.items()}


def sampling_points(layer, x, place):
    """(rows, columns, masks), float32 [K, O] each: where the taps of one output pixel sample the map.

    Args:
        layer: a built `DeformableConv`.
        x: [1, H, W, C], what the layer takes.
        place: (row, column) of the output pixel.
    """
    offsets, masks = layer.offsets(x)
    options = dict(dilation=layer.dilation, padding=layer.padding)
    rows, columns = positions(offsets, [layer.side] * 2, layer.strides, **options)
    pixel = place[0] * offsets.shape[2] + place[1]
    rows, columns = rows[0, pixel].numpy(), columns[0, pixel].numpy()
    if masks is None:
        return rows, columns, np.ones_like(rows)
    return rows, columns, masks[0, place[0], place[1]].numpy().reshape(rows.shape[::-1]).T


def query_kernels(layer, x, place):
    """float32 [G, N, N]: the kernels of one query.

    Args:
        layer: a built `DynamicConv` of maps.
        x: [1, H, W, C], what the layer takes.
        place: (row, column) of the query.
    """
    kernels = layer.query_kernels(x)[0, place[0], place[1]].numpy()
    return kernels.reshape(-1, layer.side, layer.side)


# === Drawing ===


def draw_maps(path, photo, maps, place):
    """Draws weights over a photo, a picture for each map, with the query marked.

    Args:
        path: picture to write.
        photo: uint8 [h, w, 3].
        maps: dict from titles to [Y, X].
        place: (row, column) of the query on a map of as many pixels.
    """
    figure = Figure(figsize=(3.2 * len(maps), 3.4), layout="constrained")
    for axes, (title, weights) in zip(np.atleast_1d(figure.subplots(1, len(maps))), maps.items()):
        _show(axes, photo, title)
        large = Image.fromarray(weights.astype(np.float32)).resize(photo.shape[1::-1], Image.BILINEAR)
        axes.imshow(np.asarray(large), cmap="inferno", alpha=0.6)
        axes.plot(*_middle(place, weights.shape, photo), "P", color="cyan", markeredgecolor="black", markersize=10)
    write_whole(path, lambda partial: figure.savefig(partial, dpi=110))


def draw_points(path, photo, points, place, size):
    """Draws the samples of one output pixel of a deformable convolution on a photo.

    Args:
        path: picture to write.
        photo: uint8 [h, w, 3].
        points: of `sampling_points`; the area of a dot is its mask.
        place: (row, column) of the output pixel, on a map of the input's stride.
        size: (rows, columns) of the map.
    """
    figure = Figure(figsize=(5, 5 * photo.shape[0] / photo.shape[1]), layout="constrained")
    axes = figure.subplots()
    _show(axes, photo, "samples of one pixel")
    rows, columns, masks = (np.ravel(a) for a in points)
    axes.scatter(*_middle((rows, columns), size, photo), 60 * masks, color="red", edgecolors="white")
    axes.plot(*_middle(place, size, photo), "P", color="cyan", markeredgecolor="black", markersize=10)
    axes.set(xlim=(0, photo.shape[1]), ylim=(photo.shape[0], 0))  # samples may lie outside the photo
    write_whole(path, lambda partial: figure.savefig(partial, dpi=110))


def draw_kernels(path, kernels):
    """Draws the kernels [G, N, N] of one query of a dynamic convolution, a picture for each group."""
    figure = Figure(figsize=(1.6 * len(kernels), 1.9), layout="constrained")
    for group, (axes, kernel) in enumerate(zip(np.atleast_1d(figure.subplots(1, len(kernels))), kernels)):
        axes.imshow(kernel, cmap="inferno", vmin=0)
        axes.set_title(f"group {group + 1}", fontsize=8)
        axes.set_axis_off()
    write_whole(path, lambda partial: figure.savefig(partial, dpi=110))


def _show(axes, photo, title):
    axes.imshow(photo)
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()


def _middle(place, size, photo):
    """(x, y) on the photo of the middle of a map's pixel."""
    rows, columns = ((np.asarray(p) + 0.5) * n / m - 0.5 for p, n, m in zip(place, photo.shape, size))
    return columns, rows
