"""Draws boxes and masks of objects."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from axial.io.show import plain
from axial.tasks.segmentation.drawing import segment_colors


def draw_boxes(photo, boxes, classes, spec, *, scores=None, masks=()):
    """A photo, uint8 [h, w, 3], with boxes, named, and painted with masks.

    Args:
        photo: uint8 [h, w, 3].
        boxes: list of (x, y, width, height) in pixels, the best first: it is drawn last.
        classes: class index of each box.
        spec: `DatasetSpec`.
        scores: from 0 to 1, written after the names; None for no scores.
        masks: uint8 [h, w] of each box, 1 inside; empty for none.
    """
    colors, pixels = segment_colors(classes, spec), photo.astype(np.float64)
    for mask, color in zip(masks, colors):
        pixels = np.where(mask[..., None] > 0, 0.5 * pixels + 0.5 * color, pixels)
    image = Image.fromarray(pixels.astype(np.uint8))
    side = max(photo.shape[:2])
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(max(10, round(side / 40)))
    for i in reversed(range(len(boxes))):
        x, y, width, height = boxes[i]
        color = tuple(int(value) for value in colors[i])
        draw.rectangle((x, y, x + width, y + height), outline=color, width=max(2, side // 300))
        text = plain(spec.class_names[classes[i]]) + (f" {scores[i]:.0%}" if scores is not None else "")
        place = draw.textbbox((x, y), text, font=font)
        draw.rectangle(place, fill=color)
        draw.text((x, y), text, fill="black", font=font)
    return np.asarray(image)
