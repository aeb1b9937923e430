"""HTML pages: the common frame, tables and pictures."""

import base64

from axial.io.show import Html, html

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .15em .8em; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child, .words th, .words td {{ text-align: left; }}
figure {{ margin: 1em 0; }}
.row {{ display: grid; grid-auto-columns: 1fr; grid-auto-flow: column; gap: 4px; }}
pre {{ background: #f6f6f6; overflow-x: auto; padding: 1em; }}
img {{ max-width: 100%; }}
i {{ display: inline-block; width: 1em; height: 1em; margin-right: .5em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(title, sections):
    """A complete HTML page.

    Args:
        title: title of the page.
        sections: dict from headings to HTML; the heading '' adds HTML without a heading.
    """
    body = "\n".join(f"<h2>{html(head)}</h2>\n{section}" if head else section for head, section in sections.items())
    return _PAGE.format(title=html(title), body=body)


def table(header, rows, words=False):
    """An HTML table. Right-aligns all columns but the first, or no column with `words`. Omits an empty header."""

    def line(tag, cells):
        return f"<tr>{''.join(f'<{tag}>{html(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = [line("th", header)] if header else []
    return "\n".join(
        ['<table class="words">' if words else "<table>", *lines, *(line("td", r) for r in rows), "</table>"]
    )


def embedded(data, alt, kind="png"):
    """An HTML image that embeds the bytes of a picture's file."""
    return Html(f'<img src="data:image/{kind};base64,{base64.b64encode(data).decode()}" alt="{html(alt)}">')


def figure(content, caption):
    """An HTML figure: content with a caption."""
    return f"<figure>{content}<figcaption>{html(caption)}</figcaption></figure>"
