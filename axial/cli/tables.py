"""Scores as tables on the terminal and as rows of a CSV."""

import csv
import datetime
import io
import os
import sys

from axial.errors import InputError


def _console():
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 100)


def print_scores(split, scores, photos):
    """Prints the table of a result of `evaluate`, in percent."""
    from rich.table import Table

    from axial.evaluation.report import mistakes, percent

    table = Table("class", "PQ", "SQ", "RQ", "IoU", "TP", "FP", "FN")
    iou = scores["miou"]["per_class"]
    for name, row in scores["pq"]["per_class"].items():
        counts = (str(row[k]) for k in ("tp", "fp", "fn"))
        values = (percent(row[k]) for k in ("pq", "sq", "rq"))
        table.add_row(name, *values, percent(iou.get(name, float("nan"))), *counts)
    table.add_section()
    for name in ("all", "things", "stuff"):
        row = scores["pq"][name]
        miou = percent(scores["miou"]["miou"]) if name == "all" else ""
        cells = (percent(row[k]) for k in ("pq", "sq", "rq"))
        table.add_row(f"{name} ({row['classes']} classes)", *cells, miou, "", "", "")
    _console().print(table)
    taken = [f"{a} for {b} {percent(share)} %" for a, b, share in mistakes(scores["miou"]["confusion"], 5)]
    print(f"most often taken: {', '.join(taken) or 'nothing for anything else'}")
    ap = scores["ap"]
    print("mask AP " + "  ".join(f"{name}={percent(value)}" for name, value in ap.items()))
    pq = scores["pq"]
    print(
        f"PQ={percent(pq['all']['pq'])} PQ_things={percent(pq['things']['pq'])} "
        f"PQ_stuff={percent(pq['stuff']['pq'])} mIoU={percent(scores['miou']['miou'])} "
        f"AP={percent(ap['ap'])} split={split} photos={photos}",
        flush=True,
    )


SHARES = ("pq", "pq_things", "pq_stuff", "miou", "ap", "ap50", "relative_change")


def print_rows(title, rows):
    """Prints a table of dicts with the same keys. Shares are in percent."""
    from rich.table import Table

    from axial.evaluation.report import percent

    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(percent(v) if k in SHARES else str(v) for k, v in row.items()))
    _console().print(table)


def append_scores(path, scores, **about):
    """Appends a row to a CSV. A missing file is created with its header.

    Args:
        path: path of the CSV.
        scores: result of `evaluate`; the row has the scores in percent.
        **about: the columns before the scores.

    Raises:
        InputError: the file has other columns.
    """
    import tensorflow as tf

    from axial.io.read import read_text
    from axial.io.write import write_text

    time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    row = {"time": time, **about}
    groups = [(q, g) for g in ("all", "things", "stuff") for q in ("pq", "sq", "rq")]
    values = {f"{q}_{g}": scores["pq"][g][q] for q, g in groups}
    values.update(miou=scores["miou"]["miou"], **scores["ap"])
    row.update({name: "" if v != v else round(100 * v, 3) for name, v in values.items()})
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
