"""The paper's tables: published figures, our counts, the commands, and the copy in results/tables.md."""

import shlex

import pytest

from axial.recipes import configuration
from published import DATA, IMAGENET, ON_8_CORES, ROWS, plain_classifier
from tables import Result, count_rows, markdown
from tests.conftest import ROOT

# dict from (table, row) to multiply-adds in billions, by an analytic count of the published architectures.
MACS = {
    (1, "ResNet-50"): 4.089,
    (1, "Conv-Stem + Attention"): 3.483,
    (1, "Full Axial-Attention"): 3.084,
    (2, "Panoptic-DeepLab, Xception-71, MS"): 3072.2,
    (2, "Axial-DeepLab-S"): 108.32,
    (4, "Axial-DeepLab-L, MS"): 39030,
    (6, "PS-Attention, ASPP"): 340.15,
    (6, "Axial-DeepLab-XL"): 2437.17,
    (7, "Axial-ResNet-L, span 17"): 628.38,
    (9, "Axial-ResNet-L, OS 32"): 520.36,
    (10, "Conv-Stem + Axial-Attention x0.375"): 1.676,
    (10, "Full Axial-Attention x1"): 11.460,
}


def results_block():
    text = (ROOT / "experiments" / "results" / "tables.md").read_text()
    return text.partition("<!-- tables:begin -->\n")[2].partition("\n<!-- tables:end -->")[0]


def check(results):
    """Checks that parameters match the printed digits, and multiply-adds the analytic count within 0.5 %."""
    for result in results:
        key = result.row.table, result.row.label
        if result.row.params and result.row.model:
            assert f"{result.params / 1e6:.1f}" == f"{result.row.params:.1f}", key
        if key in MACS:
            assert abs(result.macs / (MACS[key] * 1e9) - 1) < 0.005, key


@pytest.mark.slow
def test_the_copy_is_not_stale():
    """The page has the current rows, published figures and commands. The test repeats the counts of one model."""
    block = results_block()

    def uncounted(text):
        """Returns a block's lines without our counts (columns 2 to 5, 7 and 8) and without the counts' summary."""
        for line in text.splitlines():
            columns = line.split("|")
            if not line.startswith("- with"):
                yield columns if len(columns) < 9 else [c for i, c in enumerate(columns) if i not in (3, 4, 5, 6, 8, 9)]

    assert list(uncounted(block)) == list(uncounted(markdown(list(map(Result, ROWS)))))
    results = count_rows([row for row in ROWS if row.model == "resnet_50"], processes=1)
    check(results)
    assert next(line for line in markdown(results[:1]).splitlines() if "ResNet-50" in line) in block.splitlines()


TRAINED = list({row.flags: row for row in ROWS if row.flags}.values())


def build(arguments, data_dir, split):
    """Builds (task, training, optimizer) from axial-train's flags for a split of a data set."""
    flags = [argument.partition("=")[::2] for argument in arguments]
    files = [value for name, value in flags if name == "--gin_file"]
    bindings = [value for name, value in flags if name == "--gin_binding"]
    configuration.load(files, [*bindings, f"TRAIN_SPLIT = '{split}'", f"EVAL_SPLIT = '{split}'"])
    return configuration.build(data_dir=data_dir)


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: f"{row.table} {row.label}")
def test_every_command_is_parsed_and_built(row, sample_dir, colours_dir):
    """Each row's command builds a task with the row's model."""
    data = (colours_dir, "train") if row.image == IMAGENET else (sample_dir, "train2017")
    task, training, _ = build(row.flags, *data)
    assert task.model.name == row.model and task.model.arguments == dict(row.arguments)
    first = dict.fromkeys(("coco", "cityscapes", "mapillary"), "CHECKPOINT")
    starts = {"cityscapes": "MAPILLARY_RUN"} if row.after else first
    assert training.init_checkpoint == starts.get(DATA[row.image])
    assert tuple(task.canvas) == tuple(row.image)
    if row.image == IMAGENET:
        assert training.batch == (512 if row.label.startswith("Full Axial") else 1024)
        _, small, _ = build((*row.flags, ON_8_CORES), *data)
        assert small.batch == training.batch and training.accumulate == 1
        assert small.batch // 8 // small.accumulate == training.batch // 128
    if row.multi_scale:
        scales = task.multi_scale
        assert sum(2 * s * s for s in scales) == pytest.approx(
            row.factor * 1025 * 2049 / (row.image[0] * row.image[1]), rel=0.01
        )


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: f"{row.table} {row.label}")
def test_every_start_is_a_command_before(row, colours_dir):
    """Segmentation starts from the plain ImageNet classifier (Sec. 4). INIT names the run of the previous command."""
    made = []
    for text in row.commands():
        program, *words = shlex.split(text)
        flags = [word.partition("=")[::2] for word in words]
        for value in (value for name, value in flags if name == "--gin_binding" and value.startswith("INIT = ")):
            assert value.removeprefix("INIT = ").strip("'") == made[-1], text
        made.append(dict(flags)["--model_dir"])
        assert program == "axial-train" or made[-2:] == ["RUN", "RUN"]
    assert made[-1] == "RUN" and len(made) == 1 + (row.image != IMAGENET) + bool(row.after) + bool(row.inference_stride)
    if row.image != IMAGENET:
        flags = [flag for flag in shlex.split(row.commands()[0]) if flag.startswith("--gin_")]
        task, _, _ = build(flags, colours_dir, "train")
        name, arguments = plain_classifier(row.model)
        assert (task.model.name, task.model.arguments) == (name, arguments) and task.data.image == IMAGENET


@pytest.mark.slow  # traces every model: some minutes
def test_all_rows_and_the_copy():
    results = count_rows()
    check(results)
    assert markdown(results) == results_block()
