"""Draws images whose labels need the far side: a white disc at the left has the class of the colour in its row.

Each image has three rows. A row has a white disc at the left and a disc of a random colour at the right, about 200
pixels away. The label of the pixels of a white disc is the colour of the other disc. All other pixels are background.

    python experiments/far_side/draw.py IMAGES          # writes IMAGES in the layout of axial-convert folder
"""

import pathlib
import random

from absl import app
from PIL import Image, ImageDraw

COLORS = {"blue": (60, 90, 255), "green": (40, 190, 60), "red": (235, 60, 50), "yellow": (240, 210, 40)}
CLASSES = ["background", *COLORS]  # the label of a class is its place in this list
WIDTH, HEIGHT, ROWS, RADIUS = 257, 65, 3, 7  # pixels, pixels, rows, pixels
SPLITS = {"train": 2000, "val": 100}  # number of images


def draw(rng):
    """An image and the labels of its pixels."""
    image = Image.new("RGB", (WIDTH, HEIGHT), (rng.randint(20, 60),) * 3)
    labels = Image.new("L", image.size)
    for row in range(ROWS):
        color = rng.choice(sorted(COLORS))
        y = (2 * row + 1) * HEIGHT // (2 * ROWS) + rng.randint(-2, 2)
        left, right = rng.randint(10, 30), WIDTH - rng.randint(10, 30)
        disc(image, left, y, fill="white")
        disc(labels, left, y, fill=CLASSES.index(color))
        disc(image, right, y, fill=COLORS[color])
    return image, labels


def disc(image, x, y, fill):
    """Draws a disc with the centre (x, y)."""
    ImageDraw.Draw(image).ellipse((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), fill=fill)


def spec():
    """The classes and their colours, as `axial-convert --spec` reads them."""
    colors = [(40, 40, 40), *COLORS.values()]
    lines = [
        f"  - {{id: {i}, name: {name}, thing: false, color: {list(color)}}}"
        for i, (name, color) in enumerate(zip(CLASSES, colors))
    ]
    return "\n".join(["name: far_side", "classes:", *lines, ""])


def main(arguments):
    if len(arguments) != 2:
        raise app.UsageError("expected one folder, which is written")
    folder = pathlib.Path(arguments[1])
    for split, count in SPLITS.items():
        rng = random.Random(split)  # a split has the same images in every run
        for kind in ("photos", "semantic"):
            (folder / split / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image, labels = draw(rng)
            image.save(folder / split / "photos" / f"{number:04d}.png")
            labels.save(folder / split / "semantic" / f"{number:04d}.png")
    (folder / "spec.yaml").write_text(spec())


if __name__ == "__main__":
    app.run(main)
