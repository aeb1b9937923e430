"""Draws images of the made task of draw.py with their labels and the predictions of trained networks.

    python experiments/far_side/compare.py IMAGES far_side.png ResNet=RUN "axial attention=OTHER"

The picture has a column for the images, for the labels and for each network.
"""

import pathlib

import numpy as np
from absl import app
from PIL import Image, ImageDraw

import axial

ROWS, GAP, TITLE = 6, 8, 16  # images, and pixels


def main(arguments):
    if len(arguments) < 4:
        raise app.UsageError("expected IMAGES, the picture, and at least one TITLE=RUN")
    photos = sorted(pathlib.Path(arguments[1], "val/photos").iterdir())[:ROWS]
    models = {title: axial.load(run) for title, run in (argument.split("=", 1) for argument in arguments[3:])}
    colors = np.uint8(next(iter(models.values())).spec.colors)
    labels = [np.asarray(Image.open(photo.parent.parent / "semantic" / photo.name)) for photo in photos]
    columns = {"image": [Image.open(photo) for photo in photos], "label": [Image.fromarray(colors[x]) for x in labels]}
    for title, model in models.items():
        results = axial.predict(model, photos)
        columns[title] = [Image.fromarray(colors[result.prediction["semantic"]]) for result in results]
    width, height = columns["image"][0].size
    size = len(columns) * (width + GAP), TITLE + ROWS * (height + GAP)
    figure = Image.new("RGB", size, "white")
    for x, (title, images) in enumerate(columns.items()):
        ImageDraw.Draw(figure).text((x * (width + GAP), 2), title, fill="black")
        for y, image in enumerate(images):
            figure.paste(image, (x * (width + GAP), TITLE + y * (height + GAP)))
    figure.save(arguments[2])


if __name__ == "__main__":
    app.run(main)
