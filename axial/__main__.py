"""`python -m axial` lists the commands, each with the first sentence of its help."""

import ast
import contextlib
import pathlib
import re
import textwrap

import axial
from axial.io.show import Closed, say


def commands():
    """dict from the name of each command (a module of `axial.cli` with a `main`) to the first sentence of its help."""
    summaries = {}
    for path in sorted(pathlib.Path(__file__).with_name("cli").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            sentence = re.split(r"(?<=\.)\s", ast.get_docstring(tree))[0]
            summaries[f"axial-{path.stem.replace('_', '-')}"] = " ".join(sentence.split())
    return summaries


def main():
    rows, lines = commands(), [f"axial {axial.__version__}"]
    width = max(map(len, rows)) + 4
    for name, summary in rows.items():
        lines += textwrap.wrap(summary, 80, initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width)
    with contextlib.suppress(Closed):  # a reader like head may close the pipe
        say(*lines, "Each command explains its flags with --help.")


if __name__ == "__main__":
    main()
