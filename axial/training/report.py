"""Reports for people: an HTML page with the worst and the best photos, and tables of pictures."""

import os

import tensorflow as tf
from matplotlib.figure import Figure
from PIL import Image

from axial.errors import InputError
from axial.io import gfile
from axial.io.page import figure, page, table
from axial.io.show import drawn, html, percent, url
from axial.io.write import make_folder, output_file, output_folder, write_image, write_text


class Report:
    """The page 'SPLIT.html' of one split, and its pictures 'SPLIT/NUMBER.NAME.jpg'.

    Args:
        evaluator: `Evaluator`.
        folder: folder of the page and of the folder of its pictures.
        split: name of the split.
        spec: `DatasetSpec`.
        count: number of worst photos, and of best photos.
    """

    def __init__(self, evaluator, folder, split, spec, *, count=20):
        self.evaluator, self.folder, self.split, self.spec = evaluator, folder, split, spec
        self.count = count
        self.pictures = output_folder(folder, split, "--split")
        self._drawn = {}  # photo number -> entry in the metrics' `photos`, for the worst and best photos so far

    def extremes(self, photos):
        """(worst, best): two lists of entries of the metrics' `photos`. The most extreme entry of each comes first."""
        ranked = sorted((p for p in photos if p[2] is not None), key=lambda p: (p[2], p[0]))
        return ranked[: self.count], ranked[::-1][: self.count]

    def add(self, example, decoded, photo):
        """Draws a photo if it is among the worst or best so far. Removes the pictures of the photo that it displaces.

        Args:
            example: the photo's evaluation example.
            decoded: the result of the metrics' `update` for this example.
            photo: the photo's entry in the metrics' `photos`.
        """
        chosen = self._chosen([*self._drawn.values(), photo])
        if photo[0] in chosen:
            for name, pixels in zip(self.evaluator.pictures, self.evaluator.draw(example, decoded, self.spec)):
                image = Image.fromarray(pixels)
                image.thumbnail((800, 800))
                write_image(self._path(photo[0], name), image, "JPEG")
        self._remove(self._drawn.keys() - chosen)
        self._drawn = chosen

    def _chosen(self, photos):
        """dict from the number of each worst or best photo to its entry in `photos`."""
        worst, best = self.extremes(photos)
        return {photo[0]: photo for photo in worst + best}

    def _name(self, number, name):
        return f"{self.split}/{number:06d}.{name}.jpg"

    def _path(self, number, name):
        return output_file(self.folder, self._name(number, name), "--split")

    def _remove(self, numbers):
        for number in numbers:
            for name in self.evaluator.pictures:
                tf.io.gfile.remove(self._path(number, name))

    def _numbers_drawn(self):
        paths = gfile.glob(os.path.join(self.pictures, ""), f"*.{self.evaluator.pictures[0]}.jpg")
        return {int(os.path.basename(path).split(".")[0]) for path in paths}

    def check(self, photos):
        """Raises InputError if a picture is missing, as when a shard was evaluated without this report."""
        missing = self._chosen(photos).keys() - self._numbers_drawn()
        if missing:
            raise InputError(
                f"{self._path(min(missing), self.evaluator.pictures[0])}: no such picture; run each shard again with "
                "this --report, or merge without it"
            )

    def write(self, scores):
        """Writes the page, and removes the pictures of photos that it does not show. Returns the page's path.

        A shard keeps the pictures of other shards, because the page of the merged split shows photos of all shards.
        """
        result, others = scores.result(), self._numbers_drawn() - self._chosen(scores.photos).keys()
        make_folder(self.pictures)
        self._remove({number for number in others if number % scores.shard[1] == scores.shard[0]})
        worst, best = self.extremes(scores.photos)
        path = output_file(self.folder, f"{self.split}.html", "--split")
        header, rows, last = self.evaluator.classes(result)
        main = [[name, percent(value)] for name, value in self.evaluator.headline(result).items()]
        sections = {
            "Scores": table(["", "%"], main),
            "Classes": table(header, [*last, *rows]),
        }
        if mistakes := self.evaluator.mistakes(result):
            sections["Confusion of classes"] = table(*mistakes)
        sections["Worst photos"], sections["Best photos"] = ("\n".join(map(self._figure, x)) for x in (worst, best))
        write_text(path, page(f"{self.split}: {self.evaluator.lines(result)[-1].split()[0]}", sections))
        return path

    def _figure(self, photo):
        number, name, quality = photo
        images = "".join(
            f'<img src="{url(self._name(number, picture))}" alt="{html(picture)}" title="{html(picture)}">'
            for picture in self.evaluator.pictures
        )
        caption = f"{name}: {self.evaluator.quality} {percent(quality)} · {', '.join(self.evaluator.pictures)}"
        return figure('<div class="row">' + images + "</div>", caption)


# === Pictures ===


def save_picture_table(path, blocks, names):
    """Draws blocks of pictures side by side.

    Args:
        path: path of the file. Its suffix chooses PNG or JPEG.
        blocks: list of (name, rows, footer). Each row has a picture, uint8 [h, w, 3], for each column.
        names: titles of the columns.
    """
    rows = max(len(pictures) for _, pictures, _ in blocks)
    figure = Figure([2.5 * len(names) * len(blocks), 1.9 * rows + 1.4], layout="constrained", facecolor="white")
    for panel, (name, pictures, footer) in zip(figure.subfigures(1, len(blocks), squeeze=False)[0], blocks):
        panel.suptitle(drawn(name), fontsize=16)
        panel.supxlabel(drawn(footer), fontsize=18, weight="bold")
        grid = panel.subplots(rows, len(names), squeeze=False, gridspec_kw=dict(wspace=0, hspace=0))
        for axes, column in zip(grid[0], names):
            axes.set_title(drawn(column))
        for axes in grid.flat:
            axes.set_axis_off()
        for axes_row, row in zip(grid, pictures):
            for axes, pixels in zip(axes_row, row):
                axes.imshow(pixels, interpolation="lanczos")
    figure.savefig(path, dpi=90)
