"""Text from outside appears literally in every output, and is never read as markup, a command or a formula."""

import ast
import csv
import html.parser
import io
import re
import sys
import time
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from axial.io import show
from axial.io.page import figure, page, table
from tests.conftest import ROOT
from tests.hostile import NAMES

TEXTS = st.one_of(
    st.sampled_from(NAMES), st.text(max_size=12), st.text(alphabet="[]/$\\_`|<>&*~\"'=+-@#!()\n\x1b ab", max_size=12)
)
RUNS = settings(deadline=None, derandomize=True, max_examples=200)
every_name = pytest.mark.parametrize("name", NAMES, ids=ascii)


@RUNS
@given(TEXTS)
def test_a_line_has_no_hidden_character(text):
    line = show.plain(text)
    assert not {unicodedata.category(letter) for letter in line} & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(letter) for letter in line} & TURNS
    assert show.plain(line) == line and line.encode().decode() == line


TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # explicit formatting of UAX #9


def test_a_command_is_broken_at_its_flags():
    short, long = "--a=" + 39 * "x", "--a=" + 40 * "x"
    assert show.broken(f"axial-train {short} {short} --b=1") == [f"    axial-train {short} {short} \\", "       --b=1"]
    assert show.broken(f"axial-train {long} {long} --b=1") == [f"    axial-train {long} \\", f"       {long} --b=1"]


def test_readable_text_stays_as_it_is():
    for text in ("größe 模型 \u3000", "\u0645\u06cc\u200c\u062e", "a [b] $c$ <d> \\e"):
        assert show.plain(text) == text
    assert show.plain(12) == "12" and show.plain("a\n\udce9\x1b") == r"a\n\xe9\x1b"
    assert show.plain("\udc7f\udc80\udcff\udd00") == r"\udc7f\x80\xff\udd00"


class Stream(io.StringIO):
    """A text stream whose isatty() returns `terminal`."""

    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.fixture
def lines_of_table(monkeypatch):
    """A function that returns the lines of a table on a terminal with `columns`, or in a file if `columns` is None."""

    def lines(columns, *given, **more):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", Stream(columns is not None))
        show.print_table(*given, **more)
        return sys.stdout.getvalue().splitlines()

    return lines


@every_name
@pytest.mark.parametrize("columns", [None, 150], ids=["file", "terminal"])
def test_a_table_shows_every_cell(lines_of_table, name, columns):
    lines = lines_of_table(columns, (f"h{name}", "x"), [(name, 1)], [(f"{name}!", None)], title=f"t {name}")
    name = show.plain(name)
    cells = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]
    expected = [[f"h{name}".strip(), "x"], [name.strip(), "1"], [f"{name}!".strip(), "None"]]
    if not {"|", "┃"} & set(name):
        assert [cell for cell in cells if cell] == expected
    assert lines[0].strip() == f"t {name}".strip()


WIDE = ("model", "parameters", "with attention's batch norms", "multiply-adds", "activations", "address")
ROWS = [("axial_deeplab_s", "12,063,612,424", "1", "34,567.890 B", "12,345.6 MiB", "gs://bucket/folder/run")] * 2


@pytest.mark.parametrize("columns,blocks", [(80, True), (140, False)])
def test_a_narrow_terminal_cuts_no_word(lines_of_table, columns, blocks):
    title = "gs://bucket/" + 10 * "long/" + "run"
    lines = lines_of_table(columns, WIDE, ROWS, title=title)
    words = [word for line in lines for word in line.split()]
    assert all(words.count(cell) == 2 for cell in ("12,063,612,424", "axial_deeplab_s", "gs://bucket/folder/run"))
    assert max(map(len, lines)) <= columns and lines[0] == title
    assert ("parameters                    12,063,612,424" in lines) == blocks


