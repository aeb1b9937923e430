"""Draws panoptic segmentations, confusion matrices and stress tests as pictures."""

import textwrap

import numpy as np
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import find_objects

from axial.data.labels import nth_of_class
from axial.io.show import drawn, plain

GOLDEN = (5**0.5 - 1) / 2


def segment_colors(classes, spec):
    """uint8 [S, 3]: each segment's class colour, in shades that vary over the instances of a class.

    Where the data has one class of things, its instances have hues of their own instead; the first has the class's.
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


def overlay(photo, segments, classes, spec, alpha=0.6, labels=True):
    """A photo with its segments painted on, outlined and named.

    Args:
        photo: uint8 [h, w, 3].
        segments: int [h, w]; 0 for void, i + 1 for segment i.
        classes: class index of each segment.
        spec: `DatasetSpec`.
        alpha: opacity of the paint.
        labels: whether the larger segments get their class name. None does where the data has a background and one
            class of things.

    Returns:
        uint8 [h, w, 3].
    """
    palette = np.concatenate([np.zeros([1, 3]), alpha * segment_colors(classes, spec)]).astype(np.uint8)
    dimmed = [np.array([k * v for v in range(256)], np.uint8) for k in (0.4, 1 - alpha)]
    painted = np.where((segments > 0)[..., None], palette[segments] + dimmed[1][photo], dimmed[0][photo])
    edge = np.zeros(segments.shape, bool)
    edge[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    edge[1:] |= segments[1:] != segments[:-1]
    painted[edge] = 255
    image = Image.fromarray(painted)
    if labels and tuple(spec.things) not in ((False, True), (True, False)):  # there the colours say all
        _write_labels(image, segments, [plain(spec.class_names[c]) for c in classes])
    return np.asarray(image)


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


def caption(photo, text):
    """A photo, uint8 [h, w, 3], with a line of text on a black strip below it."""
    size = max(10, photo.shape[1] // 16)
    strip = Image.new("RGB", (photo.shape[1], 3 * size // 2))
    ImageDraw.Draw(strip).text((size // 4, size // 8), plain(text), fill="white", font=ImageFont.load_default(size))
    return np.concatenate([photo, np.asarray(strip)])


def write_lines(lines, width=800, size=20):
    """Lines of text, broken where they are too wide, black on white: uint8 [h, width, 3]."""
    font = ImageFont.load_default(size)
    letters = int((width - size) / font.getlength("n"))
    rows = [row for line in lines for row in textwrap.wrap(plain(line), letters) or [""]]
    image = Image.new("RGB", (width, (2 * len(rows) + 1) * size // 2 * 3 // 2), "white")
    ImageDraw.Draw(image).multiline_text((size // 2, size // 2), "\n".join(rows), fill="black", font=font)
    return np.asarray(image)


def _write_labels(image, segments, names):
    step = max(1, max(segments.shape) // 1000)  # enough pixels to place the labels
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
        y, x = (step * (v + part.start) for v, part in zip(_inside(mask), box))
        left, top, right, bottom = draw.textbbox((0, 0), name, font=font)
        x = min(max(x - (right - left) / 2, 1), max(image.width - right - 1, 1))
        y = min(max(y - (bottom - top) / 2, 1), max(image.height - bottom - 1, 1))
        draw.text((x, y), name, fill="white", font=font, stroke_width=max(1, size // 8), stroke_fill="black")


def _inside(mask):
    """A pixel (y, x) well inside a mask: the middle of the longest run on its middle row."""
    ys, _xs = np.nonzero(mask)
    y = int(np.median(ys))
    y = y if mask[y].any() else int(ys[np.argmin(abs(ys - y))])
    row = np.concatenate([[0], mask[y].astype(int), [0]])
    starts, ends = np.flatnonzero(np.diff(row) == 1), np.flatnonzero(np.diff(row) == -1)
    longest = np.argmax(ends - starts)
    return y, int((starts[longest] + ends[longest]) // 2)


def save_picture_table(path, blocks, names, title=""):
    """Draws blocks of pictures side by side.

    Args:
        path: of the picture. Its ending decides between PNG and JPEG.
        blocks: list of (name, rows, footer). Each row has a picture, uint8 [h, w, 3], for each of the names.
        names: of the columns.
        title: title of the whole picture.
    """
    rows = max(len(pictures) for _, pictures, _ in blocks)
    figure = Figure([2.5 * len(names) * len(blocks), 1.9 * rows + 1.4], layout="constrained", facecolor="white")
    figure.suptitle(drawn(title), fontsize=20)
    for part, (name, pictures, footer) in zip(figure.subfigures(1, len(blocks), squeeze=False)[0], blocks):
        part.suptitle(drawn(name), fontsize=16)
        part.supxlabel(drawn(footer), fontsize=18, weight="bold")
        grid = part.subplots(rows, len(names), squeeze=False, gridspec_kw=dict(wspace=0, hspace=0))
        for axes, column in zip(grid[0], names):
            axes.set_title(drawn(column))
        for axes in grid.flat:
            axes.set_axis_off()
        for row, found in zip(grid, pictures):
            for axes, pixels in zip(row, found):
                axes.imshow(pixels, interpolation="lanczos")
    figure.savefig(path, dpi=90)


MOST_NAMES = 200  # that a matrix of confusions has room for


def save_confusion(path, confusion, names):
    """Draws a confusion matrix as a PNG: the share of each true class that is predicted as each class.

    Args:
        path: of the picture.
        confusion: int [C, C] or [C, C + 1], in pixels or photos. Rows are true classes. Columns are predicted classes,
            then void.
        names: of the C classes.
    """
    seen = np.flatnonzero(confusion.any(1) | confusion[:, : len(names)].any(0))
    if not len(seen):
        seen = np.arange(len(names))
    columns = [*seen, *range(len(names), confusion.shape[1])]
    share = confusion[np.ix_(seen, columns)] / np.maximum(confusion.sum(1), 1)[seen, None]
    side = 3 + 0.2 * min(len(columns), MOST_NAMES)
    figure = Figure([side + 1, side], layout="constrained", facecolor="white")
    axes = figure.subplots()
    image = axes.imshow(share, cmap="viridis", vmin=0, vmax=1)
    if len(columns) <= MOST_NAMES:
        axes.set_xticks(range(len(columns)), [drawn([*names, "void"][i]) for i in columns], rotation=90)
        axes.set_yticks(range(len(seen)), [drawn(names[i]) for i in seen])
    axes.set(xlabel="predicted", ylabel="true")
    figure.colorbar(image, label="share of the true class", shrink=0.7)
    figure.savefig(path, dpi=80, format="png")


def save_stress(path, curves, title=""):
    """Draws PQ and its relative change against resolution, as PNG or JPEG.

    Args:
        path: of the picture.
        curves: dict from a model's name to the rows of `stress_test`, with `add_changes`. Of two models the changes of
            the second one are drawn.
        title: title of the whole picture.
    """
    figure = Figure([12, 5], layout="constrained", facecolor="white")
    figure.suptitle(drawn(title))
    grid, lines = figure.subplots(1, 2), {}
    for name, dashes in zip(curves, ("-", "--")):
        for group, color in (("pq", "C0"), ("pq_things", "C1"), ("pq_stuff", "C2")):
            values = [100 * row[group] for row in curves[name]]
            label = f"{name}: {group.replace('pq', 'PQ').replace('_', ' ')}"
            ratios = [row["ratio"] for row in curves[name]]
            (lines[drawn(label)],) = grid[0].plot(ratios, values, dashes, color=color, marker="o")
    grid[0].set(xlabel="resolution, of the canvas", ylabel="%", xscale="log")
    grid[0].legend(lines.values(), lines)
    *base, last = curves
    for kind, color in (("", "C0"), ("_things", "C1"), ("_stuff", "C2")):
        shares = [row[f"relative_change{kind}"] for row in curves[last]]
        values = [np.nan if share is None else 100 * share for share in shares]
        label = f"PQ{kind.replace('_', ' ')}"
        grid[1].plot([row["ratio"] for row in curves[last]], values, "o-", color=color, label=drawn(label))
    grid[1].axhline(0, color="grey", linewidth=1)
    ylabel = drawn(f"relative change, %: {last} to {base[0] if base else 'ratio 1'}")
    grid[1].set(xlabel="resolution, of the canvas", ylabel=ylabel, xscale="log")
    grid[1].legend()
    ticks = [row["ratio"] for row in next(iter(curves.values()))]
    for axes in grid:
        axes.set_xticks(ticks, [drawn(f"{ratio:g}") for ratio in ticks], minor=False)
        axes.minorticks_off()
    figure.savefig(path, dpi=90)
