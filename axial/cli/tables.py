"""Scores as tables on the terminal and as rows of a CSV."""

import csv
import datetime
import io

from axial.errors import InputError
from axial.io import gfile
from axial.io.lock import locked_file
from axial.io.read import read_text
from axial.io.show import csv_text, percent, print_table, say
from axial.io.write import write_json, write_text


def print_scores(evaluation, split, scores, photos):
    """Prints the result of an evaluation of a `Evaluation`, in percent."""
    print_table(*evaluation.classes(scores))
    *lines, main = evaluation.lines(scores)
    say(*lines, f"{main} split={split} {evaluation.unit}s={photos}")


def print_rows(title, rows, about):
    """Prints a table of dicts with the same keys. Columns are shares, in percent, but for those that `about` names."""
    cells = [[value if name in about else percent(value) for name, value in row.items()] for row in rows]
    print_table(rows[0], cells, title=title)


def write_scores(path, scores):
    """Writes the file of --json, if it is given."""
    if path:
        write_json(path, scores)


def append_scores(path, evaluation, scores, columns):
    """Appends a row to a CSV. A missing file is created with its header.

    Args:
        path: path of the CSV.
        evaluation: `Evaluation` of the evaluation.
        scores: its result; the row has the scores in percent.
        columns: dict of the columns before the scores.

    Raises:
        InputError: the file has other columns.
    """
    time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    row = {"time": time, **columns}
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
