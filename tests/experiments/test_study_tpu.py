"""The training step of every row of the study's tables has static shapes and no operation without a TPU kernel."""

import pytest

import study
import tpu_compile
import tpu_table
from axial import configuration

TINY = {"detection": "detection", "segmentation": "segmentation", "nmt": "translation"}
SMALL = {  # arguments that make the recipe's model small
    "detection": dict(width=0.25, repeats=(1, 1, 1, 1), pyramid_width=32, head_width=32, sampled=16),
    "segmentation": dict(width=0.25, repeats=(1, 1, 1, 1), context=32),
    "nmt": dict(layers=1, channels=32, inner=64, heads=2),
}
ROWS = [(task, *row) for row in {**study.TABLE_2, **study.TABLE_3} for task in study.TASKS]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_training_step_can_be_compiled_for_a_tpu(row, request):
    task = row[0]
    data_dir = request.getfixturevalue("texts_dir" if task == "nmt" else "sample_dir")
    changes = {**SMALL[task], **study.arguments(*row)}
    model = f"MODEL = {study.RECIPES[task][1]!r}"
    bindings = [model, f"ModelConfig.arguments = {changes}", "TrainingConfig.precision = 'mixed_bfloat16'"]
    configuration.load([study.RECIPES[task][0], f"tiny/{TINY[task]}.gin"], bindings)
    batch = 64 if task == "nmt" else 2
    step = tpu_table.training_step(lambda: configuration.build(data_dir=data_dir), batch, 2, "v5e:1x2")
    assert not tpu_compile.custom_calls(tpu_compile.lower(*step))
