"""Tables of pictures, and confusions of classes."""

import numpy as np
from matplotlib.figure import Figure

from axial.io.show import drawn


def save_picture_table(path, blocks, names, title=""):
    """Draws blocks of pictures side by side.

    Args:
        path: of the picture. Its ending decides between PNG and JPEG.
        blocks: list of (name, rows, footer). Each row has a picture, uint8 [h, w, 3], for each of the names.
        names: of the columns.
        title: title of the whole picture.
    """
    rows = max(len(pictures) for _, pictures, _ in blocks)
    figure = Figure([2.5 * len(names) * len(blocks), 1.9 * rows + 1.4], layout="constrained", facecolor="white")
    figure.suptitle(drawn(title), fontsize=20)
    for part, (name, pictures, footer) in zip(figure.subfigures(1, len(blocks), squeeze=False)[0], blocks):
        part.suptitle(drawn(name), fontsize=16)
        part.supxlabel(drawn(footer), fontsize=18, weight="bold")
        grid = part.subplots(rows, len(names), squeeze=False, gridspec_kw=dict(wspace=0, hspace=0))
        for axes, column in zip(grid[0], names):
            axes.set_title(drawn(column))
        for axes in grid.flat:
            axes.set_axis_off()
        for row, found in zip(grid, pictures):
            for axes, pixels in zip(row, found):
                axes.imshow(pixels, interpolation="lanczos")
    figure.savefig(path, dpi=90)


MOST_NAMES = 200  # that a matrix of confusions has room for


def save_confusion(path, confusion, names):
    """Draws a confusion matrix as a PNG: the share of each true class that is predicted as each class.

    Args:
        path: of the picture.
        confusion: int [C, C] or [C, C + 1], in pixels or photos. Rows are true classes. Columns are predicted classes,
            then void.
        names: of the C classes.
    """
    seen = np.flatnonzero(confusion.any(1) | confusion[:, : len(names)].any(0))
    if not len(seen):
        seen = np.arange(len(names))
    columns = [*seen, *range(len(names), confusion.shape[1])]
    share = confusion[np.ix_(seen, columns)] / np.maximum(confusion.sum(1), 1)[seen, None]
    side = 3 + 0.2 * min(len(columns), MOST_NAMES)
    figure = Figure([side + 1, side], layout="constrained", facecolor="white")
    axes = figure.subplots()
    image = axes.imshow(share, cmap="viridis", vmin=0, vmax=1)
    if len(columns) <= MOST_NAMES:
        axes.set_xticks(range(len(columns)), [drawn([*names, "void"][i]) for i in columns], rotation=90)
        axes.set_yticks(range(len(seen)), [drawn(names[i]) for i in seen])
    axes.set(xlabel="predicted", ylabel="true")
    figure.colorbar(image, label="share of the true class", shrink=0.7)
    figure.savefig(path, dpi=80, format="png")
