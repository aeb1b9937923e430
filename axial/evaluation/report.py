"""An HTML page of scores: the classes, their confusion, and the worst and the best photos."""

import functools
import os

import tensorflow as tf
from PIL import Image

from axial.drawing import save_confusion
from axial.errors import InputError
from axial.evaluation.kind import percent
from axial.io.page import figure, page, table
from axial.io.show import html, url
from axial.io.write import write_text, write_whole


class Report:
    """The page 'SPLIT.html' of one split and its pictures, 'SPLIT/NUMBER.NAME.jpg', in a folder.

    Args:
        kind: `Kind`.
        folder: where they go.
        split: name of the split.
        spec: `DatasetSpec`.
        caption: a line under the title.
        count: number of the worst and of the best photos.
    """

    def __init__(self, kind, folder, split, spec, *, caption="", count=20):
        self.kind, self.folder, self.split, self.spec = kind, folder, split, spec
        self.caption, self.count = caption, count
        self._drawn = None

    def extremes(self, photos):
        """The worst of the scores' `photos`, with the worst first, and the best, with the best first."""
        ranked = sorted((p for p in photos if p[2] is not None), key=lambda p: (p[2], p[0]))
        return ranked[: self.count], ranked[::-1][: self.count]

    def add(self, example, seen, photos):
        """Draws the last of the `photos` if it is among the extremes so far.

        Removes the pictures of photos that are no longer among the extremes.
        """
        chosen = self._chosen(photos)
        number = photos[-1][0]
        if number in chosen:
            for name, pixels in zip(self.kind.pictures, self.kind.draw(example, seen, self.spec)):
                image = Image.fromarray(pixels)
                image.thumbnail((800, 800))
                path = os.path.join(self.folder, self._name(number, name))
                write_whole(path, functools.partial(_save_jpeg, image))
        if self._drawn is not None:
            self._remove(self._drawn - chosen)
        self._drawn = chosen

    def _chosen(self, photos):
        worst, best = self.extremes(photos)
        return {number for number, *_ in worst + best}

    def _name(self, number, name):
        return f"{self.split}/{number:06d}.{name}.jpg"

    def _remove(self, numbers):
        for number in numbers:
            for name in self.kind.pictures:
                tf.io.gfile.remove(os.path.join(self.folder, self._name(number, name)))

    def _numbers_drawn(self):
        there = tf.io.gfile.glob(os.path.join(self.folder, self.split, f"*.{self.kind.pictures[0]}.jpg"))
        return {int(os.path.basename(path).split(".")[0]) for path in there}

    def check(self, photos):
        """Raises InputError unless every picture is there: a shard may have been evaluated without this report."""
        missing = self._chosen(photos) - self._numbers_drawn()
        if missing:
            raise InputError(
                f"{os.path.join(self.folder, self._name(min(missing), self.kind.pictures[0]))}: no such picture; run "
                "each shard again with this --report, or merge without it"
            )

    def write(self, scores):
        """Writes the page of the scores and removes the pictures of other photos. Returns the page's path.

        A shard leaves the pictures of other shards: the whole split's page shows the extremes of all of them.
        """
        result, others = scores.result(), self._numbers_drawn() - self._chosen(scores.photos)
        tf.io.gfile.makedirs(os.path.join(self.folder, self.split))
        self._remove({number for number in others if number % scores.shard[1] == scores.shard[0]})
        worst, best = self.extremes(scores.photos)
        path = os.path.join(self.folder, f"{self.split}.html")
        header, rows, last = self.kind.classes(result)
        main = self.kind.headline(result)
        sections = {
            "": f"<p>{html(self.caption)}</p>",
            "Scores": table(["", "%"], [[name, percent(value)] for name, value in main.items()]),
            "Classes": table(header, [*last, *rows]),
            **self._confusion(scores, result),
            "Worst photos": "\n".join(map(self._figure, worst)),
            "Best photos": "\n".join(map(self._figure, best)),
        }
        write_text(path, page(f"{self.split}: {self.kind.lines(result)[-1].split()[0]}", sections))
        return path

    def _confusion(self, scores, result):
        """The section of the confusions, with its picture; empty if nothing is confused."""
        if not self.kind.mistakes:
            return {}
        name = f"{self.split}/confusion.png"

        def save(path):
            return save_confusion(path, scores.confusion, list(self.spec.class_names))

        write_whole(os.path.join(self.folder, name), save)
        image = f'\n<p><img src="{url(name)}" alt="confusion of classes"></p>'
        return {"Confusion of classes": table(*self.kind.mistakes(result)) + image}

    def _figure(self, photo):
        number, name, quality = photo
        pictures = self.kind.pictures
        images = [
            f'<img src="{url(self._name(number, picture))}" alt="{html(picture)}" title="{html(picture)}">'
            for picture in pictures
        ]
        caption = f"{name}: {self.kind.quality} {percent(quality)} · {', '.join(pictures)}"
        return figure("".join(['<div class="row">', *images, "</div>"]), caption)


def _save_jpeg(image, path):
    with tf.io.gfile.GFile(path, "wb") as file:
        image.save(file, "JPEG", quality=88)
