"""From a decoded photo to the network's canvas and back. Training, evaluation and export share this file.

A photo is scaled to fit the canvas, or by one factor for all photos, which then go on canvases of several sizes (see
`ScaledCanvas`). Its values are scaled to [-1, 1]. The rest of the canvas is padded with 0, mid grey. Evaluation pads at
the bottom and on the right. Training puts the photo at a random place (see `pipeline.Augmentation`).
"""

import dataclasses
import itertools

import numpy as np
import tensorflow as tf

from axial.errors import InputError

SCALE = "photo_scale"  # the name that files store the factor of all photos under
STEP, LEAST_SIDE = 0.8, 65  # of a list of canvases: from one side to the next, and where the list ends
STRIDE = 16  # of most networks
LEAST_TILE = 32  # pixels of a photo along a side of the part of it that a canvas holds


@dataclasses.dataclass(frozen=True)
class ScaledCanvas:
    """Canvases for photos that are all scaled by one factor.

    A photo goes on the smallest canvas that holds it. Height and width are chosen separately. A photo that is larger
    than all of them is cut into tiles that overlap, each of which goes on the largest canvas; see
    `axial.tasks.segmentation.tiles`.

    Attributes:
        scale: the factor.
        heights, widths: sides of the canvases, the largest first.
        overlap: pixels of a photo that neighbouring tiles have in common along a side, at least.
    """

    scale: float
    heights: tuple[int, ...]
    widths: tuple[int, ...]
    overlap: int

    @classmethod
    def within(cls, canvas, scale, overlap=None):
        """The canvas (height, width) and smaller ones, each side by `canvas_sides`.

        `overlap` is that of tiles; None for a quarter of a tile's smaller side.
        """
        overlap = min(tile_size(canvas, scale)) // 4 if overlap is None else overlap
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
        """The largest canvas alone, as exports have it."""
        return dataclasses.replace(self, heights=self.heights[:1], widths=self.widths[:1])

    def choose(self, content):
        """(height, width) of the canvas for a photo of `content`, int32 [2], which the largest canvas holds."""
        return _smallest(self.heights, content[0]), _smallest(self.widths, content[1])


def canvas_sides(side):
    """Sides of canvases from `side` down to `LEAST_SIDE`, each about `STEP` of the one before.

    They differ by multiples of `STRIDE`: a canvas of 16k + 1 pixels has smaller ones of 16k + 1.
    """
    sides = (side - STRIDE * round(side * (1 - STEP**i) / STRIDE) for i in itertools.count(1))
    return side, *dict.fromkeys(itertools.takewhile(lambda smaller: smaller >= LEAST_SIDE, sides))


def _smallest(sides, length):
    """The smallest of the sides that is at least `length`, int []."""
    if len(sides) == 1:
        return sides[0]
    return tf.reduce_min(tf.where(tf.constant(sides) >= length, sides, sides[0]))


def scaled_size(size, scale):
    """int32 [2]: the size of a photo of `size` (h, w), times `scale`. It may have less than a pixel, then it is 0."""
    return tf.cast(tf.minimum(tf.round(tf.cast(size, tf.float32) * scale), 2.0**30), tf.int32)


def tile_size(canvas, scale):
    """(height, width) of the part of a photo that fills a canvas (height, width) at a scale."""
    return tuple(int(np.float32(side) / np.float32(scale)) for side in canvas)


def is_whole(size, canvas, name=""):
    """Whether a canvas holds a photo; it is cut into tiles otherwise.

    Args:
        size: int [2], the photo's own (h, w).
        canvas: `ScaledCanvas`; a canvas (height, width), which photos are fitted to, holds any photo.
        name: of the photo, for the message.

    Raises:
        InputError: at its scale the photo has less than a pixel, or it is larger than a canvas that has no room for a
            tile.
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
        image: the photo, of any dtype, with values from 0 to 255.
        content: int32 [2], the size that it is scaled to.
        canvas: (height, width).
        corner: (y, x) of the canvas' upper left corner on the scaled photo. It is negative if padding comes before the
            photo.
    """
    first, extent, before = _shown_region(content, canvas, corner)
    return _padded(_resized(image, content, first, extent) / 127.5 - 1, canvas, before, 0.0)


def place_labels(labels, content, canvas, corner=(0, 0), fill=0):
    """Labels on a canvas: int32 [h, w] -> int32 [*canvas]. Each pixel has its nearest label; padding has `fill`.

    The other arguments are those of `place_image`.
    """
    first, extent, before = _shown_region(content, canvas, corner)
    sides = tf.unstack(tf.shape(labels))
    rows, columns = (_nearest(first[i], extent[i], content[i], side) for i, side in enumerate(sides))
    return _padded(tf.gather(tf.gather(labels, rows), columns, axis=1)[..., None], canvas, before, fill)[..., 0]


