"""Places a decoded photo on the network's canvas, and resizes predictions to the photo.

Training, evaluation and export share this file. A photo is scaled to fit the canvas, or all photos are scaled by one
factor and placed on canvases of several sizes (see `ScaledCanvas`). Values are scaled to [-1, 1]. The rest of the
canvas is padded with 0, which is mid grey. Evaluation pads at the bottom and on the right; training places the photo at
random (see `pipeline.Augmentation`).
"""

import contextvars
import dataclasses
import itertools

import numpy as np
import tensorflow as tf

from axial.errors import InputError

SCALE = "photo_scale"  # name of the common scale factor in stored files
STEP, LEAST_SIDE = 0.8, 65  # ratio of a canvas side to the next larger one, and smallest canvas side in pixels
STRIDE = 16  # output stride of most networks
LEAST_TILE = 32  # smallest side of a tile, in pixels of the photo
# Whether the traced graph is for an ONNX or TFLite file, whose formats lack some of TensorFlow's operators.
IN_FILE = contextvars.ContextVar("IN_FILE", default=False)


@dataclasses.dataclass(frozen=True)
class ScaledCanvas:
    """Canvases for photos that all have the same scale factor.

    A photo goes on the smallest canvas that holds it; height and width are chosen separately. A photo larger than all
    canvases is cut into overlapping tiles, each on the largest canvas; see `axial.tasks.segmentation.tiles`.

    Attributes:
        scale: the scale factor, pixels of the canvas per pixel of the photo.
        heights, widths: sides of the canvases in pixels, the largest first.
        overlap: least overlap of neighbouring tiles along a side, in pixels of the photo.
    """

    scale: float
    heights: tuple[int, ...]
    widths: tuple[int, ...]
    overlap: int

    @classmethod
    def within(cls, canvas, scale, overlap=None):
        """Makes the canvas (height, width) and smaller ones, whose sides are `canvas_sides`.

        `overlap` is the tiles' overlap in pixels of the photo; None for a quarter of a tile's smaller side.
        """
        overlap = min(tile_size(canvas, scale)) // 4 if overlap is None else overlap
        scale = float(np.float32(scale))  # as exports store it: the tiles of a run and of its export are equal
        return cls(scale, *map(canvas_sides, canvas), overlap)

    @property
    def largest(self):
        """(height, width) of the largest canvas."""
        return self.heights[0], self.widths[0]

    @property
    def tile(self):
        """(height, width) of a tile, in pixels of the photo."""
        return tile_size(self.largest, self.scale)

    @property
    def alone(self):
        """A `ScaledCanvas` with only the largest canvas, which exports use."""
        return dataclasses.replace(self, heights=self.heights[:1], widths=self.widths[:1])

    def choose(self, valid_size):
        """(height, width) of the smallest canvas that holds a photo of scaled size `valid_size`, int32 [2]."""
        return _smallest(self.heights, valid_size[0]), _smallest(self.widths, valid_size[1])


def canvas_sides(side):
    """Sides of canvases from `side` down to `LEAST_SIDE`, each about `STEP` times the previous one.

    The sides differ by multiples of `STRIDE`. So if `side` is 16k + 1 for an integer k, all sides are.
    """
    sides = (side - STRIDE * round(side * (1 - STEP**i) / STRIDE) for i in itertools.count(1))
    return side, *dict.fromkeys(itertools.takewhile(lambda smaller: smaller >= LEAST_SIDE, sides))


def _smallest(sides, length):
    """The smallest side that is at least `length`, int []; the largest if all sides are below it."""
    if len(sides) == 1:
        return sides[0]
    return tf.reduce_min(tf.where(tf.constant(sides) >= length, sides, sides[0]))


def scaled_size(size, scale):
    """int32 [2]: the size (h, w) of a photo times `scale`. A small side may round to 0."""
    return tf.cast(tf.minimum(tf.round(tf.cast(size, tf.float32) * scale), 2.0**30), tf.int32)


def tile_size(canvas, scale):
    """(height, width), in pixels of the photo, of a tile that fills the canvas (height, width) after scaling."""
    return tuple(int(np.float32(side) / np.float32(scale)) for side in canvas)


