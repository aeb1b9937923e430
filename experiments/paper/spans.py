"""Counts multiply-adds of Axial-DeepLab by what its attention sees, beside the published ones (minutes).

%s --json=spans.json

The counts tell a window of 65 from a longer one and from the whole axis. They do not tell a window of 65 from one that
is the whole axis up to a length of 65: both are counted with min(span, length) keys for each query. All have the 19
classes of Cityscapes, with which the paper counts (see `Row.canvas`).
"""

import sys

from absl import flags

from axial.cli import app
from axial.cli.pages import finish
from axial.io.show import print_table, progress
from published import LEAVES, ROWS

FLAGS = flags.FLAGS

SPANS = {
    "window 65": dict(span=65),
    "whole up to 65": dict(span=65, whole_up_to_span=True),
    "window 129": dict(span=129),
    "whole": dict(span=None),
}
COLUMNS = ("model", "image", "published", *SPANS)


def published_rows():
    """The first row of the paper's tables with multiply-adds of one image, of each Axial-DeepLab and image size."""
    found = {}
    for row in ROWS:
        if row.model in LEAVES["coco"] and row.macs and not row.multi_scale:
            found.setdefault((row.model, row.image), row)
    return list(found.values())


def count_spans(model, image):
    """dict from the names of `SPANS` to the multiply-adds of a model for an image (height, width)."""
    from axial.analysis.counts import trace
    from axial.analysis.multiply_adds import count_multiply_adds, total
    from axial.models.registry import find_variant

    def count(changes):
        _, graph, _ = trace(model, find_variant(model).classes, *image, changes=changes)
        return total(count_multiply_adds(graph))

    return {name: count(changes) for name, changes in SPANS.items()}


def cells(row):
    """The cells of a row of the table: multiply-adds in billions."""
    numbers = (f"{row[name] / 1e9:.1f}" for name in COLUMNS[2:])
    return row["model"], " x ".join(map(str, row["image"])), *numbers


def _main(_):
    """Of each model and image size, the published multiply-adds and the counts of `SPANS`."""
    rows = []
    for row in progress(published_rows(), unit="model"):
        counts = count_spans(row.model, row.image)
        rows.append({"model": row.model, "image": row.image, "published": round(row.macs * 1e9), **counts})
    print_table(COLUMNS, map(cells, rows), title="multiply-adds, billions")
    finish(rows)


if __name__ == "__main__":  # who imports this has flags of its own
    flags.DEFINE_string("json", None, "file for every number, in plain units.")
    app.run(_main, sys.modules[__name__])
