"""seconds.py measures the times of tracing and compilation."""

import pytest
import tensorflow as tf

import seconds
import tpu
import tpu_compile
from axial.layers import device
from tests.conftest import ROOT

EXPERIMENTS = ROOT / "experiments"


def test_the_page_has_the_measured_rows():
    rows = tpu.read_table(str(EXPERIMENTS / "compile.csv"), seconds.Row)
    block = (EXPERIMENTS / "results" / "speed.md").read_text().partition("<!-- compile:begin -->\n")[2]
    assert block.partition("\n<!-- compile:end -->")[0] == seconds.markdown(rows)


@pytest.mark.parametrize("compiler", [tpu_compile.CPU, "v5e:1x1"])
def test_a_step_is_traced_in_the_forms_of_accelerators(compiler):
    """For a CPU, `lower` also compiles the step. For a TPU, it returns a module for the TPU's compiler."""
    if not device.has_xla():
        pytest.skip("this TensorFlow has XLA for TPUs only")
    forms, weight = [], tf.Variable(tf.ones([3, 3]))

    def step(x):
        forms.append(device.on_cpu())
        return tf.tanh(x @ weight)

    module, row = seconds.lower("leaf", compiler, 5, (step, [tf.TensorSpec([5, 3])]))
    assert forms == [False] and row.batch == 5 and row.computations == 1
    assert 4 <= row.instructions < 20  # two inputs, product, tanh, and conversions
    assert min(row.tracing, row.compiling, row.wall, row.gib) > 0
    assert (module is None) == (compiler == tpu_compile.CPU)
