"""The pages in Markdown are short. Their links have targets, and their commands exist with the flags they show."""

import json
import re
import shlex
import subprocess
import sys
from urllib.parse import unquote

import pytest

from axial.errors import DISTRIBUTION
from axial.recipes import configuration
from tests.conftest import ROOT
from tests.test_imports import COMMANDS

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS, *sorted(ROOT.glob("experiments/results/*.md"))]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.md"))
LINKED = [
    *DOCS,
    *NOTEBOOKS,
    *(ROOT / name for name in ("README.md", "SECURITY.md", "WORKSPACE.md", "CHANGELOG.md")),
    *(path for room in ("experiments", "axial/layers") for path in sorted(ROOT.glob(f"{room}/**/*.md"))),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Prints the flags of each verb; '' is the default verb. Each command has its own fork, as commands share flag names.
TELL = """
import importlib, json, os, sys
from axial.cli import app

for command in sys.argv[1:]:

    def tell(verbs, default=None, moved=()):
        told = {name: sorted(kind.names()) for name, (kind, _) in verbs.items()}
        told |= {"": told[default]} if default else {}
        print(json.dumps(["axial-" + command.replace("_", "-"), told]), flush=True)

    app.run = tell
    if not os.fork():
        importlib.import_module("axial.cli." + command).main()
        os._exit(0)
    os.wait()
"""


def relative(path):
    return str(path.relative_to(ROOT))


def prose(path):
    """The text of a page without code blocks and inline code."""
    text = re.sub(r"(?m)^    .*$", "", path.read_text())
    return re.sub(r"`[^`]*`", "", text)


def commands_of(text):
    """Yields the words of each axial-... command on a page: on indented lines, after a "!", or between backquotes."""
    blocks = "\n".join(line.lstrip(" !") for line in text.splitlines() if line.startswith(("    ", "!")))
    lines = blocks.replace("\\\n", " ").splitlines()
    outside = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    lines += [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", outside)]
    for line in lines:
        command = re.match(r"(?:\s*[A-Z_]+='[^']*')?\s*(axial-[a-z-]+\b.*)", line)
        if command and command[1] != DISTRIBUTION:
            yield shlex.split(command[1], comments=True)


@pytest.fixture(scope="module")
def flags():
    """dict from the name of each command to a dict from each verb to the names of its flags."""
    call = [sys.executable, "-c", TELL, *COMMANDS]
    lines = subprocess.run(call, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    return dict(map(json.loads, lines))


def wrong(words, flags):
    """Message about the wrong name, verb or flag of a page's command. None if the command is right."""
    name, *arguments = words
    if name not in flags:
        return f"no command {name}"
    verbs = flags[name]
    verb = arguments[0] if arguments and arguments[0] in verbs else ""
    if verb not in verbs:
        asked = arguments[0] if arguments else None
        return f"{name} has no verb {asked!r}" if asked and not asked.startswith("-") else None
    named = [word[2:].split("=")[0] for word in arguments if word.startswith("--")]
    defined = {*verbs[verb], *(f"no{flag}" for flag in verbs[verb]), "help", "helpshort", "version"}
    unknown = [flag for flag in named if flag not in defined]
    return f"{name} {verb}: unknown {unknown}" if unknown else None


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=relative)
def test_a_page_is_short_and_its_commands_and_recipes_exist(path, flags):
    text = path.read_text()
    written = re.sub(r"(?s)<!-- (\w+):begin -->.*<!-- \1:end -->", "", text)  # the text that no script generates
    assert len(written.splitlines()) <= (150 if path.name == "README.md" else 300)
    for words in commands_of(text):
        assert wrong(words, flags) is None, " ".join(words)
    for name in re.findall(r"[\w/]+\.gin\b", text):
        assert name.startswith("WEIGHTS/") or name == "config.gin" or (ROOT / "experiments" / name).exists(), name


def recipes_of(text):
    """The (gin files, bindings) of a page's commands. It omits files that a reader makes, like WEIGHTS/model.gin."""
    for words in commands_of(text):
        given = [word.partition("=")[::2] for word in words]
        files = [file for name, file in given if name == "--gin_file" and (ROOT / "experiments" / file).exists()]
        if files:
            yield tuple(files), tuple(binding for name, binding in given if name == "--gin_binding")


def test_recipes_of_commands_load():
    recipes = {
        recipe for path in [*PAGES, *NOTEBOOKS, ROOT / "experiments/ZOO.md"] for recipe in recipes_of(path.read_text())
    }
    assert len(recipes) > 50
    for files, bindings in recipes:
        configuration.load(files, bindings)


def test_scripts_of_commands_exist_and_have_their_flags():
    for path in [*PAGES, ROOT / "WORKSPACE.md"]:
        text = " ".join(path.read_text().replace("\\\n", " ").splitlines())
        for script, arguments in re.findall(r"python\s+(experiments/[\w/]+\.py)((?:\s+--[a-z_]+\S*)*)", text):
            defined = (ROOT / script).read_text()
            for flag in re.findall(r"--([a-z_]+)", arguments):
                assert re.search(rf'"{flag}"|^    {flag} = ', defined, re.MULTILINE), f"{script} --{flag}"


def test_the_readme_leads_to_every_page():
    links = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{path.name}" for path in DOCS} <= links


def test_the_site_has_every_page_and_every_layer():
    site = ROOT / "scripts/docs"
    pages = set(re.findall(r": (\S+\.md)$", (site / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {relative(path) for path in [*PAGES, *NOTEBOOKS]} <= pages
    layers = re.findall(r"^from axial\S+ import (\w+) as", (ROOT / "axial/layers/__init__.py").read_text(), re.M)
    assert re.findall(r"::: axial\.layers\.\S+\.(\w+)", (site / "api/layers.md").read_text()) == layers


@pytest.mark.slow
def test_the_site_opens_without_network_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("zensical", reason="needs pip install '.[docs]'")
    subprocess.run([ROOT / "scripts/docs.sh", tmp_path], check=True)
    pages = {path.resolve(): path.read_text() for path in tmp_path.rglob("[!4]*.html")}  # not 404.html
    assert len(pages) > len(PAGES)
    for page, text in pages.items():
        assert not re.findall(r'(?:src|<link[^>]*href)="https?://[^"]+', text)
        for link in re.findall(r'(?:href|src)="([^":]+)"', text):
            target, _, anchor = link.partition("#")
            path = (page.parent / target.split("?")[0]).resolve() if target else page
            assert path.exists(), f"{page}: {link}"
            assert not anchor or re.search(rf'(id|name)="?{re.escape(unquote(anchor))}["> ]', pages[path]), link


def anchors(path):
    """The anchors that GitHub makes of a page's headings."""
    return [
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"(?m)^#+ (.+)$", path.read_text())
    ]


@pytest.mark.parametrize("path", LINKED, ids=relative)
def test_links_lead_somewhere(path):
    for link in LINK.findall(prose(path)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


def test_the_description_for_an_index_has_no_link_that_leads_nowhere():
    """The long description has only absolute links, because PyPI shows it without the repository's files."""
    done = subprocess.run(
        [sys.executable, "setup.py", "--long-description"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert "# axial" in done.stdout and "https://arxiv.org/abs/2003.07853" in done.stdout
    assert [link for link in LINK.findall(done.stdout) if "://" not in link] == []
