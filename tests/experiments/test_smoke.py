"""What the scripts of experiments/ refuse, and what benchmark.py computes and reads."""

import pytest

import benchmark
from tests.conftest import run_script

REFUSED = {
    "README.md: holds no lines <!-- tables:begin -->": ("paper/tables.py", "--markdown=README.md"),
    "--figure needs --suite=scaling": ("speed/benchmark.py", "--figure=a.png"),
    "must end in .png or": ("paper/study.py", "--figure=figure.txt"),
    "cannot be written": ("speed/benchmark.py", "--json=README.md/a.json"),
    "--layer=258: wants rows x length, like 258x65": ("tpu/layers.py", "--layer=258"),
    "no compiled recipe with 'none' in its name": ("tpu/pod.py", "--only=none"),
    "--slice=v5e:2x2: expected one device, like v5e:1x1": ("tpu/seconds.py", "--csv=a.csv", "--slice=v5e:2x2"),
    "--csv needs --all": ("tpu/tpu.py", "--csv=tpu.csv"),
    "--parts: no speed of the memory of v2:2x2 is known": ("tpu/tpu.py", "--parts", "--slice=v2:2x2"),
    "no such gin file (did you mean": ("tpu/ops.py", "--gin_file=coco/axial_deeplab_x.gin"),
}


@pytest.mark.slow  # seconds each, for the imports
@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_is_one_line(message):
    done = run_script(*REFUSED[message])
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


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
