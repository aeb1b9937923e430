"""The commands on a translator: convert, train, evaluate with averaged weights, export, predict, and errors."""

import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from axial.recipes import configuration
from tests.data.text_fixture import write_pairs

TEXT = "two dogs run"


@pytest.fixture(scope="module")
def root(succeed, tmp_path_factory):
    """A folder with four subfolders: `texts`, `data` (TFRecords), `run` (two steps, a checkpoint of each) and `export`
    (the run's SavedModel).
    """
    root = tmp_path_factory.mktemp("translator")
    for split, count in (("train", 96), ("val", 7)):
        write_pairs(root / "texts", split, count, seed=count)
    with open(root / "texts" / "val.de", "a") as target, open(root / "texts" / "val.en", "a") as source:
        target.write("\n")  # a pair without a translation
        source.write("snow\n")
    splits = "--split=train", "--split=val"
    result = succeed("convert", "multi30k", *convert(root, "data"), *splits, "--vocabulary_size=64")
    assert "val: 1 pair with an empty line left out" in result.out
    files = "--gin_file=multi30k/transformer_nano.gin", "--gin_file=tiny/translation.gin"
    steps = "--gin_binding=STEPS = 2", "--gin_binding=TrainingConfig.checkpoint_interval = 1"
    succeed("train", *files, *steps, f"--data_dir={root}/data", f"--model_dir={root}/run")
    result = succeed("export", f"--model_dir={root}/run", f"--output_dir={root}/export")
    assert "translation equal on 100.00 % of sentences" in result.out
    return root


def convert(root, data):
    return f"--input_dir={root}/texts", f"--output_dir={root}/{data}"


def test_weights_are_averaged(succeed, root):
    flags = f"--model_dir={root}/run", "--average=2", f"--results_dir={root}/results", f"--json={root}/scores.json"
    assert "sentences=7" in succeed("evaluate", *flags, "--split=val", f"--report={root}/report").out
    assert "Worst photos" in (root / "report" / "val.html").read_text()
    scores = json.loads((root / "scores.json").read_text())["val"]
    assert scores["signatures"]["bleu"].startswith("nrefs:1|case:mixed|")
    # After two steps, the translations of both checkpoints are equal, so the test compares the restored weights.
    run, key = str(root / "run"), "model/embedding/.ATTRIBUTES/VARIABLE_VALUE"
    first, second = (tf.train.load_checkpoint(f"{run}/ckpt-{n}").get_tensor(key) for n in (1, 2))
    assert np.abs(first - second).max() > 1e-4
    for average, expected in ((1, second), (2, (first + second) / 2)):
        _, model = configuration.restore_run(run, average=average)
        np.testing.assert_allclose(model.embedding, expected, rtol=1e-6)


def test_a_run_and_its_export_translate_alike(succeed, root):
    one = succeed("predict", f"--model_dir={root}/run", f"--text={TEXT}")
    several = succeed("predict", f"--saved_model={root}/export", f"--text={TEXT}", "--text=", "--text=snow")
    lines = several.out.split("\n")
    assert lines[0] == one.out.rstrip("\n") and lines[1] == "" and len(lines) == 4


REFUSED = {
    "tokens, at most 16 are translated": ("predict", "--model_dir={}/run", f"--text={'snow ' * 10_000}"),
    "each is empty": ("predict", "--model_dir={}/run", "--text= "),
    "it takes --text": ("predict", "--model_dir={}/run", "{}/photo.png"),
    "/run: does translation; expected a model that takes photos": (
        *("analyze", "attention", "--checkpoint={}/run", "--image={}/photo.png", "--output_dir={}/pictures"),
    ),
    "--format=tflite: not for translation": ("export", "--model_dir={}/run", "--output_dir={}/x", "--format=tflite"),
    "one is expected for each": ("convert", "multi30k", "--input_dir={}/uneven", "--output_dir={}/y", "--split=train"),
    "photo.png: not a SentencePiece model": (
        *("convert", "multi30k", "--input_dir={}/texts", "--output_dir={}/v", "--split=train"),
        "--vocabulary={}/photo.png",
    ),
    "has 64 pieces": (
        *("convert", "multi30k", "--input_dir={}/texts", "--output_dir={}/data", "--split=train"),
        "--vocabulary_size=65",
    ),
    "records with 'text' labels; expected 'panoptic'": (
        *("train", "--gin_file=coco/axial_deeplab_s.gin", "--data_dir={}/data", "--model_dir={}/other"),
    ),
    "--submission_dir: not for translation": (
        *("evaluate", "--saved_model={}/export", "--data_dir={}/data", "--submission_dir={}/files"),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_is_one_line(refuse, root, refused, message):
    verb, *flags = REFUSED[message]
    refuse(message, verb, *(flag.format(root) for flag in flags))


@pytest.fixture(scope="module")
def refused(root):
    """Adds files to `root`: photo.png, uneven/train.en with two lines and uneven/train.de with one line."""
    Image.new("RGB", (8, 8)).save(root / "photo.png")
    (root / "uneven").mkdir()
    (root / "uneven" / "train.en").write_text("a\nb\n")
    (root / "uneven" / "train.de").write_text("a\n")
