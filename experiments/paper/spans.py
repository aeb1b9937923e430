"""Counts multiply-adds of Axial-DeepLab by what its attention sees, beside the published ones (minutes).

The counts tell a window of 65 from a longer one and from the whole axis. They do not tell a window of 65 from one that
is the whole axis up to a length of 65: both are counted with min(span, length) keys for each query. All have the 19
classes of Cityscapes, with which the paper counts (see `Row.canvas`).
"""

import sys

from axial.cli import app
from axial.io.show import print_table, progress
from published import LEAVES, ROWS

SPANS = {
    "window 65": dict(span=65),
    "whole up to 65": dict(span=65, whole_up_to_span=True),
    "window 129": dict(span=129),
    "whole": dict(span=None),
}


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


def _main(_):
    """Of each model and image size, the published multiply-adds and the counts of `SPANS`."""
    rows = []
    for row in progress(published_rows(), unit="model"):
        counts = count_spans(row.model, row.image).values()
        rows.append((row.model, " x ".join(map(str, row.image)), row.macs, *(f"{n / 1e9:.1f}" for n in counts)))
    print_table(("model", "image", "published", *SPANS), rows, title="multiply-adds, billions")


if __name__ == "__main__":  # who imports this has flags of its own
    app.run(_main, sys.modules[__name__])
