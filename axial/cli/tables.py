"""Scores as tables on the terminal and as rows of a CSV."""

import csv
import datetime
import io
import os

from axial.cli import app
from axial.errors import InputError
from axial.evaluation.studies import CHANGES


def print_scores(kind, split, scores, photos):
    """Prints the result of an evaluation of a `Kind`, in percent."""
    from rich.table import Table

    header, rows, last = kind.classes(scores)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    for row in last:
        table.add_row(*row)
    app.console().print(table)
    *lines, main = kind.lines(scores)
    print(*lines, f"{main} split={split} {kind.unit}s={photos}", sep="\n", flush=True)


_OF_EVALUATION = (
    *("pq", "pq_things", "pq_stuff", "miou", "ap", "ap50", "ap75", "mask_ap"),
    *("top1", "top5", "calibration_error", "bleu", "tokenized_bleu", "chrf"),
)
SHARES = (*_OF_EVALUATION, *CHANGES)


def print_rows(title, rows):
    """Prints a table of dicts with the same keys. Shares are in percent."""
    from rich.table import Table

    from axial.evaluation.kind import percent

    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(percent(v) if k in SHARES else str(v) for k, v in row.items()))
    app.console().print(table)


def append_scores(path, kind, scores, **about):
    """Appends a row to a CSV. A missing file is created with its header.

    Args:
        path: path of the CSV.
        kind: `Kind` of the evaluation.
        scores: its result; the row has the scores in percent.
        **about: the columns before the scores.

    Raises:
        InputError: the file has other columns.
    """
    import tensorflow as tf

    from axial.io.read import read_text
    from axial.io.write import write_text

    time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    row = {"time": time, **about}
    row.update({name: "" if v != v else round(100 * v, 3) for name, v in kind.columns(scores).items()})
    text = ""
    if tf.io.gfile.exists(path):
        text = read_text(path)
    rows = list(csv.DictReader(io.StringIO(text)))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(row), lineterminator=os.linesep)
    if not text:
        writer.writeheader()
    elif next(csv.reader(io.StringIO(text)), []) != list(row):
        raise InputError(f"{path}: has other columns than {', '.join(row)}; choose another --csv")
    elif any(old == {k: "" if v is None else str(v) for k, v in {**row, "time": old["time"]}.items()} for old in rows):
        return  # a command that was killed and called again
    writer.writerow(row)
    write_text(path, text + buffer.getvalue())
