"""How long steps take to trace and to compile."""

import re
import shutil

import pytest
import tensorflow as tf

import seconds
import tpu_compile
import tpu_table
from axial.layers import device
from tests.conftest import ROOT, run_script

EXPERIMENTS = ROOT / "experiments"


def test_the_page_has_the_measured_rows():
    rows = tpu_table.read_table(str(EXPERIMENTS / "compile.csv"), seconds.Row)
    block = (EXPERIMENTS / "RESULTS.md").read_text().partition("<!-- compile:begin -->\n")[2]
    assert block.partition("\n<!-- compile:end -->")[0] == seconds.markdown(rows)


@pytest.mark.parametrize("compiler", [tpu_compile.CPU, "v5e:1x1"])
def test_a_step_is_traced_in_the_forms_of_accelerators(compiler):
    """XLA for a CPU compiles it at once. A TPU's compiler gets its module."""
    if not device.has_xla():
        pytest.skip("this TensorFlow has XLA for TPUs only")
    forms, weight = [], tf.Variable(tf.ones([3, 3]))

    def step(x):
        forms.append(device.on_cpu())
        return tf.tanh(x @ weight)

    module, row = seconds.lower("leaf", compiler, 5, (step, [tf.TensorSpec([5, 3])]))
    assert forms == [False] and row.batch == 5 and row.computations == 1
    assert 4 <= row.instructions < 20  # two inputs, product, tanh, and what surrounds them
    assert min(row.tracing, row.compiling, row.wall, row.gib) > 0
    assert (module is None) == (compiler == tpu_compile.CPU)


@pytest.mark.slow  # seconds, for the imports
def test_the_script_measures_only_what_its_table_lacks(tmp_path):
    """Here it lacks nothing, and the page gets its rows."""
    table, page = tmp_path / "compile.csv", tmp_path / "page.md"
    shutil.copy(EXPERIMENTS / "compile.csv", table)
    page.write_text("before\n<!-- compile:begin -->\nold\n<!-- compile:end -->\nafter\n")
    result = run_script("tpu/seconds.py", f"--csv={table}", "--only=imagenette/resnet_nano.gin", f"--markdown={page}")
    assert result.returncode == 0, result.stderr
    before, block, after = re.split("\n?<!-- compile:(?:begin|end) -->\n", page.read_text())
    assert before == "before" and after == "after\n" and block in result.stdout
    assert block in (EXPERIMENTS / "RESULTS.md").read_text()
    assert table.read_bytes() == (EXPERIMENTS / "compile.csv").read_bytes()
