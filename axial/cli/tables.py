"""Scores as tables on the terminal and as rows of a CSV."""

import csv
import datetime
import io

from axial.errors import InputError
from axial.io import gfile
from axial.io.lock import locked_file
from axial.io.read import read_text
from axial.io.show import csv_text, percent, print_table, say
from axial.io.write import write_text


def print_scores(evaluation, split, scores, photos):
    """Prints the result of an evaluation of a `Evaluation`, in percent."""
    print_table(*evaluation.classes(scores))
    *lines, main = evaluation.lines(scores)
    say(*lines, f"{main} split={split} {evaluation.unit}s={photos}")


SHARES = (
    *("pq", "pq_things", "pq_stuff", "miou", "ap", "ap50", "ap75", "mask_ap"),
    *("top1", "top5", "calibration_error", "bleu", "tokenized_bleu", "chrf"),
)


def print_rows(title, rows):
    """Prints a table of dicts with the same keys. Shares are in percent."""
    from axial.tasks.segmentation.evaluation import ACCURACY
    from axial.tasks.segmentation.studies import CHANGES

    def cell(name, value):
        return percent(value) if name in (*SHARES, *CHANGES) or name.startswith(ACCURACY) else value

    cells = [[cell(name, value) for name, value in row.items()] for row in rows]
    print_table(rows[0], cells, title=title)


def append_scores(path, evaluation, scores, **about):
    """Appends a row to a CSV. A missing file is created with its header.

    Args:
        path: path of the CSV.
        evaluation: `Evaluation` of the evaluation.
        scores: its result; the row has the scores in percent.
        **about: the columns before the scores.

    Raises:
        InputError: the file has other columns.
    """
    time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    row = {"time": time, **about}
    row.update({name: "" if v != v else round(100 * v, 3) for name, v in evaluation.columns(scores).items()})
    header, line = csv_text([row]), csv_text([row.values()])
    (new,) = csv.DictReader(io.StringIO(header + line))
    with locked_file(path):  # another command may write to it
        text = read_text(path) if gfile.exists(path) else ""
        if text and next(csv.reader(io.StringIO(text)), []) != list(row):
            raise InputError(f"{path}: has other columns than {', '.join(row)}; choose another --csv")
        if any({**new, "time": old["time"]} == old for old in csv.DictReader(io.StringIO(text))):
            return  # a command that was killed and called again
        write_text(path, (text or header) + line)