def is_whole(size, canvas, name=""):
    """Whether the whole photo fits a canvas; otherwise it is cut into tiles.

    Args:
        size: int [2], original size (h, w) of the photo.
        canvas: `ScaledCanvas`, or (height, width) of a canvas to which every photo is scaled to fit.
        name: name of the photo, for the message.

    Raises:
        InputError: a side of the scaled photo is 0, or the photo needs tiles and a tile is smaller than `LEAST_TILE`.
    """
    if not isinstance(canvas, ScaledCanvas):
        return True
    (height, width), (rows, columns) = (map(int, x) for x in (size, scaled_size(size, canvas.scale)))
    about = f"{width}x{height} pixels become {columns}x{rows} by photo_scale = {canvas.scale:g}"
    about = f"{name}: {about}" if name else about
    if not min(rows, columns):
        raise InputError(f"{about}; expected at least 1x1")
    if rows <= canvas.largest[0] and columns <= canvas.largest[1]:
        return True
    if min(canvas.tile) < LEAST_TILE:
        raise InputError(
            f"{about}; the canvas holds at most {canvas.largest[1]}x{canvas.largest[0]}, and of the photo a tile of "
            f"{canvas.tile[1]}x{canvas.tile[0]}: expected at least {LEAST_TILE}x{LEAST_TILE}"
        )
    return False


def fitted_size(size, canvas, scale=1.0):
    """int32 [2]: valid size of a photo of `size` (h, w), scaled to fit `canvas` and then by `scale`.

    A photo that fits and would change by at most a pixel keeps its size: 1024x2048 on a canvas of 1025x2049 is not
    resampled.
    """
    size, canvas = tf.cast(size, tf.float32), tf.cast(canvas, tf.float32)
    fitted = tf.round(size * tf.reduce_min(canvas / size) * scale)
    kept = tf.reduce_all((tf.abs(fitted - size) <= 1) & (size <= canvas))
    return tf.cast(tf.maximum(tf.where(kept, size, fitted), 1), tf.int32)


def place_image(image, valid_size, canvas, corner=(0, 0)):
    """Places a photo on a canvas: [h, w, 3] -> float32 [*canvas, 3] with values from -1 to 1.

    Args:
        image: the photo, of any dtype, with values from 0 to 255.
        valid_size: int32 [2], (height, width) of the scaled photo.
        canvas: (height, width).
        corner: (y, x) of the canvas's upper left corner on the scaled photo; negative if padding precedes the photo.
    """
    first, extent, before = _shown_region(valid_size, canvas, corner)
    return _padded(_resized(image, valid_size, first, extent) / 127.5 - 1, canvas, before, 0.0)


def place_labels(labels, valid_size, canvas, corner=(0, 0), fill=0):
    """Places labels on a canvas: int32 [h, w] -> int32 [*canvas], by nearest neighbour, with padding `fill`.

    See `place_image` for the other arguments.
    """
    first, extent, before = _shown_region(valid_size, canvas, corner)
    sides = tf.unstack(tf.shape(labels))
    rows, columns = (_nearest(first[i], extent[i], valid_size[i], side) for i, side in enumerate(sides))
    return _padded(tf.gather(tf.gather(labels, rows), columns, axis=1)[..., None], canvas, before, fill)[..., 0]


def _shown_region(valid_size, canvas, corner):
    """The region of a scaled photo that a canvas shows: first pixel, size, offset on the canvas; int32 [2] each."""
    corner, canvas = tf.convert_to_tensor(corner), tf.stack([*canvas])
    first, before = tf.maximum(corner, 0), tf.minimum(tf.maximum(-corner, 0), canvas)
    return first, tf.maximum(tf.minimum(tf.cast(valid_size, tf.int32) - first, canvas - before), 0), before


def _resized(image, valid_size, first, extent):
    """float32 [*extent, 3]: the region of size `extent` from pixel `first` on in the photo scaled to `valid_size`.

    The result equals this region of `tf.image.resize(image, valid_size, "bilinear", antialias=True)` up to rounding,
    but only the pixels on which the region depends are read.
    """
    size = tf.cast(tf.shape(image)[:2], tf.float64)
    scale = tf.cast(valid_size, tf.float64) / size
    reach = tf.maximum(1 / scale, 1) + 1  # reach of the kernel in pixels of the photo, plus one for rounding
    first, extent = tf.cast(first, tf.float64), tf.cast(extent, tf.float64)
    start = tf.clip_by_value(tf.floor(first / scale - reach), 0, size - 1)
    end = tf.cast(tf.minimum(tf.math.ceil((first + extent) / scale + reach), size), tf.int32)
    top, left = tf.unstack(tf.cast(start, tf.int32))
    rows, columns = tf.unstack(tf.cast(extent, tf.int32))
    if IN_FILE.get():
        return resize_by_products(image, valid_size, lambda distances: tf.maximum(1 - distances, 0.0))
    resized = tf.raw_ops.ScaleAndTranslate(
        images=tf.convert_to_tensor(image)[None, top : end[0], left : end[1]],
        size=tf.maximum(tf.cast(extent, tf.int32), 1),  # the op cannot make an empty image
        scale=tf.cast(valid_size, tf.float32) / tf.cast(size, tf.float32),
        translation=tf.cast(start * scale - first, tf.float32),
        kernel_type="triangle",
        antialias=True,
    )
    return resized[0, :rows, :columns]


