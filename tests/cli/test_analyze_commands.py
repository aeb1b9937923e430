"""axial-analyze: models, curves and attention of a run, and the errors of its verbs."""

import os
import re

import numpy as np
from PIL import Image

from axial.analysis.counts import trace
from axial.data.converters.coco import SAMPLE_DIR

PHOTO = os.path.join(SAMPLE_DIR, "val2017", "000000000285.jpg")


def test_a_former_verb_names_its_script(refuse):
    result = refuse("gpu is no longer a verb; in a clone", "analyze", "gpu", "--quick")
    assert result.line.endswith("run python experiments/speed/gpu.py")


def test_analyze_shows_the_parts_of_a_model_and_their_sums(succeed):
    sizes = "--batch=2", "--height=64", "--width=48", "--classes=3"
    result = succeed("analyze", "model", "axial_deeplab_nano", *sizes)
    assert result.err.startswith("counting axial_deeplab_nano\n")
    line = next(line for line in result.out.splitlines() if "stage3" in line)
    assert [cell.strip() for cell in line.split("│")][2:5] == ["2 x 8 x 6 x 128", "65", "4"]
    assert result.out.count(" B ") > 5 and "MiB" in result.out
    everything = sum(w.shape.num_elements() for w in trace("axial_deeplab_nano", 3, 65, 65)[0].trainable_weights)
    *_, total = (line for line in result.out.splitlines() if " all " in line)
    without, trainable = (int(cell.replace(",", "")) for cell in re.findall(r" ([\d,]+) (?= *│)", total)[:2])
    assert trainable == everything > without and "with attention's batch norms" in result.out


def test_analyze_compares_two_models(succeed):
    sizes = ("--height=33", "--width=33", "--classes=3")
    result = succeed("analyze", "model", "axial_deeplab_nano", "--diff=axial_deeplab_nano", *sizes)
    assert "+0.000 B" in result.out and "difference" in result.out


def test_attention_of_a_run(succeed, refuse, trained, exported, tmp_path):
    asked, query = (f"--image={PHOTO}", f"--output_dir={tmp_path}"), "--query=10,20"
    result = succeed("analyze", "attention", f"--checkpoint={trained}", *asked, query, "--block=stage2_block1")
    assert result.out == f"{tmp_path}/000000000285.stage2_block1.png\n"
    assert np.asarray(Image.open(result.out.strip())).std() > 5
    result = succeed("analyze", "attention", f"--model={trained}", *asked, query, "--query=90,5")
    assert [line.split(".")[-3] for line in result.out.splitlines()] == ["10-20", "90-5"]
    for flag, message in {
        f"--model={exported}": "a run of axial-train is expected",
        "--query=1000,0": "--query=1000,0: outside of the photo",
        "--query=1": "--query=1: expected x,y",
        "--block=stage9": "no block 'stage9' attends",
    }.items():
        refuse(message, "analyze", "attention", *asked, *[f"--model={trained}"] * ("--model" not in flag), flag)
