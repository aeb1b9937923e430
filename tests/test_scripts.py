"""The shell scripts delete and overwrite only files that they have created themselves."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow  # creates virtual environments

# A fake system Python, whose venv module creates an environment with a fake python and a fake pip. If a file
# FOLDER-killed exists, it removes that file and kills itself before it creates pip.
PYTHON = """#!/usr/bin/env bash
[[ $1 == -m && $2 == venv ]] || exit 0
echo "$*" >>"$(dirname "$0")/calls"
mkdir -p "$3/bin" "$3/lib"
cp /bin/true "$3/bin/python"
if [[ -e $3-killed ]]; then rm "$3-killed"; touch "$3/lib/half"; kill -9 $$; fi
cp /bin/true "$3/bin/pip"
"""
MAKE_VENV = 'set -euo pipefail; source scripts/environment.sh; make_venv "$1" python3.11; echo made'


class Machine:
    """Runs scripts with fake Python interpreters on the PATH."""

    def __init__(self, folder):
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.calls = self._bin / "calls"  # one line per call of the fake venv module
        for name in ("python3", "python3.11"):
            self.program(name, PYTHON)

    def program(self, name, text):
        (self._bin / name).write_text(text)
        (self._bin / name).chmod(0o755)

    def run(self, *command, cwd=ROOT, **variables):
        """Runs a command, by default in the repository, and returns the finished process."""
        environment = {"PATH": f"{self._bin}:{os.environ['PATH']}", "HOME": str(self._bin), **variables}
        return subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True, env=environment)

    def make_venv(self, folder):
        return self.run("bash", "-c", MAKE_VENV, "bash", str(folder))

    def install(self, folder):
        """Runs scripts/tpu/install.sh with AXIAL_PRINT=1, so that it prints pip's commands and does not run them."""
        return self.run("bash", "scripts/tpu/install.sh", AXIAL_VENV=str(folder), AXIAL_PRINT="1")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def contents(folder):
    """dict from each path below a folder to the bytes of the file, or to None for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def a_project(folder):
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "thesis.tex").write_text("years of work")


def an_environment_without_pip(folder):
    """Creates a virtual environment without pip, as `uv venv` does."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)


def a_link_to_a_project(folder):
    a_project(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("script", [Machine.make_venv, Machine.install], ids=["make_venv", "install"])
@pytest.mark.parametrize("make", [a_project, an_environment_without_pip, a_link_to_a_project])
def test_a_folder_of_others_stays_as_it_is(machine, tmp_path, make, script):
    folder = tmp_path / "work" / "folder"
    folder.parent.mkdir()
    make(folder)
    before = contents(folder.parent)
    done = script(machine, folder)
    assert contents(folder.parent) == before
    assert done.returncode == 2 and not machine.calls.exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{folder}: ") and "AXIAL_VENV names another folder" in line


def test_an_environment_is_made_once_and_again_where_its_creation_was_killed(machine, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (tmp_path / "a folder-killed").touch()
    assert machine.make_venv(folder).returncode not in (0, 2)
    assert (folder / "lib" / "half").exists() and not (folder / "bin" / "pip").exists()
    for _ in range(2):
        assert machine.make_venv(folder).stdout == "made\n"
        assert (folder / "bin" / "pip").exists() and not (folder / "lib" / "half").exists()
    assert len(machine.calls.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["scores.txt", "train.pid", "run"])
def test_the_demo_overwrites_nothing_of_others(machine, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for program in ("pip", "axial-convert", "axial-train", "axial-export", "axial-predict", "axial-evaluate"):
        machine.program(f"../venv/bin/{program}", "#!/bin/sh\n")
    done = machine.run("bash", "scripts/demo.sh", "axial/data/sample", str(out), AXIAL_VENV=str(tmp_path / "venv"))
    assert [path.name for path in out.iterdir()] == [name] and (out / name).read_text() == "mine"
    assert done.returncode == 2 and done.stderr.startswith(f"{out / name}: is there, and no demo has made it")


# A fake axial-train, which writes its first checkpoint and then waits to be killed. The second call ends at once.
TRAIN = """#!/usr/bin/env bash
for flag; do case $flag in --model_dir=*) run=${flag#*=} ;; esac; done
echo "$*" >>"$(dirname "$0")/trained"
[ ! -f "$run/checkpoint" ] || exit 0
mkdir -p "$run"; touch "$run/checkpoint"; exec sleep 60
"""
# MAKE is a fake command that creates its --output_dir. EVALUATE prints the last lines of `axial-evaluate`.
MAKE = '#!/usr/bin/env bash\nfor flag; do case $flag in --output_dir=*) mkdir -p "${flag#*=}" ;; esac; done\n'
EVALUATE = """#!/usr/bin/env bash
echo 'images: 33 of 33'
echo 'PQ=77.4 PQ_things=70.1 PQ_stuff=80.0 mIoU=90.0 AP=40.0 split=train2017 photos=8'
echo 'PQ=79.2 PQ_things=64.8 PQ_stuff=93.6 mIoU=91.0 AP=36.5 split=test photos=33'
"""


@pytest.mark.parametrize("photos,last", [("", "nuclei_PQ=64.8"), ("axial/data/sample", "PQ=77.4")])
def test_the_demo_kills_and_resumes_its_training_and_ends_with_score_and_picture(machine, tmp_path, photos, last):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    programs = {"train": TRAIN, "evaluate": EVALUATE} | dict.fromkeys(("convert", "export", "predict"), MAKE)
    machine.program("../venv/bin/pip", "#!/bin/sh\n")
    for name, text in programs.items():
        machine.program(f"../venv/bin/axial-{name}", text)
    out = tmp_path / "out"
    done = machine.run("bash", "scripts/demo.sh", photos, str(out), AXIAL_VENV=str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{last} picture={out}/picture.jpg"
    assert len((tmp_path / "venv" / "bin" / "trained").read_text().splitlines()) == 2
