"""Counts the models of the paper's tables, and prints the published figures and the commands of each row (minutes).

%s --markdown=experiments/results/tables.md

Each model is traced once at each input size.
"""

import dataclasses
import itertools
import textwrap

from axial.cli import app
from axial.cli.flags import Flags
from axial.io.show import broken, markdown_table, print_table, say
from counts import count_models
from pages import MARKDOWN, write_block
from published import FIGURE, IMAGENET, ON_8_CORES, ROWS, SCORES, TITLES, Row, by_commands, publish


@dataclasses.dataclass(frozen=True)
class Result:
    """A published row and our counts. The counts are None for a row without a model.

    Attributes:
        row: the `Row`.
        params: number of parameters, excluding `attention_norms`.
        attention_norms: number of parameters of the batch norms inside attention.
        macs: multiply-adds of all images of a prediction: the traced graph's count times `Row.factor`.
    """

    row: Row
    params: int | None = None
    attention_norms: int | None = None
    macs: int | None = None


def count_rows(rows=ROWS, processes=2):
    """Returns the list of `Result`s of the rows. `count_models` counts each model once at each input size."""
    counts = count_models(sorted({row.traced for row in rows if row.model}, key=str), processes)

    def result(row):
        params, norms, macs = counts[row.traced]
        return Result(row, params, norms, round(macs * row.factor))

    return [result(row) if row.model else Result(row) for row in rows]


# === As text ===

COLUMNS = ("table", "row", "params, published", "ours", "difference", "with attention BN", "difference")
COLUMNS += ("M-Adds, published", "ours", "difference", "published scores")


def cells(result):
    """Returns the strings of a row, in the order of `COLUMNS`."""
    row = result.row
    counted = ["", "", "", ""], ["", ""]
    if result.params is not None:
        counts = result.params / 1e6, (result.params + result.attention_norms) / 1e6
        pairs = ((f"{n:.3f} M", "" if row.params is None else f"{n - row.params:+.3f} M") for n in counts)
        macs = result.macs / 1e9
        apart = "" if row.macs is None else f"{100 * (macs / row.macs - 1):+.1f} %"
        counted = [text for pair in pairs for text in pair], [f"{macs:.3f} B", apart]
    return (
        str(row.table),
        row.label if row.model else f"{row.label} (published figures only)",
        "" if row.params is None else f"{row.params:.1f} M",
        *counted[0],
        "" if row.macs is None else f"{row.macs:.1f} B",
        *counted[1],
        ", ".join(f"{_score(row, name)} {SCORES[name]}" for name in row.scores),
    )


def _score(row, name):
    digits = 2 if name.startswith("ms") else 1
    return f"{row.scores[name]:.{digits}f}" if name in row.scores else ""


def agreement(results):
    """Returns lines on how many rows match the paper's parameters, without and with attention's batch norms."""
    rows = [result for result in results if None not in (result.params, result.row.params)]
    lines = []
    for name in ("without", "with"):
        counts = [result.params + (name == "with") * result.attention_norms for result in rows]
        equal = sum(f"{n / 1e6:.1f}" == f"{result.row.params:.1f}" for n, result in zip(counts, rows))
        lines.append(f"{name} attention's batch norms: {equal} of {len(rows)} rows have the parameters' printed digit")
    return lines


def markdown(results):
    """Returns each of the paper's tables as Markdown, followed by the commands that train its rows."""
    lines = ["", *(f"- {line}" for line in agreement(results))]
    for number, title in TITLES.items():
        if rows := [result for result in results if result.row.table == number]:
            name = number if number == FIGURE else f"Table {number}"
            scores = [name for name in SCORES if any(name in result.row.scores for result in rows)]
            header = [*COLUMNS[1:-1], *(SCORES[name] for name in scores)]
            body = [[*cells(result)[1:-1], *(_score(result.row, name) for name in scores)] for result in rows]
            lines += ["", f"### {name}: {title}", "", *markdown_table(header, body)]
            groups = by_commands(result.row for result in rows)
            if groups and rows[0].row.image == IMAGENET:
                flag, _, binding = ON_8_CORES.partition("=")
                on_8 = "For 128 TPU cores, as published. On 8 cores, with as many photos at a time on each, add:"
                lines += ["", on_8, "", f'    {flag}="{binding}"']
            for commands, names in groups.items():
                code = [line for text in commands for line in broken(text)]
                lines += ["", *textwrap.wrap(f"{'; '.join(names)}:", 120), "", *code]
    return "\n".join(lines)


class Tables(Flags):
    markdown = MARKDOWN


def _main(given):
    if given.markdown:
        write_block(given.markdown, "tables")
    say("counting the models of the paper's tables: minutes", error=True)
    results = count_rows()
    groups = itertools.groupby(results, lambda result: result.row.table)
    print_table(COLUMNS, *(list(map(cells, table)) for _, table in groups))
    publish("tables", agreement(results), by_commands(ROWS), markdown(results), given.markdown)


if __name__ == "__main__":
    app.run({"": (Tables, _main)})
