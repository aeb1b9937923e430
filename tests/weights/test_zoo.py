"""The zoo: its commands parse, and they build the models of their rows."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from axial.errors import InputError
from axial.io.write import file_digest
from axial.recipes import configuration
from axial.weights import convert
from axial.weights.interchange import StoredNorm, WeightsCard
from axial.weights.source import shipped_names
from axial.weights.zoo import SHIPPED, commands, read_zoo
from tests.conftest import GOLDEN, ROOT

CSV = ROOT / "experiments" / "zoo.csv"
ROWS = read_zoo()
PUBLIC = [row for row in ROWS if row.source != SHIPPED]


def test_every_shipped_model_has_a_row(succeed):
    """The row has the hash of the model's file, and a command that predicts with the model by name."""
    rows = {row.file: row for row in ROWS if row.source == SHIPPED}
    assert set(rows) == {f"axial/shipped/{name}/weights.safetensors" for name in shipped_names()}
    shown = succeed("analyze", "zoo")
    for file, row in rows.items():
        assert file_digest(str(ROOT / file))[1] == row.sha256
        predict, score = commands(row)
        assert (
            f"axial-predict --model={file.split('/')[2]} " in predict and f"    {predict}\n    {score}\n" in shown.out
        )
        assert score.startswith(f"axial-evaluate --gin_file={row.recipe} --model=")


def flags(text, program):
    """Arguments of a program's command."""
    first, *arguments = shlex.split(text)
    assert first == program
    return arguments


COCO_SPLITS = "TRAIN_SPLIT = 'train2017'", "EVAL_SPLIT = 'val2017'"
BACKBONES = [row for row in PUBLIC if row.holds == "backbone"]
WHOLE = [row for row in PUBLIC if row.holds != "backbone"]


def as_converted(row, num_classes):
    """The card that the converter writes for a checkpoint."""
    norm = StoredNorm(0.9, 1e-4, False)
    return WeightsCard(1, row.model, num_classes, convert.PUBLIC[row.source].arguments, norm, source=row.source)


def check_network(row, task):
    assert task.model.name == row.model and task.model.norm.epsilon == 1e-4
    assert task.model.arguments == convert.PUBLIC[row.source].arguments


@pytest.mark.parametrize("row", BACKBONES, ids=[row.name for row in BACKBONES])
def test_every_training_command_builds_its_model(row, sample_dir, tmp_path, monkeypatch):
    """The commands read model.gin as the converter writes it."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("WEIGHTS")
    (tmp_path / "WEIGHTS" / "model.gin").write_text(convert.gin_text(as_converted(row, 10)))
    given = [a.partition("=")[::2] for a in flags(commands(row)[1], "axial-train")]
    assert {name for name, _ in given} <= {"--gin_file", "--gin_binding", "--data_dir", "--model_dir", "--strategy"}
    files = [value for name, value in given if name == "--gin_file"]
    configuration.load(files, [*(value for name, value in given if name == "--gin_binding"), *COCO_SPLITS])
    task, training, _ = configuration.build(data_dir=sample_dir)
    check_network(row, task)
    assert training.init_checkpoint == "WEIGHTS" and training.steps > 0


@pytest.mark.parametrize("row", WHOLE, ids=[row.name for row in WHOLE])
def test_every_evaluating_command_builds_its_model(row, sample_dir, colours_dir):
    """The converter's card gives the network, and the recipe gives the canvas."""
    given = dict(a.partition("=")[::2] for a in flags(commands(row)[1], "axial-evaluate"))
    assert given.pop("--model") == "WEIGHTS" and set(given) == {"--gin_file", "--data_dir", "--split"}
    classifier = row.holds == "classifier"
    data_dir, classes = (colours_dir, 3) if classifier else (sample_dir, 133)
    card = as_converted(row, classes)
    bindings = () if classifier else COCO_SPLITS
    task = configuration.task_of_weights([given["--gin_file"]], card, data_dir, bindings, path="WEIGHTS")
    check_network(row, task)
    assert "x".join(map(str, task.canvas)) == row.photo


def test_the_other_commands_parse(refuse, tmp_path):
    """The commands parse their flags and verbs, and then fail with the name of the missing input."""
    kinds = {row.source: row for row in PUBLIC}  # rows of a source differ in file names
    assert kinds.keys() == convert.SOURCES.keys()
    given = {commands(row)[0]: f"{os.path.basename(row.file)}: no such" for row in kinds.values()}
    given[commands(WHOLE[0])[1]] = f"{tmp_path}: no split 'val'"
    given[commands(BACKBONES[0])[2]] = f"{tmp_path}: no split 'val'"
    for text, words in given.items():
        for name, path in {"WEIGHTS": tmp_path / "WEIGHTS", "RUN": tmp_path / "RUN", "DATA": tmp_path}.items():
            text = text.replace(f"={name}", f"={path}")
        program, *arguments = shlex.split(text)
        refuse(words, program.removeprefix("axial-"), *arguments)


@pytest.mark.parametrize(
    "old,new,words", [("_s,csr", "_,csr", "did you mean"), (",csrhddlam", ",c", "source: invalid enum")]
)
def test_a_wrong_row_is_named(old, new, words, tmp_path):
    (tmp_path / "zoo.csv").write_text(CSV.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=f"zoo.csv:2: .*{words}"):
        read_zoo(str(tmp_path / "zoo.csv"))


def test_publishing_converts_a_file_once(tmp_path):
    """`scripts/publish.py` takes a file that is there. A second call keeps its conversion and prints the same hash."""
    shutil.copy(GOLDEN / "pt_checkpoint_tiny.pth", tmp_path / "axial26s.pth")
    call = [sys.executable, "scripts/publish.py", f"--folder={tmp_path}", "--name=axial_resnet_26_s.in1k"]
    first, second = (subprocess.run(call, check=True, capture_output=True, text=True, cwd=ROOT) for _ in range(2))
    folder = tmp_path / "axial_resnet_26_s.in1k"
    digest = file_digest(str(folder / "weights.safetensors"))[1]
    assert first.stdout == second.stdout == f"{folder}: weights.safetensors has the SHA-256 {digest}\n"
    assert digest in (folder / "README.md").read_text()
    refused = subprocess.run([*call, "--name=axial_resnet"], check=False, capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2 and "did you mean 'axial_resnet_26_s.in1k'" in refused.stderr