def _shown_region(content, canvas, corner):
    """What a canvas shows of a scaled photo, as its first pixel and its size, and its place there: int32 [2] each."""
    corner, canvas = tf.convert_to_tensor(corner), tf.stack([*canvas])
    first, before = tf.maximum(corner, 0), tf.minimum(tf.maximum(-corner, 0), canvas)
    return first, tf.maximum(tf.minimum(tf.cast(content, tf.int32) - first, canvas - before), 0), before


def _resized(image, content, first, extent):
    """float32 [*seen, 3]: a part of the photo scaled to `content`.

    It is that part of `tf.image.resize(image, content, "bilinear", antialias=True)`, but for rounding. Only the pixels
    that it depends on are read.
    """
    size = tf.cast(tf.shape(image)[:2], tf.float64)
    scale = tf.cast(content, tf.float64) / size
    reach = tf.maximum(1 / scale, 1) + 1  # of the kernel, in pixels of the photo, and one for rounding
    first, extent = tf.cast(first, tf.float64), tf.cast(extent, tf.float64)
    start = tf.clip_by_value(tf.floor(first / scale - reach), 0, size - 1)
    end = tf.cast(tf.minimum(tf.math.ceil((first + extent) / scale + reach), size), tf.int32)
    top, left = tf.unstack(tf.cast(start, tf.int32))
    rows, columns = tf.unstack(tf.cast(extent, tf.int32))
    resized = tf.raw_ops.ScaleAndTranslate(
        images=tf.convert_to_tensor(image)[None, top : end[0], left : end[1]],
        size=tf.maximum(tf.cast(extent, tf.int32), 1),  # the operation makes no empty image
        scale=tf.cast(content, tf.float32) / tf.cast(size, tf.float32),
        translation=tf.cast(start * scale - first, tf.float32),
        kernel_type="triangle",
        antialias=True,
    )
    return resized[0, :rows, :columns]


def _nearest(first, extent, content, side):
    """int32 [seen]: the pixels of a side that are nearest to some of the `content` pixels that it is scaled to."""
    scale = tf.cast(side, tf.float32) / tf.cast(content, tf.float32)
    centres = (tf.cast(tf.range(first, first + extent), tf.float32) + 0.5) * scale  # as `tf.image.resize` rounds
    return tf.minimum(tf.cast(tf.floor(centres), tf.int32), side - 1)


def _padded(x, canvas, before, fill):
    after = tf.stack([*canvas]) - before - tf.shape(x)[:2]
    x = tf.pad(x, [[before[0], after[0]], [before[1], after[1]], [0, 0]], constant_values=fill)
    return tf.ensure_shape(x, [*map(tf.get_static_value, canvas), x.shape[-1]])


def preprocess(image, canvas):
    """The network's input for one photo, without augmentation.

    Args:
        image: uint8 [h, w, 3], any size.
        canvas: (height, width), static, that the photo is fitted to; or a `ScaledCanvas`.

    Returns:
        float32 [*canvas, 3], and int32 [2], the photo's size on the canvas. A photo that no canvas holds is left out
        of its canvas, so that its size does not fill the memory.
    """
    size = tf.shape(image)[:2]
    if not isinstance(canvas, ScaledCanvas):
        content = content_size(size, canvas)
        return place_image(image, content, canvas), content
    content = scaled_size(size, canvas.scale)
    fits = tf.reduce_all((content > 0) & (content <= canvas.largest))
    shown = tf.where(fits, content, 1)
    return place_image(image, shown, canvas.choose(shown)), content


def restore(labels, content, size):
    """The photo's part of a label map, at the photo's own size: int32 [*canvas] -> int32 [*size]."""
    labels = labels[: content[0], : content[1], None]
    return tf.image.resize(labels, size, "nearest")[..., 0]


def full_size(result, content, size):
    """A prediction on the canvas, brought to the photo's own size.

    Args:
        result: dict of int32 maps 'panoptic', 'semantic', 'instance' [*canvas], and of 'score' [K] and 'dropped' [], of
            one photo.
        content: int [2], the photo's size on the canvas.
        size: int [2], the photo's own size.
    """
    maps = {name: restore(result[name], content, size) for name in ("panoptic", "semantic", "instance")}
    return {**maps, "score": result["score"], "dropped": result["dropped"]}
