"""The commands on a classifier: train, evaluate in parts and at several sizes, export, predict."""

import csv
import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.data.classification_fixture import COLOURS

TRAIN = (
    "--gin_file=imagenet/axial_resnet_s.gin",
    "--gin_file=tiny/classification.gin",
    "--gin_binding=STEPS = 12",
    "--gin_binding=LEARNING_RATE = 0.05",
    "--gin_binding=BATCH = 8",
    "--gin_binding=NesterovMomentum.average = 0.5",
    "--gin_binding=BatchNormConfig.momentum = 0.5",
    "--gin_binding=TrainingConfig.precision = 'float32'",
    "--gin_binding=TrainingConfig.eval_interval = 12",
)


@pytest.fixture(scope="module")
def root(command, colours_dir, tmp_path_factory):
    """A folder with a trained run and its export."""
    root = tmp_path_factory.mktemp("classifier")
    result = command("train", *TRAIN, f"--data_dir={colours_dir}", f"--model_dir={root}/run")
    assert result.code == 0, result.err
    result = command("export", f"--model_dir={root}/run", f"--output_dir={root}/export")
    assert result.code == 0, result.err
    return root


def evaluate(command, *arguments, verb=()):
    result = command("evaluate", *verb, *map(str, arguments))
    assert result.code == 0, result.err
    return result.out


@pytest.mark.slow  # a minute; the contract of tasks compares runs and exports
def test_run_and_export_have_equal_scores(command, root, colours_dir):
    outputs = f"--csv={root}/scores.csv", f"--report={root}/report", f"--picture={root}/picture.png"
    text = evaluate(command, f"--model_dir={root}/run", f"--json={root}/run.json", *outputs)
    assert "top1=" in text.splitlines()[-1] and "photos=6" in text.splitlines()[-1]
    evaluate(command, f"--saved_model={root}/export", f"--data_dir={colours_dir}", f"--json={root}/export.json")
    ours, theirs = (json.loads((root / f"{name}.json").read_text())["val"] for name in ("run", "export"))
    assert ours["top1"] == theirs["top1"] > 0.5 and set(ours["per_class"]) == set(COLOURS)
    assert ours["calibration_error"] == pytest.approx(theirs["calibration_error"], abs=1e-4)
    (row,) = csv.DictReader((root / "scores.csv").open())
    assert float(row["top1"]) == pytest.approx(100 * ours["top1"], abs=1e-3)
    page = (root / "report" / "val.html").read_text()
    assert "top1=" in page and page.count("<figure>") == 12
    assert Image.open(root / "picture.png").size[0] > 100


def test_thresholds_are_for_things(command, root):
    result = command("evaluate", f"--saved_model={root}/export", "--split=val", "--thresholds=0.5")
    assert result.code == 2 and result.line.endswith("--thresholds: not for classification"), result.err


def near(content):
    """A JSON's content that equals itself with other last bits, which a photo's place in its batch decides."""
    if isinstance(content, dict):
        return {name: near(part) for name, part in content.items()}
    if isinstance(content, list):
        return [near(part) for part in content]
    return pytest.approx(content, rel=1e-5) if isinstance(content, float) else content


def test_parts_are_the_whole(command, root):
    run = f"--model_dir={root}/run"
    evaluate(command, run, f"--results_dir={root}/whole", f"--json={root}/whole.json")
    for i in (0, 1):
        evaluate(command, run, f"--results_dir={root}/parts", f"--shard={i}/2")
    evaluate(command, f"--results_dir={root}/parts", "--split=val", f"--json={root}/parts.json", verb=["merge"])
    whole, parts = (json.loads((root / f"{name}.json").read_text()) for name in ("whole", "parts"))
    assert whole == near(parts)
    files = [json.loads((root / name / "classification_val.json").read_text()) for name in ("whole", "parts")]
    assert files[0] == near(files[1])
    again = evaluate(command, run, f"--results_dir={root}/whole", f"--picture={root}/again.png")
    assert "photos=6" in again and (root / "again.png").exists()


