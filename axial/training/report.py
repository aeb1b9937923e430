"""Reports for people: an HTML page with the worst and the best photos, and tables of pictures."""

import itertools
import os

import tensorflow as tf
from PIL import Image

from axial.errors import InputError
from axial.io import gfile
from axial.io.page import figure, in_words, page, table
from axial.io.show import counted, drawn, html, percent, url
from axial.io.write import make_folder, output_file, output_folder, write_image, write_text


class Report:
    """The page 'SPLIT.html' of one split, and its pictures 'SPLIT/NUMBER.NAME.jpg'.

    Args:
        evaluator: `Evaluator`.
        spec: `DatasetSpec`.
        folder: folder of the page and of the folder of its pictures.
        split: name of the split.
        count: number of worst photos, and of best photos.
    """

    def __init__(self, evaluator, spec, folder, split, *, count=20):
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
            path = self._path(min(missing), self.evaluator.pictures[0])
            raise InputError(f"{path}: no such picture; run each shard again with this --report, or merge without it")

    def write(self, scores, about=()):
        """Writes the page, and removes the pictures of photos that it does not show. Returns the page's path.

        A shard keeps the pictures of other shards, because the page of the merged split shows photos of all shards.

        Args:
            scores: `Metrics` of the split.
            about: texts for the page's header: the model and its checkpoint.
        """
        result, others = scores.result(), self._numbers_drawn() - self._chosen(scores.photos).keys()
        make_folder(self.pictures)
        self._remove({number for number in others if number % scores.shard[1] == scores.shard[0]})
        worst, best = ("\n".join(map(self._figure, photos)) for photos in self.extremes(scores.photos))
        path = output_file(self.folder, f"{self.split}.html", "--split")
        header, rows, last = self.evaluator.classes(result)
        main = [[in_words(name), f"{percent(value)} %"] for name, value in self.evaluator.headline(result).items()]
        sections = {"Scores": table((), main), "Worst photos": worst, "Best photos": best}
        sections["Classes"] = table(header, [*last, *rows])
        if mistakes := self.evaluator.mistakes(result):
            sections["Confusion of classes"] = table(*mistakes)
        about = *about, counted(len(scores.photos), self.evaluator.unit)
        write_text(path, page(f"{self.split}: {' '.join(main[0])}", sections, about, files=True))
        return path

    def _figure(self, photo):
        number, name, quality = photo
        image, pictures = '<img src="{path}" alt="{title}" title="{title}">', self.evaluator.pictures
        images = [image.format(path=url(self._name(number, picture)), title=html(picture)) for picture in pictures]
        caption = f"{name}: {self.evaluator.quality} {percent(quality)} · {', '.join(pictures)}"
        return figure('<div class="row">' + "".join(images) + "</div>", caption)


# === Pictures ===


def save_picture_table(path, blocks, names):
    """Draws the pictures of photos, two photos in a row.

    Args:
        path: path of the file. Its suffix chooses PNG or JPEG.
        blocks: list of (name, photos, footer), drawn one below the other. Each photo is a list of pictures, uint8
            [h, w, 3], one for each of `names`.
        names: titles of a photo's pictures.
    """
    rows = [-(-len(photos) // 2) for _, photos, _ in blocks]
    from matplotlib.figure import Figure

    figure = Figure([4.2 * len(names), sum(1.9 * n + 1.2 for n in rows)], layout="constrained", facecolor="white")
    panels = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=rows)[:, 0]
    for panel, (name, photos, footer), number in zip(panels, blocks, rows):
        panel.suptitle(drawn(name), fontsize=16)
        panel.supxlabel(drawn(footer), fontsize=18, weight="bold")
        for first, half in enumerate(panel.subfigures(1, 2)):
            grid = half.subplots(number, len(names), squeeze=False, gridspec_kw=dict(wspace=0, hspace=0))
            for axes, title in zip(grid[0], names):
                axes.set_title(drawn(title))
            for axes in grid.flat:
                axes.set_axis_off()
            for axes, picture in zip(grid.flat, itertools.chain(*photos[first::2])):
                axes.imshow(picture, interpolation="lanczos")
    figure.savefig(path, dpi=90)
