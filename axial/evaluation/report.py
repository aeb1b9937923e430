"""An HTML page of scores: the classes, their confusion, and the worst and the best photos."""

import functools
import html
import os
import string

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.drawing import save_confusion
from axial.evaluation.panoptic import draw_example
from axial.io.write import write_text, write_whole

KINDS = ("photo", "truth", "prediction")
_PAGE = string.Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; }
th, td { padding: .15em .8em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1em 0; }
.three { display: grid; grid-template-columns: repeat(3, 1fr); gap: 4px; }
img { max-width: 100%; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$caption</p>
<h2>Scores</h2>
$groups
<h2>Classes</h2>
$classes
<h2>Confusion of classes</h2>
$mistakes
<p><img src="$confusion" alt="confusion of classes"></p>
<h2>Worst photos</h2>
$worst
<h2>Best photos</h2>
$best
</body>
</html>
"""
)


class Report:
    """The page 'SPLIT.html' of one split and its pictures, 'SPLIT/NUMBER.KIND.jpg', in a folder.

    Args:
        folder: where they go.
        split: name of the split.
        spec: `DatasetSpec`.
        caption: a line under the title.
        count: number of the worst and of the best photos.
    """

    def __init__(self, folder, split, spec, caption="", count=20):
        self.folder, self.split, self.spec, self.caption, self.count = folder, split, spec, caption, count
        self._drawn = None

    def extremes(self, photos):
        """The worst of `PanopticScores.photos`, with the worst first, and the best, with the best first."""
        ranked = sorted((p for p in photos if p[2] is not None), key=lambda p: (p[2], p[0]))
        return ranked[: self.count], ranked[::-1][: self.count]

    def add(self, example, table, photos):
        """Draws the last of the `photos` if it is among the extremes so far.

        Removes the pictures of photos that are no longer among the extremes.
        """
        chosen = self._chosen(photos)
        number = photos[-1][0]
        if number in chosen:
            for kind, pixels in zip(KINDS, draw_example(example, table, self.spec)):
                image = Image.fromarray(pixels)
                image.thumbnail((800, 800))
                path = os.path.join(self.folder, self._name(number, kind))
                write_whole(path, functools.partial(_save_jpeg, image))
        if self._drawn is not None:
            self._remove(self._drawn - chosen)
        self._drawn = chosen

    def _chosen(self, photos):
        worst, best = self.extremes(photos)
        return {number for number, *_ in worst + best}

    def _name(self, number, kind):
        return f"{self.split}/{number:06d}.{kind}.jpg"

    def _remove(self, numbers):
        for number in numbers:
            for kind in KINDS:
                tf.io.gfile.remove(os.path.join(self.folder, self._name(number, kind)))

    def write(self, scores):
        """Writes the page of a `PanopticScores` and removes the pictures of other photos. Returns the page's path."""
        result, chosen = scores.result(), self._chosen(scores.photos)
        tf.io.gfile.makedirs(os.path.join(self.folder, self.split))
        there = tf.io.gfile.glob(os.path.join(self.folder, self.split, "*.photo.jpg"))
        self._remove({int(os.path.basename(path).split(".")[0]) for path in there} - chosen)
        confusion = f"{self.split}/confusion.png"
        names = list(self.spec.class_names)

        def save(path):
            return save_confusion(path, scores.iou.confusion, names)

        write_whole(os.path.join(self.folder, confusion), save)
        worst, best = self.extremes(scores.photos)
        path = os.path.join(self.folder, f"{self.split}.html")
        page = _PAGE.substitute(
            title=html.escape(f"{self.split}: PQ {percent(result['pq']['all']['pq'])}"),
            caption=html.escape(self.caption),
            groups=_groups_table(result),
            classes=_classes_table(result),
            mistakes=_mistakes_table(result["miou"]["confusion"]),
            confusion=html.escape(confusion),
            worst="\n".join(map(self._figure, worst)),
            best="\n".join(map(self._figure, best)),
        )
        write_text(path, page)
        return path

    def _figure(self, photo):
        number, name, quality = photo
        images = "".join(
            f'<img src="{html.escape(self._name(number, kind))}" alt="{kind}" title="{kind}">' for kind in KINDS
        )
        caption = html.escape(f"{name}: PQ {percent(quality)} · photo, truth, prediction")
        return f'<figure><div class="three">{images}</div><figcaption>{caption}</figcaption></figure>'


def _save_jpeg(image, path):
    with tf.io.gfile.GFile(path, "wb") as file:
        image.save(file, "JPEG", quality=88)


def percent(value):
    """A share in percent with one decimal; '-' for NaN and None."""
    return "-" if value is None or value != value else f"{100 * value:.1f}"


def _table(header, rows):
    def line(tag, cells):
        return f"<tr>{''.join(f'<{tag}>{html.escape(str(c))}</{tag}>' for c in cells)}</tr>"

    return "\n".join(["<table>", line("th", header), *(line("td", row) for row in rows), "</table>"])


def _groups_table(result):
    rows = [
        [f"{name} ({row['classes']} classes)", *(percent(row[k]) for k in ("pq", "sq", "rq"))]
        for name, row in ((name, result["pq"][name]) for name in ("all", "things", "stuff"))
    ]
    others = [["mIoU", percent(result["miou"]["miou"])]]
    others += [[f"mask {name}", percent(value)] for name, value in result["ap"].items()]
    return _table(["", "PQ", "SQ", "RQ"], rows) + "\n<br>\n" + _table(["", "%"], others)


def _classes_table(result):
    iou = result["miou"]["per_class"]
    rows = [
        [
            name,
            *(percent(row[k]) for k in ("pq", "sq", "rq")),
            percent(iou.get(name, np.nan)),
            *(row[k] for k in ("tp", "fp", "fn")),
        ]
        for name, row in result["pq"]["per_class"].items()
    ]
    return _table(["class", "PQ", "SQ", "RQ", "IoU", "TP", "FP", "FN"], rows)


def mistakes(confusion, count=20):
    """The mistakes with the most pixels in a `MeanIoU`'s 'confusion'.

    Returns:
        list of (true class, predicted class, share of the true class).
    """
    pixels = [
        (true, found, number, sum(row.values()))
        for true, row in confusion.items()
        for found, number in row.items()
        if found != true
    ]
    pixels.sort(key=lambda entry: -entry[2])
    return [(true, found, number / total) for true, found, number, total in pixels[:count]]


def _mistakes_table(confusion):
    rows = [[true, found, percent(share)] for true, found, share in mistakes(confusion)]
    return _table(["pixels of", "taken for", "% of the class"], rows)
