"""axial's public functions have type annotations, and mypy finds no error in them."""

import inspect
import os
import subprocess
import sys

import pytest

import axial.layers
from axial import api
from axial.models import base as models
from axial.models import registry
from axial.recipes import configuration
from axial.serving import result
from axial.tasks import base as tasks
from axial.tasks import metrics
from axial.weights import convert, interchange, restore, source
from tests.conftest import ROOT

MODULES = (api, configuration, models, registry, result, tasks, metrics, convert, interchange, restore, source)
HELPERS = {"DistributedPredictor", "batch_size", "by_size"}  # not public, although the public modules define them
LAYERS = [getattr(axial.layers, name) for name in axial.layers.__all__]


def test_mypy():
    """mypy with mypy.ini finds no error. It takes 5 seconds."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull]
    checked = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def functions_of(owner):
    """Yields the public functions of a module, or the constructor and public methods of a class and its bases."""
    if inspect.ismodule(owner):
        members = {k: v for k, v in vars(owner).items() if getattr(v, "__module__", "") == owner.__name__}
    else:
        bases = [base for base in reversed(owner.__mro__) if base.__module__.startswith("axial.")]
        members = {name: member for base in bases for name, member in vars(base).items()}
    for name in {name for name in members if name[0] != "_" or name == "__init__"} - HELPERS:
        member = members[name]
        member = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        if inspect.isclass(member):
            yield from functions_of(member)
        elif inspect.isfunction(member):
            yield member


@pytest.mark.parametrize("owner", [*MODULES, *LAYERS], ids=lambda owner: owner.__name__)
def test_every_argument_has_a_type(owner):
    """*args and **kwargs need none. ruff does not check a function that has no annotation at all."""
    functions = [*functions_of(owner)]
    assert functions
    for function in functions:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        untyped = [p.name for p in named if p.name not in ("self", "cls") and p.annotation is p.empty]
        assert not untyped, f"{function.__qualname__}: {', '.join(untyped)}"
        returns = function.__name__ == "__init__" or signature.return_annotation is not signature.empty
        assert returns, f"{function.__qualname__}: what it returns"
