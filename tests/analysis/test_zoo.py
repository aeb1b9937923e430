"""The zoo: its table is of the current rows and counts, and its commands parse and build the models of their rows."""

import os
import shlex

import pytest

from axial import configuration
from axial.analysis.zoo import COLUMNS, SHIPPED, counted, markdown, read_zoo
from axial.errors import InputError
from axial.io import schemas
from axial.io.write import file_digest
from axial.layers.batch_norm import BatchNormConfig
from axial.weights import convert
from axial.weights.source import shipped_names
from tests.conftest import ROOT

CSV = ROOT / "experiments" / "zoo.csv"
ENTRIES = read_zoo(str(CSV))
NAMES = [f"{entry.row.checkpoint}, {entry.row.data}" for entry in ENTRIES]
PUBLIC = [entry for entry in ENTRIES if entry.row.source != SHIPPED]


def written():
    text = (ROOT / "experiments" / "ZOO.md").read_text()
    return text.partition("<!-- zoo:begin -->\n")[2].partition("\n<!-- zoo:end -->")[0]


def test_every_shipped_model_has_a_row():
    """With the hash of its file, and a command that predicts with it by its name."""
    rows = {e.row.file: e for e in ENTRIES if e.row.source == SHIPPED}
    assert set(rows) == {f"axial/shipped/{name}/weights.safetensors" for name in shipped_names()}
    for file, entry in rows.items():
        assert file_digest(str(ROOT / file))[1] == entry.row.sha256
        assert f"axial-predict --model={file.split('/')[2]} " in f"{entry.commands[0]} "
        assert entry.commands[1].startswith(f"axial-evaluate --gin_file={entry.row.recipe} --model=")
    (counts,) = counted(list(rows.values()))
    assert markdown([counts]).splitlines()[2] in written().splitlines()


def test_the_page_is_not_stale():
    """Everything but counts is compared for all rows, and the counts of the smallest model are counted again."""

    def uncounted(text):
        counts = [1 + COLUMNS.index(name) for name in ("parameters", "multiply-adds")]
        for line in text.splitlines():
            columns = line.split("|")
            yield [c for i, c in enumerate(columns) if i not in counts] if len(columns) > 5 else columns

    assert list(uncounted(written())) == list(uncounted(markdown(ENTRIES)))
    (entry,) = counted([e for e in ENTRIES if e.row.model == "axial_resnet_26_s"])
    assert f"{entry.params / 1e6:.1f}" == "5.9"  # its README
    assert markdown([entry]).splitlines()[2] in written().splitlines()


@pytest.mark.slow  # traces the largest models at 1025x2049: some minutes
def test_the_whole_page():
    assert markdown(counted(ENTRIES)) == written()


def flags(text, program):
    """The arguments of a command of a program."""
    first, *arguments = shlex.split(text)
    assert first == program
    return arguments


COCO_SPLITS = "TRAIN_SPLIT = 'train2017'", "EVAL_SPLIT = 'val2017'"
BACKBONES = [entry for entry in PUBLIC if entry.row.holds == "backbone"]
WHOLE = [entry for entry in PUBLIC if entry.row.holds != "backbone"]


def as_converted(entry, num_classes):
    """The `Conversion` of a checkpoint, as the converter describes it, without its numbers."""
    own = convert.OWN_ARGUMENTS[entry.row.source]
    return convert.Conversion(entry.row.model, num_classes, own, BatchNormConfig(epsilon=1e-4), values={})


def check_network(entry, task):
    assert task.model.name == entry.row.model and task.model.norm.epsilon == 1e-4
    assert task.model.arguments == convert.OWN_ARGUMENTS[entry.row.source]


@pytest.mark.parametrize("entry", BACKBONES, ids=[f"{entry.row.checkpoint}, {entry.row.data}" for entry in BACKBONES])
def test_every_training_command_builds_its_model(entry, sample_dir, tmp_path, monkeypatch):
    """With a model.gin as the converter writes it."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("WEIGHTS")
    (tmp_path / "WEIGHTS" / "model.gin").write_text(convert.gin_text(entry.row.source, as_converted(entry, 10)))
    given = [a.partition("=")[::2] for a in flags(entry.commands[1], "axial-train")]
    assert {name for name, _ in given} <= {"--gin_file", "--gin_binding", "--data_dir", "--model_dir", "--strategy"}
    files = [value for name, value in given if name == "--gin_file"]
    configuration.load(files, [*(value for name, value in given if name == "--gin_binding"), *COCO_SPLITS])
    task, training, _ = configuration.build(data_dir=sample_dir)
    check_network(entry, task)
    assert training.init_checkpoint == "WEIGHTS" and training.steps > 0


@pytest.mark.parametrize("entry", WHOLE, ids=[f"{entry.row.checkpoint}, {entry.row.data}" for entry in WHOLE])
def test_every_evaluating_command_builds_its_model(entry, sample_dir, colours_dir):
    """The network is that of the card which the converter writes; the canvas is the recipe's."""
    given = dict(a.partition("=")[::2] for a in flags(entry.commands[1], "axial-evaluate"))
    assert given.pop("--model") == "WEIGHTS" and set(given) == {"--gin_file", "--data_dir", "--split"}
    classifier = entry.row.holds == "classifier"
    data_dir, classes = (colours_dir, 3) if classifier else (sample_dir, 133)
    conversion = as_converted(entry, classes)
    card = schemas.WeightsCard(
        1, conversion.model, classes, conversion.arguments, schemas.Norm(0.9, 1e-4, False), entry.row.source
    )
    bindings = () if classifier else COCO_SPLITS
    task = configuration.task_of_weights([given["--gin_file"]], card, data_dir, bindings, path="WEIGHTS")
    check_network(entry, task)
    assert "x".join(map(str, task.canvas)) == entry.row.photo


def test_the_other_commands_parse(command, tmp_path):
    """They end with the name of the input that is missing here, after flags and verbs were taken."""
    kinds = {(e.row.source, "--model" in e.convert): e for e in PUBLIC}  # they differ in their files only
    assert len(kinds) == 4
    commands = {entry.convert: f"{os.path.basename(entry.row.file)}: no such" for entry in kinds.values()}
    commands[WHOLE[0].commands[1]] = f"{tmp_path}: no split 'val'"
    commands[BACKBONES[0].commands[2]] = f"{tmp_path}/RUN/config.gin: no such"
    for text, words in commands.items():
        for name, path in {"WEIGHTS": tmp_path / "WEIGHTS", "RUN": tmp_path / "RUN", "DATA": tmp_path}.items():
            text = text.replace(f"={name}", f"={path}")
        program, *arguments = shlex.split(text)
        result = command(program.removeprefix("axial-"), *arguments)
        assert result.code == 2 and words in result.line, result.err


@pytest.mark.parametrize("old,new,words", [("_s,csr", "_,csr", "did you mean"), (",csrhddlam", ",c", "source 'c'")])
def test_a_wrong_row_is_named(old, new, words, tmp_path):
    (tmp_path / "zoo.csv").write_text(CSV.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=f"zoo.csv:2: .*{words}"):
        read_zoo(str(tmp_path / "zoo.csv"))