def test_sizes_are_rows_of_one_table(command, root):
    sizes = "--image_size=33,48x40", f"--json={root}/sizes.json"
    text = evaluate(command, f"--model_dir={root}/run", *sizes)
    scores = json.loads((root / "sizes.json").read_text())
    assert list(scores) == ["val at 33x33", "val at 48x40"]
    assert set(scores["val at 33x33"]["per_class"]) == set(COLOURS)
    assert text.count("48x40") == 1 and "image_size" in text


def test_watch(command, root):
    evaluate(command, f"--model_dir={root}/run", f"--csv={root}/watched.csv", verb=["watch"])
    (row,) = csv.DictReader((root / "watched.csv").open())
    assert row["model"].endswith("ckpt-12")


@pytest.mark.parametrize("source", ["--saved_model={}/export", "--model_dir={}/run"])
def test_predict_names_the_best_classes(command, root, source, tmp_path):
    Image.fromarray(np.full([50, 40, 3], COLOURS["red"], np.uint8)).save(tmp_path / "red.png")
    result = command("predict", source.format(root), f"--output_dir={tmp_path}", str(tmp_path / "red.png"))
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "red.json").read_text())
    assert (found["height"], found["width"]) == (50, 40) and not (tmp_path / "red.overlay.png").exists()
    assert found["best"][0]["class"] == "red" and len(found["best"]) == 3
    assert sum(guess["probability"] for guess in found["best"]) == pytest.approx(1, abs=1e-4)
    assert "red" in result.out


def test_the_export_needs_tensorflow_alone(root):
    model = tf.saved_model.load(str(root / "export"))
    photo = tf.io.encode_png(np.full([20, 30, 3], COLOURS["blue"], np.uint8))
    served = model.signatures["serving_default"](encoded=photo)
    assert served["probability"].shape == [3] and served["class"][0] == b"blue"
    np.testing.assert_array_equal(served["score"], np.sort(served["probability"])[::-1])


REFUSED = {
    "stress": ("stress", "--ratios=1"),
    "sweep": ("sweep", "--knob=nms_kernel=7"),
    "--outputs_dir": ("run", "--outputs_dir={}/outputs"),
    "--scales": ("run", "--scales=0.5"),
    "--split: stress takes one": ("stress", "--ratios=1", "--split=train", "--split=val"),
    "--model_dir: one run": ("watch", "--model_dir={}/other"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_has_not_is_one_line(command, root, message):
    verb, *flags = (text.format(root) for text in REFUSED[message])
    result = command("evaluate", verb, f"--model_dir={root}/run", *flags)
    assert result.code == 2 and message in result.line


@pytest.mark.slow
def test_a_thousand_classes_of_one_photo(command, tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 1000), ("val", 20)):
        for number in range(count):
            path = tmp_path / "photos" / split / f"n{number:05d}" / "one.JPEG"
            path.parent.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 255, [12, 16, 3], np.uint8)).save(path, "JPEG")
    flags = "--split=train", "--split=val", f"--output_dir={tmp_path}/data"
    result = command("convert", "imagenet", f"--input_dir={tmp_path}/photos", *flags)
    assert result.code == 0, result.err
    files = "--gin_file=imagenet/axial_resnet_s.gin", "--gin_file=tiny/classification.gin"
    result = command("train", *files, f"--data_dir={tmp_path}/data", f"--model_dir={tmp_path}/run")
    assert result.code == 0, result.err
    report = f"--report={tmp_path}/report", f"--json={tmp_path}/scores.json"
    assert "photos=20" in evaluate(command, f"--model_dir={tmp_path}/run", *report)
    scores = json.loads((tmp_path / "scores.json").read_text())["val"]
    assert len(scores["per_class"]) == 1000 and sum(value is not None for value in scores["per_class"].values()) == 20
