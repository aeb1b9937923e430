"""Pictures of panoptic segmentations and plots of stress tests."""

import numpy as np
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import distance_transform_cdt, find_objects

from axial.data.labels import nth_of_class
from axial.io.show import drawn, plain

GOLDEN = (5**0.5 - 1) / 2
FILL = 0.3  # strength of the colours inside segments, from 0 to 1


def hex_color(color):
    """A colour (red, green, blue), as HTML writes it."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def segment_colors(classes, spec):
    """The colour of each segment, uint8 [S, 3]: the colour of its class, in a different shade for each instance.

    If the spec has a single thing class, its instances have different hues, not shades. The first has the class's hue.
    """
    classes = np.asarray(classes, int)
    nth, colors = nth_of_class(classes), spec.colors[classes].astype(np.float64)
    shades = colors * (1 - 0.13 * (nth % 5))[:, None]
    if sum(spec.things) == 1 and len(classes):
        hsv = rgb_to_hsv(colors / 255)
        hsv[:, 0] = (hsv[:, 0] + nth * GOLDEN) % 1  # spreads any number of instances over the circle of hues
        hsv[nth > 0, 1:] = np.maximum(hsv[nth > 0, 1:], 0.5)  # grey and black have no hue
        shades = np.where(np.asarray(spec.things)[classes, None], 255 * hsv_to_rgb(hsv), shades)
    return np.clip(np.round(shades, 6), 0, 255).astype(np.uint8)


def overlay(photo, segments, classes, spec, fill=FILL, *, colors=None):
    """Overlays segments on a photo: outlines, a light fill, and the class names of large segments. Void is darker.

    No names are drawn if the spec has one stuff class and one thing class, as the colours distinguish these.

    Args:
        photo: uint8 [h, w, 3].
        segments: int [h, w]; 0 for void, i + 1 for segment i.
        classes: class index of each segment.
        spec: `DatasetSpec`.
        fill: strength of the colours inside segments: 0 draws only outlines, 1 hides the photo.
        colors: uint8 [S, 3], the colour of each segment; by default `segment_colors`.

    Returns:
        uint8 [h, w, 3].
    """
    colors = segment_colors(classes, spec) if colors is None else colors
    palette = np.concatenate([np.zeros([1, 3], np.uint8), colors])
    painted = np.uint8(fill * palette)[segments] + np.uint8((1 - fill) * np.arange(256))[photo]
    around = np.pad(segments, 1, mode="edge")
    sides = around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:]
    edge = np.logical_or.reduce([segments != side for side in sides])
    painted[edge] = palette[segments[edge]]
    image = Image.fromarray(painted)
    if tuple(spec.things) not in ((False, True), (True, False)):
        _write_labels(image, segments, [plain(spec.class_names[c]) for c in classes])
    return np.asarray(image)


def _write_labels(image, segments, names):
    step = max(1, max(segments.shape) // 1000)  # a coarse map suffices to place the names
    coarse = segments[::step, ::step]
    size = max(10, round(max(segments.shape) / 30))
    least = max(0.004 * segments.size, 3 * size * size)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    for i, (name, box) in enumerate(zip(names, find_objects(coarse, len(names)))):
        if box is None:
            continue
        mask = coarse[box] == i + 1
        if mask.sum() * step**2 < least:
            continue
        inside = distance_transform_cdt(np.pad(mask, 1))
        center = np.unravel_index(inside.argmax(), inside.shape)
        y, x = (step * (v - 1 + axis.start) for v, axis in zip(center, box))
        left, top, right, bottom = draw.textbbox((0, 0), name, font=font)
        x = min(max(x - (right - left) / 2, 1), max(image.width - right - 1, 1))
        y = min(max(y - (bottom - top) / 2, 1), max(image.height - bottom - 1, 1))
        draw.text((x, y), name, fill="white", font=font, stroke_width=max(1, size // 8), stroke_fill="black")


def save_stress(path, curves):
    """Plots PQ and its relative change against resolution, as PNG or JPEG.

    Args:
        path: path of the picture.
        curves: dict from the name of a model to the rows of `stress_test`, after `add_changes`. With two models,
            only the second model's relative changes are plotted.
    """
    from matplotlib.figure import Figure  # takes as long as all other imports of a prediction but TensorFlow

    figure = Figure([12, 5], layout="constrained", facecolor="white")
    grid, lines = figure.subplots(1, 2), ({}, {})
    *base, last = curves
    for group, color in (("", "C0"), ("_things", "C1"), ("_stuff", "C2")):
        label = f"PQ{group.replace('_', ' ')}"
        shown = [(0, f"{name}: {label}", f"pq{group}", name, dashes) for name, dashes in zip(curves, ("-", "--"))]
        for side, text, score, name, dashes in [*shown, (1, label, f"relative_change{group}", last, "-")]:
            ratios = [row["ratio"] for row in curves[name]]
            values = [np.nan if row[score] is None else 100 * row[score] for row in curves[name]]
            (lines[side][drawn(text)],) = grid[side].plot(ratios, values, dashes, color=color, marker="o")
    grid[1].axhline(0, color="grey", linewidth=1)
    ylabels = "%", f"relative change, %: {last} to {base[0] if base else 'ratio 1'}"
    ticks = [row["ratio"] for row in next(iter(curves.values()))]
    for axes, handles, ylabel in zip(grid, lines, ylabels):
        axes.set(xlabel="resolution, as a ratio of the canvas", ylabel=drawn(ylabel), xscale="log")
        axes.legend(handles.values(), handles)
        axes.set_xticks(ticks, [drawn(f"{ratio:g}") for ratio in ticks], minor=False)
        axes.minorticks_off()
    figure.savefig(path, dpi=90)
