"""What differs between the evaluations of different tasks."""

import dataclasses
import typing

import numpy as np

from axial.data.streams import decode_photo
from axial.io.write import make_folder, output_file


@dataclasses.dataclass(frozen=True)
class Description:
    """What a prediction of one photo or text says, in the forms that people and other programs read.

    Attributes:
        content: dict of what a JSON holds of it.
        summary: a short text.
        draw: function without arguments that returns a picture, uint8 [h, w, 3].
        segments: list of dicts, a part of `content`: the segments or objects of a photo. None of other kinds.
        panoptic: int32 [h, w], the 'id' of each pixel's segment, 0 for void; None but for segmentations.
        categories: int [h, w], each pixel's number in the data set; None where there are none, or none of 16 bits.
        label_image: function without arguments that returns int [h, w]: 0 for the background, and i for the pixels of
            the segment or object whose 'label' is i. None if the network finds no instances, or no pixels of them.
    """

    content: dict
    summary: str
    draw: typing.Callable
    segments: list | None = None
    panoptic: np.ndarray | None = None
    categories: np.ndarray | None = None
    label_image: typing.Callable | None = None


@dataclasses.dataclass(frozen=True)
class Kind:
    """How predictions of one kind are scored, stored, drawn and printed.

    `scores.update` returns what the other functions take as `seen`: the photo's prediction in a short form. A result is
    what `scores.result` returns.

    Attributes:
        name: in exports and in the states of evaluations.
        scores: class of the sums over photos; takes a `DatasetSpec` and the shard (i, n). Its `photos` are
            [number in the split, file name, quality from 0 to 1 or None].
        quality: name of that quality.
        results: class that writes predictions to a folder; see `CocoResults`.
        reader: class that reads results of others as predictions; see `ResultPredictions`. None if there is none.
        examples: function of (data_dir, split, spec, canvas, *, shard, skip) that returns evaluation examples.
        pictures: names of what `draw` returns.
        draw: function of (example, seen, spec) that returns pictures, uint8 [h, w, 3].
        describe: function of (photo or text, prediction, spec) that returns its `Description`.
        headline: function of a result that returns a dict of its main scores, from 0 to 1.
        columns: function of a result that returns a dict of all scores of a CSV's row, from 0 to 1.
        summaries: function of a result that returns a dict of what is plotted over training, in percent.
        brief: function of a result that returns a short text.
        classes: function of a result that returns the header of a table, its rows for the classes, and its last rows
            for groups of classes, as texts.
        lines: function of a result that returns lines below that table; the last names the main scores.
        mistakes: function of a result that returns header and rows of the most frequent confusions; None if nothing is
            confused. Otherwise the scores have a `confusion`, int [classes, predictions].
        one_file: whether a network of this kind fits a file of one canvas, TFLite or ONNX.
        studies: flags and verbs of axial-evaluate that only this kind has.
        takes: what a prediction is of, 'photo' or 'text'.
        unit: what is scored one at a time, for people.
        given: function of an evaluation example that returns what a predictor takes, a photo or a text.
    """

    name: str
    scores: type
    quality: str
    results: type
    examples: typing.Callable
    pictures: tuple[str, ...]
    draw: typing.Callable
    describe: typing.Callable
    headline: typing.Callable
    columns: typing.Callable
    summaries: typing.Callable
    brief: typing.Callable
    classes: typing.Callable
    lines: typing.Callable
    reader: type | None = None
    mistakes: typing.Callable | None = None
    one_file: bool = True
    studies: tuple[str, ...] = ()
    takes: str = "photo"
    unit: str = "photo"
    given: typing.Callable = decode_photo


class JsonResults:
    """Writes the results of all photos of a split to one JSON, KIND_SPLIT.json. A subclass says what they are.

    Args:
        folder: where it goes.
        spec: `DatasetSpec`.
        split: name of the split.
        data_dir: not needed, as there is one file; see `CocoResults`.
    """

    kind = ""  # the file's name begins with it

    def __init__(self, folder, spec, split, data_dir=None):
        del data_dir
        self.folder, self.spec, self.annotations = folder, spec, []
        self.path = self.path_of(folder, split)
        make_folder(folder)

    @classmethod
    def path_of(cls, folder, split):
        """Path of the JSON of a split's results."""
        return output_file(folder, f"{cls.kind}_{split}.json", "--split")

    def restore(self, path, annotations):
        """Goes on from the annotations in the state `path`. Raises InputError."""
        self._check(f"{path}: annotations", annotations)
        self.annotations = annotations


def percent(value, decimals=1):
    """A share in percent; '-' for NaN and None."""
    return "-" if value is None or value != value else f"{100 * value:.{decimals}f}"
