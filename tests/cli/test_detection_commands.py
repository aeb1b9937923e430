"""The commands on a detector: train, export, predict, and options that it does not support."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from pycocotools import mask as masks

from axial.data.converters.coco import SAMPLE_DIR
from axial.data.specs import COCO

PHOTO = f"{SAMPLE_DIR}/val2017/000000000785.jpg"
TRAIN = (
    "--gin_file=sample/detection_overfit.gin",
    "--gin_file=tiny/detection.gin",
    "--gin_binding=MODEL = 'mask_rcnn_resnet_nano'",
    "--gin_binding=STEPS = 1",
    "--gin_binding=BatchNormConfig.momentum = 0.5",
    "--gin_binding=LEARNING_RATE = 0.0001",
)


@pytest.fixture(scope="module")
def root(succeed, sample_dir, tmp_path_factory):
    """The folder holds `run` and `export`. `run` is a Mask R-CNN trained for one step. `export` is its SavedModel."""
    root = tmp_path_factory.mktemp("detector")
    succeed("train", *TRAIN, f"--data_dir={sample_dir}", f"--model_dir={root}/run")
    assert "box differs by" in succeed("export", f"--model_dir={root}/run", f"--output_dir={root}/export").out
    return root


def test_predict_draws_boxes(succeed, root, tmp_path):
    shutil.copy(PHOTO, tmp_path / "photo.jpg")
    call = f"--saved_model={root}/export", f"--output_dir={tmp_path}", "--label_image=png"
    succeed("predict", *call, str(tmp_path / "photo.jpg"))
    content = json.loads((tmp_path / "photo.json").read_text())
    assert Image.open(tmp_path / "photo.overlay.png").size == (content["width"], content["height"])
    size, labels = [content["height"], content["width"]], np.asarray(Image.open(tmp_path / content["label_file_name"]))
    numbers = [one["label"] for one in content["objects"] if "label" in one]
    assert labels.shape == tuple(size) and labels.dtype == np.uint16 and set(np.unique(labels)) <= {0, *numbers}
    for number, one in enumerate(content["objects"], 1):
        assert one["id"] == number and one["segmentation"]["size"] == size and one["class"] in COCO.class_names
        assert one["area"] == masks.decode(one["segmentation"]).sum()
        x, y, width, height = one["box"]
        assert x >= 0 and y >= 0 and x + width <= content["width"] + 0.01 and y + height <= content["height"] + 0.01


def test_serving_needs_tensorflow_alone(root):
    served = tf.saved_model.load(str(root / "export")).signatures["serving_default"]
    outputs = served(encoded=tf.io.read_file(PHOTO))
    assert set(outputs) == {"box", "class", "score", "count", "mask"}
    assert outputs["box"].shape == (100, 4) and (np.diff(outputs["score"]) <= 0).all()


REFUSED = {
    "--scales, --flip: a detector": ("evaluate", "--model_dir={}/run", "--flip"),
    "--format=tflite --maps: not for detection": (
        *("export", "--model_dir={}/run", "--output_dir={}/lite", "--format=tflite", "--maps"),
    ),
    "--submission_dir: not for detection": ("evaluate", "--model_dir={}/run", "--submission_dir={}/files"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_options_are_one_line(refuse, root, message):
    refuse(message, *(argument.format(root) for argument in REFUSED[message]))
