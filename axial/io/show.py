"""Shows text: one function for each medium, so that no medium reads untrusted text as markup or as commands.

File and class names, categories, model cards, gin values, JSON fields and messages of exceptions may come from a
stranger.

plain          one line for a terminal or a picture
counted        a number with its unit
say            prints lines
print_table    prints a table
progress       a progress bar
working        a line that says which work is in progress
drawn          text for matplotlib, without mathematics
html, url      text, attributes and links of an HTML page
markdown, code, markdown_table      text, code and tables of Markdown
csv_text       CSV rows that no spreadsheet reads as formulas
"""

import contextlib
import csv
import functools
import html as html_of_python
import io
import re
import shutil
import sys
import textwrap
import threading
import time
import urllib.parse

PAUSE = 30  # seconds between progress lines, where no terminal draws a bar

# Control characters, line ends, marks that change the text direction, and lone surrogates.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Characters that are markup in Markdown. An underscore inside a word is not.
_MARKDOWN = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_FORMULA = re.compile("[=+@\uff1d\uff0b\uff0d\uff20-]")  # first characters that make a spreadsheet read a formula
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Closed(BrokenPipeError):
    """Nobody reads the standard output or error any more, as after `head`."""


class Html(str):
    """Text that is already HTML."""


class Markdown(str):
    """Text that is already Markdown."""


# === The terminal ===


def plain(value):
    r"""A value as one line of text, with hidden characters as escape sequences.

    >>> print(plain("a\x1b[31mb\n\udce9"))  # \udce9 is the byte e9 of a non-UTF-8 file name
    a\x1b[31mb\n\xe9
    """
    return _HIDDEN.sub(_written_out, str(value))


def counted(number, unit):
    """A number with its unit in the singular or plural.

    >>> counted(1, "shard"), counted(17, "segment"), counted(0, "class")
    ('1 shard', '17 segments', '0 classes')
    """
    plural = "es" if unit.endswith("s") else "s"
    return f"{number} {unit}{'' if number == 1 else plural}"


def _written_out(match):
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # represents a byte; see PEP 383
        return f"\\x{number - 0xDC00:02x}"
    return match[0].encode("unicode_escape").decode()


def say(*lines, error=False):
    """Prints lines to standard output, or to standard error (`error`). Raises Closed if nobody reads them."""
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # it was closed before the start
        return
    try:
        stream.write("".join(f"{plain(line)}\n" for line in lines))
        stream.flush()
    except BrokenPipeError:
        raise Closed from None


def print_table(header, *groups, title=None):
    """Prints a table without cutting words.

    On a terminal that is too narrow, each row is printed as a block with one line per column. A file has no limit.

    Args:
        header: names of the columns.
        *groups: lists of rows. A line separates the groups.
        title: a line above the table.
    """
    if sys.stdout is None:  # it was closed before the start
        return
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Column, Table

    if title is not None:
        say(title)
    header = [plain(name) for name in header]
    table, rows = Table(*(Column(name, overflow="fold") for name in header)), []
    for group in groups:
        for row in group:
            rows.append([plain(cell) for cell in row])
            table.add_row(*rows[-1])
        table.add_section()
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10**6
    console = Console(width=columns, markup=False, emoji=False, highlight=False)
    if Measurement.get(console, console.options.update(width=10**6), table).minimum <= columns:
        lines = console.render_lines(table, pad=False)
        say(*("".join(segment.text for segment in line) for line in lines))
        return
    wide = max(map(len, header), default=0)
    for row in rows:
        say(*(f"{name:{wide}}  {cell}" for name, cell in zip(header, row)), "")


class _Lines:
    """A stream that prints each state of a tqdm bar on its own line, because a file cannot overwrite a line."""

    def __init__(self, stream):
        self._stream, self.flush = stream, stream.flush

    def write(self, text):
        if text := text.strip("\r\n "):
            self._stream.write(f"{text}\n")


def progress(items=None, what=None, *, total=None, initial=0, unit="it", leave=True, disable=False):
    """A tqdm progress bar on standard error, over `items` if given. Takes tqdm's arguments.

    If standard error is no terminal, a plain line is printed every `PAUSE` seconds, and one at the end.
    """
    from tqdm import tqdm

    what = what and plain(what)
    bar = functools.partial(tqdm, items, what, total, leave, unit=unit, initial=initial, disable=disable)
    if sys.stderr is None or sys.stderr.isatty():
        return bar()
    return bar(file=_Lines(sys.stderr), mininterval=PAUSE, miniters=1, ncols=0, position=0, delay=1e-9)


@contextlib.contextmanager
def working(what):
    """Prints the name of the work, `what`, to standard error, and every `PAUSE` seconds how long the work has run."""
    started, done = time.monotonic(), threading.Event()

    def repeat():
        with contextlib.suppress(Closed):  # the next `say` of the command raises it again
            while not done.wait(PAUSE):
                say(f"{what}: {time.monotonic() - started:.0f} s so far", error=True)

    say(what, error=True)
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# === Pictures and pages ===


def drawn(value):
    """A value as text for matplotlib, which would render text between two dollars as mathematics."""
    return plain(value).replace("$", r"\$")


def html(value):
    """A value as HTML text or quoted attribute. Keeps `Html`, line ends and tabs as they are."""
    if isinstance(value, Html):
        return value
    lines = re.split(r"([\n\r\t])", str(value))
    lines[::2] = map(plain, lines[::2])
    return Html(html_of_python.escape("".join(lines)))


def url(path):
    """A path as a relative link for HTML or Markdown."""
    return urllib.parse.quote(path, errors="backslashreplace")


# === Markdown and CSV ===


def markdown(value):
    """A value as Markdown text, also for table cells. Keeps `Markdown` as it is."""
    if isinstance(value, Markdown):
        return value
    return Markdown(_MARKDOWN.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), plain(value)))


def code(value):
    """A value as inline code of Markdown, also for table cells."""
    text = plain(value)
    return Markdown(f"<code>{markdown(text)}</code>" if re.search("[`|<]", text) else f"`{text}`")


def markdown_table(header, rows):
    """The lines of a Markdown table."""

    def line(cells):
        return f"| {' | '.join(map(markdown, cells))} |"

    return [line(header), line(["---"] * len(header)), *map(line, rows)]


def broken(command):
    """List of the lines of an indented code block that holds a shell command. Lines break before flags."""
    kept = re.sub(" (?!--)", "\0", command)  # a space that must not become a line break
    wrapper = textwrap.TextWrapper(104, "    ", "       ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(wrapper.wrap(kept)).replace("\0", " ").split("\n")


def csv_text(rows):
    """Rows as CSV. Puts a quote before text that a spreadsheet would read as a formula.

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
    """A fraction in percent; '-' for NaN and None."""
    return "-" if value is None or value != value else f"{100 * value:.{decimals}f}"
