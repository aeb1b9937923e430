"""Writes the tables of experiments/: CSV files, and blocks of Markdown pages."""

import dataclasses
import os
import urllib.parse

from axial.cli.flags import OUT_FILE, Flag
from axial.errors import InputError
from axial.io.read import read_text
from axial.io.show import Markdown, csv_text, markdown
from axial.io.write import write_text

MARKDOWN = Flag(str, "file for a table; an existing file must have the two comments around the table.", path=OUT_FILE)


def write_block(path, name, text=None):
    """Writes a block of Markdown to a new file, or replaces the block with this name in an existing file.

    A block is the text between the comments `<!-- NAME:begin -->` and `<!-- NAME:end -->`. If `text` is None, the
    function only checks that the block exists.

    Raises:
        InputError: the file has no such block.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, opened, rest = (read_text(path) if os.path.exists(path) else f"{begin}{end}\n").partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise InputError(f"{path}: holds no lines {begin} and {end} to write between")
    if text is not None:
        write_text(path, f"{before}{begin}\n{text}\n{end}{after}")


def link(value, address):
    """A Markdown link with a value as its text."""
    return Markdown(f"[{markdown(value)}]({urllib.parse.quote(address, safe=':/?#@!&+,;=%~')})")


def csv_rows(kind, rows):
    """Instances of a dataclass as CSV, which `read.read_rows` reads."""
    return csv_text([[field.name for field in dataclasses.fields(kind)], *map(dataclasses.astuple, rows)])
