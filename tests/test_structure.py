"""Bounds on patterns that make code hard to follow, like option dicts and long functions. Bounds may only fall."""

import ast
import collections
import re

import pytest

from tests.conftest import ROOT

# The number of occurrences in axial/ today. A comment has the goal. A change that lowers a count lowers its bound too.
BOUNDS = {
    "parameters with **": 30,
    "option dicts": 5,
    "functions of over 60 lines": 0,
    "functions of over 8 parameters": 5,
    "classes of over 14 methods": 0,
    "getattr, hasattr, setattr": 26,
    "inspect.signature": 0,
    "attributes set on an object of others": 24,  # all objects but one belong to other libraries
    "filler names": 18,
}
# Names that do not say what they hold. Names that start with `of_` count too.
FILLER = {"found", "own", "place", "share", "wanted", "seen", "known", "part"}
# Settings that few files of axial/ should mention, with the number of files that mention them today.
NAMES = {"photo_scale": 6, "span": 8, "recompute": 12, "jit_compile": 5}
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
NAMED = *FUNCTIONS, ast.ClassDef, ast.arg


def length(function):
    """Number of lines of a function without its docstring."""
    documentation = function.body[0] if ast.get_docstring(function) else None
    lines = documentation.end_lineno - documentation.lineno + 1 if documentation else 0
    return function.end_lineno - function.lineno + 1 - lines


def parameters(function):
    """Number of a function's parameters, not counting *args, **kwargs, self and cls."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(given) - bool(function.args.args and function.args.args[0].arg in ("self", "cls"))


def dicts_of(function):
    """Names of the local variables to which a function assigns a new dict."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            made = isinstance(node.value, (ast.Dict, ast.DictComp))
            made |= isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "dict"
            yield from (target.id for target in node.targets if made and isinstance(target, ast.Name))


def targets_of(node):
    """Yields the nodes to which an assignment assigns."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def bound_name(node):
    """The name of the variable, parameter, attribute, function or class that a node defines. '' if it defines none."""
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return getattr(node, "id", getattr(node, "attr", ""))
    return getattr(node, "arg" if isinstance(node, ast.arg) else "name", "") if isinstance(node, NAMED) else ""


def offences(node):
    """Yields (key of `BOUNDS`, line number, text) for each violation in a syntax node. See `BOUNDS`."""
    name = bound_name(node).lstrip("_")
    if name in FILLER or name.startswith("of_"):
        yield "filler names", node.lineno, f"{name} in column {node.col_offset}"
    if isinstance(node, FUNCTIONS):
        if node.args.kwarg:
            yield "parameters with **", node.lineno, f"{node.name}(**{node.args.kwarg.arg})"
        if length(node) > 60:
            yield "functions of over 60 lines", node.lineno, f"{node.name}: {length(node)}"
        if parameters(node) > 8:
            yield "functions of over 8 parameters", node.lineno, f"{node.name}: {parameters(node)}"
        made = set(dicts_of(node))
        for call in (call for call in ast.walk(node) if made and isinstance(call, ast.Call)):
            for name in (keyword.value for keyword in call.keywords if keyword.arg is None):
                if isinstance(name, ast.Name) and name.id in made:
                    yield "option dicts", call.lineno, f"**{name.id}"
    elif isinstance(node, ast.ClassDef):
        methods = sum(isinstance(child, ast.FunctionDef) for child in node.body)
        if methods > 14:
            yield "classes of over 14 methods", node.lineno, f"{node.name}: {methods}"
    elif isinstance(node, ast.Call):
        if getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            yield "getattr, hasattr, setattr", node.lineno, ast.unparse(node)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        for target in targets_of(node):
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") not in ("self", "cls"):
                yield "attributes set on an object of others", node.lineno, ast.unparse(target)


def read():
    """dict from each key of `BOUNDS` to its occurrences, as a dict with keys 'file:line: text' and values None."""
    lines = collections.defaultdict(dict)  # a dict, because `ast.walk` yields a call in a nested function twice
    for path in sorted((ROOT / "axial").rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT)
        for node in ast.walk(ast.parse(text)):
            for kind, line, what in offences(node):
                lines[kind][f"{name}:{line}: {what}"] = None
        if match := re.search(r"inspect\.signature", text):
            lines["inspect.signature"][f"{name}:{text.count(chr(10), 0, match.start()) + 1}: inspect.signature"] = None
    return lines


FOUND = read()


@pytest.mark.parametrize("kind", BOUNDS)
def test_no_number_grows(kind):
    lines, bound = list(FOUND[kind]), BOUNDS[kind]
    assert len(lines) <= bound, f"{len(lines)} {kind}, at most {bound} may be:\n" + "\n".join(lines)


def test_every_kind_has_a_bound():
    assert FOUND.keys() <= BOUNDS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_few_files_know_a_setting(name):
    files = [path for path in (ROOT / "axial").rglob("*.py") if re.search(rf"\b{name}\b", path.read_text())]
    assert len(files) <= NAMES[name], f"{name} is in {len(files)} files:\n" + "\n".join(map(str, files))
