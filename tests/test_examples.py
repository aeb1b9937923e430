"""The Python blocks of the pages and the notebooks run."""

import os
import re
import shutil
import sys

import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.test_pages import NOTEBOOKS, PAGES, relative

pytestmark = pytest.mark.slow
BLOCK = re.compile(r"(?m)(?:^    .*\n|^\n(?=    ))+")


def examples():
    """The Python blocks of each page. Such a block begins with an import."""
    for path in PAGES:
        blocks = [re.sub(r"(?m)^    ", "", block).strip() for block in BLOCK.findall(path.read_text())]
        for number, code in enumerate(code for code in blocks if re.match("import |from ", code)):
            yield pytest.param(code, id=f"{relative(path)}-{number}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, command):
    """A folder with the files that the blocks name."""
    folder = tmp_path_factory.mktemp("examples")
    photo = Image.open(sorted((ROOT / "axial/data/nuclei_sample/test/photos").iterdir())[0])
    photo.save(folder / "cells.png")
    photo.save(folder / "cells.tif")
    shutil.copytree(ROOT / "axial/shipped/nuclei", folder / "WEIGHTS")
    assert command("export", "--model_dir=nuclei", f"--output_dir={folder / 'MODEL'}").code == 0
    return folder


@pytest.mark.parametrize("code", [*examples()])
def test_a_block_runs(code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(code, "block", "exec"), {})  # noqa: S102


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    jupytext = pytest.importorskip("jupytext")
    nbclient = pytest.importorskip("nbclient", reason="needs pip install '.[notebooks]'")
    pytest.importorskip("ipykernel", reason="needs pip install '.[notebooks]'")
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    where = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(jupytext.read(path), timeout=3600, kernel_name="python3", resources=where).execute()