def test_progress_is_plain_lines_without_a_terminal(monkeypatch):
    def log(terminal=False):
        monkeypatch.setattr(sys, "stderr", Stream(terminal))
        return sys.stderr

    said = log()
    assert list(show.progress(range(1000), "check")) == list(range(1000))
    assert re.fullmatch(r"check: 100% 1000/1000 \[.*\]\n", said.getvalue())
    said = log(terminal=True)
    assert list(show.progress(range(1000), "check")) == list(range(1000)) and said.getvalue().count("\r") > 1
    monkeypatch.setattr(show, "PAUSE", 0)
    said = log()
    with show.progress(None, "train", total=3, unit="step") as bar:
        bar.set_postfix_str("compiling")
        bar.update(2)
        bar.write("a line", said)
    lines = said.getvalue().splitlines()
    assert lines[0].endswith("compiling]") and "a line" in lines and lines[-1].startswith("train:  67% 2/3 [")
    said = log()
    assert list(show.progress(range(2), "check", disable=True)) == [0, 1]
    assert list(show.progress(range(0), "check", leave=False)) == [] and said.getvalue() == ""


def test_work_in_progress_is_reported_repeatedly(monkeypatch, capsys):
    monkeypatch.setattr(show, "PAUSE", 0.05)
    said, end = "", time.monotonic() + 60
    with show.working("writing an export"):
        while said.count("\n") < 3 and time.monotonic() < end:
            time.sleep(0.02)
            said += capsys.readouterr().err
    first, *others = said.splitlines()
    assert first == "writing an export" and len(others) >= 2 and others[0] == "writing an export: 0 s so far"
    assert all(re.fullmatch(r"writing an export: \d+ s so far", line) for line in others)


@every_name
def test_lines_reach_every_stream(name, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, "ascii", errors="backslashreplace"))
    show.say(name, f"b {name}", error=True)
    first, second = raw.getvalue().decode("ascii").splitlines()
    assert second == f"b {first}" and first == show.plain(name).encode("ascii", "backslashreplace").decode()


