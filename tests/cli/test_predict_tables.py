"""The tables and refusals of axial-predict, with predictors that take no time."""

import csv
import os
import pathlib

import numpy as np
import pytest
from PIL import Image

from axial.cli import predict
from axial.data.files import find_photos
from axial.data.specs import NUCLEI
from axial.errors import InputError
from axial.serving import measure
from axial.tasks.classification.task import CLASSIFICATION
from axial.tasks.detection.evaluator import DETECTION
from axial.tasks.segmentation.evaluator import PANOPTIC
from tests.serving.test_measure import segmented
from tests.serving.test_result import detections


class Bright:
    """A predictor whose nuclei are the bright pixels, one for each grey level; or another task's predictor."""

    spec, evaluator, objects = NUCLEI, PANOPTIC, None

    def __init__(self, prediction=None, evaluator=PANOPTIC):
        self.prediction, self.evaluator = prediction, evaluator

    def __call__(self, image):
        bright = np.where(image[..., 0] > 100, image[..., 0], 0)
        return self.prediction or segmented(np.unique(bright, return_inverse=True)[1].reshape(bright.shape))


def tabulated(folder, predictor, **flags):
    """Predicts the photos of a folder into its parent, and returns the rows of the table."""
    table = folder.parent / "cells.csv"
    given = predict.Predict(model="m", output_dir=str(folder.parent), table=str(table), **flags)
    predict._predict_photos(predictor, predict.output_names(find_photos([str(folder)])), given)
    return [*csv.reader(table.open())]


def photos_in(folder, **arrays):
    """Writes photos, and returns their folder."""
    folder.mkdir()
    for name, array in arrays.items():
        Image.fromarray(array).save(folder / f"{name}.png")
    return folder


def test_a_table_of_grey_and_colour_photos(tmp_path, monkeypatch):
    """Rows of all photos but the broken one, columns of all channels, and a path that is no formula."""
    grey, colour = np.zeros([6, 8], np.uint8), np.zeros([6, 8, 3], np.uint8)
    grey[1:3, 1:4], grey[4:, 6:], colour[2, 2:5] = 200, 250, (210, 20, 30)
    folder = photos_in(tmp_path / "=photos", a=grey, b=colour, c=np.zeros([4, 4], np.uint8))
    (folder / "broken.png").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="broken.png: not an image"):
        tabulated(pathlib.Path("=photos"), Bright(), pixel_size="0.5mm")
    names, *rows = csv.reader((tmp_path / "cells.csv").open())
    rows = [dict(zip(names, row)) for row in rows]
    assert [(row["photo"], row["label"], row["area"], row["area_mm2"], row["mean_1"]) for row in rows] == [
        ("'=photos/a.png", "1", "6", "1.5", "200.0"),
        ("'=photos/a.png", "2", "4", "1.0", "250.0"),
        ("'=photos/b.png", "1", "3", "0.75", "210.0"),
    ]
    assert [row["sum_3"] for row in rows] == ["", "", "90"]
    assert names[-6:] == ["mean_1", "sum_1", "mean_2", "sum_2", "mean_3", "sum_3"]


def test_a_table_without_objects_is_its_header(tmp_path):
    (names,) = tabulated(photos_in(tmp_path / "photos", a=np.zeros([4, 4], np.uint8)), Bright())
    assert names == ["photo", "id", "label", "class", "score", *measure.COLUMNS, "mean_1", "sum_1"]


def test_a_stopped_run_leaves_no_table(tmp_path):
    folder = photos_in(tmp_path / "photos", a=np.zeros([4, 4], np.uint8), b=np.zeros([5, 5], np.uint8))

    class Stopped(Bright):
        def __call__(self, image):
            if len(image) == 5:
                raise KeyboardInterrupt
            return super().__call__(image)

    with pytest.raises(KeyboardInterrupt):
        tabulated(folder, Stopped())
    assert (tmp_path / "a.json").exists() and not list(tmp_path.glob("*cells*"))


@pytest.mark.parametrize("flag", ["table", "geojson", "label_image"])
def test_models_without_instances_are_refused_in_one_line(tmp_path, flag):
    """A classifier, a detector of boxes, and a semantic segmentation are refused once, at the first of two photos."""
    black = np.zeros([4, 4], np.uint8)
    folder, one = photos_in(tmp_path / "photos", a=black, b=black), np.ones([4, 4], int)
    semantic = {"panoptic": one * NUCLEI.label_divisor, "semantic": one, "instance": 0 * one, "score": np.zeros(2)}
    boxes = {**detections([0.9, 0.8]), "class": np.array([1, 1])}
    for prediction, evaluator in (
        ({"probability": np.array([0.1, 0.9])}, CLASSIFICATION),
        (boxes, DETECTION),
        (semantic, PANOPTIC),
    ):
        values = {"table": str(tmp_path / "x.csv"), "geojson": True, "label_image": "png"}
        given = predict.Predict(model="m", output_dir=str(tmp_path), **{flag: values[flag]})
        names = predict.output_names(find_photos([str(folder)]))
        with pytest.raises(InputError, match=f"^--{flag}: m does {evaluator.name}, and the network finds no pixels"):
            predict._predict_photos(Bright(prediction, evaluator), names, given)
    assert os.listdir(tmp_path) == ["photos"]
