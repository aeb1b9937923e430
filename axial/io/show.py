"""Text as it is shown: one function for each medium, so that no text from outside is read as markup or as commands.

Names of files and classes, categories, model cards, values of gin, fields of JSON and messages of exceptions may come
from a stranger.

plain          a line on a terminal, and in a picture
say            prints such lines
print_table    prints a table of such cells
progress       a progress bar with such words
drawn          a text of matplotlib, without its mathematics
html, url      text, attributes and links of a page
markdown, code, link, markdown_table      text, code, links and tables of Markdown
csv_text       rows of a CSV that no spreadsheet takes for formulas
"""

import csv
import html as html_of_python
import io
import re
import sys
import urllib.parse

# Control characters, ends of lines, marks that turn the direction of the text, and halves of surrogate pairs.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# What Markdown reads as markup. An underscore inside a word is none.
_MARKDOWN = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_FORMULA = re.compile("[=+@\uff1d\uff0b\uff0d\uff20-]")  # what a spreadsheet takes for the start of one
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Closed(BrokenPipeError):
    """The reader of the standard output or error has gone, as `head` does."""


class Html(str):
    """Text that is HTML already."""


class Markdown(str):
    """Text that is Markdown already."""


# === The terminal ===


def plain(value):
    r"""A value as one line of text in which every hidden character is written out.

    >>> print(plain("a\x1b[31mb\n\udce9"))  # \udce9 is the byte e9 of a file name that is not UTF-8
    a\x1b[31mb\n\xe9
    """
    return _HIDDEN.sub(_written_out, str(value))


def _written_out(found):
    number = ord(found[0])
    if 0xDC80 <= number <= 0xDCFF:  # stands for a byte; see PEP 383
        return f"\\x{number - 0xDC00:02x}"
    return found[0].encode("unicode_escape").decode()


def say(*lines, error=False, to=None):
    """Prints lines, on standard error with `error` or to another stream. Raises Closed if nobody reads them."""
    stream = to or (sys.stderr if error else sys.stdout)
    if stream is None:  # it was closed before the start
        return
    try:
        stream.write("".join(f"{plain(line)}\n" for line in lines))
        stream.flush()
    except BrokenPipeError:
        _raise_closed()


def _raise_closed():
    raise Closed from None


def print_table(header, *groups, title=None):
    """Prints a table. A table that goes to a file is wide enough to keep its columns.

    Args:
        header: names of the columns.
        *groups: lists of rows. There is a line between two groups.
        title: above the table.
    """
    if sys.stdout is None:  # it was closed before the start
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=None if title is None else plain(title))
    for name in header:
        table.add_column(plain(name), overflow="fold")
    for rows in groups:
        for row in rows:
            table.add_row(*map(plain, row))
        table.add_section()
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    console.on_broken_pipe = _raise_closed  # rich itself would end the process
    try:
        console.print(table)
    except BrokenPipeError:
        _raise_closed()


def progress(items=None, what=None, **options):
    """A progress bar of tqdm on standard error, over items if there are some."""
    from tqdm import tqdm

    return tqdm(items, what and plain(what), **options)


# === Pictures and pages ===


def drawn(value):
    """A value as text of matplotlib, which would set what stands between two dollars as mathematics."""
    return plain(value).replace("$", r"\$")


def html(value):
    """A value as HTML, between tags and in quoted attributes. `Html` is left as it is; ends of lines and tabs stay."""
    if isinstance(value, Html):
        return value
    lines = re.split(r"([\n\r\t])", str(value))
    lines[::2] = map(plain, lines[::2])
    return Html(html_of_python.escape("".join(lines)))


def url(path):
    """A path as a relative link of a page or of Markdown."""
    return urllib.parse.quote(path, errors="backslashreplace")


# === Markdown and CSV ===


def markdown(value):
    """A value as text of Markdown, in a table too. `Markdown` is left as it is."""
    if isinstance(value, Markdown):
        return value
    return Markdown(_MARKDOWN.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), plain(value)))


def code(value):
    """A value as code in a line of Markdown, in a table too."""
    text = plain(value)
    return Markdown(f"<code>{markdown(text)}</code>" if re.search("[`|<]", text) else f"`{text}`")


def link(value, address):
    """A link of Markdown from a value to an address."""
    return Markdown(f"[{markdown(value)}]({urllib.parse.quote(address, safe=':/?#@!&+,;=%~')})")


def markdown_table(header, rows):
    """The lines of a table."""

    def line(cells):
        return f"| {' | '.join(map(markdown, cells))} |"

    return [line(header), line(["---"] * len(header)), *map(line, rows)]


def csv_text(rows):
    """Rows as lines of CSV. Text that a spreadsheet would take for a formula gets a quote in front.

    >>> csv_text([["=1+1", "-1+1", "-1.5", -1.5, "a-b"]])
    "'=1+1,'-1+1,-1.5,-1.5,a-b\\n"
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_cell, row) for row in rows)
    return text.getvalue()


def _cell(value):
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def percent(value, decimals=1):
    """A share in percent; '-' for NaN and None."""
    return "-" if value is None or value != value else f"{100 * value:.{decimals}f}"
