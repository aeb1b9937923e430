"""A package imports only packages of lower layers. `--help` needs no TensorFlow. The only Keras is tf_keras."""

import ast
import subprocess
import sys

import pytest

import axial
from tests.conftest import ROOT

PACKAGE = ROOT / "axial"
# The packages of axial in layers, lowest first. A package may import itself and packages of the rows above its own.
ROWS = [
    ("errors",),
    ("chips", "slices"),
    ("io",),
    ("layers", "data", "metrics"),
    ("models",),
    ("weights",),
    ("tasks",),
    ("analysis",),
    ("training", "serving", "cloud"),
    ("recipes",),
    ("api",),
    ("cli",),
]
RANK = {room: rank for rank, row in enumerate(ROWS) for room in row}
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_one_way():
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} == set(RANK)
    for path in FILES:
        room = room_of(path)
        parts = [module.split(".") for module in imports_of(path)]
        for other in {names[1] for names in parts if names[0] == "axial" and len(names) > 1 and names[1] in RANK}:
            allowed = room not in RANK or other == room or RANK[other] < RANK[room]
            assert allowed, f"{path} imports {other}"


NAME_NO_TASK = [p for p in FILES if room_of(p) in ("training", "serving", "recipes", "api")]
NAME_NO_TASK += [PACKAGE / f"cli/{name}.py" for name in ("train", "export", "export_files", "predict")]
NAME_NO_TASK += [PACKAGE / "data/service.py"]


def test_what_serves_every_task_imports_none():
    """Code for all tasks imports no single task. axial-evaluate may, as some of its verbs are for segmentation only."""
    folders = tuple(f"axial.tasks.{child.name}" for child in (PACKAGE / "tasks").iterdir() if child.is_dir())
    for path in NAME_NO_TASK:
        assert not [module for module in imports_of(path) if module.startswith(folders)], path


def test_one_keras_one_loop_one_gin():
    for path in FILES:
        text, modules = path.read_text(), set(imports_of(path))
        assert "tf.keras" not in text and "from tensorflow import keras" not in text, path
        orbits = path.relative_to(PACKAGE).as_posix() in ("training/train_step.py", "training/trainer.py")
        assert "orbit" not in modules or orbits, path
        assert "gin" not in modules or room_of(path) == "recipes", path
        assert "gin.tf" not in modules, path


def test_tf_models_is_imported_where_it_is_used():
    """Only functions import tf-models-official. The import takes seconds, and predicting a segmentation needs none."""
    for path in FILES:
        tops = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [getattr(node, "module", None) or node.names[0].name for node in tops]
        assert not [name for name in names if name.split(".")[0] == "official"], path


COMMANDS = ("train", "evaluate", "export", "predict", "convert", "analyze", "doctor", "tpu", "data_service")


def without_tensorflow(command, *arguments):
    """Runs a command and returns its standard output. Asserts that it exits with 0 and does not import TensorFlow."""
    text = (
        "import sys\n"
        f"import axial.cli.{command} as command\n"
        f"sys.argv = ['axial-{command}', *{arguments}]\n"
        "try:\n"
        "    command.main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "assert 'tensorflow' not in sys.modules and 'tf_keras' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_useful_and_needs_no_tensorflow(command):
    text = without_tensorflow(command, "--help")
    assert f"axial-{command}" in text and "%s" not in text and max(map(len, text.splitlines())) <= 120
    flags = text.split("flags:")[1]
    assert "--" in flags and max(map(len, flags.splitlines())) <= 80
    assert "repeat this option" not in flags and "['" not in flags


def test_help_of_a_verb_has_its_flags_alone_and_a_flag_tells_the_version():
    text = without_tensorflow("evaluate", "merge", "--help")
    assert "--results_dir" in text and "--knob" not in text.split("flags:")[1]
    # The verb mapillary has another flag --version.
    assert without_tensorflow("convert", "--version") == f"axial-convert {axial.__version__}\n"
