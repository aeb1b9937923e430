"""Panoptic segmentations as pictures."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont


def segment_colors(classes, spec):
    """uint8 [S, 3]: the class' colour, varied between instances of one class."""
    colors = spec.colors[classes].astype(np.float64)
    nth = np.array([np.sum(classes[:i] == c) for i, c in enumerate(classes)], int)
    shade = 1 - 0.13 * (nth % 5)
    return np.clip(colors * shade[:, None], 0, 255).astype(np.uint8)


def overlay(photo, segments, classes, spec, alpha=0.6, labels=True):
    """A photo with its segments painted on, outlined and named.

    Args:
        photo: uint8 [h, w, 3].
        segments: int [h, w]; 0 for void, i + 1 for segment i.
        classes: class index of each segment.
        spec: `DatasetSpec`.
        alpha: opacity of the paint.
        labels: whether the larger segments get their class name.

    Returns:
        uint8 [h, w, 3].
    """
    classes = np.asarray(classes, int)
    palette = np.concatenate([[[0, 0, 0]], segment_colors(classes, spec)]).astype(np.float64)
    painted = np.where((segments > 0)[..., None], alpha * palette[segments] + (1 - alpha) * photo, photo * 0.4)
    edge = np.zeros(segments.shape, bool)
    edge[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    edge[1:] |= segments[1:] != segments[:-1]
    painted[edge] = 255
    image = Image.fromarray(painted.astype(np.uint8))
    if labels:
        _write_labels(image, segments, [spec.class_names[c] for c in classes])
    return np.asarray(image)


def _write_labels(image, segments, names):
    height, width = segments.shape
    size = max(10, round(max(height, width) / 45))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    for i, name in enumerate(names):
        mask = segments == i + 1
        if mask.sum() < max(0.004 * mask.size, 3 * size * size):
            continue
        y, x = _inside(mask)
        left, top, right, bottom = draw.textbbox((0, 0), name, font=font)
        x = min(max(x - (right - left) / 2, 1), max(width - right - 1, 1))
        y = min(max(y - (bottom - top) / 2, 1), max(height - bottom - 1, 1))
        draw.text((x, y), name, fill="white", font=font, stroke_width=max(1, size // 8), stroke_fill="black")


def _inside(mask):
    """A pixel (y, x) well inside a mask: the middle of the longest run on its middle row."""
    ys, xs = np.nonzero(mask)
    y = int(np.median(ys))
    y = y if mask[y].any() else int(ys[np.argmin(abs(ys - y))])
    row = np.concatenate([[0], mask[y].astype(int), [0]])
    starts, ends = np.flatnonzero(np.diff(row) == 1), np.flatnonzero(np.diff(row) == -1)
    longest = np.argmax(ends - starts)
    return y, int((starts[longest] + ends[longest]) // 2)
