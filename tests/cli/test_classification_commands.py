"""The commands on a classifier: train, evaluate in shards and at several sizes, export, predict."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from tests.data.classification_fixture import COLOURS

TRAIN = (
    "--gin_file=imagenet/axial_resnet_s.gin",
    "--gin_file=tiny/classification.gin",
    "--gin_binding=ModelConfig.arguments = {'repeats': (1, 0, 0, 0)}",  # one block per stage is traced fastest
    "--gin_binding=STEPS = 12",
    "--gin_binding=LEARNING_RATE = 0.05",
    "--gin_binding=BATCH = 8",
    "--gin_binding=NesterovMomentum.average = 0.5",
    "--gin_binding=BatchNormConfig.momentum = 0.5",
    "--gin_binding=TrainingConfig.precision = 'float32'",
    "--gin_binding=TrainingConfig.eval_interval = 12",
)


@pytest.fixture(scope="module")
def root(succeed, colours_dir, tmp_path_factory):
    """A folder with `run`, a classifier trained on colours for 12 steps, and its SavedModel `export`."""
    root = tmp_path_factory.mktemp("classifier")
    succeed("train", *TRAIN, f"--data_dir={colours_dir}", f"--model_dir={root}/run")
    succeed("export", f"--model_dir={root}/run", f"--output_dir={root}/export")
    return root


def test_scores_are_stored_and_shown(succeed, root):
    outputs = f"--csv={root}/scores.csv", f"--report={root}/report", f"--picture={root}/picture.png"
    results = f"--results_dir={root}/whole"
    whole = f"--model_dir={root}/run", results, "--shard=0/1", f"--json={root}/run.json"
    text = succeed("evaluate", *whole, *outputs).out
    assert "top1=" in text.splitlines()[-1] and "photos=6" in text.splitlines()[-1]
    succeed("evaluate", "merge", results, "--split=val", f"--json={root}/merged.json")
    ours, merged = (json.loads((root / f"{name}.json").read_text())["val"] for name in ("run", "merged"))
    assert ours == merged and ours["top1"] > 0.5 and set(ours["per_class"]) == set(COLOURS)
    (row,) = csv.DictReader((root / "scores.csv").open())
    assert float(row["top1"]) == pytest.approx(100 * ours["top1"], abs=1e-3)
    page = (root / "report" / "val.html").read_text()
    assert "top-1 accuracy" in page and page.count("<figure>") == 12
    assert Image.open(root / "picture.png").size[0] > 100


def test_sizes_are_rows_of_one_table(succeed, root):
    sizes = "--image_size=33,48x40", f"--json={root}/sizes.json"
    text = succeed("evaluate", f"--model_dir={root}/run", *sizes).out
    scores = json.loads((root / "sizes.json").read_text())
    assert list(scores) == ["val at 33x33", "val at 48x40"]
    assert set(scores["val at 33x33"]["per_class"]) == set(COLOURS)
    assert text.count("48x40") == 1 and "image_size" in text


def test_watch(succeed, root):
    succeed("evaluate", "watch", f"--model_dir={root}/run", f"--csv={root}/watched.csv")
    (row,) = csv.DictReader((root / "watched.csv").open())
    assert row["model"].endswith("ckpt-12")


def test_predict_names_the_best_classes(succeed, root, tmp_path):
    Image.fromarray(np.full([50, 40, 3], COLOURS["red"], np.uint8)).save(tmp_path / "red.png")
    result = succeed("predict", f"--model={root}/export", f"--output_dir={tmp_path}", str(tmp_path / "red.png"))
    prediction = json.loads((tmp_path / "red.json").read_text())
    assert (prediction["height"], prediction["width"]) == (50, 40) and not (tmp_path / "red.overlay.png").exists()
    assert prediction["best"][0]["class"] == "red" and len(prediction["best"]) == 3
    assert sum(guess["probability"] for guess in prediction["best"]) == pytest.approx(1, abs=1e-4)
    assert "red" in result.out


REFUSED = {
    "stress": ("stress", "--ratios=1"),
    "sweep": ("sweep", "--knob=nms_kernel=7"),
    "--scales": ("run", "--scales=0.5"),
    "--thresholds: not for classification": ("run", "--thresholds=0.5"),
    "--split: stress takes one": ("stress", "--ratios=1", "--split=train", "--split=val"),
    "--model_dir: one run": ("watch", "--model_dir={}/other"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_options_are_one_line(refuse, root, message):
    verb, *flags = (text.format(root) for text in REFUSED[message])
    refuse(message, "evaluate", verb, f"--model_dir={root}/run", *flags)