def test_a_reader_that_has_gone_is_told_apart(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    for call in (lambda: show.say("a"), lambda: show.print_table(("a",), [("b",)])):
        with pytest.raises(show.Closed):
            call()
    monkeypatch.setattr(sys, "stdout", None)  # stdout was closed before the program started
    show.say("a")
    show.print_table(("a",), [("b",)])


def pixels(text, **how):
    drawn = Figure([4, 0.5], dpi=60)
    drawn.text(0, 0.3, text, **how)
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


@every_name
@pytest.mark.filterwarnings("ignore:Glyph")  # for characters that the font lacks
def test_a_text_of_matplotlib_has_no_mathematics(name):
    np.testing.assert_array_equal(pixels(show.drawn(name)), pixels(show.plain(name), parse_math=False))


class Reader(html.parser.HTMLParser):
    """Collects the tags, attribute values and texts of HTML."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.values += [value for _, value in attributes]

    def handle_data(self, data):
        self.texts.append(data)


@every_name
def test_html_has_no_other_tags_than_ours(name):
    body = table((name, "b"), [(name, 1)]) + figure(f'<img alt="{show.html(name)}" src="{show.url(name)}">', name)
    ours, read = Reader(page("a", {"b": table(("a", "b"), [("a", 1)]) + figure('<img alt="" src="">', "c")})), None
    read = Reader(page(name, {name: body}))
    assert read.tags == ours.tags
    text = "".join(piece if piece in "\n\r\t" else show.plain(piece) for piece in re.split("([\n\r\t])", name))
    assert "".join(read.texts).count(text) >= 5 and text in read.values
    assert show.html(show.html(name)) == show.html(name)


def test_a_page_runs_only_its_own_script():
    hashed = "'sha256-T8Xibs7zV8KTQdRXjpKJTlizX17SudRlddrZKaeFg9E='"
    for script, allowed in {"": "'none'", "1 < 2": hashed}.items():
        text = page("a", {}, script=script)
        assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}\"" in text
        assert ("<script>1 < 2</script>" in text) == bool(script)


def cells_of(text):
    """Returns (text of each cell, types of all tokens) of a Markdown text with one table."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    inline = [token for token in tokens if token.type == "inline"]
    kinds = {child.type for token in inline for child in token.children} | {token.type for token in tokens}
    return ["".join(child.content for child in token.children) for token in inline], kinds


@every_name
def test_markdown_reads_text_as_text(name):
    lines = show.markdown_table(("a", "b"), [(name, 1), (show.markdown(name), 2), (name, 3)])
    cells, kinds = cells_of("\n".join(lines))
    plain = show.plain(name).strip()
    assert cells == ["a", "b", plain, "1", plain, "2", plain, "3"]
    assert not kinds & {"html_inline", "html_block", "link_open", "em_open", "strong_open", "s_open", "code_inline"}
    cells, kinds = cells_of("\n".join(show.markdown_table(("a",), [(show.code(name),), (show.code(f"{name}!"),)])))
    assert [re.sub("</?code>", "", cell).strip() for cell in cells] == ["a", plain, show.plain(f"{name}!").strip()]
    assert "<!--" not in "\n".join(lines) + show.code(name)  # would end a block of a page


FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # from OWASP's page on CSV injection


@every_name
def test_a_spreadsheet_reads_no_formula(name):
    (row,) = csv.reader(io.StringIO(show.csv_text([[name, f"={name}", f"a{name}", 1]])))
    name = show.plain(name)
    assert [row[0].removeprefix("'"), *row[1:]] == [name, f"'={name}", f"a{name}", "1"]
    assert not any(cell.startswith(FORMULA) for cell in row)


def test_numbers_stay_numbers_in_a_csv():
    numbers = [-1, -0.25, 1e-30, -1e20, float("-inf"), "-1", "+2.5", "-.5", "-1e-3", "", None, True]
    assert show.csv_text([numbers]) == "-1,-0.25,1e-30,-1e+20,-inf,-1,+2.5,-.5,-1e-3,,,True\n"
    assert show.csv_text([["-", "-1,5", "--1", "=1", "-1 ", "1e5"]]) == "'-,\"'-1,5\",'--1,'=1,'-1 ,1e5\n"


# === All text goes through show.py; ruff.toml refuses print, rich, tqdm, html and csv.writer elsewhere ===

FILES = [path for path in sorted((ROOT / "axial").rglob("*.py")) if path.name != "show.py"]
# dict from functions of matplotlib to the index of their text argument.
DRAWN = {
    **dict.fromkeys(("set_title", "suptitle", "supxlabel", "supylabel", "set_xlabel", "set_ylabel", "annotate"), 0),
    "text": 2,
    "set_xticks": 1,
    "set_yticks": 1,
    "set_xticklabels": 0,
    "set_yticklabels": 0,
}
NAMED = {"title", "label", "labels", "xlabel", "ylabel"}
TAG = re.compile("</?[a-z]+[0-9]?[ >]")


def called(node):
    """Returns the name of a called function without its module or object, or None if the node is not a call."""
    return getattr(node.func, "attr", getattr(node.func, "id", None)) if isinstance(node, ast.Call) else None


def is_drawn(node):
    """Returns whether a text, or each text of a list comprehension, is a constant or a result of `drawn`."""
    node = node.elt if isinstance(node, ast.ListComp) else node
    return isinstance(node, ast.Constant) or called(node) == "drawn"


def texts_of(node):
    """Yields the expressions of the texts that a call passes to matplotlib."""
    name = called(node)
    index = DRAWN.get(name, len(node.args))
    yield from node.args[index : index + 1]
    if name in DRAWN or name in ("plot", "loglog", "scatter", "bar", "set", "colorbar"):
        yield from (word.value for word in node.keywords if word.arg in NAMED)


def skipped(path):
    """Yields (line, problem) for code that shows text without `axial.io.show`."""
    tree = ast.parse(path.read_text())
    draws = "import matplotlib" in path.read_text() or "from matplotlib" in path.read_text()
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and called(node.value) == "drawn"]
    names = {target.id for node in assigned for target in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and draws:
            texts = [text for text in texts_of(node) if not is_drawn(text) and getattr(text, "id", "") not in names]
            yield from ((text.lineno, f"{called(node)} without drawn") for text in texts)
        if isinstance(node, ast.JoinedStr) and path.name != "page.py":
            words = "".join(piece.value for piece in node.values if isinstance(piece, ast.Constant))
            values = [piece.value for piece in node.values if isinstance(piece, ast.FormattedValue)]
            if TAG.search(words) and not all(called(value) in ("html", "url") for value in values):
                yield node.lineno, "HTML without html"


def test_all_text_is_shown_by_show():
    assert not [(path, *problem) for path in FILES for problem in skipped(path)]
