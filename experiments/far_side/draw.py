"""Draws images whose class needs both sides: the class is the colour of the disc in the row of the ring.

Each image has four rows. At the left, one row has a ring and the other rows have dots. At the right, each row has a
disc of another colour. All images have the same dots and discs, in other places, so only the row connects the ring with
a colour.

    python experiments/far_side/draw.py IMAGES                   # writes IMAGES/train and IMAGES/val
    python experiments/far_side/draw.py IMAGES --figure=far_side.png        # also draws eight images with their classes
"""

import pathlib
import random

from absl import app, flags
from PIL import Image, ImageDraw

COLORS = {"blue": (60, 90, 255), "green": (40, 190, 60), "red": (235, 60, 50), "yellow": (240, 210, 40)}
WIDTH, HEIGHT, ROWS, RADIUS = 128, 128, 4, 7  # pixels, pixels, rows, pixels
SPLITS = {"train": 4000, "val": 400}  # number of images

FIGURE = flags.DEFINE_string("figure", None, "picture of eight images of the validation split.")


def draw(rng):
    """An image, and the name of its class."""
    image = Image.new("RGB", (WIDTH, HEIGHT), (rng.randint(20, 60),) * 3)
    canvas, colors, target = ImageDraw.Draw(image), rng.sample(sorted(COLORS), ROWS), rng.randrange(ROWS)
    step = HEIGHT // ROWS
    for row, color in enumerate(colors):
        y = row * step + step // 2 + rng.randint(-4, 4)
        left, right = rng.randint(8, 14), WIDTH - rng.randint(8, 14)
        if row == target:
            canvas.ellipse(box(left, y, RADIUS), outline="white", width=2)
        else:
            canvas.ellipse(box(left, y, RADIUS // 2), fill="white")
        canvas.ellipse(box(right, y, RADIUS), fill=COLORS[color])
    return image, colors[target]


def box(x, y, radius):
    """Corners of a circle."""
    return x - radius, y - radius, x + radius, y + radius


def main(arguments):
    if len(arguments) != 2:
        raise app.UsageError("expected one folder, which is written")
    examples = []
    for split, count in SPLITS.items():
        rng = random.Random(split)  # a split has the same images in every run
        for number in range(count):
            image, name = draw(rng)
            folder = pathlib.Path(arguments[1]) / split / name
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number:04d}.png")
            examples += [(image, name)] * (split == "val" and number < 8)
    if FIGURE.value:
        figure = Image.new("RGB", (4 * (WIDTH + 8), 2 * (HEIGHT + 20)), "white")
        for i, (image, name) in enumerate(examples):
            corner = i % 4 * (WIDTH + 8) + 4, i // 4 * (HEIGHT + 20) + 4
            figure.paste(image, corner)
            ImageDraw.Draw(figure).text((corner[0], corner[1] + HEIGHT), name, fill="black")
        figure.resize([2 * side for side in figure.size], Image.NEAREST).save(FIGURE.value)


if __name__ == "__main__":
    app.run(main)
