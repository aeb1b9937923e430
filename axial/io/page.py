"""HTML pages: the common frame page.html with its stylesheet page.css, words for keys, tables and pictures."""

import base64
import datetime
import hashlib
import os
import re

from axial.io.read import read_text
from axial.io.show import Html, html

# Keys of scores and summaries, and the parts of such keys, as words.
WORDS = {
    **{score: score.upper() for score in ("ap", "bleu", "pq", "rq", "sq")},
    **{size: f"of {size} objects" for size in ("small", "medium", "large")},
    "all": "of all classes",
    "ap50": "AP at IoU 0.5",
    "ap75": "AP at IoU 0.75",
    "input_bound": "time waiting for input (0 to 1)",
    "miou": "mean IoU",
    "stuff": "of stuff",
    "things": "of things",
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
}


def in_words(key):
    """The words for a key of a score or summary. CSV and JSON keep the key.

    >>> in_words("pq_things"), in_words("eval/accuracy@0.5"), in_words("seconds_per_step")
    ('PQ of things', 'accuracy at IoU 0.5', 'seconds per step')
    """
    name, at, threshold = key.removeprefix("eval/").partition("@")
    text = WORDS.get(name) or " ".join(WORDS.get(word, word) for word in re.split("[_/]", name))
    return f"{text} at IoU {threshold}" if at else text


def page(title, sections, about=(), *, style="", script="", files=False):
    """A complete HTML page. Its policy forbids everything from elsewhere: requests, frames and other scripts.

    Args:
        title: title of the page.
        sections: dict from headings to HTML; the heading '' adds HTML without a heading.
        about: texts for the header, such as the model and its checkpoint. The header starts with the date.
        style: CSS that follows the common stylesheet.
        script: JavaScript that runs at the end of the page, which runs no other script.
        files: whether the page shows pictures from files beside it.
    """
    heads = {head: f"section-{number}" for number, head in enumerate(sections, 1) if head}
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pictures, scripts = " 'self' file:" if files else "", f"'sha256-{hashed}'" if script else "'none'"
    now = datetime.datetime.now(datetime.timezone.utc)
    titles = {head: f'<h2 id="{anchor}">{html(head)}</h2>\n' for head, anchor in heads.items()}
    return _file("page.html").format(
        policy=f"default-src 'none'; img-src data:{pictures}; style-src 'unsafe-inline'; script-src {scripts}",
        title=html(title),
        style=_file("page.css") + style,
        about=" · ".join(map(html, (f"{now:%Y-%m-%d %H:%M} UTC", *about))),
        links="\n".join(f'<a href="#{anchor}">{html(head)}</a>' for head, anchor in heads.items()),
        body="\n".join(titles.get(head, "") + section for head, section in sections.items()),
        script=f"<script>{script}</script>" if script else "",
    )


def _file(name):
    return read_text(os.path.join(os.path.dirname(__file__), name))


def table(header, rows, words=False):
    """An HTML table. Right-aligns all columns but the first, or no column with `words`. Omits an empty header."""

    def line(tag, cells):
        return f"<tr>{''.join(f'<{tag}>{html(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = [line("th", header)] if header else []
    kind = ' class="words"' if words else ""
    return "\n".join([f'<div class="table"><table{kind}>', *lines, *(line("td", r) for r in rows), "</table></div>"])


def embedded(data, alt, kind="png"):
    """An HTML image that embeds the bytes of a picture's file."""
    return Html(f'<img src="data:image/{kind};base64,{base64.b64encode(data).decode()}" alt="{html(alt)}">')


def figure(content, caption):
    """An HTML figure: content with a caption."""
    return f"<figure>{content}<figcaption>{html(caption)}</figcaption></figure>"


def grid(contents):
    """HTML contents side by side, as many as the window has room for."""
    return f'<div class="grid">{"".join(contents) or "none yet"}</div>'
