"""ruff and shellcheck pass, docstring examples run, and the code follows the project's own rules."""

import ast
import doctest
import importlib
import os
import subprocess
import sys
import sysconfig

import pytest

from tests.conftest import ROOT

FILES = sorted((ROOT / "axial").rglob("*.py"))
ROOMS = [ROOT / name for name in ("axial", "docs", "experiments", "scripts", "tests")]
TEXTS = sorted(
    [*ROOT.glob("*.md"), *(p for room in ROOMS for s in ("md", "gin", "sh", "txt") for p in room.rglob(f"*.{s}"))]
)
SCRIPTS = sorted((ROOT / "scripts").rglob("*.sh")) + [ROOT / ".ci" / "run"]
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in FILES
    if ">>> " in path.read_text()
]
SLOW = ("axial.api", "axial.layers", "axial.models.registry")  # modules whose examples build whole networks


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_shellcheck():
    command = [os.path.join(sysconfig.get_path("scripts"), "shellcheck"), "--external-sources", *SCRIPTS]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in WITH_EXAMPLES]
)
def test_examples_of_docstrings(name):
    import tensorflow as tf

    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"tf": tf}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed


# Functions with any number of positional arguments: three of other libraries, and axial's functions with *args.
VARIADIC = {"Table", "add_row", "join"} | {
    node.name
    for path in FILES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef) and node.args.vararg
}


def test_more_than_four_arguments_are_named_and_no_lambda_is():
    for path, node in ((file, node) for file in FILES for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            given = len(node.args) - (name == "partial")
            assert given <= 4 or name in VARIADIC, f"{path}:{node.lineno}: {given} arguments by position"
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            assert not isinstance(node.value, ast.Lambda), f"{path}:{node.lineno}: a lambda with a name"


def test_lines_have_at_most_120_characters():
    """Lines of a table and lines with a link may be longer. ruff checks Python files."""
    for path in TEXTS:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 120 or line.lstrip().startswith(("|", "![")) or "://" in line, f"{path}:{number}"
