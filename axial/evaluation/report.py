"""An HTML page of scores: the classes, their confusion, and the worst and the best photos."""

import os

import tensorflow as tf
from PIL import Image

from axial.errors import InputError
from axial.evaluation.pictures import save_confusion
from axial.io import gfile
from axial.io.page import figure, page, table
from axial.io.show import html, percent, url
from axial.io.write import make_folder, output_file, output_folder, write_image, write_text, write_whole


class Report:
    """The page 'SPLIT.html' of one split and its pictures, 'SPLIT/NUMBER.NAME.jpg', in a folder.

    Args:
        evaluation: `Evaluation`.
        folder: where they go.
        split: name of the split.
        spec: `DatasetSpec`.
        caption: a line under the title.
        count: number of the worst and of the best photos.
    """

    def __init__(self, evaluation, folder, split, spec, *, caption="", count=20):
        self.evaluation, self.folder, self.split, self.spec = evaluation, folder, split, spec
        self.caption, self.count = caption, count
        self.pictures = output_folder(folder, split, "--split")
        self._drawn = {}  # the extremes so far, by number

    def extremes(self, photos):
        """The worst of the scores' `photos`, with the worst first, and the best, with the best first."""
        ranked = sorted((p for p in photos if p[2] is not None), key=lambda p: (p[2], p[0]))
        return ranked[: self.count], ranked[::-1][: self.count]

    def add(self, example, seen, photo):
        """Draws a photo if it is among the extremes so far. Removes the pictures of the one whose place it takes.

        Args:
            example: of the photo.
            seen: what the scores' `update` returned for it.
            photo: its entry in the scores' `photos`.
        """
        chosen = self._chosen([*self._drawn.values(), photo])
        if photo[0] in chosen:
            for name, pixels in zip(self.evaluation.pictures, self.evaluation.draw(example, seen, self.spec)):
                image = Image.fromarray(pixels)
                image.thumbnail((800, 800))
                write_image(self._path(photo[0], name), image, "JPEG")
        self._remove(self._drawn.keys() - chosen)
        self._drawn = chosen

    def _chosen(self, photos):
        """dict from the numbers of the extremes to them."""
        worst, best = self.extremes(photos)
        return {photo[0]: photo for photo in worst + best}

    def _name(self, number, name):
        return f"{self.split}/{number:06d}.{name}.jpg"

    def _path(self, number, name):
        return output_file(self.folder, self._name(number, name), "--split")

    def _remove(self, numbers):
        for number in numbers:
            for name in self.evaluation.pictures:
                tf.io.gfile.remove(self._path(number, name))

    def _numbers_drawn(self):
        there = gfile.glob(os.path.join(self.pictures, ""), f"*.{self.evaluation.pictures[0]}.jpg")
        return {int(os.path.basename(path).split(".")[0]) for path in there}

    def check(self, photos):
        """Raises InputError unless every picture is there: a shard may have been evaluated without this report."""
        missing = self._chosen(photos).keys() - self._numbers_drawn()
        if missing:
            raise InputError(
                f"{self._path(min(missing), self.evaluation.pictures[0])}: no such picture; run each shard again with "
                "this --report, or merge without it"
            )

    def write(self, scores):
        """Writes the page of the scores and removes the pictures of other photos. Returns the page's path.

        A shard leaves the pictures of other shards: the whole split's page shows the extremes of all of them.
        """
        result, others = scores.result(), self._numbers_drawn() - self._chosen(scores.photos).keys()
        make_folder(self.pictures)
        self._remove({number for number in others if number % scores.shard[1] == scores.shard[0]})
        worst, best = self.extremes(scores.photos)
        path = output_file(self.folder, f"{self.split}.html", "--split")
        header, rows, last = self.evaluation.classes(result)
        main = [[name, percent(value)] for name, value in self.evaluation.headline(result).items()]
        sections = {
            "": f"<p>{html(self.caption)}</p>",
            "Scores": table(["", "%"], main),
            "Classes": table(header, [*last, *rows]),
        }
        if mistakes := self.evaluation.mistakes(result):
            name, classes = f"{self.split}/confusion.png", list(self.spec.class_names)
            picture = output_file(self.folder, name, "--split")
            write_whole(picture, lambda path: save_confusion(path, scores.confusion, classes))
            image = f'\n<p><img src="{url(name)}" alt="confusion of classes"></p>'
            sections["Confusion of classes"] = table(*mistakes) + image
        sections["Worst photos"], sections["Best photos"] = ("\n".join(map(self._figure, x)) for x in (worst, best))
        write_text(path, page(f"{self.split}: {self.evaluation.lines(result)[-1].split()[0]}", sections))
        return path

    def _figure(self, photo):
        number, name, quality = photo
        images = "".join(
            f'<img src="{url(self._name(number, picture))}" alt="{html(picture)}" title="{html(picture)}">'
            for picture in self.evaluation.pictures
        )
        caption = f"{name}: {self.evaluation.quality} {percent(quality)} · {', '.join(self.evaluation.pictures)}"
        return figure('<div class="row">' + images + "</div>", caption)
