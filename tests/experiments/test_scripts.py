"""What the scripts of experiments/ refuse, and what benchmark.py computes and reads."""

import subprocess
import sys

import pytest

import benchmark
from conftest import ROOT

REFUSED = {
    "paper/tables.py": ("--markdown=README.md", "README.md: holds no lines <!-- tables:begin -->"),
    "paper/study.py": ("--figure=figure.txt", "must end in .png or"),
    "speed/benchmark.py": ("--json=README.md/a.json", "cannot be written"),
    "tpu/layers.py": ("--layer=258", "--layer=258: wants rows x length, like 258x65"),
}


@pytest.mark.slow  # seconds each, for the imports
@pytest.mark.parametrize("script", REFUSED)
def test_what_is_refused_is_one_line(script):
    flag, message = REFUSED[script]
    command = [sys.executable, f"experiments/{script}", flag]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_table_8_has_a_time_of_each_of_our_models():
    found = {line["model"]: float(line["ms"]) for line in benchmark.table_8()}
    models = ("axial_resnet_l", "attention_resnet_no_bn", "xception_71", "resnet_101", "resnet_152")
    assert found == dict(zip(models, (16.54, 18.05, 24.85, 10.08, 14.43)))


def test_ratios_are_of_medians():
    def forms(**seconds):
        return {form: {"median_s": s, "peak_bytes": 100 * s} for form, s in seconds.items()}

    works = {
        "layer_train": forms(ours=1, textbook=3, bfloat16=0.5),
        "layer_train_56": forms(ours=2, textbook=8, bfloat16=1.6),
        "model_batch1": forms(folded=2, ours=3, textbook=9, resnet101=1),
    }
    ratios = benchmark.ratios(works)
    assert ratios["layer_train_speedup"] == 3 and ratios["layer_train_speedup_56"] == 4
    assert ratios["layer_train_memory_ratio"] == pytest.approx(1 / 3)
    assert ratios["layer_train_bfloat16_speedup"] == 2
    assert ratios["folded_speedup"] == 1.5 and ratios["folded_textbook_speedup"] == 4.5
    assert ratios["folded_vs_resnet101"] == 2
