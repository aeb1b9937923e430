"""Outside the repository, the installed wheel runs the demo's commands and installs itself on a host."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

from axial import slices
from axial.cloud.engines import OnVirtualMachines, Request
from axial.data.converters.coco import SAMPLE_DIR
from axial.errors import DISTRIBUTION
from tests.conftest import ROOT

TINY = ("--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A function that runs a command of the installed wheel in a separate folder and returns its standard output."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = folder / "source"  # a copy: in place, setuptools would include old build files and leave new ones
    for name in ("axial", "experiments", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("axial_deeplab_tf-*.whl")
    install = [python, "-m", "pip", "-q", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, env=environment)
    # axial's requirements come from the environment of the tests. Python adds a path in a .pth file to sys.path, but it
    # does not run the .pth files in that path, such as the .pth file of an editable axial.
    (ours,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (ours / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    work = folder / "work"
    work.mkdir()
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"}

    def run(command, *arguments):
        call = [python.parent / command, *map(str, arguments)]
        result = subprocess.run(call, check=False, cwd=work, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    run.folder = work
    assert str(ROOT) not in run("python", "-c", "import axial; print(axial.__file__)")
    return run


@pytest.mark.slow
def test_the_wheel_has_every_file_that_axial_reads(installed):
    (wheel,) = installed.folder.parent.glob("axial_deeplab_tf-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    patterns = "axial/**/*.py", "axial/io/page.*", "axial/data/**/*", "axial/shipped/**/*"
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    expected = {"axial/py.typed", *(str(path.relative_to(ROOT)) for path in files if path.is_file())}
    below = [*ROOT.glob("experiments/**/*.gin"), *ROOT.glob("experiments/*.csv"), *ROOT.glob("scripts/tpu/*.*")]
    expected |= {f"axial/{path.relative_to(ROOT)}" for path in below}
    assert len(expected) > 600 and not expected - names
    assert not [name for name in names - expected if name.startswith("axial/experiments/")]  # no scripts or numbers


PAGES = [p for room in ("axial", "docs", "experiments", "scripts", "tests") for p in sorted((ROOT / room).rglob("*.*"))]


def test_no_page_or_message_installs_axial_from_an_index():
    index = re.compile(rf"pip install (?:-\S+ )*['\"]?(?:axial|{DISTRIBUTION})(?![-\w/.])")
    assert index.search("run pip install -U 'axial[onnx]'") and not index.search("pip install axial-doctor")
    pages = [path for path in PAGES if path.suffix in (".py", ".md", ".sh", ".gin") and path != pathlib.Path(__file__)]
    for path in (*pages, *ROOT.glob("*.md"), ROOT / "setup.py"):
        assert not index.search(path.read_text()), path


@pytest.mark.slow  # trains and exports for over a minute
def test_the_commands_of_the_demo(installed):
    assert "test: 33 photos" in installed("axial-convert", "nuclei", "--output_dir=nuclei")
    text = installed("axial-convert", "coco", "--output_dir=data")
    assert "train2017: 8 photos" in text and "val2017: 8 photos" in text
    installed("axial-train", *TINY, "--data_dir=data", "--model_dir=run")
    assert installed("axial-export", "--model_dir=run", "--output_dir=model").splitlines()[-1] == "exported model"
    photo = os.path.join(SAMPLE_DIR, "val2017", "000000000285.jpg")
    installed("axial-predict", "--saved_model=model", "--output_dir=predictions", photo)
    assert (installed.folder / "predictions" / "000000000285.overlay.png").exists()
    scored = ("--saved_model=model", "--data_dir=data", "--split=val2017", "--picture=picture.jpg")
    assert installed("axial-evaluate", *scored).splitlines()[-1].startswith("PQ=")
    assert (installed.folder / "picture.jpg").exists()
    assert installed("axial-doctor").splitlines()[-1] == "doctor: all is well"


@pytest.mark.slow
def test_a_host_installs_the_wheel(installed, tmp_path):
    """Runs the installation commands of axial-tpu, which take the scripts from the wheel."""
    (wheel,) = installed.folder.parent.glob("*.whl")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "gcloud").write_text(f"#!/bin/sh\ncp {wheel} .\n")
    (tools / "gcloud").chmod(0o755)
    request = Request("run", slice=slices.find_slice("v5e-8"), wheel=f"gs://b/{wheel.name}")
    environment = {**os.environ, "AXIAL_PRINT": "1", "HOME": str(tmp_path), "PATH": f"{tools}:{os.environ['PATH']}"}
    script = ["bash", "-c", f"set -e\n{OnVirtualMachines(request).installation()}"]
    printed = subprocess.run(script, check=True, env=environment, capture_output=True, text=True).stdout
    assert printed.split()[-1] == wheel.name and (tmp_path / "axial" / "installed").exists()