def resize_by_products(image, size, kernel):
    """float32 [*size, C]: the whole image [h, w, C] as `ScaleAndTranslate` resizes it, up to rounding.

    Args:
        image: [h, w, C] of any dtype.
        size: int32 [2].
        kernel: function that maps distances, in pixels of the smaller image, to weights.
    """
    height, width = tf.unstack(tf.shape(image)[:2])

    def weights(old, new):
        step = 1 / (tf.cast(new, tf.float32) / tf.cast(old, tf.float32))
        centres = (tf.cast(tf.range(new), tf.float32) + 0.5) * step
        distances = tf.cast(tf.range(old), tf.float32) + 0.5 - centres[:, None]
        values = kernel(tf.abs(distances) / tf.maximum(step, 1.0))
        return values / tf.reduce_sum(values, 1, keepdims=True)

    rows = tf.matmul(weights(height, size[0]), tf.reshape(tf.cast(image, tf.float32), [height, -1]))
    return tf.matmul(weights(width, size[1])[None], tf.reshape(rows, [size[0], width, image.shape[-1]]))


def _nearest(first, extent, valid_size, side):
    """int32 [extent]: source pixel nearest to each pixel from `first` on, for a side scaled to `valid_size` pixels."""
    scale = tf.cast(side, tf.float32) / tf.cast(valid_size, tf.float32)
    centres = (tf.cast(tf.range(first, first + extent), tf.float32) + 0.5) * scale  # as `tf.image.resize` rounds
    return tf.minimum(tf.cast(tf.floor(centres), tf.int32), side - 1)


def _padded(x, canvas, before, fill):
    after = tf.stack([*canvas]) - before - tf.shape(x)[:2]
    x = tf.pad(x, [[before[0], after[0]], [before[1], after[1]], [0, 0]], constant_values=fill)
    return tf.reshape(x, tf.stack([*canvas, x.shape[-1]]))  # for its static shape


def preprocess(image, canvas):
    """The network's input for one photo, without augmentation.

    Args:
        image: uint8 [h, w, 3], any size.
        canvas: static (height, width) to fit the photo to, or a `ScaledCanvas`.

    Returns:
        float32 [*canvas, 3], and int32 [2], the valid size on the canvas. If no canvas holds the photo, the canvas
        shows it as one pixel, to save memory. The valid size is then the scaled photo's size.
    """
    size = tf.shape(image)[:2]
    if not isinstance(canvas, ScaledCanvas):
        valid_size = fitted_size(size, canvas)
        return place_image(image, valid_size, canvas), valid_size
    valid_size = scaled_size(size, canvas.scale)
    fits = tf.reduce_all((valid_size > 0) & (valid_size <= canvas.largest))
    shown = tf.where(fits, valid_size, 1)
    return place_image(image, shown, canvas.choose(shown)), valid_size


def restore(labels, valid_size, size):
    """Resizes the valid region of a label map to the photo's original size: int32 [*canvas] -> int32 [*size]."""
    if IN_FILE.get():
        rows, columns = (_nearest(0, size[i], size[i], valid_size[i]) for i in range(2))
        return tf.gather(tf.gather(labels, rows), columns, axis=1)
    labels = labels[: valid_size[0], : valid_size[1], None]
    return tf.image.resize(labels, size, "nearest")[..., 0]


def full_size(result, valid_size, size):
    """Resizes a prediction on the canvas to the photo's original size.

    Args:
        result: dict of int32 maps 'panoptic', 'semantic', 'instance' [*canvas], 'score' [K] and 'dropped' [] for one
            photo.
        valid_size: int [2], the valid size on the canvas.
        size: int [2], the original size.
    """
    maps = {name: restore(result[name], valid_size, size) for name in ("panoptic", "semantic", "instance")}
    return {**maps, "score": result["score"], "dropped": result["dropped"]}
